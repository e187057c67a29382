"""Penalties on the length of a response."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SoftOverlongPenalty:
    """Penalty that grows linearly over the last `buffer` tokens before the maximum.

    With the buffer's start s = max_tokens - buffer it is 0 up to s, ``-factor * (length - s) / buffer`` from
    there to max_tokens, and -factor beyond. Add it to the task reward. (DAPO, arXiv 2503.14476, eq. 13.)

    Attributes:
        max_tokens: Longest response without the whole penalty, in tokens.
        buffer: Length of the ramp, in tokens; it ends at `max_tokens`.
        factor: The whole penalty.

    Raises:
        ValueError: At construction, if the buffer is below 1 or longer than the maximum (every answer would
            be penalised), or the factor is negative.
    """

    max_tokens: int
    buffer: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.buffer <= self.max_tokens:
            raise ValueError(
                f"overlong buffer: expected 1 to max_tokens ({self.max_tokens}), got {self.buffer}. "
                "A longer buffer would penalise every answer: make it smaller."
            )
        if not self.factor >= 0:
            raise ValueError(f"overlong factor: expected 0 or more, got {self.factor}")

    def __call__(self, tokens: int) -> float:
        """Penalty of a response of so many tokens, from -factor to 0."""
        over = min(max(tokens - (self.max_tokens - self.buffer), 0), self.buffer)
        return -self.factor * (over / self.buffer) if over else 0.0
