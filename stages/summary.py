"""What a run says at its end about its baselines: where they came from, what they cost, and what they gave."""

from __future__ import annotations

from collections.abc import Mapping

Totals = Mapping[str, tuple[float, float]]
"""Metric -> (weighted sum, weight) over the whole run; see `Batch.report`."""


def summarise(totals: Totals) -> list[str]:
    """Lines to print at the end of a run; none for what the run did not measure.

    Args:
        totals: Everything that the stages reported.
    """
    return [line for line in (_sources(totals), _cost(totals), _gain(totals)) if line]


def _sources(totals: Totals) -> str:
    found = {name.partition("/")[2]: pair for name, pair in totals.items() if name.startswith("baseline_source/")}
    sessions = max((weight for _, weight in found.values()), default=0.0)
    if not sessions:
        return ""
    shares = [f"{100 * count / sessions:.1f} % {source}" for source, (count, _) in found.items() if count]
    return f"baselines of {sessions:.0f} sessions: {', '.join(shares)}"


def _cost(totals: Totals) -> str:
    greedy, tokens = totals.get("rollout/baseline_token_share", (0.0, 0.0))
    if not greedy or greedy == tokens:
        return ""
    extra = 100 * greedy / (tokens - greedy)
    return f"baseline cost: {greedy:.0f} of {tokens:.0f} response tokens, {extra:.1f} % more than without"


def _gain(totals: Totals) -> str:
    """The mean square of the advantages, which scales the variance of the gradient, against two other choices."""
    if "advantage/square" not in totals or not totals["advantage/square"][1]:
        return ""
    with_it, square, mean = (_mean(totals, name) for name in ("advantage/square", "return/square", "return/mean"))
    constant = square - mean * mean
    return (
        f"baseline gain: mean square of the advantages {with_it:.4f}; of the returns alone {square:.4f}"
        f"{_change(with_it, square)}; minus their mean {constant:.4f}{_change(with_it, constant)}"
    )


def _mean(totals: Totals, name: str) -> float:
    total, weight = totals[name]
    return total / weight


def _change(now: float, before: float) -> str:
    return f" ({100 * (now / before - 1):+.0f} %)" if before > 0 else ""
