"""What a run waits for: the units that do not move, grouped by where they are and who holds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from dataflow.cells import DONE, LEASED, READY, WAITING, Cell, Lease, WindowState, WorkerState
from dataflow.events import Blocked
from dataflow.pipeline import StagePlan

SHOWN = 5


def blocked(
    plans: Mapping[str, StagePlan],
    windows: Iterable[WindowState],
    workers: Iterable[WorkerState],
    lease_s: float,
    now: float,
) -> list[Blocked]:
    """List what has not moved, in the order of the data; the first lines are the cause of the later ones.

    Args:
        plans: The stages, in topological order.
        windows: The open windows.
        workers: The workers that are up.
        lease_s: Seconds without a heartbeat after which a worker's claims are void.
        now: Seconds, on the clock of the events.
    """
    workers = list(workers)
    leases = {lease.id: lease for worker in workers for lease in worker.claims.values()}
    groups: dict[tuple[str, str, int], list[Cell]] = defaultdict(list)
    for window in windows:
        cells = [cell for unit in window.units.values() for cell in unit.cells.values()]
        for cell in [*window.sources, *cells]:
            if cell.state in (READY, LEASED, WAITING) and not cell.witness:
                groups[cell.stage, cell.state, cell.claim or 0].append(cell)
    order = list(plans)
    found = []
    for (stage, state, claim), cells in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        lease = leases.get(claim)
        until_s: float | None = None
        if lease is not None:
            until_s, action = _at_deadline(plans[stage], lease, lease_s, now)
        elif state == WAITING:
            action = f"they wait for {', '.join(_unfinished(plans[stage], cells))}"
        else:
            action = _needed_first(plans, stage, workers)
        first = sorted(cells, key=lambda cell: (cell.since, cell.unit.identity.order if cell.unit else ()))
        uids = dict.fromkeys(cell.unit.identity.uid if cell.unit else cell.window.name for cell in first)
        found.append(
            Blocked(
                stage,
                state,
                lease.worker.name if lease else "",
                len(cells),
                tuple(uids)[:SHOWN],
                now - first[0].since,
                until_s,
                action,
            )
        )
    return found


def _at_deadline(plan: StagePlan, lease: Lease, lease_s: float, now: float) -> tuple[float, str]:
    """Seconds until something is done about leased cells, and what."""
    if plan.one_owner:
        return lease.deadline - now, "the run stops"
    silent = lease.worker.seen + lease_s
    if silent < lease.deadline:
        return silent - now, "unless it sends a heartbeat, others get them and its process is ended"
    return lease.deadline - now, "the claim is cancelled and tried again"


def _needed_first(plans: Mapping[str, StagePlan], stage: str, workers: list[WorkerState]) -> str:
    """What has to happen before somebody takes the ready cells of a stage."""
    mine = [worker for worker in workers if worker.stage == stage]
    if not mine:
        return "no worker of the stage is up; its process is being started"
    device = plans[stage].device
    rivals = [w.name for w in workers if w.stage != stage and plans[w.stage].device == device and not w.suspended]
    if device is not None and rivals:
        return f"{', '.join(rivals)} is to free the device {device!r} first"
    asking = [worker.name for worker in mine if worker.tickets and not worker.silent]
    if asking:
        return f"what killed its worker twice runs alone, once the process of {', '.join(asking)} holds nothing else"
    busy = [worker.name for worker in mine if worker.claims]
    return f"{', '.join(busy) or mine[0].name} has to ask for them"


def _unfinished(plan: StagePlan, cells: list[Cell]) -> list[str]:
    """What waiting cells wait for: the stages before that are not done with them, or their companions."""
    stages = {name for cell in cells if cell.unit for name, other in cell.unit.cells.items() if other.state != DONE}
    missing = [name for name in plan.depends_on if name in stages]
    if any(cell.arrived for cell in cells):
        missing.append(f"the other units that are taken with them ({plan.granularity})")
    return missing
