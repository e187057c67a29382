"""The coordinator's windows: staleness, credits, the ledger, the one owner, and what stops a run."""

from __future__ import annotations

from typing import Any

import pytest

from dataflow.events import Alarm, Claim, Dropped, Finished, Halt, Prompt, Stopped, Tick, WindowClosed, WorkerDied
from dataflow.pipeline import StagePlan
from tests.dataflow.drive import Drive, drive, grpo, ids, key, plans, remax, reward, rollout, source, update

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
    assert "failed: rollout (Error: boom)" in halt.reason


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


def test_a_run_works_as_long_as_any_claim_is_within_its_deadline() -> None:
    run = drive(plans(source(), rollout(deadline_s=100), update("rollout")))
    assert not run.coordinator.works(0)
    run.admit(Prompt("0-a", 1, False))
    assert not run.coordinator.works(0)
    run.claim("rollout-0")
    assert run.coordinator.works(100)
    assert not run.coordinator.works(101)


# What stops a run


def test_more_failures_than_a_run_may_have_stop_it_at_once() -> None:
    run = drive(plans(source(), rollout(), update("rollout")), max_failures=2)
    run.admit(Prompt("0-a", 4, False))
    claim = run.claim("rollout-0")
    run.fail("rollout-0", claim, key("0-a", 0), key("0-a", 1), retry=False)
    assert run.of(Halt) == []
    run.fail("rollout-0", claim, key("0-a", 2), retry=False)
    (halt,) = run.of(Halt)
    assert "3 units failed for good, more than limits.max_failures=2 allows" in halt.reason
    assert f"{key('0-a', 2)} at stage 'rollout': Error: boom" in halt.reason


def test_failures_that_are_tried_again_and_drops_do_not_count_as_failures_for_good() -> None:
    run = drive(plans(source(), rollout(max_attempts=3), update("rollout")), max_failures=1)
    run.admit(Prompt("0-a", 4, False), Prompt("0-b", 3, False, "prompt too long"))
    for _ in range(2):
        claim = run.claim("rollout-0")
        run.fail("rollout-0", claim, *ids(claim))
    run.work("rollout-0")
    run.work("update-0")
    assert run.of(Halt) == []


def test_a_larger_share_of_failures_than_a_run_may_have_stops_it_when_a_window_closes() -> None:
    run = drive(plans(source(), rollout(), update("rollout")), windows=3, max_failures=0.25)
    for window, failing in enumerate((0, 2, 2)):  # of all so far: 0 of 4, 2 of 8, 4 of 12
        run.admit(Prompt("0-a", 4, False))
        claim = run.claim("rollout-0")
        run.fail("rollout-0", claim, *(key("0-a", session, window) for session in range(failing)), retry=False)
        run.acknowledge("rollout-0", claim)
        assert run.of(Halt) == []
        run.work("update-0")
    (halt,) = run.of(Halt)
    assert "4 of 12 units failed for good, more than the share limits.max_failures=0.25 allows" in halt.reason
    assert "in window run/train/000002: Error: boom" in halt.reason


def test_a_share_of_failures_that_is_allowed_stops_nothing() -> None:
    run = drive(plans(source(), rollout(), update("rollout")), windows=2, max_failures=0.25)
    for window in range(2):
        run.admit(Prompt("0-a", 4, False))
        claim = run.claim("rollout-0")
        run.fail("rollout-0", claim, key("0-a", 0, window), retry=False)
        run.acknowledge("rollout-0", claim)
        run.work("update-0")
    assert run.of(Halt) == []
    assert run.of(Finished) == [Finished()]


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


def test_a_stage_can_stop_the_run_on_purpose() -> None:
    run = drive(remax())
    run.send(Stopped("join-0", "no baseline", 0.0))
    assert [halt.reason for halt in run.of(Halt)] == ["worker join-0 stopped the run: no baseline"]
