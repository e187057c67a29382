"""One running copy of a stage: claim, fetch, process, validate, write, journal, acknowledge.

The worker knows neither Ray nor TransferQueue. It talks to a coordinator through `Control` and to a queue through
`Queue`, so the same code runs on a cluster and in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, cast

import pyarrow as pa

from dataflow.batch import Batch, Failure, Unit, address, prompt_key, row_key
from dataflow.errors import DataflowError, Drop, QueueError, RowError, RunError, WorkerBroken
from dataflow.events import (
    Acknowledged,
    Admitted,
    Claim,
    ClaimedUnit,
    Dropped,
    Failed,
    Holding,
    Prompt,
    Published,
    Stopped,
    Suspended,
    Warned,
)
from dataflow.journal import JournalWriter
from dataflow.pipeline import Pipeline
from dataflow.queue import Queue
from dataflow.stage import JOINS, WHOLE_GROUPS, Outcome, Stage, StageContext, check_columns, is_streaming
from dataflow.waits import Wait
from schemas.column import ColumnError, to_values

log = logging.getLogger(__name__)

Metrics = Mapping[str, tuple[float, float]]
Report = Admitted | Acknowledged | Failed | Dropped | Stopped | Warned | Suspended | Published

TRACEBACK_CHARACTERS = 4000
WAITS_TOLD = 10  # of the oldest: every session in an engine may have one


class Stop(Exception):
    """Raised by `Control.claim` when the run is over."""


class Control(Protocol):
    """What a worker needs of the coordinator."""

    async def joined(self, worker: str, stage: str, process: str) -> None:
        """Announce a worker that is ready."""

    async def claim(self, worker: str, request: int, loaded_version: int, holding: Holding) -> Claim | None:
        """Wait for work; None after a while without any.

        Args:
            worker: Its name.
            request: The worker's own number of this request, larger than those before.
            loaded_version: Policy version that the worker's engine holds.
            holding: What the worker is about.

        Raises:
            Stop: When the run is over.
        """

    async def report(self, reports: Sequence[Report], metrics: Metrics, window: str) -> None:
        """Hand in results; all of one call are handled at once."""

    async def heartbeat(self, worker: str, holding: Holding, waits: tuple[Wait, ...]) -> None:
        """Renew the worker's leases, and tell what it waits for inside."""


@dataclass(frozen=True)
class _Result:
    """The outcome of one unit: columns with one value per row, or why there are none."""

    unit: ClaimedUnit
    outcome: Outcome | Exception


class Worker:
    """Runs one copy of a stage until the run is over.

    Args:
        name: Unique in the run, such as `reward-0`.
        stage: The stage, not yet set up.
        pipeline: Tells who writes which column.
        control: The coordinator.
        queue: Where the rows are.
        journal: Where writes are recorded.
        context: What the stage may know of the run.
        process: Names the process, which workers may share; default one of its own.
        heartbeat_s: Seconds between heartbeats.
    """

    def __init__(
        self,
        name: str,
        stage: Stage,
        pipeline: Pipeline,
        control: Control,
        queue: Queue,
        journal: JournalWriter,
        context: StageContext,
        process: str = "",
        heartbeat_s: float = 10.0,
    ) -> None:
        self.name = name
        self.stage = stage
        self._pipeline = pipeline
        self._control = control
        self._queue = queue
        self._journal = journal
        self._context = context
        self._process_name = process or name
        self._heartbeat_s = heartbeat_s
        self._threads = self._new_threads()
        self._hung = ""
        self._suspended = False
        self._turn = asyncio.Lock()
        self._requests = 0
        self._asking: set[int] = set()
        self._claims: set[int] = set()

    def _new_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.stage.concurrency, thread_name_prefix=self.name)

    async def setup(self) -> None:
        """Set the stage up; slow for stages that load a model."""
        await _maybe_await(self.stage.setup, self._context)

    async def run(self) -> None:
        """Work until the coordinator says stop. `setup` must have run."""
        await self._control.joined(self.name, self.stage.name, self._process_name)
        beats = asyncio.create_task(self._beat())
        loops = [asyncio.create_task(self._loop()) for _ in range(self.stage.concurrency)]
        try:
            await asyncio.gather(*loops)
        finally:
            for task in (beats, *loops):
                task.cancel()
            # Before `close`: what a closed stage raises for the other claims says nothing about their units.
            await asyncio.gather(beats, *loops, return_exceptions=True)
            await _maybe_await(self.stage.close)
            self._threads.shutdown(wait=False)
            self._journal.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self._control.heartbeat(self.name, self._holding(), self._context.waits.open()[:WAITS_TOLD])

    async def _loop(self) -> None:
        while True:
            try:
                claim = await self._ask()
            except Stop:
                return
            if claim is None:
                continue
            try:
                if claim.suspend:
                    await self._suspend()
                    continue
                await self._resume()
                await self._work(claim)
            finally:
                self._claims.discard(claim.id)
            if self._hung:
                raise WorkerBroken(f"{self._hung}; a thread cannot be stopped, so its process is of no more use")

    async def _ask(self) -> Claim | None:
        self._requests += 1
        request = self._requests
        self._asking.add(request)
        try:
            claim = await self._control.claim(self.name, request, self.stage.loaded_version, self._holding())
            if claim is not None:
                self._claims.add(claim.id)
            return claim
        finally:
            self._asking.discard(request)

    def _holding(self) -> Holding:
        return Holding(frozenset(self._claims), frozenset(self._asking), self._requests)

    async def _suspend(self) -> None:
        """Free the device that other stages share. Nothing is claimed meanwhile: the coordinator sees to that."""
        async with self._turn:
            await _maybe_await(self.stage.suspend)
            self._suspended = True
            log.info("device freed stage=%s device=%s", self.stage.name, self.stage.device)
        await self._control.report([Suspended(self.name, 0.0)], {}, "")

    async def _resume(self) -> None:
        async with self._turn:
            if self._suspended:
                await _maybe_await(self.stage.resume)
                self._suspended = False
                log.info("device taken stage=%s device=%s", self.stage.name, self.stage.device)

    # ---- one claim ----------------------------------------------------------------------------------

    async def _work(self, claim: Claim) -> None:
        started = time.monotonic()
        try:
            if self.stage.granularity == "source":
                await self._fill(claim)
            elif is_streaming(self.stage):
                await self._stream(claim)
            else:
                await self._transform(claim)
        except (QueueError, WorkerBroken):
            raise  # the system failed, not a row: the worker ends loudly
        except RunError as error:
            await self._control.report([Stopped(self.name, str(error), 0.0)], {}, claim.window)
        except Exception as error:
            await self._report(
                [self._failure(claim, unit, error) for unit in claim.units] or [self._window_failure(claim, error)]
            )
        log.debug(
            "claim done stage=%s window=%s units=%d seconds=%.3f",
            claim.stage,
            claim.window,
            len(claim.units),
            time.monotonic() - started,
        )

    async def _transform(self, claim: Claim) -> None:
        batch = await self._fetch(claim)
        started = time.monotonic()
        try:
            columns = await self._process(batch, claim.deadline_s)
            results = self._split(claim, batch, columns)
        except (WorkerBroken, RunError):
            raise
        except Exception as error:
            log.warning("stage %s raised on %d units: %s", self.stage.name, len(claim.units), error)
            await self._one_by_one(claim, batch, error)
            return
        batch.report({f"seconds/{self.stage.name}": time.monotonic() - started}, 1)
        await self._write(claim, results, batch)

    async def _one_by_one(self, claim: Claim, batch: Batch, error: Exception) -> None:
        """Run a batch that raised again unit by unit (group by group), so that only the culprit fails.

        Each is reported as it comes: a unit that takes its whole deadline does not hold up the others' reports.
        """
        parts = list(self._parts(claim, batch))
        if len(parts) == 1:
            batch.metrics = {}  # what the attempt reported before it raised does not count
            await self._write(claim, [_Result(unit, error) for unit in claim.units], batch)
            return
        for units, rows in parts:
            part = batch.select(rows)
            try:
                results = self._split(claim, part, await self._process(part, claim.deadline_s), units)
            except (WorkerBroken, RunError):
                raise
            except Exception as culprit:
                part.metrics = {}
                results = [_Result(unit, culprit) for unit in units]
            await self._write(claim, results, part)

    def _parts(self, claim: Claim, batch: Batch) -> Iterable[tuple[list[ClaimedUnit], slice]]:
        """The smallest pieces that may be processed alone, each with its rows."""
        if self.stage.granularity == "window":
            yield list(claim.units), slice(0, len(batch))
            return
        by_id = {unit.unit.id: unit for unit in claim.units}
        pieces: list[tuple[list[ClaimedUnit], slice]] = []
        for unit, rows in batch.sessions():
            last = pieces[-1][0][-1].unit if pieces else None
            if self.stage.granularity in WHOLE_GROUPS and last is not None and last.uid == unit.uid:
                pieces[-1] = ([*pieces[-1][0], by_id[unit.id]], slice(pieces[-1][1].start, rows.stop))
            else:
                pieces.append(([by_id[unit.id]], rows))
        yield from pieces

    async def _process(self, batch: Batch, deadline_s: float) -> Any:
        limit = asyncio.timeout(deadline_s)
        try:
            with self._processing(batch, deadline_s):
                async with limit:
                    return await _maybe_await(self.stage.process, batch, threads=self._threads)
        except TimeoutError:
            if not limit.expired():
                raise  # the stage's own
            message = self._overran(deadline_s)
            if not inspect.iscoroutinefunction(self.stage.process):
                # What hangs keeps its thread, and the next call gets a fresh one.
                self._hung = message
                self._threads.shutdown(wait=False)
                self._threads = self._new_threads()
            raise TimeoutError(message) from None

    def _processing(self, batch: Batch, deadline_s: float) -> contextlib.AbstractContextManager[None]:
        uids = list(dict.fromkeys(unit.uid for unit in batch.units))
        subject = (
            f"process() on {len(batch)} rows of {batch.window} (uids {', '.join(uids[:3])}{', ...' * (uids[3:] != [])})"
        )
        return self._context.waits.named(subject, deadline_s, "they are cancelled and count as failed once")

    def _overran(self, deadline_s: float) -> str:
        return f"stage {self.stage.name!r} took longer than its deadline of {deadline_s:g} s"

    async def _stream(self, claim: Claim) -> None:
        """Run an async generator; write and acknowledge what it yields as it comes, in whatever lots it comes."""
        batch = await self._fetch(claim)
        by_id = {unit.unit.id: unit for unit in claim.units}
        waiting: asyncio.Queue[_Result | None] = asyncio.Queue()
        writer = asyncio.create_task(self._write_as_it_comes(claim, batch, waiting))
        limit = asyncio.timeout(claim.deadline_s)
        try:
            results = cast(AsyncGenerator[tuple[Unit, Outcome]], self.stage.process(batch))
            with self._processing(batch, claim.deadline_s):
                async with limit, contextlib.aclosing(results):
                    async for unit, outcome in results:
                        waiting.put_nowait(_Result(by_id.pop(unit.id), outcome))
                        if writer.done():
                            break  # it failed; what is not written need not be made
            error: Exception = RowError("the stage ended without a result for this unit")
        except TimeoutError as raised:
            error = raised
            if limit.expired():
                error = TimeoutError(self._overran(claim.deadline_s))
        except asyncio.CancelledError:
            writer.cancel()
            raise
        except Exception as raised:
            error = raised
        if not isinstance(error, WorkerBroken | RunError):
            for left in by_id.values():
                waiting.put_nowait(_Result(left, error))
        waiting.put_nowait(None)
        await writer  # what was finished is kept, also when the worker is broken
        if isinstance(error, WorkerBroken | RunError):
            raise error

    async def _write_as_it_comes(self, claim: Claim, batch: Batch, waiting: asyncio.Queue[_Result | None]) -> None:
        """While one write is under way, the next results gather and are written together."""
        open_ = True
        while open_:
            lot = [await waiting.get()]
            while not waiting.empty():
                lot.append(waiting.get_nowait())
            open_ = lot[-1] is not None
            results = [result for result in lot if result is not None]
            if results:
                await self._write(claim, results, batch)

    # ---- source -------------------------------------------------------------------------------------

    async def _fill(self, claim: Claim) -> None:
        assert claim.draw is not None
        batch = Batch({}, (), (), claim.window, claim.window_index, draw=claim.draw)
        columns = await self._process(batch, claim.deadline_s)
        count = len(columns["uid"])
        prompts: list[Prompt] = []
        keys: list[str] = []
        kept: list[int] = []
        for row in range(count):
            uid, sample = columns["uid"][row], bool(columns["__do_sample__"][row])
            dropped = next((v.reason for v in (values[row] for values in columns.values()) if isinstance(v, Drop)), "")
            prompts.append(Prompt(uid, int(columns["__rollout_n__"][row]), not sample, dropped))
            if not dropped:
                kept.append(row)
                keys.append(prompt_key(claim.window, uid, is_baseline=not sample))
        if kept:
            arrays = self._cast({name: [values[row] for row in kept] for name, values in columns.items()}, keys)
            places = [address(key, claim.delivery) for key in keys]
            with self._calling_queue("write", len(keys), claim.window):
                await asyncio.to_thread(self._queue.put, claim.window, places, arrays)
            self._journal.rows(claim.window, keys, places, arrays)
        admitted = Admitted(
            self.name, claim.id, claim.window_index, claim.draw.number, claim.delivery, tuple(prompts), 0.0
        )
        await self._control.report([admitted], batch.metrics, claim.window)

    # ---- reading ------------------------------------------------------------------------------------

    async def _fetch(self, claim: Claim) -> Batch:
        with self._calling_queue("read", len(claim.units), claim.window):
            batch = await asyncio.to_thread(self._fetch_units, claim, claim.units)
            if self.stage.granularity in JOINS:
                batch.baseline = await asyncio.to_thread(self._fetch_units, claim, claim.baselines)
            return batch

    def _calling_queue(self, what: str, units: int, window: str) -> contextlib.AbstractContextManager[None]:
        subject = f"the queue, to {what} {units} units of {window}"
        return self._context.waits.named(subject, self._queue.timeout_s, "the run stops")

    def _fetch_units(self, claim: Claim, units: Sequence[ClaimedUnit]) -> Batch:
        """Read the declared columns, producer by producer, each at the address that was accepted for it."""
        turns = [1 if self.stage.expands else unit.rows for unit in units]
        owners = [unit for unit, count in zip(units, turns, strict=True) for _ in range(count)]
        numbers = [turn for count in turns for turn in range(count)]
        by_producer: dict[str, list[str]] = {}
        for name in self.stage.reads:
            by_producer.setdefault(self._pipeline.producers[name], []).append(name)
        columns: dict[str, list[Any]] = {name: [] for name in self.stage.reads}
        if owners:
            for producer, names in by_producer.items():
                got = self._get(claim, producer, names, owners, numbers)
                columns.update({name: to_values(array) for name, array in got.items()})
        return Batch(
            columns,
            tuple(unit.unit for unit in owners),
            tuple(numbers),
            claim.window,
            claim.window_index,
            None,
            claim.tombstones,
            claim.weights,
            claim.oldest_loaded,
        )

    def _get(
        self, claim: Claim, producer: str, names: list[str], owners: list[ClaimedUnit], turns: list[int]
    ) -> dict[str, pa.Array]:
        prompts = self._pipeline.stages[producer].granularity == "source"
        keys = [
            address(unit.unit.prompt_key if prompts else row_key(unit.unit, turn), unit.accepted[producer])
            for unit, turn in zip(owners, turns, strict=True)
        ]
        distinct = list(dict.fromkeys(keys))
        got = self._queue.get(claim.window, distinct, names)
        if len(distinct) == len(keys):
            return got
        place = {key: index for index, key in enumerate(distinct)}
        rows = pa.array([place[key] for key in keys])
        return {name: array.take(rows) for name, array in got.items()}

    # ---- writing ------------------------------------------------------------------------------------

    def _split(
        self, claim: Claim, batch: Batch, columns: Any, units: Sequence[ClaimedUnit] | None = None
    ) -> list[_Result]:
        """Cut a batch's columns into units, and check names and lengths."""
        check_columns(self.stage, columns, len(batch))
        by_id = {unit.unit.id: unit for unit in (claim.units if units is None else units)}
        results = []
        for unit, rows in batch.sessions():
            part = {name: list(values[rows]) for name, values in columns.items()}
            marks = [value for values in part.values() for value in values if isinstance(value, RowError | Drop)]
            if self.stage.granularity in (*WHOLE_GROUPS, "window") and not marks:
                self._checked(by_id[unit.id], part)  # a bad value fails all: the rest would be another group
            results.append(_Result(by_id[unit.id], marks[0] if marks else part))
        return results

    async def _write(self, claim: Claim, results: Sequence[_Result], batch: Batch) -> None:
        """Write, journal and acknowledge the units that succeeded; report the others."""
        good: list[tuple[ClaimedUnit, dict[str, Any], int]] = []
        reports: list[Report] = []
        for result in results:
            unit, outcome = result.unit, result.outcome
            if isinstance(outcome, Drop):
                reports.append(Dropped(self.name, claim.id, unit.unit.id, unit.delivery, outcome.reason, 0.0))
            elif isinstance(outcome, Exception):
                reports.append(self._failure(claim, unit, outcome))
            else:
                try:
                    good.append((unit, *self._checked(unit, outcome)))
                except (ColumnError, ValueError, TypeError) as error:
                    reports.append(self._failure(claim, unit, error))
        if good:
            with self._calling_queue("write", len(good), claim.window):
                await asyncio.to_thread(self._put, claim, good)
            reports += [
                Acknowledged(self.name, claim.id, unit.unit.id, unit.delivery, count, 0.0) for unit, _, count in good
            ]
        if batch.published is not None:
            reports.insert(0, Published(batch.published, 0.0))
            batch.published = None
        reports += [Warned(self.name, subject, message, 0.0) for subject, message in batch.warnings.items()]
        batch.warnings = {}
        metrics, batch.metrics = batch.metrics, {}
        await self._control.report(reports, metrics, claim.window)

    def _checked(self, unit: ClaimedUnit, columns: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Any], int]:
        """Cast one unit's columns; the error of a bad value names its row."""
        check_columns(self.stage, columns)
        counts = {len(values) for values in columns.values()}
        if len(counts) > 1 or (not self.stage.expands and counts and counts != {unit.rows}):
            raise ValueError(
                f"unit {unit.unit.id!r}: columns of lengths {sorted(counts)}, expected {unit.rows or 'equal lengths'}"
            )
        count = counts.pop() if counts else unit.rows
        if not count:
            raise ValueError(f"unit {unit.unit.id!r}: no rows; stage {self.stage.name!r} must give it at least one")
        keys = [row_key(unit.unit, turn) for turn in range(count)]
        return self._cast(columns, keys), count

    def _cast(self, columns: Mapping[str, Sequence[Any]], keys: Sequence[str]) -> dict[str, pa.Array]:
        return {column.name: column.cast(columns[column.name], keys) for column in self.stage.writes}

    def _put(self, claim: Claim, good: Sequence[tuple[ClaimedUnit, dict[str, Any], int]]) -> None:
        keys = [row_key(unit.unit, turn) for unit, _, count in good for turn in range(count)]
        places = [address(row_key(unit.unit, turn), unit.delivery) for unit, _, count in good for turn in range(count)]
        arrays = {
            column.name: pa.concat_arrays([parts[column.name] for _, parts, _ in good]) for column in self.stage.writes
        }
        if arrays and places:
            self._queue.put(claim.window, places, arrays)
            self._journal.rows(claim.window, keys, places, arrays)

    # ---- failures -----------------------------------------------------------------------------------

    def _failure(self, claim: Claim, unit: ClaimedUnit, error: Exception) -> Failed:
        # A unit of a group cannot be tried again alone: its estimate would be of another group.
        whole = self.stage.granularity in (*WHOLE_GROUPS, "window")
        retry = error.retry and not whole if isinstance(error, RowError) else True
        return Failed(self.name, claim.id, unit.unit.id, unit.delivery, _failure_of(error), retry, 0.0)

    def _window_failure(self, claim: Claim, error: Exception) -> Failed:
        retry = not isinstance(error, DataflowError)
        return Failed(self.name, claim.id, claim.window, claim.delivery, _failure_of(error), retry, 0.0)

    async def _report(self, reports: Sequence[Report]) -> None:
        for report in reports:
            if isinstance(report, Failed):
                log.warning("unit failed stage=%s unit=%s error=%s", self.stage.name, report.unit, report.failure)
        await self._control.report(reports, {}, "")


def _failure_of(error: Exception) -> Failure:
    """An exception as data. One that was handed over as a value was never raised, and has no traceback."""
    trace = "".join(traceback.format_exception(error)) if error.__traceback__ else ""
    return Failure(type(error).__name__, str(error), trace[-TRACEBACK_CHARACTERS:])


async def _maybe_await(function: Callable[..., Any], *args: Any, threads: ThreadPoolExecutor | None = None) -> Any:
    """Call a plain function in a thread, so that the process's other workers go on; await a coroutine function."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await asyncio.get_running_loop().run_in_executor(threads, _call, function, *args)
    if isinstance(result, Awaitable):
        return await result
    return result


def _call(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except StopIteration as error:  # cannot pass through a future: whoever waits for it would wait for ever
        raise RuntimeError(f"StopIteration: {error}") from error
