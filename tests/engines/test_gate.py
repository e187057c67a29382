"""The gate that all engines share, on an engine without a model and a clock that is not the wall's."""

from __future__ import annotations

import asyncio
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.waits import Overdue
from dataflow.weights import WeightsRef
from stages.engines.base import EngineBroken, EngineConfig, GenerateRequest, WeightsRejected
from stages.engines.gated import Drawn, EngineState, GatedEngine

CONFIG = EngineConfig("nowhere", drain_s=20, load_s=50, wait_s=100, name="e")
# How long a token, half of a weight update, and the way into or out of sleep take; seconds.
TOKEN_S, HALF_S, MOVE_S = 1.0, 1.0, 1.0
READY, UPDATING, ASLEEP, BROKEN = EngineState.READY, EngineState.UPDATING, EngineState.ASLEEP, EngineState.BROKEN


class _NoWaiting(selectors.SelectSelector):
    """Instead of waiting, moves the clock; waiting without an end is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everything waits, and nothing will ever happen"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes at once when everything waits."""

    def __init__(self) -> None:
        self._clock = _NoWaiting()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def play(scene: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scene)


def now() -> float:
    return asyncio.get_running_loop().time()


class Halves(GatedEngine):
    """Its weights are two halves, loaded one after the other; a token says what the halves were when it was drawn.

    Attributes:
        halves: The version that each half is of.
        moves: How often the device was given and taken.
        slow_s: What a load or a move takes longer.
        stubborn: Whether a request ignores that it was aborted.
    """

    def __init__(self, config: EngineConfig = CONFIG) -> None:
        super().__init__(config)
        self.halves = [0, 0]
        self.moves: Counter[str] = Counter()
        self.slow_s = 0.0
        self.stubborn = False
        self._on_device = True
        self._drawing = 0

    async def _load_model(self) -> int:
        return 100

    async def _generate(self, request: GenerateRequest) -> Drawn:
        tokens: list[int] = []
        self._drawing += 1
        try:
            for _ in range(request.max_tokens):
                assert self._on_device
                tokens.append(self.halves[0])
                await self._draw()
                tokens.append(self.halves[1])
        finally:
            self._drawing -= 1
        return Drawn(tuple(tokens), (0.0,) * len(tokens), "length")

    async def _draw(self) -> None:
        try:
            await asyncio.sleep(TOKEN_S)
        except asyncio.CancelledError:
            if not self.stubborn:
                raise

    async def _score(self, token_ids: tuple[int, ...]) -> list[float]:
        assert self._on_device
        await asyncio.sleep(TOKEN_S)
        return [-float(half) for half in self.halves]

    async def _load_weights(self, ref: WeightsRef) -> Mapping[str, float]:
        assert self._on_device
        assert not self._drawing
        self.halves[0] = ref.version
        await asyncio.sleep(HALF_S + self.slow_s)
        if ref.path == "vanishes":
            raise FileNotFoundError(ref.path)
        self.halves[1] = ref.version
        return {}

    async def _give_device(self) -> None:
        assert self._on_device
        assert not self._drawing
        self._on_device = False
        await asyncio.sleep(MOVE_S + self.slow_s)
        self.moves["given"] += 1

    async def _take_device(self) -> None:
        assert not self._on_device
        await asyncio.sleep(MOVE_S + self.slow_s)
        self._on_device = True
        self.moves["taken"] += 1

    async def _free(self) -> None:
        """Nothing is held."""


def weights(version: int, path: str = "there") -> WeightsRef:
    return WeightsRef(version, path, probe_ids=(1, 2, 3), probe_log_probs=(-version, -version), probe_step=1.0)


def ask(tokens: int, name: str = "r") -> GenerateRequest:
    return GenerateRequest(name, (1,), tokens, greedy=True)


async def begun(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task that has run as far as it comes without time passing."""
    task = asyncio.create_task(work)
    for _ in range(9):
        await asyncio.sleep(0)
    return task


async def ready(config: EngineConfig = CONFIG) -> Halves:
    engine = Halves(config)
    await engine.start()
    return engine


Scene = Callable[[], Coroutine[Any, Any, None]]


def scene(function: Scene) -> Callable[[], None]:
    """Make a test of a coroutine function: it runs on virtual time."""

    def test() -> None:
        play(function())

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    return test


# Sleep


@scene
async def test_a_request_to_a_sleeping_engine_waits_by_name_until_it_is_woken() -> None:
    engine = await ready()
    await engine.sleep()
    asking = await begun(engine.generate(ask(3, "u/0")))

    (wait,) = engine.config.waits.open()
    assert (wait.subject, wait.deadline_s) == ("request u/0: engine e is asleep", 100)
    await engine.wake()
    assert (await asking).token_ids == (0,) * 6
    assert engine.config.waits.open() == ()


@scene
async def test_what_waits_for_a_sleeping_engine_is_overdue_at_its_deadline_and_the_engine_goes_on() -> None:
    engine = await ready()
    await engine.sleep()
    start = now()
    works = (engine.generate(ask(3)), engine.score((1, 2)), engine.update_weights(weights(1)))
    errors = await asyncio.gather(*works, return_exceptions=True)

    assert [type(error) for error in errors] == [Overdue, Overdue, Overdue]
    assert now() - start == pytest.approx(CONFIG.wait_s)
    await engine.wake()
    assert (await engine.generate(ask(3))).token_ids == (0,) * 6


@scene
async def test_an_update_does_not_wake_the_engine_but_goes_before_what_waits() -> None:
    engine = await ready()
    await engine.sleep()
    first = await begun(engine.generate(ask(2)))
    update = await begun(engine.update_weights(weights(1)))
    assert engine.state is ASLEEP

    await engine.wake()
    await update
    answer = await first
    assert (answer.token_ids, answer.version_min, answer.version_max) == ((1,) * 4, 1, 1)


@scene
async def test_sleep_lets_what_is_in_flight_finish_and_lets_nothing_in() -> None:
    engine = await ready()
    early = await begun(engine.generate(ask(5, "early")))
    falling = await begun(engine.sleep())
    late = await begun(engine.generate(ask(5, "late")))

    subjects = [(wait.subject, wait.action) for wait in engine.config.waits.open()]
    assert subjects == [
        ("engine e: 1 requests in flight before sleep", "they are aborted"),
        ("request late: engine e is asleep", "the request fails"),
    ]
    await falling
    assert early.result().token_ids == (0,) * 10
    assert engine.state is ASLEEP
    assert not late.done()
    await engine.wake()
    assert (await late).token_ids == (0,) * 10


@pytest.mark.parametrize("change", ["sleep", "update"])
def test_what_a_drain_does_not_wait_for_any_longer_is_aborted_and_can_be_sent_again(change: str) -> None:
    async def scene() -> None:
        engine = await ready()
        short, long = await begun(engine.generate(ask(19))), await begun(engine.generate(ask(60)))
        start = now()
        await (engine.sleep() if change == "sleep" else engine.update_weights(weights(1)))

        assert now() - start < CONFIG.drain_s + 10
        assert (short.result().finish_reason, len(short.result().token_ids)) == ("length", 38)
        aborted = long.result()
        assert (aborted.finish_reason, aborted.token_ids) == ("abort", ())
        await engine.wake()
        assert (await engine.generate(ask(60))).token_ids == (engine.version,) * 120

    play(scene())


@scene
async def test_a_score_that_a_drain_does_not_wait_for_is_overdue() -> None:
    engine = await ready(replace(CONFIG, drain_s=0.5))
    scoring = await begun(engine.score((1, 2, 3)))
    await engine.sleep()

    with pytest.raises(Overdue, match="score was aborted"):
        await scoring


@scene
async def test_a_request_that_does_not_leave_when_it_is_aborted_breaks_the_engine() -> None:
    engine = await ready()
    engine.stubborn = True
    asking = await begun(engine.generate(ask(1000)))

    with pytest.raises(EngineBroken, match="1 requests in flight to leave"):
        await engine.sleep()
    assert engine.state is BROKEN
    with pytest.raises(EngineBroken):
        await asking


@scene
async def test_sleep_when_asleep_and_wake_when_ready_do_nothing() -> None:
    engine = await ready()
    await engine.wake()
    assert engine.moves == {}

    first, second = await begun(engine.sleep()), await begun(engine.sleep())
    await second
    assert engine.moves == {"given": 1}  # the second waited for the first: the device is free when it returns
    await first
    await engine.sleep()
    await asyncio.gather(engine.wake(), engine.wake())
    assert engine.moves == {"given": 1, "taken": 1}
    assert engine.state is READY


@scene
async def test_sleep_waits_for_an_update_and_an_update_for_the_way_into_sleep_and_out() -> None:
    engine = await ready()
    updating = await begun(engine.update_weights(weights(1)))
    falling = await begun(engine.sleep())
    assert engine.state is UPDATING
    await falling
    assert (updating.done(), engine.state, engine.version) == (True, ASLEEP, 1)

    waking = await begun(engine.wake())
    updating = await begun(engine.update_weights(weights(2)))
    await waking
    await updating
    falling = await begun(engine.sleep())
    updating = await begun(engine.update_weights(weights(3)))
    await engine.wake()
    await updating
    assert (falling.done(), engine.state, engine.version) == (True, READY, 3)


@pytest.mark.parametrize("after_s", [0.0, 4.0, 5.5], ids=["at once", "while it drains", "while it gives the device"])
def test_a_cancelled_sleep_leaves_the_engine_ready_or_asleep(after_s: float) -> None:
    async def scene() -> None:
        engine = await ready()
        asking = await begun(engine.generate(ask(5)))
        falling = await begun(engine.sleep())
        await asyncio.sleep(after_s)
        falling.cancel()
        assert isinstance((await asyncio.gather(falling, return_exceptions=True))[0], asyncio.CancelledError)

        assert engine.state is (ASLEEP if after_s > 5 else READY)
        assert (await asking).token_ids == (0,) * 10
        await engine.wake()
        assert (await engine.generate(ask(2))).token_ids == (0,) * 4

    play(scene())


@scene
async def test_a_cancelled_waking_up_still_wakes() -> None:
    engine = await ready()
    await engine.sleep()
    asking = await begun(engine.generate(ask(2)))
    waking = await begun(engine.wake())
    waking.cancel()

    assert (await asking).token_ids == (0,) * 4


@scene
async def test_an_update_that_is_cancelled_while_it_drains_lets_the_requests_behind_it_go() -> None:
    engine = await ready()
    early = await begun(engine.generate(ask(9)))
    update = await begun(engine.update_weights(weights(1)))
    late = await begun(engine.generate(ask(2)))
    assert engine.state is UPDATING
    update.cancel()

    assert (await late).token_ids == (0,) * 4
    assert not early.done()
    assert (engine.state, engine.version) == (READY, 0)


@scene
async def test_an_update_that_is_cancelled_as_its_turn_comes_lets_the_requests_behind_it_go() -> None:
    engine = await ready()
    await begun(engine.generate(ask(9)))
    first = await begun(engine.update_weights(weights(1)))
    asking = await begun(engine.generate(ask(2)))
    second = await begun(engine.update_weights(weights(2)))
    first.cancel()
    # Right behind it: the gate is open by then, and the request has looked and seen the second update.
    asyncio.get_running_loop().call_soon(second.cancel)

    assert (await asking).token_ids == (0,) * 4
    assert second.cancelled()


@pytest.mark.parametrize("state", ["asleep", "falling asleep", "waking up", "draining", "updating"])
def test_close_ends_every_wait(state: str) -> None:
    async def scene() -> None:
        engine = await ready()
        works = []
        if state == "draining":
            works.append(await begun(engine.generate(ask(10))))
        if state == "updating":
            works.append(await begun(engine.update_weights(weights(1))))
        elif state in ("falling asleep", "draining"):
            works.append(await begun(engine.sleep()))
        else:
            await engine.sleep()
        if state == "waking up":
            works.append(await begun(engine.wake()))
        works.append(await begun(engine.generate(ask(2))))
        works.append(await begun(engine.update_weights(weights(2))))
        start = now()
        await engine.close()

        results = await asyncio.gather(*works, return_exceptions=True)
        assert {type(result) for result in results} == {EngineBroken}
        assert now() == start
        assert engine.state is EngineState.CLOSED
        assert engine.config.waits.open() == ()

    play(scene())


# Failure


@scene
async def test_a_file_that_vanishes_in_the_middle_breaks_the_engine_and_nothing_is_answered() -> None:
    engine = await ready()
    update = await begun(engine.update_weights(weights(1, "vanishes")))
    asking = await begun(engine.generate(ask(2)))

    with pytest.raises(WeightsRejected, match=r"version 1 \(vanishes\) did not load"):
        await update
    assert (engine.halves, engine.state, engine.version) == ([1, 0], BROKEN, 0)
    with pytest.raises(EngineBroken, match="version 1"):
        await asking
    for work in (engine.generate(ask(2)), engine.update_weights(weights(2)), engine.sleep(), engine.wake()):
        with pytest.raises(EngineBroken, match="version 1"):
            await work


@scene
async def test_weights_that_the_probe_refuses_break_the_engine() -> None:
    engine = await ready()
    update = await begun(engine.update_weights(replace(weights(1), probe_log_probs=(-1, -2))))
    asking = await begun(engine.generate(ask(2)))

    with pytest.raises(WeightsRejected, match="probe"):
        await update
    with pytest.raises(EngineBroken):
        await asking
    assert (engine.state, engine.version) == (BROKEN, 0)


@pytest.mark.parametrize("change", ["update", "sleep", "wake"])
def test_a_change_that_takes_too_long_breaks_the_engine(change: str) -> None:
    async def scene() -> None:
        engine = await ready()
        if change == "wake":
            await engine.sleep()
        engine.slow_s = CONFIG.load_s
        start = now()
        changes = {"update": lambda: engine.update_weights(weights(1)), "sleep": engine.sleep, "wake": engine.wake}
        changing = await begun(changes[change]())
        asking = await begun(engine.generate(ask(2)))

        with pytest.raises(EngineBroken, match="waited 50 s"):
            await changing
        assert now() - start == pytest.approx(CONFIG.load_s)
        with pytest.raises(EngineBroken):
            await asking
        assert engine.state is BROKEN

    play(scene())


# Everything at once


@dataclass(frozen=True)
class Step:
    """One thing that is begun `after_s` seconds after the one before; `number` is its size, or whom it cancels."""

    kind: str
    after_s: float
    number: int


USUAL = ["generate"] * 4 + ["update"] * 2 + ["sleep"] * 2 + ["wake"] * 2 + ["cancel"] * 4
STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from([*USUAL, "fail", "close"]),
        st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.5]),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=14,
)
Begun = tuple[str, asyncio.Task[Any]]


def begin(engine: Halves, step: Step, number: int) -> asyncio.Task[Any]:
    """Start one step; `number` is its place, and the version that it publishes."""
    works: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "generate": lambda: engine.generate(ask(step.number, f"r{number}")),
        "update": lambda: engine.update_weights(weights(number)),
        "fail": lambda: engine.update_weights(weights(number, "vanishes")),
        "sleep": engine.sleep,
        "wake": engine.wake,
        "close": engine.close,
    }
    return asyncio.create_task(works[step.kind]())


def check(kind: str, task: asyncio.Task[Any], excused: bool) -> None:
    """Check how one thing ended; `excused`: the engine may have been closed or broken by then."""
    assert task.done(), f"{kind} hangs"
    if task.cancelled():
        return
    error = task.exception()
    if error is not None:
        assert isinstance(error, Overdue) or (isinstance(error, EngineBroken) and excused), error
    elif kind == "generate" and task.result().finish_reason != "abort":
        answer = task.result()
        assert answer.token_ids
        assert set(answer.token_ids) == {answer.version_min} == {answer.version_max}


@settings(max_examples=300)
@given(STEPS)
def test_no_order_of_events_hangs_loses_a_request_or_answers_from_half_loaded_weights(steps: list[Step]) -> None:
    async def scene() -> None:
        engine = await ready(replace(CONFIG, drain_s=5))
        tasks: list[Begun] = []
        cancelled = set()
        for number, step in enumerate(steps, 1):
            await asyncio.sleep(step.after_s)
            if step.kind != "cancel":
                tasks.append((step.kind, begin(engine, step, number)))
            elif tasks:
                kind, task = tasks[-(step.number % min(3, len(tasks)) + 1)]
                task.cancel()
                cancelled.add(kind)
        # Longer than any chain of waits that end one another.
        await asyncio.wait([task for _, task in tasks] or [await begun(engine.wake())], timeout=10 * CONFIG.wait_s)

        kinds = {kind for kind, _ in tasks}
        # Nobody knows what an update that was cancelled while it loaded has left.
        may_break = "fail" in kinds or "update" in cancelled
        for kind, task in tasks:
            check(kind, task, "close" in kinds or may_break)
        rejected = [t for _, t in tasks if not t.cancelled() and isinstance(t.exception(), WeightsRejected)]
        assert engine.config.waits.open() == ()
        if "close" in kinds - cancelled:
            assert engine.state is EngineState.CLOSED
        elif engine.state is BROKEN:
            assert may_break
        elif engine.state is not EngineState.CLOSED:
            assert not rejected
            await engine.wake()
            await engine.update_weights(weights(99))
            assert (await engine.generate(ask(2))).token_ids == (99,) * 4

    play(scene())
