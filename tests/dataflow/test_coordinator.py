"""The coordinator as a table of events and effects: who gets what, when, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from dataflow.batch import Failure
from dataflow.coordinator import Coordinator
from dataflow.events import (
    Acknowledged,
    Admitted,
    Alarm,
    Claim,
    ClaimWanted,
    ClaimWithdrawn,
    Dropped,
    Effect,
    Failed,
    Finished,
    Grant,
    Halt,
    Heartbeat,
    Holding,
    Prompt,
    Published,
    Settled,
    Stopped,
    Tick,
    WindowClosed,
    WorkerDied,
    WorkerJoined,
)
from dataflow.pipeline import StagePlan
from dataflow.weights import WeightsRef

SAMPLED = frozenset({"sampled"})


def plans(*stages: StagePlan) -> dict[str, StagePlan]:
    return {stage.name: stage for stage in stages}


def source(**options: Any) -> StagePlan:
    return StagePlan("source", (), "source", **options)


def rollout(**options: Any) -> StagePlan:
    return StagePlan("rollout", ("source",), "row", expands=True, **options)


def reward(**options: Any) -> StagePlan:
    return StagePlan("reward", ("rollout",), "row", **options)


def update(*after: str, **options: Any) -> StagePlan:
    return StagePlan("update", after, "window", kinds=SAMPLED, one_owner=True, **options)


def remax() -> dict[str, StagePlan]:
    return plans(
        source(),
        rollout(),
        reward(),
        StagePlan("join", ("reward", "rollout"), "join", kinds=SAMPLED),
        StagePlan("advantage", ("reward", "join"), "row", kinds=SAMPLED),
        update("advantage", "rollout"),
    )


def grpo(min_group: int = 2) -> dict[str, StagePlan]:
    return plans(
        source(),
        rollout(),
        reward(),
        StagePlan("advantage", ("reward",), "group", min_group=min_group),
        update("advantage", "rollout"),
    )


@dataclass
class Drive:
    """A coordinator, a clock that stands still unless told, and a record of every effect."""

    coordinator: Coordinator
    now: float = 0.0
    tickets: int = 0
    effects: list[Effect] = field(default_factory=list)
    granted: dict[int, Claim] = field(default_factory=dict)

    def send(self, event: Any) -> list[Effect]:
        effects = self.coordinator.handle(event)
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Grant):
                self.granted[effect.ticket] = effect.claim
        return effects

    def join(self, *workers: str) -> None:
        for worker in workers:
            self.send(WorkerJoined(worker, worker.split("-")[0], self.now))

    def want(self, worker: str) -> int:
        """Ask for work; returns the ticket."""
        self.tickets += 1
        self.send(ClaimWanted(worker, self.tickets, self.tickets, 0, Holding(), self.now))
        return self.tickets

    def claim(self, worker: str) -> Claim:
        """Ask for work that must be there."""
        return self.granted[self.want(worker)]

    def idle(self, worker: str) -> bool:
        """Whether there is no work for the worker now."""
        ticket = self.want(worker)
        if ticket in self.granted:
            return False
        self.send(ClaimWithdrawn(worker, ticket, self.now))
        return True

    def admit(self, *prompts: Prompt, worker: str = "source-0") -> list[Effect]:
        claim = self.claim(worker)
        return self.send(Admitted(worker, claim.id, claim.window_index, claim.delivery, tuple(prompts), self.now))

    def acknowledge(self, worker: str, claim: Claim, units: Iterable[str] | None = None, rows: int = 1) -> list[Effect]:
        effects: list[Effect] = []
        for unit in claim.units:
            if units is None or unit.unit.id in units:
                effects += self.send(Acknowledged(worker, claim.id, unit.unit.id, unit.delivery, rows, self.now))
        return effects

    def fail(self, worker: str, claim: Claim, *units: str, retry: bool = True, error: str = "boom") -> list[Effect]:
        effects: list[Effect] = []
        for unit in claim.units:
            if unit.unit.id in units:
                effects += self.send(Failed(worker, claim.id, unit.unit.id, unit.delivery, Failure("Error", error), retry, self.now))
        return effects

    def work(self, worker: str) -> Claim:
        """Claim once and acknowledge all of it."""
        claim = self.claim(worker)
        self.acknowledge(worker, claim)
        return claim

    def of(self, kind: type) -> list[Any]:
        return [effect for effect in self.effects if isinstance(effect, kind)]


def drive(table: Mapping[str, StagePlan], windows: int = 1, *, workers: Sequence[str] = (), **options: Any) -> Drive:
    run = Drive(Coordinator(table, "run", windows, **options))
    run.join(*(workers or [f"{name}-0" for name in table]))
    return run


def ids(claim: Claim) -> list[str]:
    return [unit.unit.id for unit in claim.units]


def key(uid: str, session: int = 0, window: int = 0) -> str:
    return f"run/train/{window:06d}/{uid}/{session}"


# Admission


def test_O01_two_prompts_of_three_sessions_with_greedy_rows_are_eight_units_with_unique_ids() -> None:
    run = drive(remax())
    run.admit(Prompt("0-a", 3, False), Prompt("0-a", 1, True), Prompt("0-b", 3, False), Prompt("0-b", 1, True))
    claim = run.claim("rollout-0")
    assert ids(claim) == [
        key("0-a", 0),
        key("0-a", 1),
        key("0-a", 2),
        key("0-a#greedy"),
        key("0-b", 0),
        key("0-b", 1),
        key("0-b", 2),
        key("0-b#greedy"),
    ]
    assert run.coordinator.ledger.created == {"sampled": 6, "baseline": 2}


def test_the_source_is_offered_the_first_window_by_name_and_number() -> None:
    run = drive(grpo())
    claim = run.claim("source-0")
    assert (claim.stage, claim.window, claim.window_index, claim.delivery, claim.units) == (
        "source",
        "run/train/000000",
        0,
        0,
        (),
    )


def test_a_dropped_prompt_is_counted_under_its_reason_and_offered_to_nobody() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 2, False), Prompt("0-long", 2, False, "prompt too long"))
    assert ids(run.claim("rollout-0")) == [key("0-a", 0), key("0-a", 1)]
    assert run.coordinator.ledger.settled == {("sampled", "dropped: prompt too long"): 2}


def test_a_window_whose_prompts_are_all_dropped_closes_with_an_alarm() -> None:
    run = drive(remax(), max_empty_windows=2)
    run.admit(Prompt("0-a", 2, False, "prompt too long"), Prompt("0-a", 1, True, "prompt too long"))
    (closed,) = run.of(WindowClosed)
    assert closed.counts == {
        ("sampled", "dropped: prompt too long"): 2,
        ("baseline", "dropped: prompt too long"): 1,
    }
    assert "nothing is left to train on" in run.of(Alarm)[0].message
    assert run.of(Finished)


def test_a_prompt_row_admitted_on_a_second_delivery_is_read_at_its_own_address() -> None:
    run = drive(grpo())
    lost = run.claim("source-0")
    run.send(WorkerDied("source-0", "killed", run.now))
    run.join("source-1")
    run.admit(Prompt("0-a", 2, False), worker="source-1")
    (unit, _) = run.claim("rollout-0").units
    assert (lost.delivery, unit.accepted) == (0, {"source": 1})


# Readiness


def test_a_row_stage_is_offered_each_unit_as_soon_as_its_own_columns_are_there() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 3, False))
    rolled = run.claim("rollout-0")
    assert run.idle("reward-0")
    run.acknowledge("rollout-0", rolled, {key("0-a", 1)})
    assert ids(run.claim("reward-0")) == [key("0-a", 1)]


def test_a_unit_carries_its_rows_and_the_accepted_delivery_of_every_stage_before() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 1, False))
    run.acknowledge("rollout-0", run.claim("rollout-0"), rows=3)
    (unit,) = run.claim("reward-0").units
    assert (unit.rows, unit.delivery, unit.accepted) == (3, 0, {"source": 0, "rollout": 0})


def test_a_join_waits_for_the_greedy_unit_of_its_own_uid_and_no_other() -> None:
    run = drive(remax())
    run.admit(Prompt("0-a", 1, False), Prompt("0-a", 1, True), Prompt("0-b", 1, False), Prompt("0-b", 1, True))
    run.work("rollout-0")
    graded = run.claim("reward-0")
    run.acknowledge("reward-0", graded, {key("0-a"), key("0-b")})
    assert run.idle("join-0")
    run.acknowledge("reward-0", graded, {key("0-b#greedy")})
    claim = run.claim("join-0")
    assert ids(claim) == [key("0-b")]
    assert [unit.unit.id for unit in claim.baselines] == [key("0-b#greedy")]


def test_a_join_is_offered_a_greedy_unit_that_failed_as_a_tombstone() -> None:
    run = drive(remax())
    run.admit(Prompt("0-a", 2, False), Prompt("0-a", 1, True))
    run.work("rollout-0")
    graded = run.claim("reward-0")
    run.acknowledge("reward-0", graded, {key("0-a", 0), key("0-a", 1)})
    run.fail("reward-0", graded, key("0-a#greedy"), retry=False, error="no")
    claim = run.claim("join-0")
    assert ids(claim) == [key("0-a", 0), key("0-a", 1)]
    assert claim.baselines == ()
    (stone,) = claim.tombstones
    assert (stone.unit.id, stone.outcome, stone.reason) == (
        key("0-a#greedy"),
        "failed: reward",
        "ValueError: no",
    )


def test_a_join_without_greedy_units_is_offered_its_units_at_once() -> None:
    run = drive(remax())
    run.admit(Prompt("0-a", 1, False))
    run.work("rollout-0")
    run.work("reward-0")
    assert run.claim("join-0").baselines == ()


def test_a_group_is_offered_when_its_last_unit_has_arrived_and_only_whole() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 3, False), Prompt("0-b", 2, False))
    run.work("rollout-0")
    graded = run.claim("reward-0")
    run.acknowledge("reward-0", graded, {key("0-a", 0), key("0-b", 0), key("0-b", 1), key("0-a", 2)})
    assert ids(run.claim("advantage-0")) == [key("0-b", 0), key("0-b", 1)]
    assert run.idle("advantage-0")
    run.acknowledge("reward-0", graded, {key("0-a", 1)})
    assert ids(run.claim("advantage-0")) == [key("0-a", 0), key("0-a", 1), key("0-a", 2)]


def test_A15_a_group_with_a_failed_unit_is_released_with_the_survivors_and_a_tombstone() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 4, False))
    run.work("rollout-0")
    graded = run.claim("reward-0")
    run.fail("reward-0", graded, key("0-a", 3), retry=False)
    run.acknowledge("reward-0", graded)
    claim = run.claim("advantage-0")
    assert ids(claim) == [key("0-a", 0), key("0-a", 1), key("0-a", 2)]
    assert [stone.unit.id for stone in claim.tombstones] == [key("0-a", 3)]


def test_A15_the_lone_survivor_of_a_group_is_dropped_as_a_partial_group() -> None:
    run = drive(grpo(min_group=2))
    run.admit(Prompt("0-a", 4, False), Prompt("0-b", 2, False))
    run.work("rollout-0")
    graded = run.claim("reward-0")
    for session in range(3):
        run.fail("reward-0", graded, key("0-a", session), retry=False)
    run.acknowledge("reward-0", graded)
    assert ids(run.claim("advantage-0")) == [key("0-b", 0), key("0-b", 1)]
    assert run.coordinator.ledger.settled == {
        ("sampled", "failed: reward"): 3,
        ("sampled", "dropped: partial group"): 1,
    }


def test_the_update_is_offered_the_whole_window_once_everything_has_arrived_or_is_gone() -> None:
    run = drive(remax())
    run.admit(Prompt("0-a", 2, False), Prompt("0-a", 1, True))
    run.work("rollout-0")
    run.work("reward-0")
    run.work("join-0")
    scored = run.claim("advantage-0")
    run.acknowledge("advantage-0", scored, {key("0-a", 1)})
    assert run.idle("update-0")
    run.fail("advantage-0", scored, key("0-a", 0), retry=False)
    claim = run.claim("update-0")
    assert ids(claim) == [key("0-a", 1)]
    assert [stone.unit.id for stone in claim.tombstones] == [key("0-a", 0)]


def test_units_come_in_canonical_order_whatever_the_order_in_which_they_were_finished() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-b", 2, False), Prompt("0-a", 2, False))
    rolled = run.claim("rollout-0")
    for unit in reversed(rolled.units):
        run.acknowledge("rollout-0", rolled, {unit.unit.id})
    assert ids(run.claim("reward-0")) == [key("0-a", 0), key("0-a", 1), key("0-b", 0), key("0-b", 1)]


def test_Q08_ten_units_in_claims_of_four_are_four_four_and_two() -> None:
    run = drive(plans(source(), rollout(), reward(max_units=4), update("reward")))
    run.admit(Prompt("0-a", 10, False))
    run.work("rollout-0")
    assert [len(run.work("reward-0").units) for _ in range(3)] == [4, 4, 2]
    assert run.idle("reward-0")


def test_a_claim_of_groups_never_splits_one() -> None:
    table = grpo()
    table["advantage"] = StagePlan("advantage", ("reward",), "group", max_units=4, min_group=2)
    run = drive(table)
    run.admit(*(Prompt(f"0-{name}", 3, False) for name in "ab"))
    run.work("rollout-0")
    run.work("reward-0")
    assert [len(run.claim("advantage-0").units) for _ in range(2)] == [3, 3]


def test_a_group_larger_than_a_claim_is_still_offered_whole() -> None:
    table = grpo()
    table["advantage"] = StagePlan("advantage", ("reward",), "group", max_units=2, min_group=2)
    run = drive(table)
    run.admit(Prompt("0-a", 5, False))
    run.work("rollout-0")
    run.work("reward-0")
    assert len(run.claim("advantage-0").units) == 5


def test_a_claim_never_mixes_windows() -> None:
    run = drive(grpo(), windows=2, max_staleness=1)
    run.admit(Prompt("0-a", 2, False))
    run.admit(Prompt("0-b", 2, False))
    assert [run.claim("rollout-0").window_index for _ in range(2)] == [0, 1]


# Claims


def test_Q11_two_workers_of_a_stage_never_hold_the_same_unit() -> None:
    run = drive(
        plans(source(), rollout(), reward(max_units=3), update("reward")),
        workers=["source-0", "rollout-0", "reward-0", "reward-1", "update-0"],
    )
    run.admit(Prompt("0-a", 10, False))
    run.work("rollout-0")
    claims = [run.claim(f"reward-{index % 2}") for index in range(4)]
    taken = [unit for claim in claims for unit in ids(claim)]
    assert sorted(taken) == sorted(set(taken))
    assert len(taken) == 10


def test_a_waiting_claim_is_answered_under_its_ticket_when_work_arrives() -> None:
    run = drive(grpo())
    ticket = run.want("rollout-0")
    assert ticket not in run.granted
    run.admit(Prompt("0-a", 1, False))
    assert ids(run.granted[ticket]) == [key("0-a")]


def test_a_withdrawn_ticket_is_never_answered() -> None:
    run = drive(grpo())
    ticket = run.want("rollout-0")
    run.send(ClaimWithdrawn("rollout-0", ticket, run.now))
    run.admit(Prompt("0-a", 1, False))
    assert ticket not in run.granted
    assert ids(run.claim("rollout-0")) == [key("0-a")]


def test_a_grant_carries_the_newest_weights_and_the_oldest_version_that_an_engine_holds() -> None:
    run = drive(
        grpo(),
        workers=["source-0", "rollout-0", "rollout-1", "reward-0", "advantage-0", "update-0"],
    )
    run.send(Published(WeightsRef(2, "two"), run.now))
    run.send(Published(WeightsRef(1, "one"), run.now))
    run.send(ClaimWanted("rollout-0", 901, 901, 2, Holding(), run.now))
    run.send(ClaimWanted("rollout-1", 902, 902, 1, Holding(), run.now))
    claim = run.claim("source-0")
    assert claim.weights == WeightsRef(2, "two")
    assert claim.oldest_loaded == 1


# Deaths


def test_Q10_the_units_of_a_dead_worker_go_to_another_under_the_next_delivery() -> None:
    run = drive(grpo(), workers=["source-0", "rollout-0", "reward-0", "reward-1"])
    run.admit(Prompt("0-a", 2, False))
    run.work("rollout-0")
    lost = run.claim("reward-0")
    run.send(WorkerDied("reward-0", "killed", run.now))
    again = run.claim("reward-1")
    assert ids(again) == ids(lost)
    assert [unit.delivery for unit in again.units] == [1, 1]
    assert run.coordinator.ledger.redelivered == {"reward": 2}
    assert run.coordinator.ledger.failures == {}


def test_a_report_of_a_dead_worker_is_too_late() -> None:
    run = drive(grpo(), workers=["source-0", "rollout-0", "reward-0", "reward-1"])
    run.admit(Prompt("0-a", 1, False))
    run.work("rollout-0")
    lost = run.claim("reward-0")
    run.send(WorkerDied("reward-0", "killed", run.now))
    assert run.acknowledge("reward-0", lost) == []
    assert run.coordinator.ledger.late == 1
    assert [unit.delivery for unit in run.claim("reward-1").units] == [1]


def test_units_that_were_in_two_deaths_run_alone_and_the_one_that_kills_alone_is_a_tombstone() -> None:
    run = drive(plans(source(), rollout(), reward(), update("reward")))
    run.admit(Prompt("0-a", 3, False))
    run.work("rollout-0")
    for _ in range(2):
        assert len(run.claim("reward-0").units) == 3
        run.send(WorkerDied("reward-0", "segfault", run.now))
        run.join("reward-0")
    assert ids(run.work("reward-0")) == [key("0-a", 0)]
    assert ids(run.claim("reward-0")) == [key("0-a", 1)]
    assert run.idle("reward-0")
    run.send(WorkerDied("reward-0", "segfault", run.now))
    run.join("reward-0")
    (settled,) = [effect for effect in run.of(Settled) if effect.outcome != "done"]
    assert (settled.unit.id, settled.outcome) == (key("0-a", 1), "failed: reward")
    assert "killed its worker 3 times" in settled.reason
    assert ids(run.work("reward-0")) == [key("0-a", 2)]
    assert ids(run.claim("update-0")) == [key("0-a", 0), key("0-a", 2)]


def test_a_unit_that_kills_alone_and_is_the_last_of_its_window_closes_the_window() -> None:
    run = drive(plans(source(), rollout(), reward(), update("reward")))
    run.admit(Prompt("0-a", 1, False))
    for _ in range(3):
        run.claim("rollout-0")
        run.send(WorkerDied("rollout-0", "segfault", run.now))
        run.join("rollout-0")
    (closed,) = run.of(WindowClosed)
    assert closed.counts == {("sampled", "failed: rollout"): 1}
    assert run.coordinator.finished


def test_a_worker_that_joins_again_without_a_word_of_its_death_gives_up_what_it_held() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 2, False))
    lost = run.claim("rollout-0")
    run.join("rollout-0")
    again = run.claim("rollout-0")
    assert ids(again) == ids(lost)
    assert [unit.delivery for unit in again.units] == [1, 1]


# Failures


def test_a_failed_unit_is_tried_again_and_is_a_tombstone_after_max_attempts() -> None:
    run = drive(plans(source(), rollout(), reward(max_attempts=2), update("reward")))
    run.admit(Prompt("0-a", 2, False))
    run.work("rollout-0")
    first = run.claim("reward-0")
    run.acknowledge("reward-0", first, {key("0-a", 0)})
    run.fail("reward-0", first, key("0-a", 1), error="boom 1")
    second = run.claim("reward-0")
    assert [(unit.unit.id, unit.delivery) for unit in second.units] == [(key("0-a", 1), 1)]
    effects = run.fail("reward-0", second, key("0-a", 1), error="boom 2")
    (settled,) = [effect for effect in effects if isinstance(effect, Settled)]
    assert (settled.outcome, settled.reason) == ("failed: reward", "boom 2")
    assert run.coordinator.ledger.failures == {"reward": 2}


def test_a_failure_that_no_retry_can_help_is_a_tombstone_at_once() -> None:
    run = drive(plans(source(), rollout(max_attempts=5), reward(), update("reward")))
    run.admit(Prompt("0-a", 1, False))
    run.fail("rollout-0", run.claim("rollout-0"), key("0-a"), retry=False)
    assert run.coordinator.ledger.settled == {("sampled", "failed: rollout"): 1}


def test_a_failed_unit_waits_until_its_claim_is_over_before_it_is_tried_again() -> None:
    run = drive(plans(source(), rollout(), reward(), update("reward")))
    run.admit(Prompt("0-a", 2, False))
    run.work("rollout-0")
    claim = run.claim("reward-0")
    run.fail("reward-0", claim, key("0-a", 0))
    assert run.idle("reward-0")
    run.acknowledge("reward-0", claim, {key("0-a", 1)})
    assert ids(run.claim("reward-0")) == [key("0-a", 0)]


def test_a_group_that_failed_is_tried_again_whole() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 3, False), Prompt("0-b", 2, False))
    run.work("rollout-0")
    run.work("reward-0")
    claim = run.claim("advantage-0")
    run.acknowledge("advantage-0", claim, {key("0-b", 0), key("0-b", 1)})
    run.fail("advantage-0", claim, *(key("0-a", session) for session in range(3)))
    assert ids(run.claim("advantage-0")) == [key("0-a", 0), key("0-a", 1), key("0-a", 2)]


def test_a_group_whose_worker_died_is_offered_again_whole() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 3, False))
    run.work("rollout-0")
    run.work("reward-0")
    run.claim("advantage-0")
    run.send(WorkerDied("advantage-0", "killed", run.now))
    run.join("advantage-0")
    assert len(run.claim("advantage-0").units) == 3


def test_a_source_that_fails_is_asked_again_and_then_stops_the_run() -> None:
    run = drive(plans(source(max_attempts=2), rollout(), update("rollout")))
    for attempt in range(2):
        assert run.coordinator.halted == ""
        claim = run.claim("source-0")
        assert claim.delivery == attempt
        run.send(Failed("source-0", claim.id, claim.window, claim.delivery, Failure("Error", "disk full"), True, run.now))
    assert "'source' could not fill window run/train/000000 in 2 attempts: disk full" in run.of(Halt)[0].reason


def test_a_unit_dropped_by_a_rule_is_counted_under_it_and_seen_by_no_later_stage() -> None:
    run = drive(plans(source(), rollout(), reward(), update("reward")))
    run.admit(Prompt("0-a", 2, False))
    run.work("rollout-0")
    claim = run.claim("reward-0")
    run.send(Dropped("reward-0", claim.id, key("0-a", 0), 0, "too easy", run.now))
    run.acknowledge("reward-0", claim, {key("0-a", 1)})
    assert ids(run.claim("update-0")) == [key("0-a", 1)]
    assert run.coordinator.ledger.settled == {("sampled", "dropped: too easy"): 1}


# Late and repeated reports


def expired(lease_s: float = 60.0) -> tuple[Drive, Claim, Claim]:
    """A silent worker `reward-0`, whose unit was given to `reward-1` as delivery 1."""
    workers = ["source-0", "rollout-0", "reward-0", "reward-1"]
    run = drive(grpo(min_group=1), workers=workers, lease_s=lease_s)
    run.admit(Prompt("0-a", 1, False))
    run.work("rollout-0")
    first = run.claim("reward-0")
    run.now += lease_s + 1
    run.send(Heartbeat("reward-1", Holding(), run.now))
    run.send(Tick(run.now))
    return run, first, run.claim("reward-1")


def accepted(run: Drive) -> Mapping[str, int]:
    run.join("advantage-0")
    ticket = run.want("advantage-0")
    return run.granted[ticket].units[0].accepted


def test_a_lease_without_heartbeats_expires_at_a_tick_and_says_so() -> None:
    run, first, second = expired()
    assert ids(second) == ids(first)
    assert second.units[0].delivery == 1
    (alarm,) = run.of(Alarm)
    assert "worker reward-0 sent no heartbeat for 60 s" in alarm.message


def test_heartbeats_keep_a_lease() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 1, False))
    run.claim("rollout-0")
    for _ in range(4):
        run.now += 50
        run.send(Heartbeat("rollout-0", Holding(), run.now))
        run.send(Tick(run.now))
    assert run.of(Alarm) == []


def test_a_lease_far_over_its_deadline_is_given_to_others_although_its_worker_is_alive() -> None:
    run = drive(
        plans(source(), rollout(deadline_s=100), update("rollout")),
        workers=["source-0", "rollout-0", "rollout-1"],
    )
    run.admit(Prompt("0-a", 1, False))
    run.claim("rollout-0")
    run.now = 161
    run.send(Heartbeat("rollout-0", Holding(), run.now))
    run.send(Tick(run.now))
    (alarm,) = run.of(Alarm)
    assert "overran its deadline" in alarm.message
    assert key("0-a") in alarm.message
    assert run.claim("rollout-1").units[0].delivery == 1


def test_the_first_acknowledgement_wins_and_names_the_address_also_from_an_earlier_delivery() -> None:
    run, first, second = expired()
    assert run.acknowledge("reward-0", first) != []
    assert run.acknowledge("reward-1", second) == []
    assert accepted(run)["reward"] == 0
    assert run.coordinator.ledger.late == 1


def test_an_acknowledgement_of_an_earlier_delivery_after_the_current_one_changes_nothing() -> None:
    run, first, second = expired()
    run.acknowledge("reward-1", second)
    assert run.acknowledge("reward-0", first) == []
    assert accepted(run)["reward"] == 1
    assert run.coordinator.ledger.late == 1


def test_a_failure_of_an_earlier_delivery_says_nothing_about_the_current_one() -> None:
    run, first, second = expired()
    run.fail("reward-0", first, key("0-a"), retry=False)
    assert run.coordinator.ledger.settled == {}
    run.acknowledge("reward-1", second)
    assert accepted(run)["reward"] == 1


def test_a_repeated_acknowledgement_is_ignored_and_counted() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 2, False))
    claim = run.claim("rollout-0")
    run.acknowledge("rollout-0", claim)
    assert run.acknowledge("rollout-0", claim) == []
    assert run.coordinator.ledger.late == 2


def test_a_repeated_failure_counts_as_one_attempt() -> None:
    run = drive(plans(source(), rollout(max_attempts=2), update("rollout")))
    run.admit(Prompt("0-a", 2, False))
    claim = run.claim("rollout-0")
    run.fail("rollout-0", claim, key("0-a", 0))
    run.fail("rollout-0", claim, key("0-a", 0))
    assert run.coordinator.ledger.failures == {"rollout": 1}
    assert run.coordinator.ledger.late == 1
    run.acknowledge("rollout-0", claim, {key("0-a", 1)})
    assert ids(run.claim("rollout-0")) == [key("0-a", 0)]


def test_a_repeated_admission_creates_no_units() -> None:
    run = drive(grpo())
    claim = run.claim("source-0")
    admitted = Admitted("source-0", claim.id, 0, 0, (Prompt("0-a", 2, False),), run.now)
    run.send(admitted)
    run.send(admitted)
    assert run.coordinator.ledger.created == {"sampled": 2}
    assert run.coordinator.ledger.late == 1


def test_a_failed_unit_is_tried_again_although_the_last_report_of_its_claim_came_too_late_to_count() -> None:
    run = drive(
        plans(source(), rollout(), reward(), update("reward")),
        workers=["source-0", "rollout-0", "reward-0", "reward-1", "update-0"],
    )
    run.admit(Prompt("0-a", 2, False))
    run.work("rollout-0")
    first = run.claim("reward-0")
    run.now = 61
    run.send(Heartbeat("reward-1", Holding(), run.now))
    run.send(Tick(run.now))
    second = run.claim("reward-1")
    run.fail("reward-1", second, key("0-a", 0))
    run.acknowledge("reward-0", first, {key("0-a", 1)})
    run.fail("reward-1", second, key("0-a", 1))
    assert ids(run.claim("reward-1")) == [key("0-a", 0)]


# The stage with one owner


def ready_to_train(**options: Any) -> tuple[Drive, Claim]:
    run = drive(plans(source(), rollout(), update("rollout", **options)), windows=2)
    run.admit(Prompt("0-a", 2, False))
    run.work("rollout-0")
    return run, run.claim("update-0")


def test_the_death_of_the_one_owner_stops_the_run_with_a_reason() -> None:
    run, _ = ready_to_train()
    run.send(WorkerDied("update-0", "killed", run.now))
    (halt,) = run.of(Halt)
    assert "worker update-0 of stage 'update' died (killed)" in halt.reason


def test_a_failure_of_the_one_owner_stops_the_run_with_its_error() -> None:
    run, claim = ready_to_train()
    run.fail("update-0", claim, key("0-a", 0), error="the gradient norm is nan")
    (halt,) = run.of(Halt)
    assert "the gradient norm is nan" in halt.reason


def test_an_overrun_of_the_one_owner_stops_the_run_and_names_the_deadline() -> None:
    run, _ = ready_to_train(deadline_s=100)
    run.send(Tick(100.0))
    assert run.of(Halt) == []
    run.send(Tick(101.0))
    (halt,) = run.of(Halt)
    assert "longer than its deadline of 100 s; raise its deadline_s" in halt.reason


def test_the_one_owner_is_not_given_up_for_want_of_heartbeats() -> None:
    run, claim = ready_to_train(deadline_s=1000)
    run.now = 900
    run.send(Tick(run.now))
    assert (run.of(Halt), run.of(Alarm)) == ([], [])
    run.acknowledge("update-0", claim)
    assert len(run.of(WindowClosed)) == 1


def test_a_halted_run_grants_nothing() -> None:
    run, _ = ready_to_train()
    run.send(WorkerDied("update-0", "killed", run.now))
    assert run.idle("source-0")


# Windows, credits, the ledger


def train(run: Drive, uid: str, fail: bool = False) -> None:
    """One window of one prompt through a pipeline of source, rollout and update."""
    run.admit(Prompt(uid, 1, False))
    claim = run.claim("rollout-0")
    if fail:
        run.fail("rollout-0", claim, *ids(claim), retry=False)
    else:
        run.acknowledge("rollout-0", claim)
        run.work("update-0")


SHORT = plans(source(), rollout(), update("rollout"))


def test_windows_in_a_row_with_nothing_to_train_on_stop_the_run() -> None:
    run = drive(SHORT, windows=9, max_empty_windows=3)
    train(run, "0-a", fail=True)
    train(run, "0-b", fail=True)
    train(run, "0-c")
    train(run, "0-d", fail=True)
    train(run, "0-e", fail=True)
    assert run.of(Halt) == []
    train(run, "0-f", fail=True)
    (halt,) = run.of(Halt)
    assert "3 windows in a row had nothing to train on" in halt.reason
    assert "failed: rollout (boom)" in halt.reason


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_staleness_bounds_how_many_untrained_windows_are_open(staleness: int) -> None:
    run = drive(SHORT, windows=9, max_staleness=staleness)
    for index in range(staleness + 1):
        run.admit(Prompt(f"0-{index}", 1, False))
    assert run.idle("source-0")
    run.work("rollout-0")
    run.work("update-0")
    assert run.claim("source-0").window_index == staleness + 1


def test_a_credit_limit_holds_later_windows_back_and_never_the_oldest() -> None:
    run = drive(SHORT, windows=4, max_staleness=9, max_open_windows=2)
    run.admit(Prompt("0-a", 1, False))
    run.admit(Prompt("0-b", 1, False))
    assert run.idle("source-0")
    run.work("rollout-0")
    run.work("update-0")
    assert run.claim("source-0").window_index == 2


def test_a_dropped_window_gives_its_credit_back() -> None:
    run = drive(SHORT, windows=3, max_staleness=9, max_open_windows=1)
    run.admit(Prompt("0-a", 1, False, "prompt too long"))
    assert run.claim("source-0").window_index == 1


def test_a_closed_window_says_what_became_of_every_unit() -> None:
    run = drive(remax())
    run.admit(Prompt("0-a", 2, False), Prompt("0-a", 1, True), Prompt("0-b", 1, False), Prompt("0-b", 1, True))
    run.work("rollout-0")
    graded = run.claim("reward-0")
    run.fail("reward-0", graded, key("0-b"), retry=False)
    run.acknowledge("reward-0", graded)
    joined = run.claim("join-0")
    run.send(Dropped("join-0", joined.id, key("0-a", 1), 0, "missing baseline", run.now))
    run.acknowledge("join-0", joined, {key("0-a", 0)})
    run.work("advantage-0")
    run.work("update-0")
    (closed,) = run.of(WindowClosed)
    assert (closed.window, closed.counts) == (
        "run/train/000000",
        {
            ("sampled", "trained"): 1,
            ("sampled", "dropped: missing baseline"): 1,
            ("sampled", "failed: reward"): 1,
            ("baseline", "used as baseline"): 1,
            ("baseline", "dropped: unused baseline"): 1,
        },
    )
    ledger = run.coordinator.ledger
    assert ledger.settled == closed.counts
    assert (ledger.balanced, ledger.in_flight) == (True, {"sampled": 0, "baseline": 0})
    assert ledger.units("dropped") == 2


def test_the_run_is_finished_when_its_last_window_is_closed() -> None:
    run = drive(SHORT, windows=2)
    train(run, "0-a")
    assert run.of(Finished) == []
    train(run, "1-a")
    assert run.of(Finished) == [Finished()]
    assert run.coordinator.finished


def test_a_pipeline_without_an_update_completes_its_units() -> None:
    run = drive(plans(source(), rollout(), reward()), windows=2)
    for index in range(2):
        run.admit(Prompt(f"0-{index}", 2, False))
        run.work("rollout-0")
        run.work("reward-0")
    assert [closed.counts for closed in run.of(WindowClosed)] == [{("sampled", "completed"): 2}] * 2
    assert run.coordinator.finished


def test_a_window_stays_open_while_a_stage_beside_the_update_still_works() -> None:
    run = drive(plans(source(), rollout(), StagePlan("words", ("rollout",), "row"), update("rollout")))
    run.admit(Prompt("0-a", 1, False))
    run.work("rollout-0")
    run.work("update-0")
    assert run.of(WindowClosed) == []
    run.work("words-0")
    assert len(run.of(WindowClosed)) == 1


def test_the_waits_of_a_run_say_how_many_units_each_stage_waits_for() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 3, False))
    rolled = run.claim("rollout-0")
    run.acknowledge("rollout-0", rolled, {key("0-a", 0)})
    waits = run.coordinator.waits()
    assert waits["rollout"] == {"leased": 2, "done": 1}
    assert waits["reward"] == {"ready": 1, "waiting": 2}
    assert run.coordinator.leases() == [("rollout-0", "rollout", f"{key('0-a', 1)}, {key('0-a', 2)}", 300.0)]


# Found by review


def test_another_window_stage_before_the_update_does_not_count_as_training() -> None:
    table = plans(source(), rollout(), reward(), StagePlan("advantage", ("reward",), "window"), update("advantage"))
    run = drive(table, windows=2)
    run.admit(Prompt("0-a", 2, False))
    for worker in ("rollout-0", "reward-0", "advantage-0"):
        run.work(worker)
    assert run.idle("source-0")
    run.work("update-0")
    assert run.claim("source-0").window_index == 1


def test_a_window_that_lags_holds_back_the_windows_that_would_make_it_too_stale() -> None:
    run = drive(SHORT, windows=9, max_staleness=1)
    run.admit(Prompt("0-a", 1, False))
    run.admit(Prompt("0-b", 1, False))
    slow = run.claim("rollout-0")
    run.join("rollout-1")
    assert slow.window_index == 0
    run.work("rollout-1")
    assert run.work("update-0").window_index == 1
    assert run.idle("source-0")
    run.acknowledge("rollout-0", slow)
    run.work("update-0")
    assert run.claim("source-0").window_index == 2


def test_workers_that_die_together_do_not_hand_their_units_to_each_other() -> None:
    run = drive(plans(source(), rollout(), reward(max_units=1), update("reward")), workers=["source-0", "rollout-0"])
    for worker in ("reward-0", "reward-1"):
        run.send(WorkerJoined(worker, "reward", 0.0, "light"))
    run.admit(Prompt("0-a", 1, False))
    run.work("rollout-0")
    held = run.claim("reward-0")
    run.want("reward-1")
    run.effects += run.coordinator.handle(WorkerDied("reward-0", "killed", 0.0), WorkerDied("reward-1", "killed", 0.0))
    run.send(WorkerJoined("reward-2", "reward", 0.0, "light"))
    again = run.claim("reward-2")
    assert ids(again) == ids(held)
    assert again.units[0].delivery == 1


def test_what_killed_its_worker_twice_is_granted_alone_in_its_process() -> None:
    table = plans(source(), rollout(), reward(), StagePlan("count", ("rollout",), "row"), update("reward", "count"))
    run = drive(table, workers=["source-0", "rollout-0", "update-0"])
    run.admit(Prompt("0-a", 1, False))
    run.work("rollout-0")
    for life in range(2):
        run.send(WorkerJoined(f"reward-{life}", "reward", 0.0, "light"))
        run.claim(f"reward-{life}")
        run.send(WorkerDied(f"reward-{life}", "killed", 0.0))
    run.send(WorkerJoined("count-0", "count", 0.0, "light"))
    run.send(WorkerJoined("reward-2", "reward", 0.0, "light"))
    counted = run.claim("count-0")
    assert run.idle("reward-2")
    run.acknowledge("count-0", counted)
    assert ids(run.claim("reward-2")) == [key("0-a")]


def test_a_stage_can_stop_the_run_on_purpose() -> None:
    run = drive(remax())
    run.send(Stopped("join-0", "no baseline", 0.0))
    assert [halt.reason for halt in run.of(Halt)] == ["worker join-0 stopped the run: no baseline"]


def test_Q09_a_group_is_of_one_uid_whatever_the_order_in_which_its_rows_were_written() -> None:
    advantage = StagePlan("advantage", ("reward",), "group", kinds=SAMPLED, max_units=2, min_group=2)
    run = drive(plans(source(), rollout(), reward(), advantage, update("advantage")), windows=2)
    for window in range(2):  # the second time the first window's rows are cleared
        run.admit(Prompt("u1", 2, False), Prompt("u2", 2, False))
        run.work("rollout-0")
        graded = run.claim("reward-0")
        for uid, session in (("u1", 0), ("u2", 0), ("u1", 1), ("u2", 1)):
            run.acknowledge("reward-0", graded, {key(uid, session, window)})
        assert ids(run.work("advantage-0")) == [key("u1", 0, window), key("u1", 1, window)]
        assert ids(run.work("advantage-0")) == [key("u2", 0, window), key("u2", 1, window)]
        run.work("update-0")
