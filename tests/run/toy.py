"""A whole small run in memory: real join, advantage, workers and coordinator, between stages that compute with hashes.

A response is made of the weights, the uid and the session; the weights are a hash of everything that was trained on, in
order. So a row that is lost, trained twice, out of order or of another delivery changes all that comes after it.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataflow.batch import Batch, Unit
from dataflow.config import ClusterSection, Fault, LimitsSection, RunConfig, RunSection
from dataflow.console import Console
from dataflow.inspect import RunView, write_columns
from dataflow.journal import read_batches
from dataflow.local import run_over
from dataflow.pipeline import Pipeline, StageSpec
from dataflow.queue import MemoryQueue
from dataflow.service import Status, ledger_record
from dataflow.stage import Outcome, Stage, StageConfig
from dataflow.weights import WeightsRef
from schemas.catalog import columns
from stages.advantage import Advantage, AdvantageConfig
from stages.baseline_join import BaselineJoin, BaselineJoinConfig

PROMPTS, SAMPLED = 2, 2
LEASE_S, DEADLINE_S = 2.0, 0.6  # the shortest lease that a configuration may ask for
_calls = itertools.count()


def _call() -> str:
    """A name of this call of `process`: what two deliveries write differs in it."""
    return f"call-{next(_calls)}"


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Source(Stage):
    """Fills each window with the same number of prompts."""

    name = "source"
    granularity = "source"
    writes = columns("uid", "__rollout_n__", "__do_sample__", "prompt")

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        rows = [(f"{batch.window_index}-{prompt}", sample) for prompt in range(PROMPTS) for sample in (True, False)]
        return {
            "uid": [uid for uid, _ in rows],
            "__rollout_n__": [SAMPLED if sample else 1 for _, sample in rows],
            "__do_sample__": [sample for _, sample in rows],
            "prompt": [_call()] * len(rows),
        }


class Rollout(Stage):
    """Answers with a hash of the weights, the uid and the session."""

    name = "rollout"
    reads = ("prompt",)
    writes = columns("response_text", "response_mask", "sampling", "engine", "policy_version_min", "policy_version_max")
    expands = True

    async def process(self, batch: Batch) -> AsyncIterator[tuple[Unit, Outcome]]:  # type: ignore[override]
        version, weights = (batch.weights.version, batch.weights.path) if batch.weights else (0, "")
        call = _call()
        for unit, prompt in zip(batch.units, batch["prompt"], strict=True):
            text = _digest(weights, unit.uid, unit.session, unit.is_baseline)
            yield (
                unit,
                {
                    "response_text": [text],
                    "response_mask": [[1] * (1 + int(text[0], 16) % 4)],
                    "sampling": [
                        json.dumps({"temperature": 0.0 if unit.is_baseline else 1.0, "n": 1, "max_tokens": 4})
                    ],
                    "engine": [json.dumps({"call": call, "read": prompt})],
                    "policy_version_min": [version],
                    "policy_version_max": [version],
                },
            )


class Reward(Stage):
    """Grades a response by its first letters, and notes which call it read.

    The real reward has a process of its own, which takes longer to start than a whole run of these.
    """

    name = "reward"
    reads = ("response_text", "engine")
    writes = columns("reward", "reward_semantics", "token_rewards", "reward_status", "reward_info")

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        call = _call()
        return {
            "reward": [int(text[:4], 16) / 65536 for text in batch["response_text"]],
            "reward_semantics": ["trajectory"] * len(batch),
            "token_rewards": [None] * len(batch),
            "reward_status": ["ok"] * len(batch),
            "reward_info": [json.dumps({"call": call, "read": engine}) for engine in batch["engine"]],
        }


@dataclass(frozen=True)
class Trained:
    """What the update was given of one unit: numbers, and by whom they were written."""

    unit: Unit
    reward: float
    baseline: float
    advantages: tuple[float, ...]
    prompt: str
    engine: str
    reward_info: str

    @property
    def numbers(self) -> tuple[Any, ...]:
        """What must be the same in another run."""
        return self.unit.uid, self.unit.session, self.reward, self.baseline, self.advantages


class Update(Stage):
    """Folds every row into the weights, in the order of the batch."""

    name = "update"
    granularity = "window"
    reads = ("response_text", "reward", "baseline", "advantages", "prompt", "engine", "reward_info")
    writes = columns("trained_version")
    one_owner = True

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self.weights = ""
        self.trained: list[Trained] = []

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        for row, unit in enumerate(batch.units):
            assert not unit.is_baseline
            advantages = tuple(float(value) for value in batch["advantages"][row])
            self.weights = _digest(self.weights, unit.uid, unit.session, batch["response_text"][row], advantages)
            reward, baseline, *by = (
                batch[name][row] for name in ("reward", "baseline", "prompt", "engine", "reward_info")
            )
            self.trained.append(Trained(unit, reward, baseline, advantages, *by))
        version = batch.window_index + 1
        batch.publish(WeightsRef(version, self.weights))
        return {"trained_version": [version] * len(batch)}


@dataclass(frozen=True)
class Made(StageSpec):
    """The specification of a stage of these tests: each worker gets a fresh one, but for the update."""

    stage: type[Stage] | Stage = Source
    config: StageConfig = field(default_factory=StageConfig)

    def build(self) -> Stage:
        return self.stage(self.config) if isinstance(self.stage, type) else self.stage


@dataclass
class Ran:
    """What came of a run."""

    status: Status
    update: Update
    view: RunView
    left: dict[str, list[str]]

    @property
    def settled(self) -> dict[str, int]:
        """How many units came to what: "kind outcome" -> units."""
        return {f"{kind} {outcome}": count for (kind, outcome), count in self.status.ledger.settled.items()}

    @property
    def units(self) -> int:
        """How many units there were, greedy ones too."""
        return sum(self.status.ledger.created.values())

    def events(self) -> list[dict[str, Any]]:
        """What the ledger's journal recorded, in order."""
        return [event for batch in self._journal("ledger") for event in batch.to_pylist()]

    def written(self, stage: str, column: str) -> dict[str, Any]:
        """Address -> what a stage wrote there, whether it was accepted or not."""
        return {
            place: value
            for batch in self._journal(stage)
            for place, value in zip(batch["__address__"].to_pylist(), batch[column].to_pylist(), strict=True)
        }

    def outcomes(self) -> dict[tuple[str, bool], str]:
        """(uid, whether greedy) -> what became of its units, all of which came to the same."""
        found: dict[tuple[str, bool], set[str]] = {}
        for event in self.events():
            if event["stage"] == "" or event["outcome"].startswith(("failed", "dropped")):
                found.setdefault((event["uid"], event["is_baseline"]), set()).add(event["outcome"])
        return {place: " and ".join(sorted(outcomes)) for place, outcomes in found.items()}

    def _journal(self, stage: str) -> Iterator[pa.RecordBatch]:
        for path in sorted((self.view.path / "journal").glob(f"{stage}.*.arrows")):
            yield from read_batches(path)


def pipeline_of(update: Update, windows: int = 6, **settings: Mapping[str, Any]) -> Pipeline:
    """The stages, with two workers of each but the update; claims are small, so that there are many."""
    specs = (
        Made(use="a test"),
        Made(use="a test", stage=Rollout),
        Made(use="a test", stage=Reward),
        Made(use="a test", stage=BaselineJoin, config=BaselineJoinConfig()),
        Made(use="a test", stage=Advantage, config=AdvantageConfig(estimator="remax")),
        Made(use="a test", stage=update),
    )
    crew = {"workers": 2, "batch_rows": 3, "deadline_s": DEADLINE_S, "max_attempts": 10, "placement": None}
    names = ("source", "rollout", "reward", "baseline_join", "advantage")
    chosen = {name: crew | settings.get(name, {}) for name in names}
    pipeline = Pipeline(specs, windows=windows, rows_per_window=1000, settings=chosen)
    pipeline.check()
    return pipeline


def _make_run_dir(run_dir: Path, pipeline: Pipeline) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    write_columns(run_dir, pipeline.columns.values())


async def run_toy(
    run_dir: Path,
    faults: Sequence[Fault] = (),
    *,
    windows: int = 6,
    seed: int = 0,
    run_id: str = "toy",
    **settings: Mapping[str, Any],
) -> Ran:
    """Run to the end in memory, under faults; `settings` are those of the stages."""
    update, queue = Update(StageConfig()), MemoryQueue()
    pipeline = pipeline_of(update, windows, **settings)
    _make_run_dir(run_dir, pipeline)
    limits = LimitsSection(lease_s=LEASE_S, max_failures=None)
    config = RunConfig(
        run=RunSection(seed=seed), limits=limits, cluster=ClusterSection(max_restarts=20), faults=list(faults)
    )
    with Console(run_dir, windows, limits, io.StringIO()) as console:
        status = await run_over(config, pipeline, run_dir, run_id, console, queue)
    (run_dir / "ledger.json").write_text(json.dumps(ledger_record(status.ledger)), encoding="utf-8")
    left = {window: queue.keys(window) for window in RunView(run_dir).partitions()}
    return Ran(status, update, RunView(run_dir), left)
