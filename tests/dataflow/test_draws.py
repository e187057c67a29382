"""Which prompts a window draws, and how it is filled up again when groups of it are filtered out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Failure
from dataflow.draws import Draw, Draws, windows_per_epoch
from dataflow.events import (
    Acknowledged,
    Alarm,
    Claim,
    Dropped,
    Failed,
    Finished,
    Halt,
    Prompt,
    WindowClosed,
    WorkerDied,
)
from tests.dataflow.drive import Drive, admitted, dapo, drive, key

SESSIONS = 2


# Dealing out


def test_D01_ten_prompts_in_windows_of_four_are_four_four_and_two_in_every_epoch() -> None:
    draws = Draws(10, 4)
    dealt = [draws.take(0, 4) for _ in range(5)]
    assert [(draw.epoch, draw.first, draw.count) for draw in dealt] == [
        (0, 0, 4),
        (0, 4, 4),
        (0, 8, 2),
        (1, 0, 4),
        (1, 4, 4),
    ]


@given(prompts=st.integers(1, 9), epochs=st.integers(1, 3), counts=st.lists(st.integers(1, 5), max_size=40))
def test_every_prompt_of_every_epoch_is_dealt_out_once_and_in_order(
    prompts: int, epochs: int, counts: list[int]
) -> None:
    draws = Draws(prompts, 1, epochs=epochs)
    dealt: list[tuple[int, int]] = []
    for number, count in enumerate(counts):
        if not draws.left:
            break
        draw = draws.take(number, count)
        assert 1 <= draw.count <= count
        assert draw.first + draw.count <= prompts
        dealt += [(draw.epoch, draw.first + place) for place in range(draw.count)]
    assert dealt == [divmod(place, prompts) for place in range(len(dealt))]
    assert draws.left == (len(dealt) < epochs * prompts)


@given(prompts=st.integers(1, 30), per_window=st.integers(1, 12), epochs=st.integers(1, 3))
def test_without_further_draws_the_epochs_make_the_windows_that_were_announced(
    prompts: int, per_window: int, epochs: int
) -> None:
    draws = Draws(prompts, per_window, epochs=epochs)
    windows = 0
    while draws.left:
        draws.take(0, per_window)
        windows += 1
    assert windows == epochs * windows_per_epoch(prompts, per_window)


# Filling a window up


def refilling(
    windows: int = 1, prompts: int = 100, *, epochs: int | None = None, max_draws: int = 3, **options: Any
) -> Drive:
    return drive(dapo(), windows, draws=Draws(prompts, 2, epochs=epochs, max_draws=max_draws), **options)


def names(draw: Draw | None) -> list[str]:
    assert draw is not None
    return [f"{draw.epoch}-{draw.first + place}" for place in range(draw.count)]


def write(run: Drive, claim: Claim, *, dropped: str = "") -> None:
    prompts = [Prompt(uid, SESSIONS, False, dropped) for uid in names(claim.draw)]
    run.send(admitted("source-0", claim, *prompts, now=run.now))


def fill(run: Drive, *, dropped: str = "") -> Draw:
    """The source writes the prompts that it is asked for."""
    claim = run.claim("source-0")
    write(run, claim, dropped=dropped)
    assert claim.draw is not None
    return claim.draw


def judge(run: Drive, *keep: str) -> None:
    """All sessions that are there are drawn and graded; the filter keeps the groups that are named."""
    run.work("rollout-0")
    run.work("reward-0")
    claim = run.claim("filter-0")
    for unit in claim.units:
        if unit.unit.uid in keep:
            run.send(Acknowledged("filter-0", claim.id, unit.unit.id, unit.delivery, 1, run.now))
        else:
            run.send(Dropped("filter-0", claim.id, unit.unit.id, unit.delivery, "no spread", run.now))


def trained(claim: Claim) -> set[str]:
    return {unit.unit.uid for unit in claim.units}


def test_a_window_draws_as_many_prompts_as_the_filter_took_groups_of_and_is_trained_on_whole() -> None:
    run = refilling()
    assert fill(run) == Draw(0, 0, 0, 2)
    judge(run, "0-1")
    run.work("advantage-0")
    assert run.idle("update-0")
    assert fill(run) == Draw(1, 0, 2, 1)
    assert run.idle("source-0")
    assert run.idle("update-0")
    judge(run, "0-2")
    run.work("advantage-0")
    assert run.idle("source-0")
    assert trained(run.work("update-0")) == {"0-1", "0-2"}
    (closed,) = run.of(WindowClosed)
    assert closed.counts == {("sampled", "trained"): 4, ("sampled", "dropped: no spread"): 2}
    assert closed.metrics == {"filter/dropped_groups": 1, "refill/draws": 1}
    assert run.of(Alarm) == []
    assert run.of(Finished)


def test_a_window_of_which_nothing_is_taken_draws_once() -> None:
    run = refilling()
    fill(run)
    judge(run, "0-0", "0-1")
    assert run.idle("source-0")
    run.work("advantage-0")
    assert trained(run.work("update-0")) == {"0-0", "0-1"}
    assert run.of(WindowClosed)[0].metrics == {"filter/dropped_groups": 0, "refill/draws": 0}


def test_nothing_is_drawn_before_every_group_of_the_last_draw_has_been_judged() -> None:
    run = refilling()
    fill(run)
    run.work("rollout-0")
    graded = run.claim("reward-0")
    run.acknowledge("reward-0", graded, {key("0-0", 0), key("0-0", 1)})
    first = run.claim("filter-0")
    for unit in first.units:
        run.send(Dropped("filter-0", first.id, unit.unit.id, unit.delivery, "no spread", run.now))
    assert run.idle("source-0")
    run.acknowledge("reward-0", graded, {key("0-1", 0), key("0-1", 1)})
    second = run.claim("filter-0")
    for unit in second.units:
        run.send(Dropped("filter-0", second.id, unit.unit.id, unit.delivery, "no spread", run.now))
    assert fill(run) == Draw(1, 0, 2, 2)


def test_C03_a_window_of_which_all_is_filtered_out_stops_after_its_draws_and_says_what_it_saw() -> None:
    run = refilling(windows=4, max_empty_windows=2)
    for _ in range(4):
        fill(run)
        judge(run)
    (closed,) = run.of(WindowClosed)
    assert closed.counts == {("sampled", "dropped: no spread"): 8 * SESSIONS}
    assert closed.metrics == {"filter/dropped_groups": 8, "refill/draws": 3}
    short, empty = (alarm.message for alarm in run.of(Alarm))
    assert short == (
        "window run/train/000000 has 0 of 2 groups to train on: 8 prompts were drawn, and its 4 draws are used up "
        "(16 units dropped: no spread); it goes on with what it has (told once)"
    )
    assert empty == "nothing is left to train on in window run/train/000000: dropped: no spread"
    for _ in range(4):
        fill(run)
        judge(run)
    assert len([alarm for alarm in run.of(Alarm) if "groups to train on" in alarm.message]) == 1
    assert "2 windows in a row had nothing to train on" in run.of(Halt)[0].reason


def test_C03_a_spread_in_every_third_group_fills_a_window_of_two_with_six_seen() -> None:
    run = refilling()
    draws = []
    for keep in ((), ("0-2",), (), ("0-5",)):
        draws.append(fill(run))
        judge(run, *keep)
    assert [draw.count for draw in draws] == [2, 2, 1, 1]
    run.work("advantage-0")
    assert trained(run.work("update-0")) == {"0-2", "0-5"}
    assert run.of(Alarm) == []


def test_a_window_whose_draws_are_used_up_is_trained_on_as_it_is() -> None:
    run = refilling(max_draws=1)
    fill(run)
    judge(run, "0-0")
    fill(run)
    judge(run)
    run.work("advantage-0")
    assert trained(run.work("update-0")) == {"0-0"}
    (alarm,) = run.of(Alarm)
    assert "has 1 of 2 groups to train on: 3 prompts were drawn, and its 2 draws are used up (4 units" in alarm.message


def test_a_filter_without_further_draws_leaves_windows_short_and_raises_no_alarm() -> None:
    run = refilling(max_draws=0)
    fill(run)
    judge(run, "0-0")
    run.work("advantage-0")
    assert trained(run.work("update-0")) == {"0-0"}
    assert run.of(Alarm) == []
    assert run.of(Finished)


def test_a_refill_never_spans_epochs_and_what_is_still_missing_is_drawn_from_the_next_one() -> None:
    run = refilling(prompts=3)
    fill(run)
    judge(run)
    assert fill(run) == Draw(1, 0, 2, 1)
    judge(run)
    assert fill(run) == Draw(2, 1, 0, 2)
    judge(run, "1-0", "1-1")
    run.work("advantage-0")
    assert trained(run.work("update-0")) == {"1-0", "1-1"}


def test_a_run_ends_when_the_epochs_have_no_prompts_left_and_its_last_window_takes_what_is_there() -> None:
    run = refilling(windows=3, prompts=6, epochs=1)
    for keep in (("0-0",), ("0-2",)):
        fill(run)
        judge(run, *keep)
    run.work("advantage-0")
    assert trained(run.work("update-0")) == {"0-0", "0-2"}
    fill(run)
    judge(run, "0-3")
    fill(run)
    judge(run)
    run.work("advantage-0")
    assert trained(run.work("update-0")) == {"0-3"}
    assert [closed.window_index for closed in run.of(WindowClosed)] == [0, 1]
    assert "the epochs have no prompts left" in run.of(Alarm)[0].message
    assert run.of(Finished)
    assert run.coordinator.ledger.created == {"sampled": 6 * SESSIONS}


# What counts as lost


def test_groups_that_fail_before_the_filter_are_replaced_too() -> None:
    run = refilling()
    fill(run)
    claim = run.claim("rollout-0")
    run.fail("rollout-0", claim, key("0-0", 0), key("0-0", 1), retry=False)
    run.acknowledge("rollout-0", claim, {key("0-1", 0), key("0-1", 1)})
    run.work("reward-0")
    run.work("filter-0")
    assert fill(run) == Draw(1, 0, 2, 1)


def test_groups_that_are_too_small_for_the_filter_are_replaced_too() -> None:
    run = refilling()
    fill(run)
    claim = run.claim("rollout-0")
    run.fail("rollout-0", claim, key("0-0", 0), retry=False)
    run.acknowledge("rollout-0", claim)
    run.work("reward-0")
    run.work("filter-0")
    assert run.coordinator.ledger.settled[("sampled", "dropped: partial group")] == 1
    assert fill(run) == Draw(1, 0, 2, 1)


def test_prompts_that_the_source_drops_are_replaced_too() -> None:
    run = refilling()
    fill(run, dropped="prompt too long")
    assert fill(run, dropped="prompt too long") == Draw(1, 0, 2, 2)
    assert fill(run) == Draw(2, 0, 4, 2)
    judge(run, "0-4", "0-5")
    run.work("advantage-0")
    assert trained(run.work("update-0")) == {"0-4", "0-5"}


def test_a_source_that_writes_nothing_uses_the_draws_up() -> None:
    run = refilling(max_draws=1)
    for _ in range(2):
        run.admit()
    assert len(run.of(WindowClosed)) == 1
    assert "0 of 2 groups" in run.of(Alarm)[0].message


def test_a_group_that_is_lost_behind_the_filter_is_not_replaced_once_the_window_is_filled() -> None:
    run = refilling()
    fill(run)
    judge(run, "0-0", "0-1")
    claim = run.claim("advantage-0")
    run.fail("advantage-0", claim, key("0-0", 0), key("0-0", 1), retry=False)
    run.acknowledge("advantage-0", claim)
    assert run.idle("source-0")
    assert trained(run.work("update-0")) == {"0-1"}


def test_a_group_that_is_lost_behind_the_filter_before_the_window_is_filled_is_replaced() -> None:
    run = refilling()
    fill(run)
    judge(run, "0-0")
    claim = run.claim("advantage-0")
    run.fail("advantage-0", claim, key("0-0", 0), key("0-0", 1), retry=False)
    fill(run)
    judge(run, "0-2")
    assert fill(run) == Draw(2, 0, 3, 1)


# Losses while a window is filled up


def test_the_death_of_the_source_in_a_refill_gives_the_same_draw_out_again() -> None:
    run = refilling()
    fill(run)
    judge(run, "0-1")
    lost = run.claim("source-0")
    run.send(WorkerDied("source-0", "killed", run.now))
    assert run.idle("update-0")
    run.join("source-0")
    again = run.claim("source-0")
    assert (again.draw, again.delivery) == (lost.draw, 1)
    write(run, again)
    rolled = run.claim("rollout-0")
    assert [(unit.unit.uid, unit.accepted["source"]) for unit in rolled.units] == [("0-2", 1)] * SESSIONS
    run.acknowledge("rollout-0", rolled)
    run.work("reward-0")
    run.work("filter-0")
    run.work("advantage-0")
    update = run.work("update-0")
    assert {unit.unit.uid: unit.accepted["source"] for unit in update.units} == {"0-1": 0, "0-2": 1}
    assert run.coordinator.ledger.redelivered == {"source": 1}


def test_a_report_of_the_first_draw_that_comes_late_is_not_taken_for_one_of_the_next() -> None:
    run = refilling()
    claim = run.claim("source-0")
    write(run, claim)
    judge(run)
    write(run, claim)
    assert run.coordinator.ledger.late == 1
    assert run.coordinator.ledger.created == {"sampled": 2 * SESSIONS}
    assert fill(run) == Draw(1, 0, 2, 2)


def test_a_refill_that_was_written_twice_counts_once_whichever_came_first() -> None:
    run = refilling()
    fill(run)
    judge(run)
    first = run.claim("source-0")
    run.wait(61)  # without a heartbeat
    run.join("source-1")
    second = run.claim("source-1")
    assert second.draw == first.draw
    write(run, first)
    prompts = [Prompt(uid, SESSIONS, False) for uid in names(second.draw)]
    run.send(admitted("source-1", second, *prompts, now=run.now))
    assert run.coordinator.ledger.late == 1
    assert run.coordinator.ledger.created == {"sampled": 4 * SESSIONS}
    assert {unit.accepted["source"] for unit in run.claim("rollout-0").units} == {0}


def fail(run: Drive, claim: Claim) -> None:
    failure = Failure("OSError", "no file")
    run.send(Failed("source-0", claim.id, claim.window, claim.delivery, failure, True, run.now))


def test_a_refill_that_fails_is_tried_again_and_then_stops_the_run() -> None:
    run = refilling()
    fill(run)
    judge(run)
    first = run.claim("source-0")
    fail(run, first)
    second = run.claim("source-0")
    assert (second.draw, second.delivery) == (first.draw, 1)
    fail(run, second)
    assert "could not fill window run/train/000000 in 2 attempts: OSError: no file" in run.of(Halt)[0].reason


def test_a_failure_of_a_draw_that_others_wrote_meanwhile_touches_neither_it_nor_the_next_one() -> None:
    run = refilling()
    first = run.claim("source-0")
    run.wait(61)
    run.join("source-1")
    second = run.claim("source-1")
    write(run, first)
    judge(run)
    failure = Failure("OSError", "no file")
    for _ in range(3):
        run.send(Failed("source-1", second.id, second.window, second.delivery, failure, True, run.now))
    assert run.of(Halt) == []
    assert not run.coordinator.works(run.now)
    assert fill(run) == Draw(1, 0, 2, 2)


# Several windows


def test_a_refill_of_an_older_window_draws_behind_the_windows_that_are_open() -> None:
    run = refilling(windows=2, max_staleness=1)
    fill(run)
    assert fill(run) == Draw(0, 0, 2, 2)
    judge(run, "0-0")
    assert fill(run) == Draw(1, 0, 4, 1)
    judge(run, "0-4")
    judge(run, "0-2", "0-3")
    run.work("advantage-0")
    run.work("advantage-0")
    assert [trained(run.work("update-0")) for _ in range(2)] == [{"0-0", "0-4"}, {"0-2", "0-3"}]


def test_synchronous_windows_draw_after_those_before_are_filled() -> None:
    run = refilling(windows=2)
    fill(run)
    judge(run, "0-0")
    assert fill(run) == Draw(1, 0, 2, 1)
    judge(run, "0-2")
    run.work("advantage-0")
    assert run.idle("source-0")
    run.work("update-0")
    assert fill(run) == Draw(0, 0, 3, 2)


@pytest.mark.parametrize("credits", [1, 2])
def test_a_window_is_refilled_within_the_credits_it_was_admitted_with(credits: int) -> None:
    run = refilling(windows=9, max_staleness=9, max_open_windows=credits)
    for _ in range(credits):
        fill(run)
    assert run.idle("source-0")
    judge(run)
    draw = fill(run)
    assert (draw.number, draw.first) == (1, 2 * credits)
    assert run.idle("source-0")


def test_a_later_window_is_not_admitted_while_an_earlier_one_that_lost_all_its_units_is_refilled() -> None:
    run = refilling(windows=2)
    fill(run)
    judge(run)
    assert fill(run).number == 1
    assert run.idle("source-0")


def test_the_screen_of_waits_names_the_draw_that_a_window_waits_for() -> None:
    run = refilling()
    fill(run)
    judge(run, "0-0")
    run.work("advantage-0")
    blocked = {line.stage: line for line in run.coordinator.blocked(run.now)}
    assert (blocked["source"].state, blocked["source"].uids) == ("ready", ("run/train/000000",))
    assert "the other units that are taken with them (window)" in blocked["update"].action
    assert run.coordinator.waits()["source"] == {"done": 1, "ready": 1}
