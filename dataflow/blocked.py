"""What a run waits for: the units that do not move, grouped by where they are and who holds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from dataflow.cells import LEASED, READY, WAITING, Cell, Lease, WindowState, WorkerState
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
        for cell in [*filter(None, [window.source]), *cells]:
            if cell.state in (READY, LEASED, WAITING) and not cell.witness:
                groups[cell.stage, cell.state, cell.claim or 0].append(cell)
    order = list(plans)
    found = []
    for (stage, state, claim), cells in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        lease = leases.get(claim)
        until_s, action = _what_then(plans[stage], state, lease, workers, lease_s, now)
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


def _what_then(
    plan: StagePlan, state: str, lease: Lease | None, workers: list[WorkerState], lease_s: float, now: float
) -> tuple[float | None, str]:
    """Seconds until something is done about cells in this state, and what."""
    if lease is not None:
        if plan.one_owner:
            return lease.deadline - now, "the run stops"
        silent = lease.worker.seen + lease_s
        if silent < lease.deadline:
            return silent - now, "unless it sends a heartbeat, others get them and its process is ended"
        return lease.deadline - now, "the claim is cancelled and tried again"
    if state == WAITING:
        return None, f"they wait for {', '.join(plan.depends_on)}" + (
            "" if plan.granularity == "row" else f" of every unit that is taken together ({plan.granularity})"
        )
    mine = [worker for worker in workers if worker.stage == plan.name]
    if not mine:
        return None, "no worker of the stage is up; its process is being started"
    suspending = [worker.name for worker in workers if worker.suspending is not None]
    if plan.device is not None and suspending:
        return None, f"{', '.join(suspending)} is to free the device {plan.device!r} first"
    busy = [worker.name for worker in mine if worker.claims]
    return None, f"{', '.join(busy) or mine[0].name} has to ask for them"
