"""The rollout engine on plain transformers, for a machine without vLLM. Slower, and nothing to install.

Imports torch and transformers only when an engine starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from dataflow.weights import WeightsRef
from stages.engines.base import EngineBroken, EngineConfig, GenerateRequest
from stages.engines.gated import Drawn, FinishReason, GatedEngine
from stages.engines.verification import check_names

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Waiting = tuple[GenerateRequest, "asyncio.Future[Drawn]"]


class HfEngine(GatedEngine):
    """One replica on `transformers`: requests that wait together are decoded in one left-padded batch.

    A request that arrives while a batch runs waits for the next one. Everything that touches the model runs
    in one thread, so that decoding, scoring and loading never overlap. Other requests in the batch change a
    log-probability by rounding only (about 1e-6 in float32).
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._model: Any = None
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._stopping = threading.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._batches: asyncio.Task[None] | None = None

    async def _load_model(self) -> int:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-engine")
        self._model = await self._in_thread(lambda: _load(self.config))
        self._batches = asyncio.create_task(self._run_batches())
        return int(self._model.config.vocab_size)

    async def _generate(self, request: GenerateRequest) -> Drawn:
        answer: asyncio.Future[Drawn] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((request, answer))
        return await answer

    async def _score(self, token_ids: tuple[int, ...]) -> list[float]:
        return await self._in_thread(lambda: self._forward_scores(token_ids))

    async def _load_weights(self, ref: WeightsRef) -> Mapping[str, float]:
        return await self._in_thread(lambda: self._copy_weights(ref))

    async def _give_device(self) -> None:
        await self._in_thread(lambda: self._model_to("cpu"))

    async def _take_device(self) -> None:
        await self._in_thread(lambda: self._model_to(self.config.device))

    def _model_to(self, device: str) -> None:
        import torch

        self._model.to(device)
        torch.cuda.empty_cache()  # what the allocator keeps, no other process can have

    async def _free(self) -> None:
        self._stopping.set()
        if self._batches is not None:
            self._batches.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._batches
        if self._thread is not None:
            await asyncio.to_thread(self._thread.shutdown)
        self._model = self._thread = self._batches = None

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise EngineBroken(f"engine {self.config.name} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _run_batches(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < self.config.max_sequences and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            batch = [(request, answer) for request, answer in batch if not answer.cancelled()]
            if batch:
                await self._run_batch(batch)

    async def _run_batch(self, batch: list[Waiting]) -> None:
        loop = asyncio.get_running_loop()
        rows = [_Row(request, answer, self.config.max_model_len) for request, answer in batch]

        def finish(row: _Row) -> None:
            loop.call_soon_threadsafe(row.resolve)

        try:
            await self._in_thread(lambda: self._decode(rows, finish))
        except Exception as error:
            # Such as out of memory: nobody knows what the model's state is now.
            for row in rows:
                if not row.answer.done():
                    row.answer.set_exception(EngineBroken(f"engine {self.config.name} failed: {error!r}"))

    def _decode(self, rows: list[_Row], finish: Callable[[_Row], None]) -> None:
        import torch
        from transformers import DynamicCache

        device = self._model.device
        width = max(len(row.request.prompt_ids) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            start = width - len(row.request.prompt_ids)
            ids[i, start:] = torch.tensor(row.request.prompt_ids, device=device)
            mask[i, start:] = 1
        # Each row's first real token stands at position 0, whatever padding is to its left.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            while rows and not self._stopping.is_set():
                logits = self._model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1]
                for row, row_logits in zip(rows, logits.float().cpu(), strict=True):
                    row.draw(row_logits)
                    if row.finish_reason is not None:
                        finish(row)
                keep = [i for i, row in enumerate(rows) if row.finish_reason is None and not row.answer.cancelled()]
                if len(keep) < len(rows):
                    rows = [rows[i] for i in keep]
                    alive = torch.tensor(keep, dtype=torch.long, device=device)
                    cache.batch_select_indices(alive)
                    mask, positions = mask[alive], positions[alive]
                ids = torch.tensor([[row.token_ids[-1]] for row in rows], device=device)
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=-1)
                positions = positions[:, -1:] + 1

    def _forward_scores(self, token_ids: tuple[int, ...]) -> list[float]:
        import torch

        ids = torch.tensor([token_ids], device=self._model.device)
        with torch.inference_mode():
            log_probs = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            scores: list[float] = log_probs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
        return scores

    def _copy_weights(self, ref: WeightsRef) -> dict[str, float]:
        import torch
        from safetensors import safe_open

        from stages.engines.fingerprint import fingerprint

        # Parameters that share memory (a tied head) appear once here, under the first name, as in the file.
        parameters: dict[str, torch.Tensor] = dict(self._model.named_parameters())
        received = {}
        with safe_open(ref.path, framework="pt") as file, torch.no_grad():
            names = list(file.keys())
            check_names(ref, names, parameters)
            for name in names:
                tensor = file.get_tensor(name)
                received[name] = fingerprint(tensor)
                if tensor.shape != parameters[name].shape:  # copy_ would broadcast
                    raise ValueError(
                        f"{name} has shape {tuple(tensor.shape)}, expected {tuple(parameters[name].shape)}"
                    )
                parameters[name].copy_(tensor)
        return received


class _Row:
    """One response while it grows."""

    def __init__(self, request: GenerateRequest, answer: asyncio.Future[Drawn], max_model_len: int) -> None:
        import torch

        self.request = request
        self.answer = answer
        self.budget = min(request.max_tokens, max_model_len - len(request.prompt_ids))
        # A generator of its own: the sample depends on its seed and not on its neighbours.
        self.generator = torch.Generator().manual_seed(request.seed)
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.finish_reason: FinishReason | None = None

    def draw(self, logits: torch.Tensor) -> None:
        """Append the next token, given its logits [V] float32."""
        log_probs = behaviour_log_probs(logits, self.request)
        if self.request.greedy:
            token = int(log_probs.argmax())
        else:
            token = int(log_probs.exp().multinomial(1, generator=self.generator))
        self.token_ids.append(token)
        self.log_probs.append(float(log_probs[token]))
        if token in self.request.stop_token_ids:  # before the budget: a stop at its last token is a stop
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.budget:
            self.finish_reason = "length"

    def resolve(self) -> None:
        """Answer the request, on the event loop."""
        if not self.answer.done():  # its caller may have gone
            assert self.finish_reason is not None
            self.answer.set_result(Drawn(tuple(self.token_ids), tuple(self.log_probs), self.finish_reason))


def behaviour_log_probs(logits: torch.Tensor, request: GenerateRequest) -> torch.Tensor:
    """Log-probabilities of the distribution that the next token is drawn from.

    In vLLM's order: temperature, then top-k, then top-p among what top-k kept; renormalised over the rest.
    Greedy decoding reports the distribution at temperature 1.

    Args:
        logits: [V] float32.
        request: Whose sampling parameters apply.

    Returns:
        [V] float32, nats; -inf for a token that cannot be drawn.
    """
    if request.greedy:
        return logits.log_softmax(-1)
    logits = logits / request.temperature
    if 0 < request.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(request.top_k).values[-1], float("-inf"))
    if request.top_p < 1:
        ascending, order = logits.sort()
        cut = ascending.softmax(-1).cumsum(-1) <= 1 - request.top_p
        cut[-1] = False  # the most likely token always stays
        logits = logits.masked_fill(cut.new_zeros(cut.shape).scatter(0, order, cut), float("-inf"))
    return logits.log_softmax(-1)


def _load(config: EngineConfig) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        config.model, dtype=getattr(torch, config.dtype), local_files_only=True
    )
    return model.to(config.device).eval()
