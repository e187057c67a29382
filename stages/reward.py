"""Reward: grades each session once. A reward that cannot be determined has a status, never a silent 0."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dataflow.batch import Batch, Unit
from dataflow.stage import Stage, StageConfig, StageContext
from schemas.catalog import columns
from stages.rewards.base import Scored
from stages.rewards.child import MEMORY_MIB, Child, Row
from stages.rewards.extract import NO_ANSWER
from stages.rewards.length import SoftOverlongPenalty

_SHARES = 4
"""Parts of a batch for each process: more would even out slow rows better, fewer cost less."""
_FRESH_S = 10.0
"""Allowance for a new process after one was ended, in seconds."""


TASK_REWARD = "task_reward"
"""Where reward_info keeps the reward as the function gave it, when a penalty was added."""


class OverlongConfig(StageConfig):
    """A penalty on responses that come near the limit of their length, as DAPO has it (arXiv 2503.14476, eq. 13)."""

    buffer_tokens: int = Field(ge=1)
    """Tokens before rollout.max_tokens over which the penalty grows from 0 to the whole."""
    penalty: float = Field(1.0, ge=0, allow_inf_nan=False)
    """The whole penalty, taken from the reward of a response of full length."""


class GradingConfig(StageConfig):
    """What a user sets of the reward."""

    function: str = "exact_match"
    """A built-in name or an import path, `package.module:name` or `file.py:name`."""
    options: dict[str, Any] = {}
    """Keyword arguments given to the function with every row."""
    semantics: Literal["trajectory", "step"] = "trajectory"
    """`trajectory`: the last turn is graded, for the whole session. `step`: each turn is, and they add up."""
    timeout_s: float = Field(10.0, gt=0, allow_inf_nan=False)
    """Longest time to grade one response, in seconds; then its process is killed and its status is `timeout`."""
    processes: int = Field(1, ge=1)
    """Processes that grade at the same time."""
    memory_mib: int = Field(MEMORY_MIB, ge=256)
    """Most memory of each of these processes, in MiB; beyond it the function sees a MemoryError."""
    overlong: OverlongConfig | None = None
    """Takes a penalty from the rewards of responses that come near the limit of their length; none is off."""


class RewardConfig(GradingConfig):
    """Options of the reward."""

    max_tokens: int = Field(64, ge=1)
    """Longest response, in tokens."""

    @property
    def length_penalty(self) -> SoftOverlongPenalty | None:
        """The penalty of a response by its length; None if there is none."""
        if self.overlong is None:
            return None
        return SoftOverlongPenalty(self.max_tokens, self.overlong.buffer_tokens, self.overlong.penalty)


class Reward(Stage):
    """Applies the reward function to every row, sampled and greedy alike, in processes that can be killed.

    A penalty on length is added to what the function gave, on both sides as well, so that a greedy baseline is made of
    the same parts as the returns that it is subtracted from.
    """

    Config = RewardConfig
    name = "reward"
    writes = columns("reward", "reward_semantics", "token_rewards", "reward_status", "reward_info")
    batch_rows = 128
    config: RewardConfig

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(config)
        self._penalty = config.length_penalty
        self.reads = (
            "response_text",
            "ground_truth",
            "prompt",
            "data_source",
            "extra",
            *(("response_mask",) if self._penalty else ()),
        )
        # Every row of a claim may take its whole time: the deadline is for what the timeouts do not see.
        slowest = math.ceil(self.batch_rows / config.processes) * (config.timeout_s + _FRESH_S)
        self.deadline_s = max(Stage.deadline_s, slowest)

    def setup(self, context: StageContext) -> None:
        """Start the processes that grade, so that a function that cannot be imported stops the run before it begins.

        Raises:
            WorkerBroken: If one does not start.
        """
        config = self.config
        self._children = [
            Child(config.function, config.options, memory_mib=config.memory_mib) for _ in range(config.processes)
        ]
        self._threads = ThreadPoolExecutor(config.processes, thread_name_prefix="reward-grades")
        self._free: SimpleQueue[Child] = SimpleQueue()
        for child in self._children:
            self._free.put(child)
        try:
            list(self._threads.map(Child.start, self._children))
        except BaseException:
            self.close()
            raise

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Grade the rows of a batch."""
        sessions = list(batch.sessions())
        graded = [range(rows.stop - 1 if self._once else rows.start, rows.stop) for _, rows in sessions]
        by_row = iter(self._grade([self._row(batch, row) for rows in graded for row in rows]))
        scored: list[Scored] = []
        for (unit, rows), places in zip(sessions, graded, strict=True):
            own = [self._shaped(next(by_row), batch, row) for row in places]
            self._report(batch, unit, own)
            scored += own * (rows.stop - rows.start) if self._once else own
        return {
            "reward": [one.reward for one in scored],
            "reward_semantics": [self.config.semantics] * len(scored),
            "token_rewards": [None] * len(scored),
            "reward_status": [one.status for one in scored],
            "reward_info": [json.dumps(one.info, ensure_ascii=False) for one in scored],
        }

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            child.close()

    @property
    def _once(self) -> bool:
        """Whether a session is graded once, by its last turn."""
        return self.config.semantics == "trajectory"

    @staticmethod
    def _row(batch: Batch, row: int) -> Row:
        truth = batch["ground_truth"][row]
        context = {
            "prompt": batch["prompt"][row],
            "data_source": batch["data_source"][row],
            "extra": json.loads(batch["extra"][row]),
        }
        return batch["response_text"][row], None if truth is None else json.loads(truth), context

    def _shaped(self, scored: Scored, batch: Batch, row: int) -> Scored:
        """The reward of a row with the penalty for its length, in policy tokens, and both of them in its info."""
        if self._penalty is None or scored.reward is None:
            return scored
        penalty = self._penalty(int(np.count_nonzero(batch["response_mask"][row])))
        info = {**scored.info, TASK_REWARD: scored.reward, "overlong_penalty": penalty}
        return Scored(scored.reward + penalty, scored.status, info)

    def _grade(self, rows: Sequence[Row]) -> list[Scored]:
        """Grade rows: each process takes the next few when it is free. The result is in the order of the rows."""
        few = max(1, math.ceil(len(rows) / (_SHARES * self.config.processes)))
        shares = [rows[start : start + few] for start in range(0, len(rows), few)]
        return [one for scored in self._threads.map(self._grade_share, shares) for one in scored]

    def _grade_share(self, rows: Sequence[Row]) -> list[Scored]:
        child = self._free.get()
        try:
            return child.grade(rows, timeout_s=self.config.timeout_s)
        finally:
            self._free.put(child)

    def _report(self, batch: Batch, unit: Unit, scored: Sequence[Scored]) -> None:
        """Report the session's return, once however many turns it has. Greedy sessions have figures of their own."""
        kind = "reward/greedy" if unit.is_baseline else "reward"
        known = [one.reward for one in scored if one.reward is not None]
        batch.report({f"{kind}/not_ok_share": len(known) < len(scored)}, 1)
        if len(known) == len(scored):
            batch.report({f"{kind}/mean": sum(known)}, 1)
        for one in scored:
            batch.report({f"{kind}/no_answer_share": one.info.get("reason") == NO_ANSWER}, 1)
            for name, value in one.info.items():
                if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
                    batch.report({f"{kind}/info/{name}": value}, 1)  # the mean over the rows that have it
            if one.status in ("error", "timeout"):
                error = str(one.info.get("error", "no reason given"))
                subject = f"reward {self.config.function!r}: {one.status}"
                batch.warn(f"{subject} {error.partition(':')[0]}", f"{subject}: {error} (the first of its kind)")
