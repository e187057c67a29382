"""What the workers need of a queue, and the one that lives in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from dataflow.errors import QueueError


class Queue(Protocol):
    """Rows by key, in named partitions; columns can be added at any time. No consumption, no order, no waiting.

    All methods may be called from several threads. Every call has a deadline; a queue that does not answer in
    time raises.
    """

    @property
    def timeout_s(self) -> float:
        """Longest time of one call, in seconds."""

    def put(self, partition: str, keys: Sequence[str], columns: Mapping[str, pa.Array]) -> None:
        """Write columns of rows; a row that is not there is made, a value that is there is replaced.

        The columns of one stage are written together; those of several stages add up.

        Args:
            partition: Its name; made if it is not there.
            keys: One per row, no duplicates.
            columns: Arrays of length ``len(keys)``, already cast to their columns' types.

        Raises:
            QueueError: If the rows were not stored.
        """

    def get(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, pa.Array]:
        """Read columns of rows, in the order of `keys`. Reading changes nothing.

        Raises:
            QueueError: If a row is not there or lacks a column: names the partition, key and column.
        """

    def keys(self, partition: str) -> list[str]:
        """Keys of a partition in order of text; empty if there is no such partition."""

    def clear(self, partition: str) -> int:
        """Remove a partition; returns how many rows it had, 0 if there was none."""

    def close(self) -> None:
        """Let go of the queue. The data stays where it is."""


class MemoryQueue:
    """The queue of a run in one process, and of tests. Passes the same contract tests as TransferQueue."""

    timeout_s = 1.0

    def __init__(self) -> None:
        self._partitions: dict[str, dict[str, dict[str, pa.Array]]] = {}

    def put(self, partition: str, keys: Sequence[str], columns: Mapping[str, pa.Array]) -> None:
        """See `Queue.put`."""
        check_put(partition, keys, columns)
        rows = self._partitions.setdefault(partition, {})
        for index, key in enumerate(keys):
            row = rows.setdefault(key, {})
            for name, array in columns.items():
                row[name] = array.slice(index, 1)

    def get(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, pa.Array]:
        """See `Queue.get`."""
        check_get(partition, keys, columns)
        rows = self._partitions.get(partition, {})
        for key in keys:
            for name in columns:
                if name not in rows.get(key, {}):
                    raise missing(partition, key, name, rows.get(key))
        return {name: pa.concat_arrays([rows[key][name] for key in keys]) for name in columns}

    def keys(self, partition: str) -> list[str]:
        """See `Queue.keys`."""
        return sorted(self._partitions.get(partition, {}))

    def clear(self, partition: str) -> int:
        """See `Queue.clear`."""
        return len(self._partitions.pop(partition, {}))

    def close(self) -> None:
        """See `Queue.close`."""


def check_put(partition: str, keys: Sequence[str], columns: Mapping[str, pa.Array]) -> None:
    """Refuse a put that no queue could store faithfully.

    Raises:
        QueueError: No keys, a key that is no text, a duplicate key, or a column of another length.
    """
    if not keys:
        raise QueueError(f"put into {partition!r}: no keys; write nothing by not calling put")
    if any(not isinstance(key, str) for key in keys):
        raise QueueError(
            f"put into {partition!r}: keys are text, got {[k for k in keys if not isinstance(k, str)][:3]}"
        )
    if len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if list(keys).count(key) > 1})
        raise QueueError(f"put into {partition!r}: duplicate keys {twice[:3]}")
    for name, array in columns.items():
        if len(array) != len(keys):
            raise QueueError(f"put into {partition!r}: column {name!r} has {len(array)} values for {len(keys)} keys")


def check_get(partition: str, keys: Sequence[str], columns: Sequence[str]) -> None:
    """Refuse a get that asks for nothing.

    Raises:
        QueueError: No keys or no columns.
    """
    if not keys or not columns:
        raise QueueError(
            f"get from {partition!r}: {len(keys)} keys and {len(columns)} columns; ask for at least one each"
        )


def missing(partition: str, key: str, column: str, row: Mapping[str, object] | None) -> QueueError:
    """The error of a row or a column that is not there."""
    if row is None:
        return QueueError(f"partition {partition!r} has no row {key!r} (asked for column {column!r})")
    return QueueError(
        f"row {key!r} of partition {partition!r} has no column {column!r}; it has: {', '.join(sorted(row)) or 'none'}"
    )
