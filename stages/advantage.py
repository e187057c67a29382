"""Advantage: lays sessions out as padded rows, calls a pure estimator, and cuts the result into turns again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dataflow.batch import Batch, Unit
from dataflow.errors import Drop
from dataflow.stage import Stage, StageConfig, import_object
from schemas.catalog import columns
from stages.algorithms.catalog import ESTIMATORS
from stages.algorithms.returns import place_rewards


class AdvantageConfig(StageConfig):
    """Options of the advantage stage."""

    estimator: str = "remax"
    """Name of an estimator in `stages.algorithms.catalog`."""
    filtered: bool = False
    """Whether groups are filtered before; see `stages.filter_groups`."""


class Advantage(Stage):
    """Computes `advantages` and `returns`. What it waits for follows from the estimator's needs.

    A session whose reward is unknown has no advantage: it takes no part in any statistic and is dropped under its
    reward's status.
    """

    Config = AdvantageConfig
    name = "advantage"
    writes = columns("advantages", "returns")
    batch_rows = 256
    config: AdvantageConfig

    def __init__(self, config: AdvantageConfig) -> None:
        super().__init__(config)
        self._needs = needs = ESTIMATORS[config.estimator]
        self.granularity = needs.granularity
        self.min_group = needs.min_group
        self.reads = (
            "response_mask",
            "reward",
            "reward_semantics",
            "token_rewards",
            "reward_status",
            *(("baseline",) if needs.greedy_baseline else ()),
            # Not looked at: what the filter drops must be gone before it costs anything.
            *(("group_spread",) if config.filtered else ()),
        )

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Estimate the advantages of a batch's sessions."""
        import torch

        parts = list(batch.sessions())
        masks = [np.concatenate(batch["response_mask"][rows]) for _, rows in parts]
        placed = [self._token_rewards(batch, rows) for _, rows in parts]
        valid = [all(status == "ok" for status in batch["reward_status"][rows]) for _, rows in parts]
        uids = {unit.uid: place for place, unit in enumerate(dict.fromkeys(unit for unit, _ in parts))}
        inputs: dict[str, torch.Tensor] = {
            "token_rewards": _padded(placed, np.float32),
            "mask": _padded(masks, np.float32),
            "groups": torch.tensor([uids[unit.uid] for unit, _ in parts]),
            "valid": torch.tensor(valid),
        }
        if self._needs.greedy_baseline:
            baselines = [batch["baseline"][rows.start] for _, rows in parts]
            inputs["baseline"] = torch.tensor(baselines, dtype=torch.float32)
            self._report_moments(batch, placed, masks, valid, baselines)
        estimate = import_object(self._needs.function, "estimator")
        result = estimate(**{name: inputs[name] for name in self._needs.inputs})
        advantages, returns = result.advantages.numpy(), result.returns.numpy()
        self._report(batch, parts, advantages, masks, valid)
        few = self._too_few(parts, valid)
        return {
            "advantages": self._cut(batch, parts, advantages, few),
            "returns": self._cut(batch, parts, returns, few),
        }

    def _too_few(self, parts: Sequence[tuple[Unit, slice]], valid: Sequence[bool]) -> set[str]:
        """Groups in which too few sessions have a reward to be compared with."""
        if self.granularity != "group":
            return set()
        known: dict[str, int] = {}
        for (unit, _), ok in zip(parts, valid, strict=True):
            known[unit.uid] = known.get(unit.uid, 0) + ok
        return {uid for uid, count in known.items() if count < self.min_group}

    def _report(
        self,
        batch: Batch,
        parts: Sequence[tuple[Unit, slice]],
        advantages: Any,
        masks: Sequence[Any],
        valid: Sequence[bool],
    ) -> None:
        moved: dict[str, bool] = {}
        for (unit, _), row, mask, ok in zip(parts, advantages, masks, valid, strict=True):
            used = row[: len(mask)][mask != 0]
            moved[unit.uid] = moved.get(unit.uid, False) or bool(np.any(used))
            if ok and len(used):
                batch.report({"advantage/abs_mean": float(np.abs(used).mean())}, 1)
        if self.granularity != "row":  # else a uid's sessions may come in several batches
            for moves in moved.values():
                batch.report({"advantage/zero_group_share": not moves}, 1)

    @staticmethod
    def _report_moments(
        batch: Batch, placed: Sequence[Any], masks: Sequence[Any], valid: Sequence[bool], baselines: Sequence[float]
    ) -> None:
        """Report per session what tells how much the baseline narrows the returns: R, R² and (R - b)²."""
        for rewards, mask, ok, baseline in zip(placed, masks, valid, baselines, strict=True):
            if ok and np.any(mask):
                total = float(rewards.sum(dtype=np.float64))
                moments = {"return/mean": total, "return/square": total**2, "advantage/square": (total - baseline) ** 2}
                batch.report(moments, 1)

    def _token_rewards(self, batch: Batch, rows: slice) -> np.ndarray[Any, Any]:
        return place_rewards(
            batch["reward"][rows],
            batch["reward_semantics"][rows.start],
            batch["response_mask"][rows],
            batch["token_rewards"][rows],
        )

    @staticmethod
    def _cut(batch: Batch, parts: Sequence[tuple[Unit, slice]], values: Any, few: set[str]) -> list[Any]:
        """From one row per session to one array per turn; what cannot be trained on is dropped by its reason."""
        result: list[Any] = []
        for place, (unit, rows) in enumerate(parts):
            bad = next((f"reward {status}" for status in batch["reward_status"][rows] if status != "ok"), None)
            reason = bad or ("partial group" if unit.uid in few else None)
            start = 0
            for mask in batch["response_mask"][rows]:
                result.append(Drop(reason) if reason else values[place, start : start + len(mask)])
                start += len(mask)
        return result


def _padded(arrays: Sequence[np.ndarray[Any, Any]], dtype: Any) -> Any:
    """Stack 1-D arrays of several lengths into ``[B, T]``, zeros behind."""
    import torch

    width = max((len(array) for array in arrays), default=0)
    stacked = np.zeros((len(arrays), width), dtype)
    for row, array in enumerate(arrays):
        stacked[row, : len(array)] = array
    return torch.from_numpy(stacked)
