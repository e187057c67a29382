"""What all engines share: admission, draining, sleep, verification. Imports neither torch nor vllm."""

from __future__ import annotations

import abc
import asyncio
import enum
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from dataflow.waits import Overdue
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

log = logging.getLogger(__name__)

# How long aborted requests may take to leave; they need no computation for it.
ABORT_S = 30.0
# vLLM raises a lower temperature to this value without saying so in its answer.
MIN_TEMPERATURE = 0.01

T = TypeVar("T")
FinishReason = Literal["stop", "length", "abort"]


class EngineState(enum.Enum):
    """What an engine does with a request that arrives now."""

    CLOSED = "closed"  # refuses it; also before start
    READY = "ready"  # answers it
    UPDATING = "updating"  # lets it wait for the new weights
    ASLEEP = "asleep"  # lets it wait until the engine is woken
    BROKEN = "broken"  # refuses it for good


@dataclass(frozen=True)
class Drawn:
    """One response as an implementation returns it; fields as in `Completion`."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason


class _Aborted(Exception):
    """Raised for a request that a drain no longer waits for."""


class GatedEngine(Engine):
    """An engine whose requests pass one gate.

    Requests are counted while they run. An update, and falling asleep, close the gate, let what runs finish
    for `drain_s`, abort the rest, and only then touch the weights or the device. So one response is always
    drawn by one policy version. When anything goes wrong after the weights or the device were touched, the state
    is BROKEN for good: half-loaded weights never answer.

    An update that waits goes before the requests that wait with it, so that they are answered under its weights.

    Everything here runs on one event loop. The gate takes no lock: state and counts change between two
    awaits, so that a cancelled request can never leave them wrong.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._version = 0
        self._vocab_size = 0
        self._state = EngineState.CLOSED
        self._why = "it has not been started"
        self._moving = False  # ASLEEP, and on the way into sleep or out of it
        self._updates = 0  # updates that were asked for and are not over
        self._in_flight = 0
        self._changed = asyncio.Event()  # pulsed when one of the above may let somebody go on
        self._idle = asyncio.Event()  # nothing is in flight
        self._abort: asyncio.Future[None] | None = None  # done when what is in flight now has had its time
        self._gone: asyncio.Future[None] | None = None  # done when nothing can be answered any more
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
    async def _give_device(self) -> None:
        """Free the device's memory while nothing runs; the weights must be the same after `_take_device`."""

    @abc.abstractmethod
    async def _take_device(self) -> None:
        """Bring back what `_give_device` freed."""

    @abc.abstractmethod
    async def _free(self) -> None:
        """Free everything, child processes included. Also called when broken, dead, or freed already."""

    def __str__(self) -> str:
        return f"engine {self.config.name}"

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
        loop = asyncio.get_running_loop()
        self._gone, self._abort = loop.create_future(), loop.create_future()
        self._vocab_size = await self._load_model()
        self._state = EngineState.READY

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate one response; see `Engine.generate`."""
        async with self._admitted(f"request {request.request_id}"):
            self._check(request)
            try:
                drawn = await self._unless_gone(self._generate(request), self._abort)
            except _Aborted:
                drawn = Drawn((), (), "abort")
            return Completion(drawn.token_ids, drawn.log_probs, drawn.finish_reason, self._version, self._version)

    async def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Log-probability (nats, temperature 1) of each token after the first.

        Raises:
            ValueError: `token_ids` is empty, as long as `max_model_len`, or has an id outside the vocabulary.
            Overdue: The engine was not ready within `wait_s`, or a drain did not wait for this score any longer.
            EngineBroken: The engine died, was closed or holds rejected weights.
        """
        async with self._admitted(f"score of {len(token_ids)} tokens"):
            self._check_ids("score", token_ids)
            if len(token_ids) == 1:
                return []
            try:
                return await self._unless_gone(self._score(token_ids), self._abort)
            except _Aborted:
                raise Overdue(f"{self}: a score was aborted after a drain of {self.config.drain_s:g} s") from None

    async def update_weights(self, ref: WeightsRef) -> float:
        """Drain, load, verify; see `Engine.update_weights`. Concurrent updates run one after another."""
        what = f"weights version {ref.version}"
        self._updates += 1
        try:
            await self._wait(what, lambda: self._state is EngineState.READY, "the update fails, nothing is loaded")
            await self._shut(EngineState.UPDATING, what)
            difference = await self._or_broken(self._load_and_verify(ref), f"the update to version {ref.version}")
            self._version = ref.version
            self._settle(EngineState.READY)
            return difference
        finally:
            self._updates -= 1
            self._pulse()

    async def sleep(self) -> None:
        """Drain and free the device; see `Engine.sleep`."""
        await self._wait("sleep", self._is_settled, "the engine does not sleep")
        if self._state is EngineState.READY:
            await self._shut(EngineState.ASLEEP, "sleep")
            await self._hand_over(self._give_device(), "falling asleep", EngineState.ASLEEP)

    async def wake(self) -> None:
        """Take the device again and become ready; see `Engine.wake`."""
        await self._wait("waking up", self._is_settled, "the engine is not woken")
        if self._state is EngineState.ASLEEP:
            self._moving = True
            await self._hand_over(self._take_device(), "waking up", EngineState.READY)

    async def close(self) -> None:
        """Free everything; what is in flight fails with EngineBroken. May be called again."""
        self._state, self._why = EngineState.CLOSED, "it has been closed"
        self._give_up()
        await self._free()

    # ---- the gate -----------------------------------------------------------------------------------

    def _is_open(self) -> bool:
        return self._state is EngineState.READY and not self._updates

    def _is_settled(self) -> bool:
        return self._state is EngineState.READY or (self._state is EngineState.ASLEEP and not self._moving)

    async def _wait(self, what: str, may_go: Callable[[], bool], action: str) -> None:
        """Wait for at most `wait_s` until `what` may go on; the caller acts on it before its next await."""
        self._refuse_if_gone()
        if not may_go():
            subject = f"{what}: {self} is {self._state.value}"
            await self.config.waits.until(self._reach(may_go), subject, self.config.wait_s, action)

    async def _reach(self, may_go: Callable[[], bool]) -> None:
        while not may_go():  # whoever was waiting too may have gone first
            await self._changed.wait()
            self._refuse_if_gone()

    @asynccontextmanager
    async def _admitted(self, what: str) -> AsyncIterator[None]:
        await self._wait(what, self._is_open, "the request fails")
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

    async def _shut(self, state: EngineState, before: str) -> None:
        """Shut the gate and drain; if that is cancelled, open it again: nothing has been touched."""
        self._state, self._moving = state, state is EngineState.ASLEEP
        try:
            await self._drain(before)
        except BaseException:
            self._settle(EngineState.READY)
            raise

    async def _drain(self, before: str) -> None:
        """Wait until nothing is in flight; after `drain_s`, abort what still is."""
        assert self._abort is not None  # set by start
        config, requests = self.config, f"{self._in_flight} requests in flight"
        subject = f"{self}: {requests} before {before}"
        try:
            await config.waits.until(self._idle.wait(), subject, config.drain_s, "they are aborted")
        except Overdue as overdue:
            log.warning("requests aborted engine=%s count=%d: %s", config.name, self._in_flight, overdue)
            abort, self._abort = self._abort, asyncio.get_running_loop().create_future()
            abort.set_result(None)
            await self._wait_for_aborted(f"{self}: {requests} to leave after their abort")
        self._refuse_if_gone()  # what was in flight may have found the engine dead

    async def _wait_for_aborted(self, subject: str) -> None:
        try:
            await self.config.waits.until(self._idle.wait(), subject, ABORT_S, "the engine is broken")
        except Overdue as error:
            self._break(str(error))
            raise EngineBroken(str(error)) from error

    async def _hand_over(self, work: Coroutine[Any, Any, None], what: str, then: EngineState) -> None:
        """Give or take the device to the end, also when the caller is cancelled: half of it is no state."""

        async def hand_over() -> None:
            await self._or_broken(work, what)
            self._settle(then)

        await asyncio.shield(asyncio.create_task(hand_over()))

    async def _or_broken(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Await `work` for at most `load_s`; unless it ends well, the engine is broken."""
        timed = self.config.waits.until(work, f"{self}: {what}", self.config.load_s, "the engine is broken")
        try:
            return await self._unless_gone(timed)
        except BaseException as error:
            self._break(f"{what} failed: {error!r}")
            if isinstance(error, EngineBroken) or not isinstance(error, Exception):
                raise
            raise EngineBroken(f"{self}: {what} failed: {error}") from error

    async def _load_and_verify(self, ref: WeightsRef) -> float:
        try:
            received = await self._load_weights(ref)
            scores = await self._score(ref.probe_ids) if len(ref.probe_ids) > 1 else []
        except EngineBroken:
            raise
        except Exception as error:
            raise WeightsRejected(f"weights version {ref.version} ({ref.path}) did not load: {error}") from error
        return verify_update(ref, scores, received, self.config.probe_bound)

    async def _unless_gone(self, work: Coroutine[Any, Any, T], abort: asyncio.Future[None] | None = None) -> T:
        """Await `work`, unless the engine breaks or closes first: what it waits for may then never come.

        Raises:
            EngineBroken: The engine is gone.
            _Aborted: `abort` was done first, and `work` has ended.
        """
        assert self._gone is not None  # set by start; nothing is admitted before
        task = asyncio.create_task(work)
        ends: set[asyncio.Future[Any]] = {task, self._gone}
        try:
            await asyncio.wait(ends if abort is None else ends | {abort}, return_when=asyncio.FIRST_COMPLETED)
            if abort is not None and abort.done() and not task.done():
                task.cancel()
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)  # the device is at rest only then
                if task.cancelled():
                    raise _Aborted
            if task.done() and not task.cancelled():
                return task.result()
        finally:
            task.cancel()  # also when the caller has gone
        self._refuse_if_gone()
        raise EngineBroken(f"{self} dropped its work; its process may have died")

    def _refuse_if_gone(self) -> None:
        if self._state in (EngineState.BROKEN, EngineState.CLOSED):
            raise EngineBroken(f"{self} is {self._state.value}: {self._why}")

    def _settle(self, state: EngineState) -> None:
        # Not when the engine was closed, or found dead, in the meantime.
        if self._state in (EngineState.UPDATING, EngineState.ASLEEP):
            self._state = state
        self._moving = False
        self._pulse()

    def _break(self, why: str) -> None:
        if self._state not in (EngineState.CLOSED, EngineState.BROKEN):  # the first reason is the true one
            self._state, self._why = EngineState.BROKEN, why
        self._give_up()

    def _give_up(self) -> None:
        self._pulse()
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def _pulse(self) -> None:
        """Let everybody who waits now look again."""
        self._changed.set()
        self._changed.clear()

    # ---- what a request may ask for -----------------------------------------------------------------

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
