"""Reward: grades each session once. A reward that cannot be determined has a status, never a silent 0."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dataflow.batch import Batch, Unit
from dataflow.stage import Stage, StageConfig, StageContext
from schemas.catalog import columns
from stages.rewards import resolve
from stages.rewards.base import Scored, score


class RewardConfig(StageConfig):
    """Options of the reward."""

    function: str = "exact_match"
    """A built-in name or an import path, `package.module:name` or `file.py:name`."""
    options: dict[str, Any] = {}
    """Keyword arguments given to the function with every row."""
    semantics: Literal["trajectory", "step"] = "trajectory"
    """`trajectory`: the last turn is graded, for the whole session. `step`: each turn is, and they add up."""


class Reward(Stage):
    """Applies the reward function to every row, sampled and greedy alike."""

    Config = RewardConfig
    name = "reward"
    reads = ("response_text", "ground_truth", "prompt", "data_source", "extra")
    writes = columns("reward", "reward_semantics", "token_rewards", "reward_status", "reward_info")
    batch_rows = 128
    config: RewardConfig

    def setup(self, context: StageContext) -> None:
        """Import the reward function."""
        self._function = resolve(self.config.function, self.config.options)

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Grade the rows of a batch."""
        scored: list[Scored] = []
        for unit, rows in batch.sessions():
            places = range(rows.start, rows.stop)
            if self.config.semantics == "trajectory":
                scored += [self._score(batch, places[-1])] * len(places)
            else:
                scored += [self._score(batch, place) for place in places]
            self._report(batch, unit, scored[rows])
        return {
            "reward": [one.reward for one in scored],
            "reward_semantics": [self.config.semantics] * len(scored),
            "token_rewards": [None] * len(scored),
            "reward_status": [one.status for one in scored],
            "reward_info": [json.dumps(one.info, ensure_ascii=False, default=str) for one in scored],
        }

    def _report(self, batch: Batch, unit: Unit, scored: Sequence[Scored]) -> None:
        """Report the session's return, once however many turns it has. Greedy sessions have figures of their own."""
        kind = "reward/greedy" if unit.is_baseline else "reward"
        known = [one.reward for one in scored if one.reward is not None]
        batch.report({f"{kind}/not_ok_share": len(known) < len(scored)}, 1)
        for one in scored:
            if one.status in ("error", "timeout"):
                error = str(one.info.get("error", "no reason given"))
                subject = f"reward {self.config.function!r}: {one.status}"
                batch.warn(f"{subject} {error.partition(':')[0]}", f"{subject}: {error} (the first of its kind)")
        if len(known) == len(scored) and scored:
            batch.report({f"{kind}/mean": sum(known) if self.config.semantics == "step" else known[-1]}, 1)

    def _score(self, batch: Batch, row: int) -> Scored:
        truth = batch["ground_truth"][row]
        return score(
            self._function,
            batch["response_text"][row],
            None if truth is None else json.loads(truth),
            prompt=batch["prompt"][row],
            data_source=batch["data_source"][row],
            extra=json.loads(batch["extra"][row]),
        )
