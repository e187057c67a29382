"""Which prompts a window gets: the epochs' prompts are dealt out in order, each once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Draw:
    """Prompts that the source is to write into a window.

    Attributes:
        number: Which draw of its window it is, from 0; the later ones replace groups that were filtered out.
        epoch: Pass over the data, from 0.
        first: Place of the first prompt in the epoch's order, from 0.
        count: How many prompts; never past the end of the epoch.
    """

    number: int
    epoch: int
    first: int
    count: int


class Draws:
    """Deals prompts out to windows.

    The defaults suit a source that makes its prompts up: each window is an epoch of one draw.

    Args:
        prompts: How many the data set has.
        per_window: How many a window is to have.
        epochs: Passes over the data; None is no limit.
        max_draws: Most further draws of a window, in place of what was lost of it.
    """

    def __init__(self, prompts: int = 1, per_window: int = 1, *, epochs: int | None = None, max_draws: int = 0) -> None:
        self.per_window = per_window
        self.max_draws = max_draws
        self._prompts = prompts
        self._epochs = epochs
        self._epoch = self._first = 0

    @property
    def left(self) -> bool:
        """Whether there are prompts that were not drawn yet."""
        return self._epochs is None or self._epoch < self._epochs

    def take(self, number: int, count: int) -> Draw:
        """Draw the next `count` prompts, or those up to the end of the epoch, as draw `number` of a window."""
        draw = Draw(number, self._epoch, self._first, min(count, self._prompts - self._first))
        self._first += draw.count
        if self._first == self._prompts:
            self._epoch, self._first = self._epoch + 1, 0
        return draw

    def why_no_more(self, made: int) -> str:
        """Why a window that has made `made` draws cannot make another; empty if it can."""
        if made > self.max_draws:
            return f"its {made} draws are used up"
        return "" if self.left else "the epochs have no prompts left"


def windows_per_epoch(prompts: int, per_window: int) -> int:
    """How many windows one pass over the data makes without further draws; the last may be short."""
    return -(-prompts // per_window)
