"""For users' tests: run a stage on rows, in milliseconds, without a cluster."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.batch import Batch, Unit, prompt_key
from dataflow.errors import Drop, RowError
from dataflow.queue import MemoryQueue
from dataflow.stage import Stage, StageContext, check_columns
from schemas.column import to_values

__all__ = ["MemoryQueue", "make_batch", "run_stage"]


def make_batch(rows: Sequence[Mapping[str, Any]], *, window: str = "test/train/000000") -> Batch:
    """Make a batch of rows, one dict per row.

    Args:
        rows: Column values. The keys `uid` (default: one per row), `session` (default: counted per uid), `turn`
            (default 0) and `is_baseline` (default false) give a row its identity; all others are columns.
        window: Name of the window.
    """
    identity = ("uid", "session", "turn", "is_baseline")
    counts: dict[str, int] = {}
    units, turns = [], []
    for number, row in enumerate(rows):
        uid, greedy = str(row.get("uid", number)), bool(row.get("is_baseline", False))
        session = int(row.get("session", counts.get(uid, 0)))
        counts[uid] = session + 1
        key = prompt_key(window, uid, is_baseline=greedy)
        units.append(Unit(f"{key}/{session}", window, uid, session, greedy, key))
        turns.append(int(row.get("turn", 0)))
    names = list(dict.fromkeys(name for row in rows for name in row if name not in identity))
    return Batch({name: [row.get(name) for row in rows] for name in names}, units, turns, window)


def run_stage(
    stage: type[Stage] | Stage,
    rows: Sequence[Mapping[str, Any]],
    *,
    baseline: Sequence[Mapping[str, Any]] | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Set a stage up, run its `process` on rows as one batch, and check what it returns against its `writes`.

    Args:
        stage: A stage class without required options (such as a function under `@stage`), or a stage.
        rows: See `make_batch`.
        baseline: For a `join` stage, the greedy rows.
        seed: The run's seed.

    Returns:
        One dict per row with the written columns, as they would be read back from the queue; a `Drop` or `RowError`
        stands where the stage put one.

    Raises:
        Exception: Whatever the stage raises; ColumnError if a value does not fit its column.
    """
    built = stage(stage.Config()) if isinstance(stage, type) else stage
    batch = _declared(built, make_batch(rows))
    if baseline is not None:
        batch.baseline = _declared(built, make_batch(baseline))

    async def run() -> Any:
        prepared = built.setup(StageContext("test", Path("."), f"{built.name}-0", seed))
        if inspect.isawaitable(prepared):
            await prepared
        result = built.process(batch)
        return await result if inspect.isawaitable(result) else result

    columns = asyncio.run(run())
    check_columns(built, columns, len(batch))
    written: list[dict[str, Any]] = [{} for _ in rows]
    for column in built.writes:
        values = list(columns[column.name])
        kept = [place for place, value in enumerate(values) if not isinstance(value, Drop | RowError)]
        cast = to_values(column.cast([values[place] for place in kept]))
        for place, value in enumerate(values):
            written[place][column.name] = value
        for place, value in zip(kept, cast, strict=True):
            written[place][column.name] = value
    return written


def _declared(stage: Stage, batch: Batch) -> Batch:
    """Keep the columns that the stage declares in `reads`: it sees no others in a run."""
    batch.columns = {name: batch.columns[name] for name in stage.reads if name in batch.columns}
    return batch
