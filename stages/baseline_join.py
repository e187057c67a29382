"""Baseline join: gives each sampled session a number to compare its return with, or a named reason why not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from dataflow.batch import Batch
from dataflow.errors import Drop, RunError
from dataflow.stage import Stage, StageConfig, StageContext
from schemas.catalog import columns
from stages.algorithms.fallback import OF_SIBLINGS, POLICIES, check_chain, fall_back
from stages.algorithms.join import SOURCES, Baseline, Missing, Session, Turn, join_baselines
from stages.names import known
from stages.return_mean import RunningMeans


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _checked(chain: tuple[str, ...]) -> tuple[str, ...]:
    for policy in chain:
        known(policy, POLICIES, "policies")
    check_chain(chain)
    return chain


class MissingBaselineConfig(StageConfig):
    """What happens where a greedy baseline is missing."""

    on_missing: Annotated[tuple[str, ...], BeforeValidator(_as_list), AfterValidator(_checked)] = ("drop",)
    """What stands in for a missing baseline: a policy or a list of them, of which the first that applies is taken:
    leave_one_out, group_mean, ema, zero, drop (leave the session out, by name), fail (stop the run)."""
    ema_decay: float = Field(0.9, ge=0, lt=1)
    """Weight of the past in the running mean of `ema`, and of the estimator rae, per window."""


class BaselineJoinConfig(MissingBaselineConfig):
    """Options of the join."""

    max_version_gap: int = 0
    """Largest accepted distance in policy versions between a greedy session and a sampled one of its uid."""
    max_staleness: int = 0
    """How many of the windows before one may not be trained on yet when it is filled; `ema` leaves them out."""


class BaselineJoin(Stage):
    """Joins by uid. A missing baseline is never silently zero: a named policy decides, and every use is counted.

    A session whose own reward is not ok needs no baseline: it has no return to compare. It is dropped under its
    reward's status, whether its uid has a baseline or not, and never stops a run that is to `fail`.
    """

    Config = BaselineJoinConfig
    name = "baseline_join"
    writes = columns("baseline", "baseline_source")
    batch_rows = 256
    config: BaselineJoinConfig

    def __init__(self, config: BaselineJoinConfig) -> None:
        super().__init__(config)
        # A sibling may only be missing from a mean if it is gone for good.
        self.granularity = "group_join" if OF_SIBLINGS & set(config.on_missing) else "join"
        self.reads = (
            "reward",
            "reward_semantics",
            "token_rewards",
            "reward_status",
            "response_mask",
            "sampling",
            "policy_version_min",
            "policy_version_max",
            *(("data_source",) if "ema" in config.on_missing else ()),
        )

    def setup(self, context: StageContext) -> None:
        """Look where the returns of earlier windows are noted."""
        self._means = RunningMeans(context.run_dir, self.config.ema_decay)

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Join the sampled sessions of a batch with `batch.baseline`.

        Raises:
            RunError: If a baseline is missing and the chain has come to `fail`.
        """
        assert batch.baseline is not None
        greedy = sessions(batch.baseline)
        greedy += [
            Session(stone.unit.uid, stone.unit.session, "trajectory", failure=f"{stone.outcome} ({stone.reason})")
            for stone in batch.tombstones
            if stone.unit.is_baseline
        ]
        sampled = sessions(batch)
        found = join_baselines(sampled, greedy, max_version_gap=self.config.max_version_gap)
        found = fall_back(sampled, found, self.config.on_missing, self._running_means(batch))
        baselines: list[float | Drop] = []
        sources: list[str | Drop] = []
        for session, result in zip(sampled, found, strict=True):
            value, source = self._outcome(batch, session, result)
            baselines += [value] * len(session.turns)
            sources += [source] * len(session.turns)
        return {"baseline": baselines, "baseline_source": sources}

    def _running_means(self, batch: Batch) -> list[float | None]:
        """The running mean of each session's data source, over the windows that are surely trained on."""
        parts = list(batch.sessions())
        if "ema" not in self.config.on_missing:
            return [None] * len(parts)
        means = self._means.after(batch.window_index - self.config.max_staleness)
        return [means.get(batch["data_source"][rows.start]) for _, rows in parts]

    def _outcome(
        self, batch: Batch, session: Session, result: Baseline | Missing
    ) -> tuple[float, str] | tuple[Drop, Drop]:
        """What a session's rows get in both columns; reported once, whatever the number of its turns."""
        if session.status != "ok":
            return (drop := Drop(f"reward {session.status}")), drop
        chain = self.config.on_missing
        if isinstance(result, Missing) and chain[-1] == "fail":
            raise RunError(
                f"no baseline for uid {session.uid!r}: {result}; baseline.on_missing is {', '.join(chain)!r}, which "
                "stops the run; with drop or zero in place of fail it goes on"
            )
        source = result.source if isinstance(result, Baseline) else "missing"
        batch.report({f"baseline_source/{name}": name == source for name in (*SOURCES, "missing")}, 1)
        if isinstance(result, Missing):
            return (drop := Drop(f"missing baseline: {result.reason}")), drop
        batch.report({"baseline/mean": result.value}, 1)
        return result.value, result.source


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
