"""What the coordinator remembers: cells, and the units, groups, windows, workers and leases around them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from dataflow.batch import Failure, Unit
from dataflow.draws import Draw
from dataflow.events import Holding

WAITING, READY, LEASED, DONE, DEAD = "waiting", "ready", "leased", "done", "dead"


@dataclass(eq=False)
class Cell:
    """One stage's work on one unit (or, for the source, on one draw of a window).

    Attributes:
        missing: How many of the stages before it are not done.
        witness: Whether it only tells a join how far its group's greedy unit has come; nobody works on it.
        arrived: Whether all columns that its stage reads have been there.
        delivery: Number of the newest grant, from 0; -1 before the first.
        attempts: Failures attributed to the unit.
        deaths: Workers that died while they held it.
        accepted: The delivery whose rows are valid; -1 while there is none.
        claim: The lease that holds it now.
        since: When it came into its state, seconds.
        draw: For the source, which prompts to write.
    """

    stage: str
    unit: UnitState | None
    window: WindowState
    missing: int
    witness: bool = False
    state: str = WAITING
    arrived: bool = False
    delivery: int = -1
    attempts: int = 0
    deaths: int = 0
    accepted: int = -1
    claim: int | None = None
    since: float = 0.0
    draw: Draw | None = None

    @property
    def ended(self) -> bool:
        """Whether it is done or dead."""
        return self.state in (DONE, DEAD)


@dataclass(eq=False)
class UnitState:
    """A unit with its cells, the source's among them apart, and what became of it once that is known."""

    identity: Unit
    kind: str
    group: GroupState
    window: WindowState
    source: Cell
    rows: int = 0
    cells: dict[str, Cell] = field(default_factory=dict)
    outcome: str = ""
    reason: str = ""
    stage: str = ""
    failure: Failure | None = None

    @property
    def dead(self) -> bool:
        """Whether it left early or, at its window's end, was settled."""
        return bool(self.outcome)

    def has_passed(self, stage: str) -> bool:
        """Whether it is a sampled unit that a stage is done with, and is still there."""
        cell = self.cells.get(stage)
        return self.kind == "sampled" and not self.dead and cell is not None and cell.state == DONE

    @property
    def fate(self) -> str:
        """The outcome, and the reason where the outcome does not say it yet."""
        return self.outcome if self.outcome.endswith(self.reason) else f"{self.outcome} ({self.reason})"


@dataclass(eq=False)
class GroupState:
    """The units of a uid.

    Attributes:
        pending: Stage that takes whole groups -> members whose cell still waits.
        parked: Join stage -> cells that wait for the greedy unit.
    """

    uid: str
    members: list[UnitState] = field(default_factory=list)
    baseline: UnitState | None = None
    pending: dict[str, int] = field(default_factory=dict)
    parked: dict[str, list[Cell]] = field(default_factory=dict)


@dataclass(eq=False)
class WindowState:
    """A window with its units.

    Attributes:
        pending: Window stage -> units whose cell still waits, and 1 more as long as the window is not filled.
        sources: The source's cell of each draw; the last one is the only one that may not be done.
        unfiltered: Cells of the stage that filters that have not ended.
        filled: Whether all prompts are drawn that it will get.
        open_cells: Cells that have not ended, the source's left out; at 0 a window that is filled closes.
        settled: Whether its training is over, with or without rows.
    """

    index: int
    name: str
    pending: dict[str, int]
    sources: list[Cell] = field(default_factory=list)
    units: dict[str, UnitState] = field(default_factory=dict)
    groups: dict[str, GroupState] = field(default_factory=dict)
    unfiltered: int = 0
    filled: bool = False
    open_cells: int = 0
    settled: bool = False

    def survivors(self, stage: str) -> int:
        """How many groups have a sampled unit that has passed a stage and is still there."""
        return sum(any(unit.has_passed(stage) for unit in group.members) for group in self.groups.values())

    def refill_metrics(self, stage: str) -> dict[str, float]:
        """Groups that a stage dropped units of, and draws beyond the first."""
        dropped = {unit.identity.uid for unit in self.units.values() if unit.stage == stage and unit.failure is None}
        return {"filter/dropped_groups": len(dropped), "refill/draws": len(self.sources) - 1}


@dataclass(eq=False)
class WorkerState:
    """A worker: what it holds, and the tickets it waits on.

    Attributes:
        seen: When it was last heard of, seconds.
        tickets: Ticket -> the worker's number of the request that waits on it.
        lost: The leases that it lost and may still be writing for.
        silent: Whether it missed its heartbeats, since it was last heard of.
        suspended: Whether it has freed the device that its stage shares.
        suspending: The call to free it, as long as that is not answered.
    """

    name: str
    stage: str
    process: str
    seen: float
    claims: dict[int, Lease] = field(default_factory=dict)
    tickets: dict[int, int] = field(default_factory=dict)
    lost: list[Lease] = field(default_factory=list)
    loaded_version: int = 0
    silent: bool = False
    suspended: bool = False
    suspending: Lease | None = None

    def next_ticket(self) -> tuple[int, int]:
        """Take the ticket that has waited longest, with its request."""
        ticket = next(iter(self.tickets))
        return ticket, self.tickets.pop(ticket)


@dataclass(eq=False)
class Lease:
    """A claim as the coordinator sees it: the cells not yet reported, and those to be tried again at its end.

    Attributes:
        request: The worker's request that it answers.
        alone: Whether its unit has killed two workers, and nothing else may run beside it.
    """

    id: int
    request: int
    worker: WorkerState
    window: int
    cells: list[Cell]
    granted: float
    deadline: float
    alone: bool
    retry: list[Cell] = field(default_factory=list)

    def may_be_known(self, holding: Holding) -> bool:
        """Whether its worker works on it, or may yet be told of it."""
        return self.id in holding.claims or self.request in holding.asking or self.request > holding.latest


def by_group(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Sort cells into the groups of their units."""
    groups: dict[int, list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[id(cell.unit.group) if cell.unit else 0].append(cell)
    return list(groups.values())


def shortage(window: WindowState, found: int, wanted: int, why: str) -> str:
    """Say that a window has fewer groups than it is to have, and what became of the others."""
    lost = Counter(unit.outcome for unit in window.units.values() if unit.dead and unit.kind == "sampled")
    fates = "; ".join(f"{count} units {outcome}" for outcome, count in lost.most_common(3))
    return (
        f"window {window.name} has {found} of {wanted} groups to train on: {len(window.groups)} prompts were drawn, "
        f"and {why} ({fates}); it goes on with what it has (told once)"
    )


def describe(cells: Sequence[Cell]) -> str:
    """Name the units of cells: the first three, and how many more."""
    names = [cell.unit.identity.id if cell.unit else cell.window.name for cell in cells]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more units" if len(names) > 3 else "")
