"""Who may work on what: a pure state machine. Events in, effects out; no clock, no Ray, no I/O.

Each unit has one *cell* per stage that applies to it. A cell waits for the stages before it, becomes ready,
is leased to a worker, and ends done or dead. Everything else follows from cells: a group is ready when none of
its cells waits any more, a window is closed when all its cells have ended. An event touches only the cells it is
about and their consumers, so its cost does not grow with the queue.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dataflow.batch import Failure, Tombstone, Unit, prompt_key
from dataflow.blocked import blocked
from dataflow.cells import (
    DEAD,
    DONE,
    LEASED,
    READY,
    WAITING,
    Cell,
    GroupState,
    Lease,
    UnitState,
    WindowState,
    WorkerState,
    by_group,
    describe,
    shortage,
)
from dataflow.draws import Draws
from dataflow.events import (
    ATTEMPT_FAILED,
    Acknowledged,
    Admitted,
    Alarm,
    Blocked,
    Claim,
    ClaimedUnit,
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
    Prompt,
    Published,
    Settled,
    Stopped,
    Suspended,
    Tick,
    Unused,
    Warned,
    WindowClosed,
    WorkerDied,
    WorkerJoined,
)
from dataflow.pipeline import StagePlan
from dataflow.stage import JOINS, WHOLE_GROUPS
from dataflow.weights import WeightsRef


class Coordinator:
    """The state machine. `handle` is its one mutating method.

    Args:
        plans: The stages, in topological order.
        run_id: Names the run's partitions.
        windows: How many windows to admit; fewer if there are no prompts left to draw.
        draws: Deals the prompts out; the default suits a source that makes its prompts up.
        max_staleness: Window k is admitted when every window before k - max_staleness is trained on.
        max_open_windows: Credit limit, in windows; the oldest open window is never blocked.
        lease_s: Seconds without a heartbeat after which a worker's claims are void.
        max_empty_windows: Windows in a row with nothing to train on, after which the run stops.
        max_failures: Units that may fail for good before the run stops: a count if 1 or more, else a share of all
            units so far, looked at when a window closes. None is no limit.
    """

    def __init__(
        self,
        plans: Mapping[str, StagePlan],
        run_id: str,
        windows: int,
        draws: Draws | None = None,
        *,
        max_staleness: int = 0,
        max_open_windows: int | None = None,
        lease_s: float = 60.0,
        max_empty_windows: int = 3,
        max_failures: float | None = None,
    ) -> None:
        self.plans = dict(plans)
        self.windows = windows
        self._draws = draws or Draws()
        self._run_id = run_id
        self._max_staleness = max_staleness
        self._max_open = max_open_windows
        self._lease_s = lease_s
        self._max_empty = max_empty_windows
        self._max_failures = max_failures
        self._source = next(name for name, plan in plans.items() if plan.granularity == "source")
        self._trainer = next((name for name, plan in plans.items() if plan.one_owner), None)
        self._filter = next((name for name, plan in plans.items() if plan.filters), None)
        self._consumers: dict[str, list[str]] = defaultdict(list)
        for name, plan in plans.items():
            for producer in plan.depends_on:
                self._consumers[producer].append(name)
        self.ledger = Ledger()
        self.weights: WeightsRef | None = None
        self.halted = ""
        self.finished = False
        self._workers: dict[str, WorkerState] = {}
        self._open: dict[int, WindowState] = {}
        self._closed: dict[int, str] = {}  # closed, and not yet reported as unused
        self._ready: dict[str, list[tuple[tuple[Any, ...], int, list[Cell]]]] = {name: [] for name in plans}
        self._next_window = 0
        self._empty_in_a_row = 0
        self._serial = 0
        self._now = 0.0
        self._told: set[str] = set()
        self._effects: list[Effect] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            WorkerJoined: self._worker_joined,
            WorkerDied: self._worker_died,
            ClaimWanted: self._claim_wanted,
            ClaimWithdrawn: self._claim_withdrawn,
            Heartbeat: self._heartbeat,
            Admitted: self._admitted,
            Acknowledged: self._acknowledged,
            Failed: self._failed,
            Dropped: self._dropped,
            Stopped: self._stopped,
            Warned: self._warned,
            Suspended: self._suspended,
            Published: self._published,
            Tick: self._tick,
        }

    # ---- events -------------------------------------------------------------------------------------

    def handle(self, *events: Event) -> list[Effect]:
        """Take events that happened together and return what follows from them, in order.

        Claims are granted after the last of them, so that a waiting worker gets all the units they made ready.
        """
        self._effects = []
        for event in events:
            self._now = max(self._now, event.now)
            self._handlers[type(event)](event)
        if not self.halted:
            self._grant_waiting()
        self._release_windows()
        return self._effects

    def _worker_joined(self, event: WorkerJoined) -> None:
        if event.worker in self._workers:
            self._worker_died(WorkerDied(event.worker, "it was started again", event.now))
        self._offer_windows()  # the first time; from then on as windows are trained on and closed
        process = event.process or event.worker
        self._workers[event.worker] = WorkerState(event.worker, event.stage, process, event.now)

    def _worker_died(self, event: WorkerDied) -> None:
        worker = self._workers.pop(event.worker, None)
        if worker is None:
            return
        plan = self.plans[worker.stage]
        if plan.one_owner:
            self._halt(
                f"worker {worker.name} of stage {worker.stage!r} died ({event.reason}); the stage has one owner and is "
                "not started again"
            )
            return
        for lease in list(worker.claims.values()):
            for cell in lease.cells:
                if cell.claim == lease.id and cell.state == LEASED:
                    cell.deaths += 1
                    if lease.alone and cell.unit is not None:
                        message = f"killed its worker {cell.deaths} times, the last time alone ({event.reason})"
                        self._bury(cell, Failure("WorkerDied", message, attempt=cell.attempts))
        self._release_worker(worker)
        for window in list(self._open.values()):  # a buried unit may have been the last
            self._close_if_done(window)

    def _claim_wanted(self, event: ClaimWanted) -> None:
        worker = self._workers.get(event.worker)
        if worker is not None:
            worker.tickets[event.ticket] = event.request
            worker.loaded_version = event.loaded_version
            self._heard(worker, event.now, event.holding)

    def _claim_withdrawn(self, event: ClaimWithdrawn) -> None:
        worker = self._workers.get(event.worker)
        if worker is not None:
            worker.tickets.pop(event.ticket, None)

    def _heartbeat(self, event: Heartbeat) -> None:
        worker = self._workers.get(event.worker)
        if worker is not None:
            self._heard(worker, event.now, event.holding)

    def _heard(self, worker: WorkerState, now: float, holding: Holding) -> None:
        """The worker is alive, and says what it is about.

        A lease that it knows nothing of was lost on the way, or its report was. Of the leases that were taken from it,
        it will not write any more for those that it no longer works on.
        """
        worker.seen, worker.silent = now, False
        for lease in [lease for lease in worker.claims.values() if not lease.may_be_known(holding)]:
            self._forgotten(lease)
        worker.lost = [lease for lease in worker.lost if lease.may_be_known(holding)]
        if worker.suspending is not None and not worker.suspending.may_be_known(holding):
            worker.suspending = None  # the call, or the answer to it, was lost: it is made again

    def _forgotten(self, lease: Lease) -> None:
        worker = lease.worker
        if self.plans[worker.stage].one_owner:
            self._halt(
                f"worker {worker.name} of stage {worker.stage!r} no longer works on {describe(lease.cells)} and never "
                "reported them; the stage has one owner, so they are not given out again"
            )
            return
        self._release(lease)

    def _suspended(self, event: Suspended) -> None:
        worker = self._workers.get(event.worker)
        if worker is not None and worker.suspending is not None:
            worker.suspended, worker.suspending = True, None

    def _stopped(self, event: Stopped) -> None:
        self._halt(f"worker {event.worker} stopped the run: {event.reason}" if event.worker else event.reason)

    def _warned(self, event: Warned) -> None:
        self._tell_once(event.subject, event.message)

    def _tell_once(self, subject: str, message: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            self._alarm(message)

    def _published(self, event: Published) -> None:
        if self.weights is None or event.weights.version > self.weights.version:
            self.weights = event.weights

    def _tick(self, event: Tick) -> None:
        for worker in list(self._workers.values()):
            if self.plans[worker.stage].one_owner:
                self._check_owner(worker, event.now)
                continue
            if worker.claims and event.now - worker.seen > self._lease_s:
                self._alarm(f"worker {worker.name} sent no heartbeat for {self._lease_s:g} s; others get its units")
                self._release_worker(worker)
            worker.silent = event.now - worker.seen > self._lease_s
            for lease in list(worker.claims.values()):
                if event.now > lease.deadline + self._lease_s:
                    self._alarm(f"worker {worker.name} overran its deadline; others get {describe(lease.cells)}")
                    self._release(lease)

    def _check_owner(self, worker: WorkerState, now: float) -> None:
        for lease in worker.claims.values():
            if now > lease.deadline:
                self._halt(
                    f"stage {worker.stage!r} has worked on {describe(lease.cells)} for longer than its deadline of "
                    f"{self.plans[worker.stage].deadline_s:g} s; raise its deadline_s if it needs more"
                )

    def _admitted(self, event: Admitted) -> None:
        self._drop_lease(event.worker, event.claim)
        window = self._open.get(event.window_index)
        cell = window.sources[event.draw] if window is not None else None
        if window is None or cell is None or cell.ended:
            self.ledger.late += 1
            return
        cell.state, cell.accepted, cell.claim = DONE, event.delivery, None
        units = [unit for prompt in event.prompts for unit in self._create_units(cell, prompt)]
        for unit in units:
            self._count_cells(unit)
        for unit in units:
            if unit.dead:
                self._kill_cells(unit)
            else:
                for consumer in self._consumers[self._source]:
                    self._one_less(unit, consumer)
        self._fill_up(window)
        self._close_if_done(window)

    def _acknowledged(self, event: Acknowledged) -> None:
        cell = self._reported(event)
        if cell is None or cell.unit is None:
            return
        cell.accepted = event.delivery
        if self.plans[cell.stage].expands:
            cell.unit.rows = event.rows
        self._effects.append(
            Settled(cell.unit.identity, cell.stage, "done", "", event.delivery, cell.unit.rows, None, event.worker)
        )
        self._end(cell, DONE)
        self._close_if_done(cell.window)

    def _failed(self, event: Failed) -> None:
        lease = self._lease(event.worker, event.claim)
        cell = self._reported(event)
        if cell is None or lease is None:
            return
        plan = self.plans[cell.stage]
        self.ledger.failures[cell.stage] = self.ledger.failures.get(cell.stage, 0) + 1
        if plan.one_owner:
            self._halt(f"stage {cell.stage!r} failed on {describe([cell])}: {event.failure}")
            return
        cell.attempts += 1
        failure = replace(event.failure, attempt=cell.attempts)
        if cell.unit is not None:
            identity, rows = cell.unit.identity, cell.unit.rows
            self._effects.append(
                Settled(identity, cell.stage, ATTEMPT_FAILED, str(failure), event.delivery, rows, failure, event.worker)
            )
        if cell.unit is not None and cell.unit.dead:
            self._end(cell, DEAD)
        elif event.retry and cell.attempts < plan.max_attempts:
            lease.retry.append(cell)
        elif cell.unit is None:
            self._halt(
                f"stage {cell.stage!r} could not fill window {cell.window.name} in {cell.attempts} attempts: {failure}"
            )
        else:
            self._bury(cell, failure)
        if not lease.cells:
            self._release(lease)
        self._close_if_done(cell.window)

    def _dropped(self, event: Dropped) -> None:
        cell = self._reported(event)
        if cell is None or cell.unit is None:
            return
        self._settle_unit(cell.unit, f"dropped: {event.reason}", event.reason, cell.stage)
        self._end(cell, DEAD)
        self._kill_cells(cell.unit)
        self._close_if_done(cell.window)

    def _reported(self, event: Acknowledged | Failed | Dropped) -> Cell | None:
        """The cell a report is about, or None if the report comes too late to count."""
        worker, lease = self._workers.get(event.worker), self._lease(event.worker, event.claim)
        if worker is not None:
            worker.seen, worker.silent = event.now, False
        cell = self._find(worker.stage, event.unit, lease) if worker is not None else None
        current = cell is not None and lease is not None and cell in lease.cells
        if lease is not None:  # who reports piece by piece is not overdue
            lease.deadline = max(lease.deadline, event.now + self.plans[lease.worker.stage].deadline_s)
        if cell is not None and lease is not None and cell in lease.cells:
            lease.cells.remove(cell)
            if not lease.cells and (cell.ended or not isinstance(event, Failed)):
                self._release(lease)
        if cell is None or cell.ended or not (current or self._counts_early(event, cell)):
            self.ledger.late += 1
            return None
        return cell

    def _counts_early(self, event: Acknowledged | Failed | Dropped, cell: Cell) -> bool:
        """Whether a report of an earlier delivery counts.

        A write is as good as the current one, if it is the first to arrive; but one of a part of a group or window is
        not, since the rest would then be done as if it were the whole. A failure says nothing about the current one.
        """
        together = self.plans[cell.stage].granularity in (*WHOLE_GROUPS, "window")
        return isinstance(event, Acknowledged) and event.delivery <= cell.delivery and not together

    # ---- units --------------------------------------------------------------------------------------

    def _create_units(self, source: Cell, prompt: Prompt) -> Iterator[UnitState]:
        window = source.window
        group = window.groups.setdefault(prompt.uid, GroupState(prompt.uid))
        key = prompt_key(window.name, prompt.uid, is_baseline=prompt.is_baseline)
        kind = "baseline" if prompt.is_baseline else "sampled"
        for session in range(prompt.sessions):
            identity = Unit(f"{key}/{session}", window.name, prompt.uid, session, prompt.is_baseline, key)
            unit = UnitState(identity, kind, group, window, source)
            for name, plan in self.plans.items():
                if plan.granularity == "source":
                    continue
                # A join needs to know when the greedy unit has come as far as the join itself: a witness cell.
                witness = plan.granularity in JOINS and kind == "baseline"
                if kind in plan.kinds or witness:
                    unit.cells[name] = Cell(name, unit, window, len(plan.depends_on), witness, since=self._now)
            window.units[identity.id] = unit
            group.members.append(unit)
            if prompt.is_baseline:
                group.baseline = unit
            self.ledger.created[kind] = self.ledger.created.get(kind, 0) + 1
            self.ledger.in_flight[kind] = self.ledger.in_flight.get(kind, 0) + 1
            if prompt.dropped:
                self._settle_unit(unit, f"dropped: {prompt.dropped}", prompt.dropped, self._source)
            yield unit

    def _count_cells(self, unit: UnitState) -> None:
        """Count a new unit's cells with those that its window and its group wait for."""
        window, group = unit.window, unit.group
        window.open_cells += len(unit.cells)
        for name, cell in unit.cells.items():
            granularity = self.plans[name].granularity
            # A whole group with its greedy unit is complete when the witness has ended too.
            if granularity in WHOLE_GROUPS and (not cell.witness or granularity == "group_join"):
                group.pending[name] = group.pending.get(name, 0) + 1
            elif granularity == "window":
                window.pending[name] += 1
            window.unfiltered += name == self._filter

    def _one_less(self, unit: UnitState, stage: str) -> None:
        """A stage that `stage` depends on is done for the unit."""
        cell = unit.cells.get(stage)
        if cell is None or cell.ended:
            return
        cell.missing -= 1
        if cell.missing == 0:
            self._arrive(cell)

    def _arrive(self, cell: Cell) -> None:
        """All columns that the cell's stage reads are there."""
        unit = cell.unit
        assert unit is not None
        plan = self.plans[cell.stage]
        cell.arrived = True
        if cell.witness:
            self._end(cell, DONE)
        elif plan.granularity == "row":
            self._make_ready([cell])
        elif plan.granularity == "join":
            witness = unit.group.baseline.cells[cell.stage] if unit.group.baseline else None
            if witness is None or witness.ended:
                self._make_ready([cell])
            else:
                unit.group.parked.setdefault(cell.stage, []).append(cell)
        else:
            self._no_longer_pending(cell)

    def _no_longer_pending(self, cell: Cell) -> None:
        """The cell has its columns or is dead: its group or window may now be complete."""
        granularity = self.plans[cell.stage].granularity
        if granularity not in (*WHOLE_GROUPS, "window"):
            return
        assert cell.unit is not None
        self._one_less_pending(cell.window if granularity == "window" else cell.unit.group, cell.stage)

    def _one_less_pending(self, holder: GroupState | WindowState, stage: str) -> None:
        holder.pending[stage] -= 1
        if holder.pending[stage]:
            return
        units = holder.members if isinstance(holder, GroupState) else list(holder.units.values())
        alive = [unit.cells[stage] for unit in units if stage in unit.cells and not unit.cells[stage].ended]
        if alive:
            self._make_ready(alive)
        elif isinstance(holder, WindowState) and stage == self._trainer:
            self._window_trained(holder, empty=True)

    def _check_group(self, group: GroupState, stage: str) -> None:
        """Drop what is ready of a group where that is fewer than the stage may use."""
        cells = [unit.cells[stage] for unit in group.members if stage in unit.cells]
        alive = [cell.unit for cell in cells if cell.state == READY and cell.unit and not cell.unit.dead]
        needed = self.plans[stage].min_group
        if len(alive) >= needed:
            return
        asked = sum(unit.kind == "sampled" for unit in group.members)
        for unit in alive:
            reason = f"{len(alive)} of {asked} units survived, {needed} needed"
            self._settle_unit(unit, "dropped: partial group", reason, stage)
        for unit in alive:
            self._kill_cells(unit)

    def _make_ready(self, cells: list[Cell]) -> None:
        for cell in cells:
            cell.state, cell.claim, cell.since = READY, None, self._now
        first = cells[0]
        order: tuple[Any, ...] = (first.window.index, *(first.unit.identity.order if first.unit else ()))
        self._serial += 1
        heapq.heappush(self._ready[first.stage], (order, self._serial, cells))
        if first.unit is not None and self.plans[first.stage].granularity in WHOLE_GROUPS:
            self._check_group(first.unit.group, first.stage)

    def _end(self, cell: Cell, state: str) -> None:
        """A cell is done or dead: tell its consumers, its group and its window."""
        unit, was_arrived, was_ready = cell.unit, cell.arrived, cell.state == READY
        assert unit is not None
        cell.state, cell.claim = state, None
        cell.window.open_cells -= 1
        if cell.witness:
            self._make_each_ready(unit.group.parked.pop(cell.stage, []))
        if not was_arrived or cell.witness:
            self._no_longer_pending(cell)
        elif was_ready and self.plans[cell.stage].granularity in WHOLE_GROUPS:
            self._check_group(unit.group, cell.stage)
        if state == DONE and not unit.dead and not cell.witness:
            for consumer in self._consumers[cell.stage]:
                self._one_less(unit, consumer)
        if cell.stage == self._filter:
            cell.window.unfiltered -= 1
            self._fill_up(cell.window)
        if cell.stage == self._trainer and not cell.window.settled and state == DONE:
            self._window_trained(cell.window, empty=False)

    def _make_each_ready(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            if not cell.ended:
                self._make_ready([cell])

    def _bury(self, cell: Cell, failure: Failure) -> None:
        """The unit failed for good: its remaining work is void, and those who wait for it are told."""
        unit = cell.unit
        assert unit is not None
        self._settle_unit(unit, f"failed: {cell.stage}", str(failure), cell.stage, failure)
        self._tell_once(
            f"failed: {cell.stage}",
            f"stage {cell.stage!r} gave up on {unit.identity.id}: {failure} (told once; dead_letters() has them all)",
        )
        self._end(cell, DEAD)
        self._kill_cells(unit)
        failed = self.ledger.units("failed")
        if self._max_failures is not None and 1 <= self._max_failures < failed:
            self._halt(
                f"{failed} units failed for good, more than limits.max_failures={self._max_failures:g} allows; the "
                f"last: {unit.identity.id} at stage {cell.stage!r}: {failure}"
            )

    def _check_share_of_failures(self, window: WindowState) -> None:
        failed, created = self.ledger.units("failed"), sum(self.ledger.created.values())
        if self._max_failures is not None and self._max_failures < 1 and failed > self._max_failures * created:
            reasons = sorted({unit.reason for unit in window.units.values() if unit.failure is not None})
            self._halt(
                f"{failed} of {created} units failed for good, more than the share limits.max_failures="
                f"{self._max_failures:g} allows; in window {window.name}: {'; '.join(reasons[:3]) or 'none'}"
            )

    def _kill_cells(self, unit: UnitState) -> None:
        """End the unit's cells that nobody holds; a leased one ends when its worker reports."""
        for cell in unit.cells.values():
            if cell.state in (WAITING, READY):
                self._end(cell, DEAD)

    def _settle_unit(
        self, unit: UnitState, outcome: str, reason: str, stage: str, failure: Failure | None = None
    ) -> None:
        if unit.dead:
            return
        unit.outcome, unit.reason, unit.stage, unit.failure = outcome, reason, stage, failure
        self.ledger.in_flight[unit.kind] -= 1
        key = (unit.kind, outcome)
        self.ledger.settled[key] = self.ledger.settled.get(key, 0) + 1
        self._effects.append(Settled(unit.identity, stage, outcome, reason, -1, unit.rows, failure))

    # ---- windows ------------------------------------------------------------------------------------

    def _offer_windows(self) -> None:
        """Draw the prompts of each window that staleness and credits allow."""
        while not self._all_offered:
            index = self._next_window
            if index > self._oldest_untrained() + self._max_staleness:
                return
            if self._open and self._max_open is not None and len(self._open) >= self._max_open:
                return
            held = {name: 1 for name, plan in self.plans.items() if plan.granularity == "window"}
            window = WindowState(index, f"{self._run_id}/train/{index:06d}", held)
            self._open[index] = window
            self._next_window += 1
            self._draw(window, self._draws.per_window)

    @property
    def _all_offered(self) -> bool:
        return self._next_window >= self.windows or not self._draws.left

    def _draw(self, window: WindowState, count: int) -> None:
        window.sources.append(Cell(self._source, None, window, 0, draw=self._draws.take(len(window.sources), count)))
        self._make_ready(window.sources[-1:])

    def _fill_up(self, window: WindowState) -> None:
        """When all units have passed the stage that filters, draw prompts in place of the groups that are gone.

        With no filter, or no more draws, the window is filled: its window stages wait for their units alone.
        """
        if window.filled or window.unfiltered or not window.sources[-1].ended:
            return
        wanted = self._draws.per_window
        found = wanted if self._filter is None else window.survivors(self._filter)
        if found < wanted:
            why = self._draws.why_no_more(len(window.sources))
            if not why:
                self._draw(window, wanted - found)
                return
            if self._draws.max_draws:
                self._tell_once("short window", shortage(window, found, wanted, why))
        window.filled = True
        for stage in window.pending:
            self._one_less_pending(window, stage)

    def _oldest_untrained(self) -> int:
        untrained = (window.index for window in self._open.values() if not window.settled)
        return min(untrained, default=self._next_window)

    def _window_trained(self, window: WindowState, *, empty: bool) -> None:
        window.settled = True
        self._empty_in_a_row = self._empty_in_a_row + 1 if empty else 0
        if empty:
            reasons = sorted({unit.fate for unit in window.units.values() if unit.dead})
            message = f"nothing is left to train on in window {window.name}: {'; '.join(reasons[:3])}"
            self._alarm(message)
            if self._empty_in_a_row >= self._max_empty:
                self._halt(f"{self._empty_in_a_row} windows in a row had nothing to train on; {message}")
        self._offer_windows()

    def _close_if_done(self, window: WindowState) -> None:
        if window.open_cells or not window.filled or window.index not in self._open:
            return
        if not window.settled and self._trainer is not None:
            self._window_trained(window, empty=True)
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for unit in window.units.values():
            if not unit.dead:
                self._settle_unit(unit, *self._final_outcome(unit), "")
            counts[unit.kind, unit.outcome] += 1
        del self._open[window.index]
        self._check_balance(window)
        self._check_share_of_failures(window)
        metrics = window.refill_metrics(self._filter) if self._filter else {}
        self._effects.append(WindowClosed(window.name, window.index, dict(counts), metrics))
        self._closed[window.index] = window.name
        self._offer_windows()
        if not self._open and self._all_offered and not self.halted:
            self.finished = True
            self._effects.append(Finished())

    def _release_windows(self) -> None:
        """Let those closed windows be cleared that nobody can write to any more.

        A late writer into a partition that was cleared would make rows that nobody sweeps, and the queue recycles the
        places of cleared rows: its write could land on another window's.
        """
        if not self._closed:
            return
        # A claim may outlive its window: its units were done by an earlier delivery.
        held = {lease.window for worker in self._workers.values() for lease in (*worker.claims.values(), *worker.lost)}
        for index in [index for index in self._closed if index not in held]:
            self._effects.append(Unused(self._closed.pop(index)))

    def _final_outcome(self, unit: UnitState) -> tuple[str, str]:
        if unit.kind == "sampled":
            return ("trained", "") if self._trainer else ("completed", "")
        joins = [name for name, plan in self.plans.items() if plan.granularity in JOINS]
        if not joins:
            return ("completed", "")
        used = any(
            other.cells[name].state == DONE
            for other in unit.group.members
            for name in joins
            if name in other.cells and not other.cells[name].witness
        )
        return (
            ("used as baseline", "") if used else ("dropped: unused baseline", "no sampled unit of its uid was joined")
        )

    def _check_balance(self, window: WindowState) -> None:
        """Compare the running counts with a recount of the units that are still held."""
        recount: dict[str, int] = defaultdict(int)
        for held in self._open.values():
            for unit in held.units.values():
                recount[unit.kind] += not unit.dead
        for kind, count in self.ledger.in_flight.items():
            if recount[kind] != count or not self.ledger.balanced:
                self._halt(
                    f"the ledger does not balance at window {window.name}: {count} {kind} units should be in flight, "
                    f"{recount[kind]} are; {self.ledger}"
                )

    def _alarm(self, message: str) -> None:
        self._effects.append(Alarm(message))

    def _halt(self, reason: str) -> None:
        if not self.halted:
            self.halted = reason
            self._effects.append(Halt(reason))

    # ---- claims -------------------------------------------------------------------------------------

    def _grant_waiting(self) -> None:
        for worker in self._workers.values():
            if worker.silent:
                continue  # it would take back what was just taken from it
            while worker.tickets and self._has_ready(worker.stage) and self._grant(worker):
                pass

    def _has_ready(self, stage: str) -> bool:
        queue = self._ready[stage]
        while queue and not any(cell.state == READY for cell in queue[0][2]):
            heapq.heappop(queue)
        return bool(queue)

    def _grant(self, worker: WorkerState) -> bool:
        plan = self.plans[worker.stage]
        if plan.device is not None and not self._take_turn(worker, plan.device):
            return False
        cells = self._take(plan, [peer for peer in self._workers.values() if peer.process == worker.process])
        if not cells:
            return False
        self._serial += 1
        ticket, request = worker.next_ticket()
        deadline, alone = self._now + plan.deadline_s, cells[0].deaths >= 2
        lease = Lease(self._serial, request, worker, cells[0].window.index, cells, self._now, deadline, alone)
        worker.suspended = False
        for cell in cells:
            cell.state, cell.claim, cell.since = LEASED, lease.id, self._now
            cell.delivery += 1
            if cell.delivery:
                self.ledger.redelivered[cell.stage] = self.ledger.redelivered.get(cell.stage, 0) + 1
        worker.claims[lease.id] = lease
        self._effects.append(Grant(worker.name, ticket, self._claim(lease, plan)))
        return True

    def _take_turn(self, worker: WorkerState, device: str) -> bool:
        """Whether the device is the worker's. If not, those who have it are asked to free it, as soon as they can.

        Of two stages with work, the later one goes first: what is nearly finished frees rows and credits.
        """
        stages = [name for name, plan in self.plans.items() if plan.device == device]
        later = stages[stages.index(worker.stage) + 1 :]
        if worker.suspending is not None or any(self._has_ready(stage) for stage in later):
            return False
        rivals = [w for w in self._workers.values() if w.stage in stages and w.stage != worker.stage]
        if any(rival.claims or rival.lost for rival in rivals):
            return False
        for rival in rivals:
            if not rival.suspended and rival.suspending is None and rival.tickets:
                self._call_to_suspend(rival)
        return all(rival.suspended for rival in rivals)

    def _call_to_suspend(self, worker: WorkerState) -> None:
        self._serial += 1
        ticket, request = worker.next_ticket()
        deadline_s = self.plans[worker.stage].deadline_s
        worker.suspending = Lease(self._serial, request, worker, -1, [], self._now, self._now + deadline_s, False)
        call = Claim(self._serial, worker.stage, "", -1, deadline_s=deadline_s, suspend=True)
        self._effects.append(Grant(worker.name, ticket, call))

    def _take(self, plan: StagePlan, peers: Sequence[WorkerState]) -> list[Cell]:
        """Pop ready cells of one window, up to the stage's limit, groups whole.

        What killed its worker twice is taken only while nothing else is held in the process, whose workers are the
        `peers`; and nothing is taken beside it.
        """
        if any(lease.alone for peer in peers for lease in peer.claims.values()):
            return []
        queue = self._ready[plan.name]
        taken: list[Cell] = []
        while queue:
            cells = [cell for cell in queue[0][2] if cell.state == READY]
            if not cells:
                heapq.heappop(queue)
                continue
            alone = cells[0].deaths >= 2
            if taken and (alone or cells[0].window is not taken[0].window or len(taken) + len(cells) > plan.max_units):
                break
            if alone and any(peer.claims for peer in peers):
                break
            heapq.heappop(queue)
            taken += cells
            if alone or plan.granularity in ("window", "source"):
                break
        return taken

    def _claim(self, lease: Lease, plan: StagePlan) -> Claim:
        cells = sorted(lease.cells, key=lambda cell: cell.unit.identity.order if cell.unit else ())
        window = cells[0].window
        loaded = [w.loaded_version for w in self._workers.values() if self.plans[w.stage].loads_weights]
        groups = list({id(cell.unit.group): cell.unit.group for cell in cells if cell.unit}.values())
        baselines: tuple[ClaimedUnit, ...] = ()
        tombstones: tuple[Tombstone, ...] = ()
        if plan.granularity in JOINS:
            greedy = [group.baseline for group in groups if group.baseline and not group.baseline.dead]
            baselines = tuple(self._claimed(unit, 0) for unit in greedy)
        if plan.granularity in (*JOINS, *WHOLE_GROUPS):
            tombstones = _tombstones(unit for group in groups for unit in group.members)
        if plan.granularity == "window":
            tombstones = _tombstones(window.units.values())
        return Claim(
            lease.id,
            plan.name,
            window.name,
            window.index,
            tuple(self._claimed(cell.unit, cell.delivery) for cell in cells if cell.unit),
            baselines,
            tombstones,
            cells[0].draw,
            cells[0].delivery,
            plan.deadline_s,
            self.weights,
            min(loaded, default=0),
        )

    def _claimed(self, unit: UnitState, delivery: int) -> ClaimedUnit:
        accepted = {name: cell.accepted for name, cell in unit.cells.items() if cell.state == DONE and not cell.witness}
        accepted[self._source] = unit.source.accepted
        return ClaimedUnit(unit.identity, unit.rows, delivery, accepted)

    def _release_worker(self, worker: WorkerState) -> None:
        for lease in list(worker.claims.values()):
            self._release(lease)

    def _release(self, lease: Lease) -> None:
        """End a lease: what was not reported, or is to be tried again, becomes ready; groups whole."""
        lease.worker.claims.pop(lease.id, None)
        if lease.cells:  # the worker may still be writing for it
            lease.worker.lost.append(lease)
        lost = [cell for cell in lease.cells + lease.retry if cell.claim == lease.id and cell.state == LEASED]
        alive = [cell for cell in lost if cell.unit is None or not cell.unit.dead]
        for cell in lost:
            if cell.unit is not None and cell.unit.dead:
                self._end(cell, DEAD)
        granularity = self.plans[lease.worker.stage].granularity
        if granularity in WHOLE_GROUPS:
            jobs = by_group(alive)
        else:
            jobs = [alive] if alive and granularity == "window" else [[cell] for cell in alive]
        for cells in jobs:
            self._make_ready(cells)
        for window in {id(cell.window): cell.window for cell in lost}.values():
            self._close_if_done(window)

    def _lease(self, worker: str, claim: int) -> Lease | None:
        held = self._workers.get(worker)
        return held.claims.get(claim) if held else None

    def _drop_lease(self, worker: str, claim: int) -> None:
        held = self._workers.get(worker)
        if held is not None:
            held.claims.pop(claim, None)

    def _find(self, stage: str, name: str, lease: Lease | None) -> Cell | None:
        """The cell of a stage for a unit, or, for the source, which names the window, that of the draw it leased."""
        for window in self._open.values():
            if window.name == name:
                return lease.cells[0] if lease is not None and lease.cells else None
            if name in window.units:
                return window.units[name].cells.get(stage)
        return None

    # ---- views --------------------------------------------------------------------------------------

    def waits(self) -> dict[str, dict[str, int]]:
        """Stage -> state -> number of cells, over the open windows."""
        counts: dict[str, dict[str, int]] = {name: defaultdict(int) for name in self.plans}
        for window in self._open.values():
            for source in window.sources:
                counts[self._source][source.state] += 1
            for unit in window.units.values():
                for name, cell in unit.cells.items():
                    counts[name][cell.state] += not cell.witness
        return {name: dict(states) for name, states in counts.items()}

    def works(self, now: float) -> bool:
        """Whether any claim is within its deadline."""
        return any(now <= lease.deadline for worker in self._workers.values() for lease in worker.claims.values())

    def silent(self) -> list[str]:
        """Workers that send no heartbeat."""
        return [worker.name for worker in self._workers.values() if worker.silent]

    def blocked(self, now: float) -> list[Blocked]:
        """What does not move now, and why; see `blocked`."""
        return blocked(self.plans, self._open.values(), self._workers.values(), self._lease_s, now)


def _tombstones(units: Iterable[UnitState]) -> tuple[Tombstone, ...]:
    return tuple(
        Tombstone(unit.identity, unit.stage, unit.outcome, unit.reason, unit.failure) for unit in units if unit.dead
    )
