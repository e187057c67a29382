"""Rollout: one request per session to a generation engine, greedy and sampled in one continuous batch."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pydantic import Field, field_validator

from dataflow.batch import Batch, Unit
from dataflow.errors import RowError
from dataflow.stage import Outcome, Stage, StageConfig, StageContext
from schemas.catalog import columns
from stages.engines import Completion, Engine, EngineBroken, EngineConfig, GenerateRequest
from stages.models import local_model
from stages.text import load_tokenizer, response_text, stop_token_ids
from stages.training import ENGINE_AND_LEARNER

log = logging.getLogger(__name__)

ENGINES = {"vllm": "stages.engines.vllm:VllmEngine", "hf": "stages.engines.hf:HfEngine"}


class SamplingConfig(StageConfig):
    """What a user sets of generation."""

    temperature: float = Field(1.0, ge=0.01)
    """Divides the logits of sampled sessions; at least 0.01, since a greedy policy has nothing to compare."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass; 1 is off. Below 1 the learner's probabilities are of another distribution than the engine's."""
    top_k: int = -1
    """Most likely tokens kept; -1 is off."""
    max_tokens: int = Field(64, ge=1)
    """Response budget, in tokens."""
    max_sequences: int = Field(128, ge=1)
    """Sequences decoded at one time."""
    kv_cache_mib: int = Field(256, ge=1)
    """Memory of the engine's key-value cache, in MiB."""
    probe_bound: float = Field(1e-3, gt=0)
    """Largest accepted difference between learner and engine after a weight update, in nats."""

    @field_validator("top_k")
    @classmethod
    def _count_or_off(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError(f"expected a count of tokens, or -1 for off, got {value}")
        return value


class RolloutConfig(SamplingConfig):
    """Options of rollout."""

    engine: str = "vllm"
    """`vllm`, `hf`, or an import path of an `Engine`."""
    model: str
    """Model directory, or a hub id that is on this machine."""
    dtype: str = "float32"
    """float32 on a CPU, bfloat16 on a GPU."""
    device: str = "cpu"
    """cpu or cuda."""
    gpu_share: float = 0.5
    """Share of a GPU that one engine takes."""
    max_model_len: int = 512
    """Longest prompt plus response, in tokens."""
    colocate: bool = False
    """Whether the engine shares its device with the learner, and takes turns."""


def session_seed(run_seed: int, uid: str, session: int, turn: int) -> int:
    """Seed of one response: decided by what it is, never by where, when or in which attempt it is made."""
    text = json.dumps([run_seed, uid, session, turn])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") & 0x7FFFFFFF


def make_engine(kind: str, config: EngineConfig) -> Engine:
    """Make an engine by name or import path; imports nothing heavy before its `start`."""
    from dataflow.stage import import_object

    engine: Engine = import_object(ENGINES.get(kind, kind), "engine")(config)
    return engine


class Rollout(Stage):
    """Turns prompt rows into trajectory rows. Short sessions are written while long ones still run."""

    Config = RolloutConfig
    name = "rollout"
    reads = ("prompt_ids",)
    writes = columns(
        "response_ids",
        "response_mask",
        "rollout_log_probs",
        "response_text",
        "finish_reason",
        "sampling",
        "engine",
        "policy_version_min",
        "policy_version_max",
    )
    expands = True
    loads_weights = True
    batch_rows = 512
    concurrency = 2
    deadline_s = 900.0
    placement = None
    config: RolloutConfig

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        if config.colocate:
            self.device = ENGINE_AND_LEARNER
        if config.device != "cpu":
            self.num_gpus = config.gpu_share
        elif config.engine == "vllm":
            from stages.engines.vllm import cpu_environment

            self.environment = cpu_environment()

    async def setup(self, context: StageContext) -> None:
        """Start the engine."""
        config = self.config
        model = local_model(config.model)
        self._seed = context.seed
        self._name = context.worker
        self._tokenizer = await asyncio.to_thread(load_tokenizer, model)
        self._stops = stop_token_ids(model, self._tokenizer)
        pad = self._tokenizer.pad_token_id
        self._removed = () if pad is None else (pad,)
        self._engine = make_engine(
            config.engine,
            EngineConfig(
                model=model,
                dtype=config.dtype,
                device=config.device,
                max_model_len=config.max_model_len,
                max_sequences=config.max_sequences,
                kv_cache_bytes=config.kv_cache_mib << 20,
                probe_bound=config.probe_bound,
                name=context.worker,
                colocate=config.colocate,
                # No session lasts longer than its claim: an update that waits for it aborts nothing that would end.
                drain_s=self.deadline_s,
                waits=context.waits,
            ),
        )
        await self._engine.start()
        self._updating = asyncio.Lock()

    async def process(self, batch: Batch) -> AsyncIterator[tuple[Unit, Outcome]]:
        """Yield each session as it finishes."""
        await self._load_newest(batch)
        tasks = {
            asyncio.create_task(self._session(unit, batch["prompt_ids"][row])): unit
            for row, unit in enumerate(batch.units)
        }
        try:
            left = set(tasks)
            while left:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    outcome = task.result()
                    if isinstance(outcome, Mapping):
                        _report(batch, tasks[task], outcome)
                    yield tasks[task], outcome
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _load_newest(self, batch: Batch) -> None:
        """Bring the engine to the version that was newest when the claim was granted."""
        async with self._updating:
            if batch.weights is None or batch.weights.version <= self._engine.version:
                return
            difference = await self._engine.update_weights(batch.weights)
            self.loaded_version = self._engine.version
            batch.report({"weights/probe_max_abs": difference}, 1)
            log.info("weights loaded version=%d probe_max_abs=%.2e", self._engine.version, difference)

    async def _session(self, unit: Unit, prompt_ids: Any) -> Outcome:
        config = self.config
        request = GenerateRequest(
            request_id=unit.id,
            prompt_ids=tuple(int(token) for token in prompt_ids),
            max_tokens=config.max_tokens,
            greedy=unit.is_baseline,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=session_seed(self._seed, unit.uid, unit.session, 0),
            stop_token_ids=self._stops,
        )
        try:
            completion = await self._engine.generate(request)
        except ValueError as error:
            # The engine refuses this request for what it is; trying again would be refused again.
            return RowError(str(error), retry=False)
        except EngineBroken:
            raise
        except Exception as error:
            # One session's trouble is its own: its siblings go on.
            return RowError(f"{type(error).__name__}: {error}")
        if completion.finish_reason == "abort":
            return RowError(f"the engine aborted the request after {len(completion.token_ids)} tokens")
        return self._row(request, completion)

    def _row(self, request: GenerateRequest, completion: Completion) -> Mapping[str, list[Any]]:
        ids = completion.token_ids
        return {
            "response_ids": [ids],
            "response_mask": [[1] * len(ids)],
            "rollout_log_probs": [completion.log_probs],
            "response_text": [response_text(self._tokenizer, ids, self._stops, self._removed)],
            "finish_reason": [completion.finish_reason],
            "sampling": [json.dumps(request.effective)],
            "engine": [self._name],
            "policy_version_min": [completion.version_min],
            "policy_version_max": [completion.version_max],
        }

    async def suspend(self) -> None:
        """Put the engine to sleep, so that the learner can have the device."""
        await self._engine.sleep()

    async def resume(self) -> None:
        """Wake the engine; it has the weights it fell asleep with until a claim brings newer ones."""
        await self._engine.wake()

    async def close(self) -> None:
        """Stop the engine and its processes."""
        await self._engine.close()


def _report(batch: Batch, unit: Unit, row: Mapping[str, Sequence[Any]]) -> None:
    length = len(row["response_ids"][0])
    batch.report({"rollout/tokens_per_row": length}, 1)
    batch.report({"rollout/baseline_token_share": unit.is_baseline}, length)
    if not unit.is_baseline:
        truncated = row["finish_reason"][0] == "length"
        batch.report({"response/length_mean": length, "response/truncated_share": truncated}, 1)
        batch.report({"response/empty_share": length == 0}, 1)
