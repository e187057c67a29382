"""What all engines share: admission, draining, verification. Imports neither torch nor vllm."""

from __future__ import annotations

import abc
import asyncio
import enum
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from dataflow.weights import WeightsRef
from stages.engines.base import (
    Completion,
    Engine,
    EngineBroken,
    EngineConfig,
    GenerateRequest,
    WeightsRejected,
)
from stages.engines.verification import verify_update

# vLLM raises a lower temperature to this value without saying so in its answer.
MIN_TEMPERATURE = 0.01

T = TypeVar("T")
FinishReason = Literal["stop", "length", "abort"]


class EngineState(enum.Enum):
    """What an engine does with a request that arrives now."""

    CLOSED = "closed"  # refuses it; also before start
    READY = "ready"  # answers it
    UPDATING = "updating"  # lets it wait for the new weights
    BROKEN = "broken"  # refuses it for good


@dataclass(frozen=True)
class Drawn:
    """One response as an implementation returns it; fields as in `Completion`."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason


class GatedEngine(Engine):
    """An engine whose requests pass one gate.

    Requests are counted while they run. An update closes the gate, lets what runs finish, loads, verifies
    and opens the gate again, so that one response is always drawn by one policy version. When anything goes
    wrong after the loading began the state is BROKEN for good: half-loaded weights never answer.

    Everything here runs on one event loop. The gate takes no lock: state and count change between two
    awaits, so that a cancelled request can never leave them wrong.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._version = 0
        self._vocab_size = 0
        self._state = EngineState.CLOSED
        self._why = "it has not been started"
        self._in_flight = 0
        self._settled = asyncio.Event()  # the state is not UPDATING
        self._idle = asyncio.Event()  # nothing is in flight
        self._gone: asyncio.Future[None] | None = None  # done when nothing can be answered any more
        self._settled.set()
        self._idle.set()

    @abc.abstractmethod
    async def _load_model(self) -> int:
        """Load the model; returns its vocabulary size."""

    @abc.abstractmethod
    async def _generate(self, request: GenerateRequest) -> Drawn:
        """Answer a request that has been checked. Raises EngineBroken when the engine died."""

    @abc.abstractmethod
    async def _score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Score at least two ids that have been checked."""

    @abc.abstractmethod
    async def _load_weights(self, ref: WeightsRef) -> Mapping[str, float]:
        """Load a file while nothing runs; returns the fingerprint of each tensor received."""

    @abc.abstractmethod
    async def _free(self) -> None:
        """Free everything, child processes included. Also called when broken, dead, or freed already."""

    @property
    def version(self) -> int:
        """Policy version of the weights loaded now."""
        return self._version

    @property
    def state(self) -> EngineState:
        """What the engine does with a request that arrives now."""
        return self._state

    async def start(self) -> None:
        """Load the model and become ready."""
        self._gone = asyncio.get_running_loop().create_future()
        self._vocab_size = await self._load_model()
        self._state = EngineState.READY

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate one response; see `Engine.generate`."""
        async with self._admitted():
            self._check(request)
            drawn = await self._unless_gone(self._generate(request))
            return Completion(drawn.token_ids, drawn.log_probs, drawn.finish_reason, self._version, self._version)

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Log-probability (nats, temperature 1) of each token after the first.

        Raises:
            ValueError: `token_ids` is empty, as long as `max_model_len`, or has an id outside the vocabulary.
            EngineBroken: The engine died, was closed or holds rejected weights.
        """
        async with self._admitted():
            self._check_ids("score", token_ids)
            return await self._unless_gone(self._score(token_ids)) if len(token_ids) > 1 else []

    async def update_weights(self, ref: WeightsRef) -> float:
        """Drain, load, verify; see `Engine.update_weights`. Concurrent updates run one after another."""
        await self._wait_settled()
        self._state = EngineState.UPDATING
        self._settled.clear()
        try:
            await self._idle.wait()
        except asyncio.CancelledError:
            self._settle(EngineState.READY)  # nothing was loaded: the old weights are whole
            raise
        self._refuse_unless_ready()  # what was in flight may have found the engine dead
        try:
            difference = await self._unless_gone(self._load_and_verify(ref))
        except BaseException as error:
            self._break(f"the update to version {ref.version} failed: {error!r}")
            if isinstance(error, EngineBroken) or not isinstance(error, Exception):
                raise
            raise WeightsRejected(f"weights version {ref.version} ({ref.path}) did not load: {error}") from error
        self._version = ref.version
        self._settle(EngineState.READY)
        return difference

    async def close(self) -> None:
        """Free everything; what is in flight fails with EngineBroken. May be called again."""
        self._state, self._why = EngineState.CLOSED, "it has been closed"
        self._give_up()
        await self._free()

    async def _load_and_verify(self, ref: WeightsRef) -> float:
        received = await self._load_weights(ref)
        scores = await self._score(ref.probe_ids) if len(ref.probe_ids) > 1 else []
        return verify_update(ref, scores, received, self.config.probe_bound)

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        await self._wait_settled()
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        except EngineBroken as error:
            self._break(str(error))
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _unless_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, unless the engine breaks or closes first: what it waits for may then never come."""
        assert self._gone is not None  # set by start; nothing is admitted before
        task = asyncio.create_task(work)
        either: set[asyncio.Future[Any]] = {task, self._gone}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
        finally:
            task.cancel()  # also when the caller has gone
        self._refuse_unless_ready()
        raise EngineBroken(f"engine {self.config.name} dropped its work; its process may have died")

    async def _wait_settled(self) -> None:
        # A loop: the next update may have begun before this waiter ran.
        while self._state is EngineState.UPDATING:
            await self._settled.wait()
        self._refuse_unless_ready()

    def _refuse_unless_ready(self) -> None:
        if self._state in (EngineState.BROKEN, EngineState.CLOSED):
            raise EngineBroken(f"engine {self.config.name} is {self._state.value}: {self._why}")

    def _settle(self, state: EngineState) -> None:
        # Not when the engine was closed, or found dead, in the meantime.
        if self._state is EngineState.UPDATING:
            self._state = state
        self._settled.set()

    def _break(self, why: str) -> None:
        if self._state not in (EngineState.CLOSED, EngineState.BROKEN):  # the first reason is the true one
            self._state, self._why = EngineState.BROKEN, why
        self._give_up()

    def _give_up(self) -> None:
        self._settled.set()
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def _check(self, request: GenerateRequest) -> None:
        name = f"request {request.request_id}"
        self._check_ids(name, request.prompt_ids)
        self._check_vocabulary(name, "stop_token_ids", request.stop_token_ids)
        if request.max_tokens < 1:
            raise ValueError(f"{name}: max_tokens is {request.max_tokens}, expected at least 1")
        if request.greedy:
            return
        if not request.temperature >= MIN_TEMPERATURE:
            raise ValueError(
                f"{name}: temperature is {request.temperature}, expected at least {MIN_TEMPERATURE}; "
                "ask for greedy decoding instead of temperature 0"
            )
        if not 0 < request.top_p <= 1:
            raise ValueError(f"{name}: top_p is {request.top_p}, expected above 0 and at most 1")
        if request.top_k != -1 and request.top_k < 1:
            raise ValueError(f"{name}: top_k is {request.top_k}, expected -1 (off) or at least 1")
        if not 0 <= request.seed < 2**63:
            raise ValueError(f"{name}: seed is {request.seed}, expected 0 to 2**63 - 1")

    def _check_ids(self, name: str, token_ids: tuple[int, ...]) -> None:
        limit = self.config.max_model_len
        if not 0 < len(token_ids) < limit:
            raise ValueError(
                f"{name}: {len(token_ids)} token ids, expected at least 1, fewer than max_model_len={limit}"
            )
        self._check_vocabulary(name, "token ids", token_ids)

    def _check_vocabulary(self, name: str, what: str, token_ids: tuple[int, ...]) -> None:
        outside = [token for token in token_ids if not 0 <= token < self._vocab_size]
        if outside:
            raise ValueError(f"{name}: {what} {outside[:5]} are outside the vocabulary of {self._vocab_size}")
