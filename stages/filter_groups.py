"""Filter groups: leaves out prompts whose sessions all came to the same, so that others take their place."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from dataflow.batch import Batch
from dataflow.errors import Drop, RunError
from dataflow.stage import Stage, StageConfig
from schemas.catalog import columns
from stages.algorithms.returns import beyond_rounding, place_rewards

NO_SPREAD, TOO_LOW, TOO_HIGH = "no spread", "group mean too low", "group mean too high"
BY_RULE = frozenset({NO_SPREAD, TOO_LOW, TOO_HIGH})
"""Reasons of drops that follow from the rewards alone."""
RETURN = "return"
EPS = float(np.finfo(np.float32).eps)  # rewards are float32


class FilterConfig(StageConfig):
    """What a user sets of the rule."""

    by: str | None = Field(None, min_length=1)
    """What is compared: `return`, the session's total return, or a number that the reward puts into reward_info;
    default the return without the penalty of reward.overlong."""
    min_mean: float | None = Field(None, allow_inf_nan=False)
    """Lowest mean over its sessions that a group may have; default no limit."""
    max_mean: float | None = Field(None, allow_inf_nan=False)
    """Highest mean over its sessions that a group may have; default no limit."""

    @model_validator(mode="after")
    def _in_order(self) -> Any:
        if self.min_mean is not None and self.max_mean is not None and self.min_mean > self.max_mean:
            raise ValueError(f"min_mean {self.min_mean:g} is above max_mean {self.max_mean:g}; no group would be kept")
        return self


class FilterGroups(Stage):
    """Drops groups that teach nothing: the dynamic sampling of DAPO (Yu et al., arXiv 2503.14476, section 3.2).

    A group is kept if what its sessions came to differs by more than float rounding, as the group estimators see it:
    only sessions take part whose reward is ok and that have a policy token. The window is filled up with further
    prompts (`filters`). Sessions whose reward is not ok are dropped with their group, under their own status.
    """

    Config = FilterConfig
    name = "filter_groups"
    granularity = "group"
    filters = True
    reads = ("reward", "reward_semantics", "token_rewards", "reward_status", "reward_info", "response_mask")
    writes = columns("group_spread")
    batch_rows = 256
    config: FilterConfig

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Keep or drop each group of a batch."""
        groups: dict[str, list[slice]] = {}
        for unit, rows in batch.sessions():
            groups.setdefault(unit.uid, []).append(rows)
        verdicts = {uid: self._verdict(batch, sessions) for uid, sessions in groups.items()}
        spreads: list[float | Drop] = []
        for unit, rows in batch.sessions():
            verdict = verdicts[unit.uid]
            status = next((status for status in batch["reward_status"][rows] if status != "ok"), None)
            if isinstance(verdict, Drop) and status:
                verdict = Drop(f"reward {status}")
            spreads += [verdict] * (rows.stop - rows.start)
        return {"group_spread": spreads}

    def _verdict(self, batch: Batch, sessions: Sequence[slice]) -> float | Drop:
        """The spread of a group, or why it is dropped."""
        known = [rows for rows in sessions if all(status == "ok" for status in batch["reward_status"][rows])]
        if len(known) < self.min_group:
            return Drop("partial group")
        compared = [self._compared(batch, rows) for rows in known if any(map(np.any, batch["response_mask"][rows]))]
        values = [value for value, _ in compared] or [0.0]
        spread, mean = max(values) - min(values), math.fsum(values) / len(values)
        config, reason = self.config, ""
        if not beyond_rounding(spread, max((size for _, size in compared), default=0.0), EPS):
            reason = NO_SPREAD
            batch.report({"filter/no_spread_mean": mean}, 1)
        elif config.min_mean is not None and mean < config.min_mean:
            reason = TOO_LOW
        elif config.max_mean is not None and mean > config.max_mean:
            reason = TOO_HIGH
        return Drop(reason) if reason else spread

    def _compared(self, batch: Batch, rows: slice) -> tuple[float, float]:
        """What a session came to, and the size of the parts that this is the sum of.

        Raises:
            RunError: If the reward does not report the number that `by` names.
        """
        semantics, by = batch["reward_semantics"][rows.start], self.config.by
        if by is None or by == RETURN:
            placed = place_rewards(
                batch["reward"][rows], semantics, batch["response_mask"][rows], batch["token_rewards"][rows]
            )
            return float(placed.sum(dtype=np.float64)), float(np.abs(placed).sum(dtype=np.float64))
        # Under `trajectory` each turn has a copy of the one grade.
        infos = batch["reward_info"][rows] if semantics == "step" else batch["reward_info"][rows][-1:]
        numbers = [_number(json.loads(info), by) for info in infos]
        return math.fsum(numbers), math.fsum(map(abs, numbers))


def _number(info: Mapping[str, Any], name: str) -> float:
    value = info.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        numbers = [other for other, found in info.items() if isinstance(found, int | float)]
        raise RunError(
            f"filter.by: the reward reports no number {name!r} beside the score (got {value!r}); its numbers are: "
            f"{', '.join(numbers) or 'none'}. Let it return one, or compare by {RETURN!r}"
        )
    return float(value)
