"""Read-only views of a run, live or over: from its journal alone. Looking claims nothing and asks no process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataflow.batch import Unit, address, prompt_key, row_key
from dataflow.errors import ConfigError
from dataflow.events import ATTEMPT_FAILED
from dataflow.journal import LEDGER, ROWS, read_batches
from schemas.column import Column

IDENTITY = pa.schema(
    [
        ("unit", pa.string()),
        ("uid", pa.string()),
        ("session", pa.int32()),
        ("turn", pa.int32()),
        ("is_baseline", pa.bool_()),
        ("done", pa.list_(pa.string())),
        ("outcome", pa.string()),
        ("reason", pa.string()),
    ]
)
_FIXED = {item.name for item in ROWS}


def connect(where: str | Path) -> RunView:
    """Open a run directory for reading, while the run goes on or after its end.

    Raises:
        ConfigError: If it is no run directory.
    """
    path = Path(where).expanduser()
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path} is no run directory: it has no config.yaml; name the folder that a run printed")
    return RunView(path)


def write_columns(run_dir: Path, columns: Iterable[Column]) -> None:
    """Note a run's columns, so that a table has them all from the first moment on."""
    # Nullable in a table, whatever they are in the queue: a row may not have come so far.
    schema = pa.schema([column.field.with_nullable(True) for column in columns])
    (run_dir / "columns.arrow").write_bytes(schema.serialize().to_pybytes())


@dataclass
class _UnitLife:
    unit: Unit
    prompt: dict[str, Any]
    rows: int = 1
    accepted: dict[str, int] = field(default_factory=dict)
    outcome: str = ""
    reason: str = ""


class RunView:
    """What a run left on disk. Every call reads anew; nothing is cached and nothing is locked."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"RunView({str(self.path)!r}, {len(self.partitions())} partitions)"

    def partitions(self) -> list[str]:
        """Names of the windows that were filled, in order."""
        names = {window for batch in self._batches("source") for window in batch["__window__"].to_pylist()}
        return sorted(names)

    def table(self, partition: str, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a window with every column of the pipeline, as accepted; null where there is none yet.

        One line per trajectory row, in canonical order; a unit that has no rows yet, or that failed before it had
        any, has one line. `done` lists the stages that finished it, `outcome` and `reason` say how it left.

        Args:
            partition: Name of the window, or the end of it, such as "train/000003".
            columns: Which columns to keep besides the identity; default all.

        Raises:
            ConfigError: If there is no such window or column.
        """
        window = self._window(partition)
        lives = self._lives(window)
        keys = {row_key(life.unit, turn): (life, turn) for life in lives for turn in range(life.rows)}
        values: dict[str, dict[str, Any]] = {key: {} for key in keys}
        for stage, batch in self._written(window):
            for row in batch.to_pylist():
                life = keys[row["__key__"]][0] if row["__key__"] in keys else None
                if life is not None and row["__address__"] == address(row["__key__"], life.accepted.get(stage, -1)):
                    values[row["__key__"]].update({name: row[name] for name in row if name not in _FIXED})
        records = [_identity(life, turn) | life.prompt | values[key] for key, (life, turn) in keys.items()]
        fields = [*IDENTITY, *(item for item in self._columns() if item.name not in IDENTITY.names)]
        table = pa.Table.from_pylist(records, schema=pa.schema(fields))
        return table if columns is None else self._chosen(table, columns)

    def ledger(self) -> dict[str, Any]:
        """The final ledger; empty while the run goes on."""
        path = self.path / "ledger.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def metrics(self) -> pa.Table:
        """One line per closed window, one column per metric."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return pa.Table.from_pylist([{"window": r["window"], "seconds": r["seconds"], **r["metrics"]} for r in records])

    def failures(self) -> pa.Table:
        """One line per failed attempt, in order of time: who, where, which attempt, and the exception."""
        return self._events(lambda event: event["outcome"] == ATTEMPT_FAILED)

    def dead_letters(self) -> pa.Table:
        """One line per unit that failed for good: its last stage and attempt, and the exception with its traceback."""
        return self._events(lambda event: event["outcome"].startswith("failed"))

    # ---- inside -------------------------------------------------------------------------------------

    def _files(self, stage: str) -> list[Path]:
        return sorted((self.path / "journal").glob(f"{stage}.*.arrows"))

    def _batches(self, stage: str) -> Iterable[pa.RecordBatch]:
        for path in self._files(stage):
            yield from read_batches(path)

    def _events(self, wanted: Callable[[dict[str, Any]], bool]) -> pa.Table:
        events = [event for batch in self._batches("ledger") for event in batch.to_pylist() if wanted(event)]
        return pa.Table.from_pylist(events, schema=LEDGER)

    def _written(self, window: str) -> Iterable[tuple[str, pa.RecordBatch]]:
        """The window's batches by stage, in the order in which they were written."""
        stages = {path.name.partition(".")[0] for path in self._files("*")} - {"source", "ledger"}
        found = [
            (stage, batch)
            for stage in stages
            for batch in self._batches(stage)
            if batch["__window__"][0].as_py() == window
        ]
        return sorted(found, key=lambda pair: pair[1]["__at__"][0].as_py())

    def _window(self, partition: str) -> str:
        names = self.partitions()
        found = [name for name in names if name == partition or name.endswith("/" + partition)]
        if len(found) != 1:
            raise ConfigError(f"{self.path} has no window {partition!r}; it has: {', '.join(names[-5:]) or 'none yet'}")
        return found[0]

    def _lives(self, window: str) -> list[_UnitLife]:
        """Every unit of a window, from its prompt row and from what the ledger recorded of it."""
        lives: dict[str, _UnitLife] = {}
        for batch in self._batches("source"):
            for row in batch.to_pylist():
                if row["__window__"] == window:
                    prompt = {name: value for name, value in row.items() if name not in _FIXED}
                    key = prompt_key(window, row["uid"], is_baseline=not row["__do_sample__"])
                    for session in range(row["__rollout_n__"]):
                        unit = Unit(f"{key}/{session}", window, row["uid"], session, not row["__do_sample__"], key)
                        lives[unit.id] = _UnitLife(unit, prompt)
        for batch in self._batches("ledger"):
            for event in batch.to_pylist():
                if event["window"] == window:
                    self._note(lives, event)
        return sorted(lives.values(), key=lambda life: life.unit.order)

    @staticmethod
    def _note(lives: dict[str, _UnitLife], event: dict[str, Any]) -> None:
        life = lives.get(event["unit"])
        if life is None:  # a prompt that was dropped before it had a row
            greedy = event["is_baseline"]
            key = prompt_key(event["window"], event["uid"], is_baseline=greedy)
            unit = Unit(event["unit"], event["window"], event["uid"], event["session"], greedy, key)
            life = lives.setdefault(unit.id, _UnitLife(unit, {}))
        life.rows = max(1, event["rows"])
        if event["outcome"] == ATTEMPT_FAILED:
            return
        if event["outcome"] == "done":
            life.accepted[event["stage"]] = event["delivery"]
        else:
            life.outcome, life.reason = event["outcome"], event["reason"]

    def _columns(self) -> pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer((self.path / "columns.arrow").read_bytes()))

    @staticmethod
    def _chosen(table: pa.Table, columns: Sequence[str]) -> pa.Table:
        unknown = [name for name in columns if name not in table.column_names]
        if unknown:
            raise ConfigError(f"no column {unknown[0]!r}; the columns are: {', '.join(table.column_names)}")
        return table.select([*IDENTITY.names, *(name for name in columns if name not in IDENTITY.names)])


def _identity(life: _UnitLife, turn: int) -> dict[str, Any]:
    return {
        "unit": life.unit.id,
        "uid": life.unit.uid,
        "session": life.unit.session,
        "turn": turn,
        "is_baseline": life.unit.is_baseline,
        "done": list(life.accepted),
        "outcome": life.outcome,
        "reason": life.reason,
    }
