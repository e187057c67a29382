"""What many scored rows say together: means over what is there, counts of what is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stages.rewards.base import Scored


class _Absent:
    """The value of an extra field in a row whose scorer did not give it; None is a value of its own."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = _Absent()


@dataclass(frozen=True)
class RewardSummary:
    """Counts and means of scored rows.

    Attributes:
        rows: How many rows.
        mean_reward: Mean over the rows that have a reward; None if none has.
        statuses: Rows by status.
        reasons: Rows by ``info["reason"]``, such as ``no answer`` or ``unscorable``.
        means: Mean of each numeric extra field, over the rows that have it.
    """

    rows: int
    mean_reward: float | None
    statuses: dict[str, int]
    reasons: dict[str, int]
    means: dict[str, float]


def summarise(scored: Sequence[Scored]) -> RewardSummary:
    """Summarise scored rows; rows without a reward are counted, never averaged as 0."""
    rewards = [row.reward for row in scored if row.reward is not None]
    fields = info_columns([row.info for row in scored])
    numbers = {name: [float(v) for v in values if isinstance(v, int | float)] for name, values in fields.items()}
    return RewardSummary(
        rows=len(scored),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        statuses=dict(Counter(row.status for row in scored)),
        reasons=dict(Counter(row.info["reason"] for row in scored if isinstance(row.info.get("reason"), str))),
        means={name: sum(values) / len(values) for name, values in sorted(numbers.items()) if values},
    )


def info_columns(infos: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows of differing extra fields into columns: the union of the names, `ABSENT` where not given.

    Args:
        infos: One mapping per row, in the order of the rows.

    Returns:
        One list per field, as long as `infos`; fields in alphabetical order, whatever row came first.
    """
    names = sorted({name for info in infos for name in info})
    return {name: [info.get(name, ABSENT) for info in infos] for name in names}
