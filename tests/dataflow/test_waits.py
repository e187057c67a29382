"""Named waits: what is waited for, since when, until when, and what happens then."""

from __future__ import annotations

import asyncio

import pytest

from dataflow.waits import Overdue, Wait, Waits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_is_open_while_it_lasts_and_says_how_long_it_has_lasted() -> None:
    clock = Clock()
    waits = Waits(clock)
    with waits.named("engine rollout-0: 3 requests in flight", 120.0, "they are aborted"):
        clock.now += 12.0
        (wait,) = waits.open()
        assert wait == Wait("engine rollout-0: 3 requests in flight", 12.0, 120.0, "they are aborted")
        assert str(wait) == "engine rollout-0: 3 requests in flight: 12 s of 120 s, then: they are aborted"
    assert waits.open() == ()


def test_a_wait_that_ends_in_an_error_is_over_too() -> None:
    waits = Waits()
    with pytest.raises(OSError, match="gone"), waits.named("a file", 1.0, "it is made again"):
        raise OSError("gone")
    assert waits.open() == ()


def test_waits_are_listed_from_the_oldest_on() -> None:
    waits = Waits()
    with waits.named("first", 1.0, ""), waits.named("second", 1.0, ""):
        assert [wait.subject for wait in waits.open()] == ["first", "second"]


def test_what_comes_in_time_is_returned() -> None:
    async def soon() -> int:
        return 7

    assert asyncio.run(Waits().until(soon(), "a number", 10.0, "the run stops")) == 7


def test_what_does_not_come_is_cancelled_and_named() -> None:
    cancelled = []

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    waits = Waits()
    with pytest.raises(Overdue, match=r"waited 0.01 s for the weights of version 3; the engine is replaced"):
        asyncio.run(waits.until(never(), "the weights of version 3", 0.01, "the engine is replaced"))
    assert cancelled == [True]
    assert waits.open() == ()


def test_a_timeout_of_what_is_awaited_keeps_its_own_words() -> None:
    async def fails() -> None:
        raise TimeoutError("the grader's own")

    with pytest.raises(TimeoutError, match="the grader's own") as caught:
        asyncio.run(Waits().until(fails(), "a grade", 10.0, ""))
    assert not isinstance(caught.value, Overdue)
