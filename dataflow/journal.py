"""Append-only Arrow files of what was written and acknowledged: for inspection, during a run and after it.

One file per worker and table, in `RUN/journal/`, in the Arrow stream format, written through one record batch at a
time: a reader sees every whole batch, also while the file grows and after a crash. Nothing is pickled.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dataflow.batch import Failure
from dataflow.events import Settled

# Reserved names, so that no stage's column can collide with them.
ROWS = [
    pa.field("__window__", pa.string()),
    pa.field("__key__", pa.string()),
    pa.field("__address__", pa.string()),
    pa.field("__at__", pa.float64(), metadata={"doc": "Unix time, seconds"}),
]
LEDGER = pa.schema(
    [
        pa.field("at", pa.float64(), metadata={"doc": "Unix time, seconds"}),
        pa.field("window", pa.string()),
        pa.field("unit", pa.string()),
        pa.field("uid", pa.string()),
        pa.field("session", pa.int32()),
        pa.field("is_baseline", pa.bool_()),
        pa.field("stage", pa.string()),
        pa.field("outcome", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("delivery", pa.int32()),
        pa.field("rows", pa.int32()),
        pa.field("worker", pa.string()),
        pa.field("attempt", pa.int32()),
        pa.field("error", pa.string()),
        pa.field("message", pa.string()),
        pa.field("traceback", pa.string()),
    ]
)


class JournalWriter:
    """The files of one worker. Not shared between processes.

    Args:
        directory: `RUN/journal`; made if it is not there. None writes nothing.
        stage: The stage whose columns are written.
        worker: Name of the worker.
    """

    def __init__(self, directory: Path | None, stage: str, worker: str) -> None:
        self._directory = directory
        # A worker that was started again writes a file of its own.
        self._name = f"{stage}.{worker}.{time.time_ns():x}"
        self._lock = threading.Lock()  # a worker with several claims writes from several threads
        self._sink: Any = None
        self._writer: Any = None

    def rows(self, window: str, keys: Sequence[str], addresses: Sequence[str], columns: Mapping[str, pa.Array]) -> None:
        """Record that columns of rows were written at their addresses."""
        now = time.time()
        fixed = [
            pa.array([window] * len(keys)),
            pa.array(list(keys)),
            pa.array(list(addresses)),
            pa.array([now] * len(keys)),
        ]
        schema = pa.schema([*ROWS, *(pa.field(name, array.type) for name, array in columns.items())])
        self._append(pa.record_batch([*fixed, *columns.values()], schema=schema))

    def settled(self, effects: Sequence[Settled]) -> None:
        """Record what became of units."""
        now = time.time()
        records = [
            {
                **_failed(effect.failure),
                "worker": effect.worker,
                "at": now,
                "window": effect.unit.window,
                "unit": effect.unit.id,
                "uid": effect.unit.uid,
                "session": effect.unit.session,
                "is_baseline": effect.unit.is_baseline,
                "stage": effect.stage,
                "outcome": effect.outcome,
                "reason": effect.reason,
                "delivery": effect.delivery,
                "rows": effect.rows,
            }
            for effect in effects
        ]
        self._append(pa.RecordBatch.from_pylist(records, schema=LEDGER))

    def close(self) -> None:
        """Close the file. A file that was never closed is read up to its last whole batch."""
        with self._lock:
            if self._writer is not None:
                self._writer.close()
                self._sink.close()
                self._writer = self._sink = None

    def _append(self, batch: pa.RecordBatch) -> None:
        if self._directory is None:
            return
        with self._lock:
            if self._writer is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                path = self._directory / f"{self._name}.arrows"
                self._sink = path.open("xb", buffering=0)
                path.chmod(0o600)
                self._writer = pa.ipc.new_stream(self._sink, batch.schema)
            self._writer.write_batch(batch)


def _failed(failure: Failure | None) -> dict[str, Any]:
    if failure is None:
        return {}
    return {
        "attempt": failure.attempt,
        "error": failure.type,
        "message": failure.message,
        "traceback": failure.traceback,
    }


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield every whole record batch of a journal file, also of one that is being written or was cut off."""
    with path.open("rb") as source:
        try:
            reader = pa.ipc.open_stream(source)
            yield from reader
        except (pa.ArrowInvalid, OSError, EOFError, StopIteration):
            return


def append_json(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
