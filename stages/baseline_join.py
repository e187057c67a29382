"""Baseline join: gives each sampled session the total return of its uid's greedy session, or a named reason why not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dataflow.batch import Batch
from dataflow.errors import Drop, RunError
from dataflow.stage import Stage, StageConfig
from schemas.catalog import columns
from stages.algorithms.join import Baseline, Session, Turn, join_baselines


class BaselineJoinConfig(StageConfig):
    """Options of the join."""

    on_missing: Literal["drop", "fail"] = "drop"
    """What happens to a sampled session without a baseline: leave it out under a reason, or stop the run."""
    max_version_gap: int = 0
    """Largest accepted distance in policy versions between a greedy session and a sampled one of its uid."""


class BaselineJoin(Stage):
    """Joins by uid. A missing baseline is never taken for zero; it is dropped by name and counted."""

    Config = BaselineJoinConfig
    name = "baseline_join"
    granularity = "join"
    reads = (
        "reward",
        "reward_semantics",
        "token_rewards",
        "reward_status",
        "response_mask",
        "sampling",
        "policy_version_min",
        "policy_version_max",
    )
    writes = columns("baseline", "baseline_source")
    batch_rows = 256
    config: BaselineJoinConfig

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Join the sampled sessions of a batch with `batch.baseline`."""
        assert batch.baseline is not None
        greedy = sessions(batch.baseline)
        greedy += [
            Session(stone.unit.uid, stone.unit.session, "trajectory", failure=f"{stone.outcome} ({stone.reason})")
            for stone in batch.tombstones
            if stone.unit.is_baseline
        ]
        sampled = sessions(batch)
        verdicts = join_baselines(sampled, greedy, max_version_gap=self.config.max_version_gap)
        baselines: list[Any] = []
        sources: list[Any] = []
        for session, verdict in zip(sampled, verdicts, strict=True):
            value: float | Drop
            source: str | Drop
            if isinstance(verdict, Baseline):
                value, source = verdict.value, verdict.source
                batch.report({"baseline/mean": verdict.value}, 1)
            elif self.config.on_missing == "fail":
                raise RunError(f"no baseline for uid {session.uid!r}: {verdict}; baseline.on_missing is 'fail'")
            else:
                value = source = Drop(f"missing baseline: {verdict.reason}")
            baselines += [value] * len(session.turns)
            sources += [source] * len(session.turns)
        return {"baseline": baselines, "baseline_source": sources}


def sessions(batch: Batch) -> list[Session]:
    """The sessions of a batch, as the pure join reads them."""
    found = []
    for unit, rows in batch.sessions():
        turns = [
            Turn(
                turn=batch.turns[row],
                reward=batch["reward"][row],
                status=batch["reward_status"][row],
                mask=batch["response_mask"][row],
                sampling=json.loads(batch["sampling"][row]),
                version_min=batch["policy_version_min"][row],
                version_max=batch["policy_version_max"][row],
                token_rewards=batch["token_rewards"][row],
            )
            for row in range(rows.start, rows.stop)
        ]
        found.append(Session(unit.uid, unit.session, batch["reward_semantics"][rows.start], tuple(turns)))
    return found
