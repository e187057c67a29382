"""The coordinator as a table of events and effects: what is offered to whom, and when."""

from __future__ import annotations

import pytest

from dataflow.events import (
    Alarm,
    Claim,
    ClaimWanted,
    ClaimWithdrawn,
    Dropped,
    Finished,
    Holding,
    Prompt,
    Published,
    WindowClosed,
    WorkerDied,
)
from dataflow.pipeline import StagePlan
from dataflow.weights import WeightsRef
from tests.dataflow.drive import SAMPLED, Drive, drive, grpo, ids, key, plans, remax, reward, rollout, source, update

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
        "Error: no",
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


# Whole groups with their greedy unit


def grouped(min_group: int = 2) -> dict[str, StagePlan]:
    """As for a policy that falls back from the greedy unit to the siblings."""
    advantage = StagePlan("advantage", ("reward",), "group_join", kinds=SAMPLED, min_group=min_group)
    return plans(source(), rollout(), reward(), advantage, update("advantage"))


def graded(run: Drive) -> Claim:
    """A uid with three sampled units and a greedy one, at the reward stage."""
    run.admit(Prompt("0-a", 3, False), Prompt("0-a", 1, True))
    run.work("rollout-0")
    return run.claim("reward-0")


SIBLINGS, GREEDY = [key("0-a", session) for session in range(3)], key("0-a#greedy")


@pytest.mark.parametrize("last", range(4))
def test_a_group_join_is_offered_whole_when_the_last_of_its_units_and_its_greedy_one_have_come(last: int) -> None:
    run = drive(grouped())
    claim = graded(run)
    order = [*SIBLINGS, GREEDY]
    for unit in order[:last] + order[last + 1 :]:
        run.acknowledge("reward-0", claim, {unit})
        assert run.idle("advantage-0")
    run.acknowledge("reward-0", claim, {order[last]})
    offered = run.claim("advantage-0")
    assert ids(offered) == SIBLINGS
    assert [unit.unit.id for unit in offered.baselines] == [GREEDY]
    assert offered.tombstones == ()


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("end", ["failed", "dropped"])
def test_a_group_join_whose_greedy_unit_is_gone_is_offered_with_its_tombstone(end: str, late: bool) -> None:
    run = drive(grouped())
    claim = graded(run)
    if late:
        run.acknowledge("reward-0", claim, SIBLINGS)
        assert run.idle("advantage-0")
    if end == "failed":
        run.fail("reward-0", claim, GREEDY, retry=False)
    else:
        run.send(Dropped("reward-0", claim.id, GREEDY, 0, "reward error", run.now))
    if not late:
        assert run.idle("advantage-0")
        run.acknowledge("reward-0", claim, SIBLINGS)
    offered = run.claim("advantage-0")
    assert (ids(offered), offered.baselines) == (SIBLINGS, ())
    (stone,) = offered.tombstones
    assert (stone.unit.id, stone.outcome) == (
        GREEDY,
        {"failed": "failed: reward", "dropped": "dropped: reward error"}[end],
    )


def test_a_group_join_whose_greedy_prompt_was_not_admitted_waits_for_its_siblings_alone() -> None:
    run = drive(grouped())
    run.admit(Prompt("0-a", 2, False), Prompt("0-a", 1, True, "prompt too long"))
    run.work("rollout-0")
    run.work("reward-0")
    offered = run.claim("advantage-0")
    assert (ids(offered), offered.baselines) == (SIBLINGS[:2], ())
    assert [stone.unit.id for stone in offered.tombstones] == [GREEDY]


def test_a_group_join_without_a_greedy_unit_is_a_group() -> None:
    run = drive(grouped())
    run.admit(Prompt("0-a", 3, False))
    run.work("rollout-0")
    run.work("reward-0")
    offered = run.claim("advantage-0")
    assert (ids(offered), offered.baselines) == (SIBLINGS, ())


def test_a_group_join_is_offered_with_its_survivors_and_never_fewer_than_the_rule_asks_for() -> None:
    run = drive(grouped(min_group=2))
    claim = graded(run)
    run.fail("reward-0", claim, SIBLINGS[0], retry=False)
    run.acknowledge("reward-0", claim)
    offered = run.claim("advantage-0")
    assert (ids(offered), [stone.unit.id for stone in offered.tombstones]) == (SIBLINGS[1:], SIBLINGS[:1])

    run = drive(grouped(min_group=2))
    claim = graded(run)
    run.acknowledge("reward-0", claim, {SIBLINGS[2], GREEDY})
    run.fail("reward-0", claim, *SIBLINGS[:2], retry=False)
    (closed,) = run.of(WindowClosed)
    assert closed.counts == {
        ("sampled", "failed: reward"): 2,
        ("sampled", "dropped: partial group"): 1,
        ("baseline", "dropped: unused baseline"): 1,
    }


def test_a_group_join_is_tried_again_whole_with_its_greedy_unit() -> None:
    run = drive(grouped())
    run.acknowledge("reward-0", graded(run))
    first = run.claim("advantage-0")
    run.fail("advantage-0", first, *SIBLINGS)
    second = run.claim("advantage-0")
    run.die("advantage-0")
    run.join("advantage-0")
    third = run.work("advantage-0")
    for claim, delivery in ((first, 0), (second, 1), (third, 2)):
        assert [(unit.unit.id, unit.delivery) for unit in claim.units] == [(name, delivery) for name in SIBLINGS]
        assert [unit.unit.id for unit in claim.baselines] == [GREEDY]
    run.work("update-0")
    (closed,) = run.of(WindowClosed)
    assert closed.counts == {("sampled", "trained"): 3, ("baseline", "used as baseline"): 1}


def beside() -> dict[str, StagePlan]:
    """A stage that judges rollouts beside the main road, and may drop some."""
    table = grpo(min_group=2)
    last = update("advantage", "rollout", "judge")
    return plans(*(table[name] for name in table if name != "update"), StagePlan("judge", ("rollout",), "row"), last)


def test_a_group_that_loses_a_unit_before_it_is_taken_still_keeps_the_rule() -> None:
    run = drive(beside())
    run.admit(Prompt("0-a", 2, False), Prompt("0-b", 3, False))
    run.work("rollout-0")
    run.work("reward-0")
    judged = run.claim("judge-0")
    for unit in (key("0-a", 0), key("0-b", 0)):
        run.send(Dropped("judge-0", judged.id, unit, 0, "unsafe", run.now))
    offered = run.claim("advantage-0")
    assert ids(offered) == [key("0-b", 1), key("0-b", 2)]
    assert [stone.unit.id for stone in offered.tombstones] == [key("0-b", 0)]
    assert run.idle("advantage-0")
    assert run.coordinator.ledger.settled == {
        ("sampled", "dropped: unsafe"): 2,
        ("sampled", "dropped: partial group"): 1,
    }


def test_a_group_that_loses_a_unit_while_its_worker_dies_still_keeps_the_rule() -> None:
    run = drive(beside())
    run.admit(Prompt("0-a", 2, False))
    run.work("rollout-0")
    run.work("reward-0")
    run.claim("advantage-0")
    judged = run.claim("judge-0")
    run.send(Dropped("judge-0", judged.id, key("0-a", 0), 0, "unsafe", run.now))
    run.acknowledge("judge-0", judged, {key("0-a", 1)})
    run.die("advantage-0")
    run.join("advantage-0")
    assert run.idle("advantage-0")
    (closed,) = run.of(WindowClosed)
    assert closed.counts == {("sampled", "dropped: unsafe"): 1, ("sampled", "dropped: partial group"): 1}


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
