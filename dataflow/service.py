"""The coordinator with a clock, waiting workers and files: the shell around the state machine.

It runs in one actor on a cluster and in the same process in local mode; there is no other copy of its logic.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from dataflow.config import LimitsSection
from dataflow.coordinator import Coordinator
from dataflow.draws import Draws
from dataflow.errors import QueueError
from dataflow.events import (
    Acknowledged,
    Admitted,
    Alarm,
    Blocked,
    Claim,
    ClaimWanted,
    ClaimWithdrawn,
    Dropped,
    Effect,
    Event,
    Failed,
    Finished,
    Grant,
    Halt,
    Heartbeat,
    Holding,
    Ledger,
    Settled,
    Stopped,
    Tick,
    Unused,
    WindowClosed,
    WorkerDied,
    WorkerJoined,
)
from dataflow.journal import JournalWriter
from dataflow.pipeline import Pipeline
from dataflow.waits import Wait
from dataflow.worker import Metrics, Report, Stop

log = logging.getLogger(__name__)
T = TypeVar("T")

CLAIM_WAIT_S = 20.0
TICK_S = 1.0


@dataclass(frozen=True)
class WindowRecord:
    """What a closed window came to.

    Attributes:
        index: Number of the window, from 0.
        window: Its name.
        seconds: Time since the window before it closed (since the start of work for the first).
        metrics: What the stages reported, averaged.
        weights: By how much each average is backed; average times weight is the sum.
        counts: "kind outcome" -> units.
    """

    index: int
    window: str
    seconds: float
    metrics: Mapping[str, float]
    weights: Mapping[str, float]
    counts: Mapping[str, int]


@dataclass
class Status:
    """What the driver and an onlooker see; cheap to make and to send.

    Attributes:
        closed: Records of windows closed since the asked-for one.
        stages: Stage -> cell state -> count.
        ledger: Counts of all units.
        alarms: Messages since the asked-for one.
        finished: Whether all windows are closed.
        idle_s: Seconds since a worker last reported anything.
        works: Whether any claim is within its deadline.
        silent: Workers that send no heartbeat; their processes are to be ended.
        halted: Why the run cannot go on; empty if it can.
        detailed: Whether the rest was asked for.
        blocked: What does not move.
        waits: Worker -> what it waits for inside.
    """

    closed: list[WindowRecord] = field(default_factory=list)
    stages: dict[str, dict[str, int]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    alarms: list[str] = field(default_factory=list)
    finished: bool = False
    idle_s: float = 0.0
    works: bool = False
    silent: list[str] = field(default_factory=list)
    halted: str = ""
    detailed: bool = False
    blocked: list[Blocked] = field(default_factory=list)
    waits: Mapping[str, tuple[Wait, ...]] = field(default_factory=dict)


def coordinator_for(pipeline: Pipeline, run_id: str, settings: LimitsSection) -> Coordinator:
    """Make the state machine of a pipeline: credits become a number of open windows."""
    limits = [
        limit // per_window
        for limit, per_window in (
            (pipeline.max_rows, pipeline.most_rows),
            (pipeline.max_bytes, pipeline.most_rows * pipeline.bytes_per_row),
        )
        if limit is not None and per_window
    ]
    draws = Draws(
        pipeline.prompts, pipeline.prompts_per_window, epochs=pipeline.epochs, max_draws=pipeline.further_draws
    )
    return Coordinator(
        pipeline.plans,
        run_id,
        pipeline.windows,
        draws,
        max_staleness=pipeline.max_staleness,
        max_open_windows=max(1, min(limits)) if limits else None,
        lease_s=settings.lease_s,
        max_empty_windows=settings.max_empty_windows,
        max_failures=settings.max_failures,
    )


class CoordinatorService:
    """Answers workers, executes the coordinator's effects, and keeps what the driver shows.

    Args:
        coordinator: The state machine.
        clear: Removes a partition from the queue.
        journal_dir: Where the ledger's journal goes; None for none.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        clear: Callable[[str], Any],
        journal_dir: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.coordinator = coordinator
        self._clear = clear
        self._journal = JournalWriter(journal_dir, "ledger", "coordinator")
        self._clock = clock
        self._tickets: dict[int, asyncio.Future[Claim]] = {}
        self._serial = 0
        self._metrics: dict[str, dict[str, tuple[float, float]]] = {}
        self._closed: _Feed[WindowRecord] = _Feed()
        self._alarms: _Feed[str] = _Feed()
        self._waits: dict[str, tuple[Wait, ...]] = {}
        self._closed_at: float | None = None
        self._clearing: set[asyncio.Task[None]] = set()
        self._stopping = ""
        self._progress_at = clock()

    # ---- for workers (see `worker.Control`) -----------------------------------------------------------

    async def joined(self, worker: str, stage: str, process: str) -> None:
        """A worker came up."""
        self._progress_at = self._clock()
        if self._closed_at is None:
            self._closed_at = self._clock()
        self._handle(WorkerJoined(worker, stage, self._clock(), process))

    async def claim(self, worker: str, request: int, loaded_version: int, holding: Holding) -> Claim | None:
        """Wait for work for at most `CLAIM_WAIT_S`; None if there was none.

        Raises:
            Stop: When the run is over.
        """
        if self.over:
            raise Stop
        self._serial += 1
        ticket = self._serial
        future: asyncio.Future[Claim] = asyncio.get_running_loop().create_future()
        self._tickets[ticket] = future
        self._handle(ClaimWanted(worker, ticket, request, loaded_version, holding, self._clock()))
        try:
            return await asyncio.wait_for(asyncio.shield(future), CLAIM_WAIT_S)
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()
            self._handle(ClaimWithdrawn(worker, ticket, self._clock()))
            return None
        finally:
            self._tickets.pop(ticket, None)

    async def report(self, reports: Sequence[Report], metrics: Metrics, window: str) -> None:
        """Take a worker's results; all of one call are handled at once."""
        self._progress_at = now = self._clock()
        late = self.coordinator.ledger.late
        effects = self.coordinator.handle(*(replace(report, now=now) for report in reports))
        results = sum(isinstance(report, Admitted | Acknowledged | Failed | Dropped) for report in reports)
        if self.coordinator.ledger.late - late < results:  # what comes too late to count is not measured either
            self._count(window, metrics)
        self._execute(effects)

    def _count(self, window: str, metrics: Metrics) -> None:
        totals = self._metrics.setdefault(window, {})
        for name, (total, weight) in metrics.items():
            old = totals.get(name, (0.0, 0.0))
            totals[name] = (old[0] + total, old[1] + weight)

    async def heartbeat(self, worker: str, holding: Holding, waits: tuple[Wait, ...]) -> None:
        """A worker is alive."""
        self._waits[worker] = waits
        self._handle(Heartbeat(worker, holding, self._clock()))

    # ---- for the driver -------------------------------------------------------------------------------

    async def died(self, workers: Sequence[str], reason: str) -> None:
        """The process of these workers ended."""
        now = self._clock()
        for worker in workers:
            self._waits.pop(worker, None)
        self._execute(self.coordinator.handle(*(WorkerDied(worker, reason, now) for worker in workers)))

    async def fail(self, reason: str) -> None:
        """The run cannot go on, for a reason outside of any stage."""
        self._handle(Stopped("", reason, self._clock()))

    async def stop(self, reason: str) -> None:
        """End the run: waiting workers are told, and no claim is granted any more."""
        self._stopping = self._stopping or reason
        self._release_waiting()

    async def status(self, closed_from: int, alarms_from: int, detail: bool = False) -> Status:
        """The state of the run, with window records and alarms from the given numbers on; earlier ones are forgotten.

        Args:
            closed_from: Number of the first window record.
            alarms_from: Number of the first alarm.
            detail: Whether to list what does not move.
        """
        now = self._clock()
        status = Status(
            self._closed.since(closed_from),
            self.coordinator.waits(),
            self.coordinator.ledger,
            self._alarms.since(alarms_from),
            self.coordinator.finished,
            now - self._progress_at,
            self.coordinator.works(now),
            self.coordinator.silent(),
            self.coordinator.halted,
        )
        if detail:
            status.detailed = True
            status.blocked = self.coordinator.blocked(now)
            status.waits = {worker: waits for worker, waits in self._waits.items() if waits}
        return status

    async def tick_forever(self) -> None:
        """Let time pass for leases and deadlines. Runs until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(Tick(self._clock()))

    @property
    def over(self) -> bool:
        """Whether no more work will be granted."""
        return bool(self._stopping or self.coordinator.halted or self.coordinator.finished)

    async def close(self) -> None:
        """Finish clearing and close the journal."""
        if self._clearing:
            await asyncio.wait(self._clearing, timeout=10)
        self._journal.close()

    # ---- effects --------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        self._execute(self.coordinator.handle(event))

    def _execute(self, effects: Sequence[Effect]) -> None:
        settled = [effect for effect in effects if isinstance(effect, Settled)]
        if settled:
            self._journal.settled(settled)
        for effect in effects:
            if isinstance(effect, Grant):
                future = self._tickets.get(effect.ticket)
                if future is not None and not future.done():
                    future.set_result(effect.claim)
            elif isinstance(effect, WindowClosed):
                self._window_closed(effect)
            elif isinstance(effect, Unused):
                task = asyncio.get_running_loop().create_task(self._clear_partition(effect.window))
                self._clearing.add(task)
                task.add_done_callback(self._clearing.discard)
            elif isinstance(effect, Alarm):
                log.warning("alarm: %s", effect.message)
                self._alarms.append(effect.message)
            elif isinstance(effect, Halt):
                log.error("halt: %s", effect.reason)
        if any(isinstance(effect, Halt | Finished) for effect in effects):
            self._release_waiting()

    def _window_closed(self, effect: WindowClosed) -> None:
        now = self._clock()
        seconds = now - (self._closed_at if self._closed_at is not None else now)
        self._closed_at = now
        totals = self._metrics.pop(effect.window, {})
        metrics = {name: total / weight for name, (total, weight) in totals.items() if weight}
        weights = {name: weight for name, (_, weight) in totals.items() if weight}
        metrics |= effect.metrics
        weights |= dict.fromkeys(effect.metrics, 1.0)
        counts = {f"{kind} {outcome}": count for (kind, outcome), count in effect.counts.items()}
        self._closed.append(WindowRecord(effect.window_index, effect.window, seconds, metrics, weights, counts))

    async def _clear_partition(self, window: str) -> None:
        try:
            rows = await _in_thread(self._clear, window)
        except QueueError as error:
            self._alarms.append(f"window {window} was not cleared from the queue: {error}")
        else:
            log.debug("partition cleared window=%s rows=%s", window, rows)

    def _release_waiting(self) -> None:
        for future in self._tickets.values():
            if not future.done():
                future.set_exception(Stop())


class _Feed(Generic[T]):
    """A numbered list that forgets what its one reader has seen."""

    def __init__(self) -> None:
        self._first = 0
        self._items: list[T] = []

    def append(self, item: T) -> None:
        self._items.append(item)

    def since(self, number: int) -> list[T]:
        """The items from a number on; those before it are forgotten."""
        del self._items[: max(0, number - self._first)]
        self._first = max(self._first, number)
        return list(self._items)


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    result = await asyncio.to_thread(function, *args)
    return await result if isinstance(result, Awaitable) else result


def ledger_record(ledger: Ledger) -> dict[str, Any]:
    """The ledger as JSON-ready data."""
    record = asdict(ledger)
    record["settled"] = {f"{kind} {outcome}": count for (kind, outcome), count in ledger.settled.items()}
    record["balanced"] = ledger.balanced
    return record
