"""Named waits: whoever waits says for what, until when, and what happens then.

A worker keeps one `Waits` for all that runs in it and hands a copy to the coordinator with every heartbeat, so that
a run that does not move can say what it waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class Overdue(TimeoutError):
    """Raised when a wait reached its deadline. The message says what was waited for, and how long."""


@dataclass(frozen=True)
class Wait:
    """One wait that is going on.

    Attributes:
        subject: What is waited for, with names: units, an engine, a version.
        seconds: How long it has lasted.
        deadline_s: How long it may last.
        action: What happens at the deadline.
    """

    subject: str
    seconds: float
    deadline_s: float
    action: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.seconds:.0f} s of {self.deadline_s:g} s, then: {self.action}"


class Waits:
    """The waits of one worker.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._serial = 0
        self._open: dict[int, tuple[str, float, float, str]] = {}

    def open(self) -> tuple[Wait, ...]:
        """The waits that are going on, the oldest first."""
        now = self._clock()
        return tuple(
            Wait(subject, now - since, deadline_s, action)
            for subject, since, deadline_s, action in list(self._open.values())
        )

    @contextlib.contextmanager
    def named(self, subject: str, deadline_s: float, action: str) -> Iterator[None]:
        """Register a wait that keeps its own deadline."""
        self._serial += 1
        number = self._serial
        self._open[number] = (subject, self._clock(), deadline_s, action)
        try:
            yield
        finally:
            del self._open[number]

    async def until(self, what: Awaitable[T], subject: str, deadline_s: float, action: str) -> T:
        """Await `what` for at most `deadline_s` seconds, by name.

        Raises:
            Overdue: At the deadline; `what` is cancelled.
        """
        limit = asyncio.timeout(deadline_s)
        try:
            with self.named(subject, deadline_s, action):
                async with limit:
                    return await what
        except TimeoutError:
            if not limit.expired():
                raise  # of what was awaited
            raise Overdue(f"waited {deadline_s:g} s for {subject}; {action}") from None
