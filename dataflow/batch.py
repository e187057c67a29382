"""What a stage sees: the rows of one claim, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataflow.draws import Draw
from dataflow.weights import WeightsRef


@dataclass(frozen=True)
class Unit:
    """What is claimed, acknowledged and counted as one: a session of a prompt.

    Identity lives in these fields and in columns; it is never parsed out of a key.

    Attributes:
        id: `{prompt_key}/{session}`, unique in a run.
        window: Name of the window, which is the queue's partition.
        uid: One draw of a prompt, `{epoch}-{prompt_id}`; all units of a uid are its group.
        session: Number of the session among those of its prompt row, from 0.
        is_baseline: Whether the session is decoded greedily, to serve as its group's baseline.
        prompt_key: Queue key of the prompt row.
    """

    id: str
    window: str
    uid: str
    session: int
    is_baseline: bool
    prompt_key: str

    @property
    def order(self) -> tuple[str, bool, int]:
        """Canonical order within a window: by uid, sampled before greedy, by session."""
        return (self.uid, self.is_baseline, self.session)


def prompt_key(window: str, uid: str, *, is_baseline: bool) -> str:
    """Queue key of a prompt row."""
    return f"{window}/{uid}" + ("#greedy" if is_baseline else "")


def row_key(unit: Unit, turn: int) -> str:
    """Queue key of a trajectory row, before its address."""
    return f"{unit.id}/{turn}"


def address(key: str, delivery: int) -> str:
    """Where a delivery writes a row. A late writer reaches only an address that nobody reads."""
    return key if delivery == 0 else f"{key}~{delivery}"


@dataclass(frozen=True)
class Failure:
    """What went wrong with a unit, as data.

    Attributes:
        type: Name of the exception's class.
        message: Its text.
        traceback: Where it was raised, innermost frame last; empty for a failure that was handed over as a value.
        attempt: Which attempt failed, from 1; 0 as long as nobody has counted.
    """

    type: str
    message: str
    traceback: str = ""
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.type}: {self.message}"


@dataclass(frozen=True)
class Tombstone:
    """A unit that left the pipeline early: it failed for good, or a rule dropped it.

    Attributes:
        unit: Its identity.
        stage: Where it left.
        outcome: `failed: stage` or `dropped: reason`, as the ledger counts it.
        reason: Why, with the values that decided it.
        failure: The exception, if it failed.
    """

    unit: Unit
    stage: str
    outcome: str
    reason: str
    failure: Failure | None = None


@dataclass
class Batch:
    """The rows of one claim, in canonical order (window, uid, session, turn).

    Attributes:
        columns: Column name -> one value per row: a 1-D numpy array for a token column, a Python value
            otherwise (None where a nullable column has none).
        units: The unit of each row. A unit of several turns has several adjacent rows.
        turns: The turn of each row within its unit, from 0.
        window: Name of the window.
        window_index: Number of the window in the run, from 0.
        baseline: For a `join` stage, the greedy rows of the claimed uids, with the same columns; a uid whose
            greedy unit failed has none. None for other stages.
        tombstones: For `group`, `join` and `window` stages, the units of the claimed groups that are gone.
        weights: The newest published policy version; None before the first publication.
        oldest_loaded: Oldest policy version that a stage which loads weights still holds; files before it can go.
        draw: For the source, which prompts to write; None for other stages.
        metrics: Name -> (weighted sum, weight) of what the stage reports; see `report`.
        published: What the stage published; see `publish`.
        warnings: Subject -> what a person should read; see `warn`.
    """

    columns: dict[str, list[Any]]
    units: Sequence[Unit]
    turns: Sequence[int]
    window: str
    window_index: int = 0
    baseline: Batch | None = None
    tombstones: Sequence[Tombstone] = ()
    weights: WeightsRef | None = None
    oldest_loaded: int = 0
    draw: Draw | None = None
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    published: WeightsRef | None = None
    warnings: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, column: str) -> list[Any]:
        try:
            return self.columns[column]
        except KeyError:
            names = ", ".join(sorted(self.columns)) or "none"
            raise KeyError(
                f"the batch has no column {column!r}; a stage sees what it declares in reads: {names}"
            ) from None

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    def sessions(self) -> Iterator[tuple[Unit, slice]]:
        """Yield each unit with the slice of its rows."""
        start = 0
        for stop in range(1, len(self.units) + 1):
            if stop == len(self.units) or self.units[stop].id != self.units[start].id:
                yield self.units[start], slice(start, stop)
                start = stop

    def select(self, rows: slice) -> Batch:
        """Return the batch of some of the rows, with the whole `baseline`."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Batch(
            columns,
            self.units[rows],
            self.turns[rows],
            self.window,
            self.window_index,
            self.baseline,
            self.tombstones,
            self.weights,
            self.oldest_loaded,
        )

    def report(self, metrics: Mapping[str, float], weight: float | None = None) -> None:
        """Report numbers; per window they are averaged, weighted by `weight` (default: the batch's rows)."""
        weight = float(len(self) if weight is None else weight)
        for name, value in metrics.items():
            total, weights = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (total + float(value) * weight, weights + weight)

    def warn(self, subject: str, message: str) -> None:
        """Tell the person at the terminal something; the first message on a subject is shown, once in a run."""
        self.warnings.setdefault(subject, message)

    def publish(self, weights: WeightsRef) -> None:
        """Publish a policy version; it is announced when the batch is acknowledged."""
        self.published = weights
