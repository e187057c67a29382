"""The coordinator when something goes wrong: deaths, failures, and reports that come late, twice or never."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dataflow.batch import Failure
from dataflow.events import (
    ATTEMPT_FAILED,
    Alarm,
    Claim,
    ClaimWanted,
    Dropped,
    Failed,
    Finished,
    Halt,
    Heartbeat,
    Holding,
    Prompt,
    Settled,
    Tick,
    Unused,
    WindowClosed,
    WorkerDied,
    WorkerJoined,
)
from dataflow.pipeline import StagePlan
from tests.dataflow.drive import Drive, admitted, drive, grpo, ids, key, plans, reward, rollout, source, update

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
    (settled,) = [effect for effect in effects if isinstance(effect, Settled) and effect.outcome != ATTEMPT_FAILED]
    assert (settled.outcome, settled.reason) == ("failed: reward", "Error: boom 2")
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
        run.send(
            Failed("source-0", claim.id, claim.window, claim.delivery, Failure("Error", "disk full"), True, run.now)
        )
    assert "'source' could not fill window run/train/000000 in 2 attempts: Error: disk full" in run.of(Halt)[0].reason


def test_a_unit_dropped_by_a_rule_is_counted_under_it_and_seen_by_no_later_stage() -> None:
    run = drive(plans(source(), rollout(), reward(), update("reward")))
    run.admit(Prompt("0-a", 2, False))
    run.work("rollout-0")
    claim = run.claim("reward-0")
    run.send(Dropped("reward-0", claim.id, key("0-a", 0), 0, "too easy", run.now))
    run.acknowledge("reward-0", claim, {key("0-a", 1)})
    assert ids(run.claim("update-0")) == [key("0-a", 1)]
    assert run.coordinator.ledger.settled == {("sampled", "dropped: too easy"): 1}


def test_every_failed_attempt_is_told_with_its_exception_and_the_tombstone_carries_the_last() -> None:
    run = drive(grpo(min_group=1))
    run.admit(Prompt("0-a", 2, False))
    run.work("rollout-0")
    for attempt in (1, 2):
        claim = run.claim("reward-0")
        failure = Failure("ValueError", f"boom {attempt}", f"Traceback {attempt}")
        run.send(Failed("reward-0", claim.id, key("0-a", 0), claim.units[0].delivery, failure, True, run.now))
        run.acknowledge("reward-0", claim, {key("0-a", 1)})
    attempts = [effect for effect in run.of(Settled) if effect.outcome == ATTEMPT_FAILED]
    assert [(told.unit.id, told.stage, told.delivery, told.worker) for told in attempts] == [
        (key("0-a", 0), "reward", 0, "reward-0"),
        (key("0-a", 0), "reward", 1, "reward-0"),
    ]
    first, last = (Failure("ValueError", f"boom {n}", f"Traceback {n}", attempt=n) for n in (1, 2))
    assert [told.failure for told in attempts] == [first, last]
    (stone,) = run.claim("advantage-0").tombstones
    assert (stone.unit.id, stone.stage, stone.reason, stone.failure) == (
        key("0-a", 0),
        "reward",
        "ValueError: boom 2",
        last,
    )


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


def test_a_part_of_a_group_that_is_reported_too_late_does_not_leave_its_rest_as_a_group() -> None:
    run = drive(grpo(), workers=["source-0", "rollout-0", "reward-0", "advantage-0", "advantage-1"])
    run.admit(Prompt("0-a", 3, False))
    run.work("rollout-0")
    run.work("reward-0")
    late = run.claim("advantage-0")
    run.now = 61
    run.beat("advantage-1")
    run.wait(0)
    run.acknowledge("advantage-0", late, {key("0-a", 0)})
    run.send(Dropped("advantage-0", late.id, key("0-a", 1), 0, "no variance", run.now))
    again = run.claim("advantage-1")
    assert [(unit.unit.id, unit.delivery) for unit in again.units] == [(key("0-a", n), 1) for n in range(3)]
    assert run.coordinator.ledger.late == 2


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
    written = admitted("source-0", claim, Prompt("0-a", 2, False), now=run.now)
    run.send(written)
    run.send(written)
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


# What a worker holds


def test_a_claim_that_its_worker_was_never_told_of_is_given_out_again() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 2, False))
    lost = run.claim("rollout-0")
    run.beat("rollout-0")
    again = run.claim("rollout-0")
    assert ids(again) == ids(lost)
    assert [unit.delivery for unit in again.units] == [1, 1]
    assert run.coordinator.ledger.failures == {}


def test_a_worker_that_asks_again_without_a_word_of_its_claim_gets_it_under_the_next_delivery() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 1, False))
    lost = run.claim("rollout-0")
    run.send(ClaimWanted("rollout-0", 99, 99, 0, Holding(frozenset(), frozenset({99}), 99), run.now))
    assert (ids(run.granted[99]), run.granted[99].units[0].delivery) == (ids(lost), 1)


def test_what_was_never_reported_of_a_claim_that_is_over_is_given_out_again() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 3, False))
    claim = run.claim("rollout-0")
    run.acknowledge("rollout-0", claim, {key("0-a", 0)})
    run.fail("rollout-0", claim, key("0-a", 1))
    run.beat("rollout-0", claims={claim.id})
    assert run.idle("rollout-0")
    run.beat("rollout-0")
    again = run.claim("rollout-0")
    assert [(unit.unit.id, unit.delivery) for unit in again.units] == [(key("0-a", 1), 1), (key("0-a", 2), 1)]


def test_a_worker_that_works_on_its_claim_or_may_yet_be_told_of_it_keeps_it() -> None:
    run = drive(grpo())
    run.admit(Prompt("0-a", 1, False))
    before = run.tickets
    claim = run.claim("rollout-0")
    request = run.tickets
    run.send(Heartbeat("rollout-0", Holding(frozenset(), frozenset(), before), run.now))  # sent before it asked
    run.beat("rollout-0", asking={request})  # sent before it had the answer
    run.beat("rollout-0", claims={claim.id})
    assert run.idle("rollout-0")
    run.acknowledge("rollout-0", claim)
    assert run.coordinator.ledger.late == 0


def test_a_claim_of_the_one_owner_that_was_lost_stops_the_run() -> None:
    run = drive(plans(source(), rollout(), update("rollout")))
    run.admit(Prompt("0-a", 1, False))
    run.work("rollout-0")
    claim = run.claim("update-0")
    run.beat("update-0", claims={claim.id})
    assert run.of(Halt) == []
    run.beat("update-0")
    (halt,) = run.of(Halt)
    assert f"update-0 of stage 'update' no longer works on {key('0-a')} and never reported" in halt.reason


# Silence


def silenced() -> tuple[Drive, Claim]:
    """Two workers of a stage; `reward-0` took a unit and has not been heard of for longer than a lease."""
    run = drive(
        plans(source(), rollout(), reward(), update("reward")),
        workers=["source-0", "rollout-0", "reward-0", "reward-1", "update-0"],
    )
    run.admit(Prompt("0-a", 1, False))
    run.work("rollout-0")
    claim = run.claim("reward-0")
    run.now += 61
    for worker in ("source-0", "rollout-0", "reward-1"):
        run.beat(worker)
    return run, claim


def test_a_silent_worker_is_listed_and_its_units_go_to_another() -> None:
    run, claim = silenced()
    assert run.coordinator.silent() == []
    run.wait(0)
    assert run.coordinator.silent() == ["reward-0"]
    assert ids(run.claim("reward-1")) == ids(claim)


def test_a_silent_worker_that_still_waits_for_work_is_given_none() -> None:
    run, claim = silenced()
    ticket = run.want("reward-0")
    run.now += 61
    for worker in ("source-0", "rollout-0", "reward-1"):
        run.beat(worker)
    run.wait(0)
    assert ticket not in run.granted
    assert ids(run.claim("reward-1")) == ids(claim)


def test_a_worker_without_a_claim_is_silent_too() -> None:
    run, _ = silenced()
    run.wait(61)
    assert run.coordinator.silent() == ["source-0", "rollout-0", "reward-0", "reward-1"]


@pytest.mark.parametrize("sign", ["heartbeat", "request", "report"])
def test_a_worker_that_is_heard_again_is_silent_no_more(sign: str) -> None:
    run, claim = silenced()
    run.wait(0)
    if sign == "heartbeat":
        run.beat("reward-0", claims={claim.id})
    elif sign == "request":
        run.want("reward-0")
    else:
        run.acknowledge("reward-0", claim)
    run.wait(0)
    assert run.coordinator.silent() == []


def test_a_dead_worker_is_not_silent() -> None:
    run, _ = silenced()
    run.wait(0)
    run.die("reward-0")
    assert run.coordinator.silent() == []


# When a window may be cleared


def closed_too_early() -> tuple[Drive, Claim]:
    """A window that was trained on while `reward-0`, which lost its lease, may still be writing into it."""
    run, claim = silenced()
    run.wait(0)
    run.work("reward-1")
    run.work("update-0")
    assert len(run.of(WindowClosed)) == 1
    return run, claim


def test_a_window_that_nobody_writes_to_any_more_is_unused_as_soon_as_it_is_closed() -> None:
    run = drive(plans(source(), rollout(), update("rollout")))
    run.admit(Prompt("0-a", 1, False))
    run.work("rollout-0")
    run.work("update-0")
    assert [type(effect) for effect in run.effects[-3:]] == [WindowClosed, Finished, Unused]
    assert run.of(Unused) == [Unused("run/train/000000")]


def test_a_closed_window_is_unused_only_when_a_late_writer_has_let_go_of_it() -> None:
    run, claim = closed_too_early()
    run.beat("reward-0", claims={claim.id})
    run.acknowledge("reward-0", claim)  # it may write for the claim's other rows still
    assert run.of(Unused) == []
    run.beat("reward-0")
    assert run.of(Unused) == [Unused("run/train/000000")]
    run.beat("reward-0")
    assert len(run.of(Unused)) == 1


def test_a_closed_window_is_unused_when_its_late_writer_is_dead() -> None:
    run, _ = closed_too_early()
    run.die("reward-1")
    assert run.of(Unused) == []
    run.die("reward-0")
    assert run.of(Unused) == [Unused("run/train/000000")]


def test_a_window_that_closed_on_an_earlier_delivery_is_unused_only_when_the_later_one_has_ended() -> None:
    run, early = silenced()
    run.wait(0)
    late = run.claim("reward-1")
    run.acknowledge("reward-0", early)
    run.work("update-0")
    assert len(run.of(WindowClosed)) == 1
    run.beat("reward-0")
    assert run.of(Unused) == []
    run.beat("reward-1", claims={late.id})
    run.acknowledge("reward-1", late)
    assert run.of(Unused) == []
    run.beat("reward-1")
    assert run.of(Unused) == [Unused("run/train/000000")]
