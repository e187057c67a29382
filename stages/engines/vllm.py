"""The rollout engine on vLLM; the same code on a CPU and a GPU.

Only this module and `vllm_weights` import vllm, and this one only when an engine starts. On a CPU the process
needs the environment of `cpu_environment` before it imports torch or vllm.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import multiprocessing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from dataflow.weights import WeightsRef
from stages.engines.base import EngineBroken, EngineConfig, GenerateRequest
from stages.engines.checkpoint import model_parameters, parameter_sizes
from stages.engines.gated import Drawn, FinishReason, GatedEngine
from stages.engines.verification import check_names

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

# vLLM's default block on a CPU is 128 tokens, and only whole blocks of a prompt are shared.
CPU_BLOCK_TOKENS = 32
# Elements that one update call names; loaders hold views of the file until a layer is complete.
CHUNK_ELEMENTS = 64 << 20
# How often to ask whether the core process lives; a request notices its death this much later at worst.
LIVENESS_S = 0.5
# How long to wait for a process that was told to end, or killed.
JOIN_S = 10.0


def cpu_environment() -> dict[str, str]:
    """Environment that a process on a CPU must have before it imports torch or vllm.

    Set it as the actor's `runtime_env` (Ray sets OMP_NUM_THREADS itself otherwise) and start Ray with
    `RAY_worker_niceness=0`, or workers run at nice 15.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # Two threads: up to 1.6 times faster on an idle machine, 6 to 24 times slower on a busy one, and
        # then a seed no longer decides a sample bit for bit.
        "OMP_NUM_THREADS": "1",
        # Otherwise the worker pins itself to core 0, beside everything else.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The worker lives in the engine process: one process and one import of vllm fewer.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The first request with log-probabilities would compile a function for 5 to 28 s.
        "TORCHDYNAMO_DISABLE": "1",
    }


class VllmEngine(GatedEngine):
    """One vLLM replica: token ids in, token ids and log-probabilities out.

    The engine core is a child process. It ends with `close`, and when this process dies in any way.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._llm: AsyncLLM | None = None
        self._processes: set[BaseProcess] = set()
        self._watching: asyncio.Task[None] | None = None
        self._parameters: set[str] = set()
        self._score_ids = itertools.count()

    async def _load_model(self) -> int:
        # In a thread: import and start take half a minute, in which the caller's loop must go on. And apart:
        # the import leaves a traceback behind, and with it alive whatever its callers' frames hold later.
        await asyncio.to_thread(importlib.import_module, "vllm.v1.engine.async_llm")
        llm, self._processes = await asyncio.to_thread(_start, self.config)
        self._llm = llm
        self._watching = asyncio.create_task(self._watch(llm))
        self._parameters = await asyncio.to_thread(model_parameters, self.config.model)
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        return int(llm.model_config.get_vocab_size())

    async def _generate(self, request: GenerateRequest) -> Drawn:
        params = _sampling_params(
            max_tokens=request.max_tokens,
            logprobs=0,
            stop_token_ids=list(request.stop_token_ids),
            **_sampling(request),
        )
        output = await self._run(request.prompt_ids, params, request.request_id)
        drawn = output.outputs[0]
        steps = zip(drawn.token_ids, cast("list[dict[int, Any]]", drawn.logprobs), strict=True)
        return Drawn(
            token_ids=tuple(int(token) for token in drawn.token_ids),
            log_probs=tuple(float(step[token].logprob) for token, step in steps),
            finish_reason=cast("FinishReason", drawn.finish_reason),
        )

    async def _score(self, token_ids: tuple[int, ...]) -> list[float]:
        params = _sampling_params(max_tokens=1, temperature=1.0, seed=0, prompt_logprobs=0)
        output = await self._run(token_ids, params, f"score-{next(self._score_ids)}")
        steps = zip(token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
        return [float(step[token].logprob) for token, step in steps if step is not None]

    async def _run(self, prompt_ids: tuple[int, ...], params: SamplingParams, name: str) -> RequestOutput:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            outputs = self._running().generate(tokens_input(list(prompt_ids)), params, name)
            return [output async for output in outputs][-1]
        except VLLMValidationError as error:
            raise ValueError(f"request {name}: {error}") from error
        except EngineDeadError as error:
            raise EngineBroken(f"engine {self.config.name}: its core process died") from error

    async def _load_weights(self, ref: WeightsRef) -> Mapping[str, float]:
        sizes = parameter_sizes(ref.path)
        check_names(ref, sizes, self._parameters)
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._running()
        # Nothing runs now; the pause drops the key-value and prefix caches of the old weights.
        await llm.pause_generation(mode="keep", clear_cache=True)
        await llm.start_weight_update()
        for names in _chunks(sizes):
            await llm.update_weights(WeightTransferUpdateRequest({"path": ref.path, "names": names}))
        await llm.finish_weight_update(weight_version=str(ref.version))
        received: list[dict[str, float]] = await llm.collective_rpc("received_fingerprints")
        # Not in a finally: after a failure the scheduler stays paused, whatever else goes wrong.
        await llm.resume_generation()
        return received[0]

    async def _give_device(self) -> None:
        # Level 1 keeps the weights in the host's memory. Level 2 would drop them, and the engine would answer by
        # whatever is in their place if it is woken without an update.
        await self._running().sleep(level=1 if self._frees_memory() else 0)

    async def _take_device(self) -> None:
        await self._running().wake_up(None if self._frees_memory() else ["scheduling"])

    def _frees_memory(self) -> bool:
        """Whether vLLM was started so that it can; on a CPU it cannot, and sleep is a pause."""
        return bool(self._running().model_config.enable_sleep_mode)

    async def _free(self) -> None:
        llm, self._llm = self._llm, None
        if self._watching is not None:
            self._watching.cancel()
        if llm is not None:
            # Not in a thread: the loop would see the core go first, and log its death as an error.
            llm.shutdown()
        for process in self._processes:
            # vLLM gives the core 5 s to leave, of which it needs 3 to 5, then kills it and does not wait.
            process.join(timeout=JOIN_S)

    async def _watch(self, llm: AsyncLLM) -> None:
        while not llm.errored:  # noqa: ASYNC110  vLLM offers no event for it
            await asyncio.sleep(LIVENESS_S)
        # vLLM lets a pending call, such as a pause, wait for ever when the core dies; this ends the wait.
        self._break("its core process died")

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineBroken(f"engine {self.config.name} is closed")
        return self._llm


def _start(config: EngineConfig) -> tuple[AsyncLLM, set[BaseProcess]]:
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    block: dict[str, Any] = {"block_size": CPU_BLOCK_TOKENS} if current_platform.is_cpu() else {}
    others = set(multiprocessing.active_children())
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=config.model,
            dtype=cast(Any, config.dtype),
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_sequences,
            kv_cache_memory_bytes=config.kv_cache_bytes,
            enforce_eager=True,
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            worker_extension_cls="stages.engines.vllm_weights.WeightsExtension",
            weight_transfer_config=WeightTransferConfig(backend="safetensors_file"),
            disable_log_stats=True,
            enable_sleep_mode=config.colocate and current_platform.is_sleep_mode_available(),
            **block,
        )
    )
    return llm, set(multiprocessing.active_children()) - others


def _sampling(request: GenerateRequest) -> dict[str, Any]:
    if request.greedy:
        return {"temperature": 0.0}
    return {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed,
    }


def _sampling_params(**given: Any) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # ignore_eos: else the end ids of the model's generation_config.json stop a response as well, unasked.
    return SamplingParams(n=1, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False, ignore_eos=True, **given)


def _chunks(sizes: Mapping[str, int]) -> list[list[str]]:
    chunks: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if chunks[-1] and filled + size > CHUNK_ELEMENTS:
            chunks.append([])
            filled = 0
        chunks[-1].append(name)
        filled += size
    return chunks
