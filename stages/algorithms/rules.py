"""Bounds of the off-policy correction. Imports no torch, so that a configuration is checked by the same rules."""

from __future__ import annotations

from dataclasses import dataclass

from stages.algorithms.catalog import CORRECTION_LEVELS, CORRECTION_MODES, REJECTION_KINDS, REJECTION_LEVELS


@dataclass(frozen=True)
class WeightRule:
    """How importance weights are formed.

    Attributes:
        level: ``token``: ``w = e^x`` of each token. ``sequence``: ``w = e^{Σ_t m_t x_t}`` on all tokens of the
            sequence, the sum cut to ±20.
        mode: ``truncate``: ``min(w, high)``. ``mask``: w in [low, high], 0 outside.
        high: Upper bound, at least 1.
        low: Lower bound of ``mask``, at most 1.
        normalise: Divide by the mean of the bounded weights, over tokens or over sequences.

    Raises:
        ValueError: An unknown name; bounds that change the weight of a token without mismatch, 1; a lower bound that
            ``truncate`` has no use for.
    """

    level: str = "sequence"
    mode: str = "truncate"
    high: float = 2.0
    low: float = 0.0
    normalise: bool = False

    def __post_init__(self) -> None:
        _known("importance weights: level", self.level, CORRECTION_LEVELS)
        _known("importance weights: mode", self.mode, CORRECTION_MODES)
        if not 0.0 <= self.low <= 1.0 <= self.high:
            raise ValueError(
                "importance weights: expected 0 <= low <= 1 <= high, so that a token without mismatch keeps its weight "
                f"of 1, got low {self.low} and high {self.high}"
            )
        if self.mode == "truncate" and self.low:
            raise ValueError(
                f"importance weights: mode 'truncate' has no lower bound, but low is {self.low}; leave it out, or use "
                "mode 'mask'"
            )


@dataclass(frozen=True)
class Rejection:
    """A rule by which tokens, or whole sequences, leave the loss.

    Attributes:
        kind: An estimate of KL(π_rollout‖π): ``k1`` −x, ``k2`` x²/2, ``k3`` ``e^x − 1 − x``.
        level: ``token``; or the sum (``seq_sum``), mean (``seq_mean``) or largest (``seq_max``) of a sequence's tokens,
            by which the whole sequence is kept or not.
        high: k1: the largest ratio π_rollout / π that is kept, above 1. k2, k3: the largest estimate, above 0.
        low: k1: the smallest ratio that is kept, in (0, 1); by default 1 / high.

    Raises:
        ValueError: An unknown name, a bound out of range, or one that the kind has no use for.
    """

    kind: str
    level: str
    high: float
    low: float | None = None

    def __post_init__(self) -> None:
        _known("rejection: kind", self.kind, REJECTION_KINDS)
        _known("rejection: level", self.level, REJECTION_LEVELS)
        if self.kind == "k1" and self.level == "seq_max":
            raise ValueError(
                "rejection by k1: a largest value of either sign bounds nothing; use k2 or k3 with seq_max"
            )
        if self.kind != "k1" and self.low is not None:
            raise ValueError(f"rejection by {self.kind}: it has no lower bound, but low is {self.low}; leave it out")
        least = 1.0 if self.kind == "k1" else 0.0
        if not self.high > least or not (self.low is None or 0.0 < self.low < 1.0):
            raise ValueError(
                f"rejection by {self.kind}: expected high > {least:g}{', 0 < low < 1' if least else ''}, "
                f"got high {self.high} and low {self.low}"
            )


def _known(what: str, name: str, names: dict[str, str]) -> None:
    if name not in names:
        raise ValueError(f"{what}: expected one of {', '.join(names)}, got {name!r}")
