"""A storm of faults that a run must come through without a trace, and the comparison with a run that had none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, Literal, get_args

from dataflow.config import Fault
from dataflow.inspect import RunView
from dataflow.pipeline import Pipeline
from dataflow.stage import Stage

Kind = Literal["kill", "hang", "raise", "late", "slow", "drop", "duplicate"]
Where = Literal["before", "written", "reported"]
APART = ("kill", "hang", "raise", "late")
"""Kinds that count against a unit, as a death or an attempt; and `late`, which is nothing if its process ends first."""
MARGIN_S = 2.0
"""By how much a late write outlasts its lease, in seconds: the coordinator looks once a second."""
OF_THE_RUN = ("unit", "window", "engine", "done")
"""Columns that are another run's in another run, or tell who came first."""


def draw_storm(pipeline: Pipeline, lease_s: float, seed: int, count: int = 24) -> list[Fault]:
    """Draw faults of all kinds over all stages but the one with one owner; each strikes once.

    No unit is struck so often that it is given up: in one window, a process gets at most one fault of the kinds in
    `APART`, and a stage at most one of any kind. A late write outlasts its lease, so that others get its units before
    it lands.

    Args:
        pipeline: Its stages, with their deadlines.
        lease_s: `limits.lease_s` of the run, in seconds.
        seed: Decides everything.
        count: How many, at least 7.

    Raises:
        ValueError: If the run has too few windows for so many.
    """
    random = Random(seed)
    stages = [stage for stage in pipeline.stages.values() if not stage.one_owner]
    struck: set[tuple[str, int]] = set()
    faults: list[Fault] = []
    for kind, share in _shares(count).items():
        wanted = len(faults) + share
        for stage, window in _places(stages, pipeline.windows, random):
            place = (stage.placement or stage.name, window)
            if len(faults) == wanted or (kind in APART and place in struck):
                continue
            if kind in APART:
                struck.add(place)
            both = stage.granularity == "row" and "baseline" in pipeline.plans[stage.name].kinds
            greedy = random.choice((None, True, False)) if both else None
            faults.append(_fault(kind, stage, window, greedy, lease_s, number=wanted - len(faults)))
        if len(faults) < wanted:
            raise ValueError(
                f"{count} faults are too many for {len(stages)} stages in {pipeline.windows} windows: there is no "
                f"place left for one of kind {kind!r}; draw fewer, or run more windows"
            )
    return faults


def _shares(count: int) -> dict[Kind, int]:
    """How many of each kind: few of those that cost a process or a deadline, and a kill at each of its places."""
    few = count // len(get_args(Kind))
    shares: dict[Kind, int] = {"kill": max(few, len(get_args(Where))), "hang": few, "late": few}
    cheap: tuple[Kind, ...] = ("raise", "slow", "drop", "duplicate")
    left = count - sum(shares.values())
    return shares | {kind: left // len(cheap) + (place < left % len(cheap)) for place, kind in enumerate(cheap)}


def _places(stages: Sequence[Stage], windows: int, random: Random) -> Iterator[tuple[Stage, int]]:
    """Every stage in every window, in an order in which each stage comes once before any of them comes again."""
    orders = [(stage, random.sample(range(windows), windows)) for stage in random.sample(stages, len(stages))]
    for turn in range(windows):
        for stage, order in orders:
            yield stage, order[turn]


def _fault(kind: Kind, stage: Stage, window: int, greedy: bool | None, lease_s: float, number: int) -> Fault:
    long = stage.deadline_s + lease_s + MARGIN_S
    seconds = {"late": long, "hang": long, "slow": min(1.0, stage.deadline_s / 4)}
    wheres: tuple[Where, ...] = get_args(Where)
    return Fault(
        kind=kind,
        stage=stage.name,
        window=window,
        greedy=greedy,
        seconds=seconds.get(kind, 0.0),
        where=wheres[number % len(wheres)] if kind == "kill" else "before",
    )


def violations(run: RunView, calm: RunView, columns: Sequence[str] = ()) -> list[str]:
    """What a run came to otherwise than the same run without faults; empty if it left no trace.

    Both must be over. Compared are the counts of the ledger, and bit for bit the rows of every window.

    Args:
        run: The run under faults.
        calm: The run without.
        columns: Which columns to compare; default all but those that name the run or a worker.
    """
    found = []
    ledger, expected = run.ledger(), calm.ledger()
    if not ledger.get("balanced"):
        found.append(f"the ledger does not balance: {ledger}")
    for what in ("created", "settled"):
        if ledger.get(what) != expected[what]:
            found.append(f"{what} units: {ledger.get(what)}; expected {expected[what]}")
    names, others = run.partitions(), calm.partitions()
    if len(names) != len(others):
        found.append(f"{len(names)} windows; expected {len(others)}")
    for name, other in zip(names, others, strict=False):
        found += _row_differences(run, name, calm.table(other).to_pylist(), columns)
    return found


def _row_differences(run: RunView, window: str, expected: list[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    rows = run.table(window).to_pylist()
    if len(rows) != len(expected):
        return [f"{window}: {len(rows)} rows; expected {len(expected)}"]
    for row, other in zip(rows, expected, strict=True):
        for name in columns or [name for name in other if name not in OF_THE_RUN]:
            if repr(row[name]) != repr(other[name]):  # by repr: it tells every bit of a number, and NaN is NaN
                place = f"{window}, uid {row['uid']}, session {row['session']}"
                return [f"{place}: {name} is {row[name]!r}; expected {other[name]!r}"]
    return []
