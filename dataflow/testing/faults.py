"""Faults on purpose: what a run must survive, put into it by configuration.

A worker sees the world through its stage, its queue and its coordinator. `Faults.around` wraps these three, so that the
code under test is the code of every run. Whether a fault strikes is drawn from (seed, fault, unit, delivery): whoever
draws it, in whatever order and run, comes to the same result. How often it struck is counted in files of the run
directory, which outlive the process that it kills.

The stage with one owner is not struck: its death ends a run by design.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.batch import Batch, Unit
from dataflow.config import Fault
from dataflow.errors import ConfigError
from dataflow.events import Claim, Holding
from dataflow.pipeline import Pipeline
from dataflow.queue import Queue
from dataflow.stage import Stage, is_streaming
from dataflow.waits import Wait
from dataflow.worker import Control, Metrics, Report

FOR_EVER_S = 1e6


class InjectedFault(Exception):
    """Raised by a fault of kind `raise`."""


def kill_this_process() -> None:
    """End the process at once, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class _Target:
    """A unit in the claim that a worker works on, or, for the source, a window."""

    id: str
    claim: int
    window_index: int
    delivery: int
    unit: Unit | None

    @property
    def place(self) -> tuple[Any, ...]:
        """What it is, in words that hold in any run: its id begins with the name of its own."""
        return (self.window_index, *(self.unit.order if self.unit is not None else ()), self.delivery)


class Faults:
    """The faults of one run, as one process sees them.

    Args:
        faults: What may go wrong.
        seed: The run's seed.
        run_dir: Faults that struck are recorded in its folder `faults`, one JSON file each.
        kill: Ends the process; a run of one process gives its own.
    """

    def __init__(
        self, faults: Sequence[Fault], seed: int, run_dir: Path, kill: Callable[[], None] = kill_this_process
    ) -> None:
        self._faults = list(enumerate(faults))
        self._seed = seed
        self._folder = run_dir / "faults"
        self.kill = kill

    def around(self, stage: Stage, control: Control, queue: Queue) -> tuple[Control, Queue]:
        """Wrap what a worker sees; the stage's `process` is replaced in place."""
        mine = [(number, fault) for number, fault in self._faults if fault.stage == stage.name]
        if not mine or stage.one_owner:
            return control, queue
        wrapped = _FaultyControl(self, control, stage.name)
        _wrap_process(stage, wrapped)
        return wrapped, _FaultyQueue(queue, wrapped)

    def strikes(self, stage: str, targets: Sequence[_Target], kind: str, where: str = "") -> Fault | None:
        """The first fault of a kind that strikes one of these units now; it is recorded as having struck."""
        for number, fault in self._faults:
            if fault.stage != stage or fault.kind != kind or (where and fault.where != where):
                continue
            for target in targets:
                if self._matches(fault, target) and self._drawn(number, fault, target) and self._counted(number, fault):
                    self._record(number, fault, target)
                    return fault
        return None

    @staticmethod
    def _matches(fault: Fault, target: _Target) -> bool:
        unit = target.unit
        return (
            fault.window in (None, target.window_index)
            and (fault.uid is None or (unit is not None and unit.uid == fault.uid))
            and (fault.greedy is None or (unit is not None and unit.is_baseline == fault.greedy))
        )

    def _drawn(self, number: int, fault: Fault, target: _Target) -> bool:
        text = json.dumps([self._seed, number, *target.place])
        draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
        return draw < fault.probability

    def _counted(self, number: int, fault: Fault) -> bool:
        """Take one of the fault's times, if one is left."""
        if fault.times is None:
            return True
        self._folder.mkdir(parents=True, exist_ok=True)
        for time_ in range(fault.times):
            try:
                (self._folder / f"{number:03d}.{time_:03d}.taken").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False

    def _record(self, number: int, fault: Fault, target: _Target) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        record = {"at": time.time(), "fault": number, "unit": target.id, "delivery": target.delivery}
        record |= fault.model_dump(include={"kind", "stage", "where"})
        name = f"{number:03d}.{os.getpid()}.{time.time_ns():x}"
        partial = self._folder / f"{name}.partial"
        partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
        partial.rename(self._folder / f"{name}.json")


def check_faults(faults: Sequence[Fault], pipeline: Pipeline) -> None:
    """Refuse faults that could not strike as they are written.

    Raises:
        ConfigError: Names the fault, and what is wrong with it.
    """
    for number, fault in enumerate(faults):
        if problem := _problem(fault, pipeline):
            raise ConfigError(f"faults[{number}].{problem}")


def _problem(fault: Fault, pipeline: Pipeline) -> str:
    """The key of a fault that keeps it from striking, and why; empty if there is none."""
    plan = pipeline.plans.get(fault.stage)
    if plan is None:
        return f"stage: there is no stage {fault.stage!r}; the stages are: {', '.join(pipeline.plans)}"
    if plan.one_owner:
        return f"stage: {fault.stage!r} has one owner, and its death ends a run"
    if fault.window is not None and fault.window >= pipeline.windows:
        return f"window: there is no window {fault.window}; the run has {pipeline.windows}, counted from 0"
    for key in ("uid", "greedy"):
        if plan.granularity == "source" and getattr(fault, key) is not None:
            return f"{key}: stage {fault.stage!r} fills whole windows; leave the key out, or choose a window"
    if fault.greedy and "baseline" not in plan.kinds:
        return f"greedy: stage {fault.stage!r} never works on greedy units"
    if fault.kind in ("slow", "late") and not fault.seconds:
        return f"seconds: a fault of kind {fault.kind!r} takes some; it is 0"
    if fault.seconds and fault.kind not in ("slow", "late", "hang"):
        return f"seconds: a fault of kind {fault.kind!r} takes none; leave the key out"
    if fault.where != "before" and fault.kind != "kill":
        return f"where: a fault of kind {fault.kind!r} has one place; leave the key out"
    return ""


def struck_faults(run_dir: Path) -> list[dict[str, Any]]:
    """What struck a run, in order of time: records with at, fault, kind, stage, where, unit, delivery."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in (run_dir / "faults").glob("*.json")]
    return sorted(records, key=lambda record: float(record["at"]))


class _FaultyControl:
    """The coordinator as a worker sees it. It sees every claim, so it knows which delivery of a unit is worked on."""

    def __init__(self, faults: Faults, control: Control, stage: str) -> None:
        self._faults = faults
        self._targets: dict[str, _Target] = {}
        self._control = control
        self._stage = stage

    async def joined(self, worker: str, stage: str, process: str) -> None:
        await self._control.joined(worker, stage, process)

    async def claim(self, worker: str, request: int, loaded_version: int, holding: Holding) -> Claim | None:
        self._targets = {name: target for name, target in self._targets.items() if target.claim in holding.claims}
        claim = await self._control.claim(worker, request, loaded_version, holding)
        if claim is not None and not claim.suspend:
            index = claim.window_index
            found = [_Target(unit.unit.id, claim.id, index, unit.delivery, unit.unit) for unit in claim.units]
            found = found or [_Target(claim.window, claim.id, index, claim.delivery, None)]
            self._targets |= {target.id: target for target in found}
        return claim

    async def report(self, reports: Sequence[Report], metrics: Metrics, window: str) -> None:
        about = [getattr(report, "unit", window) for report in reports]
        if self._strikes(about, "kill", "written"):
            self._faults.kill()
        if self._strikes(about, "drop"):
            return
        again = self._strikes(about, "duplicate")
        await self._control.report(reports, metrics, window)
        if again:
            await self._control.report(reports, {}, window)
        if self._strikes(about, "kill", "reported"):
            self._faults.kill()

    async def heartbeat(self, worker: str, holding: Holding, waits: tuple[Wait, ...]) -> None:
        await self._control.heartbeat(worker, holding, waits)

    def before(self, batch: Batch) -> tuple[float, float]:
        """What happens before `process` runs: for how many seconds it is slow, and for how many it hangs.

        Raises:
            InjectedFault: If one is due.
        """
        about = [unit.id for unit in batch.units] or [batch.window]
        if self._strikes(about, "kill", "before"):
            self._faults.kill()
        if self._strikes(about, "raise"):
            raise InjectedFault(f"a fault of kind 'raise' struck stage {self._stage!r}")
        slow, hang = self._strikes(about, "slow"), self._strikes(about, "hang")
        return slow.seconds if slow else 0.0, (hang.seconds or FOR_EVER_S) if hang else 0.0

    def late(self, partition: str, keys: Sequence[str]) -> float:
        """Seconds that a write takes longer."""
        late = self._strikes([partition, *(key.rpartition("/")[0] for key in keys)], "late")
        return late.seconds if late else 0.0

    def _strikes(self, about: Iterable[str], kind: str, where: str = "") -> Fault | None:
        targets = [self._targets[name] for name in dict.fromkeys(about) if name in self._targets]
        return self._faults.strikes(self._stage, targets, kind, where)


class _FaultyQueue:
    """The queue as a worker sees it."""

    def __init__(self, queue: Queue, wrapped: _FaultyControl) -> None:
        self._queue = queue
        self._wrapped = wrapped

    def put(self, partition: str, keys: Sequence[str], columns: Mapping[str, Any]) -> None:
        time.sleep(self._wrapped.late(partition, keys))
        self._queue.put(partition, keys, columns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def _wrap_process(stage: Stage, wrapped: _FaultyControl) -> None:
    process: Callable[[Batch], Any] = stage.process

    async def stream(batch: Batch) -> AsyncIterator[Any]:
        await asyncio.sleep(sum(wrapped.before(batch)))
        async with contextlib.aclosing(process(batch)) as results:
            async for item in results:
                yield item

    async def coroutine(batch: Batch) -> Any:
        await asyncio.sleep(sum(wrapped.before(batch)))
        return await process(batch)

    def plain(batch: Batch) -> Any:
        time.sleep(sum(wrapped.before(batch)))
        return process(batch)

    chosen: Callable[[Batch], Any] = plain
    if is_streaming(stage):
        chosen = stream
    elif inspect.iscoroutinefunction(process):
        chosen = coroutine
    stage.process = chosen  # type: ignore[assignment, method-assign]
