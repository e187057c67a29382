"""TransferQueue as a `Queue`: by key only, every call with a deadline. The only importer of transfer_queue.

Per call and per cell the queue costs more than per byte (docs/measurements.md), so the small columns that one stage
writes travel packed: one JSON text per row, in a queue column named after the stage. Token columns travel as jagged
tensors under their own names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as CallTimeout
from typing import Any

import pyarrow as pa

from dataflow.errors import QueueError
from dataflow.queue import check_get, check_put, missing
from schemas.column import Column, to_values

CONTROLLER = "TransferQueueController"
NAMESPACE = "transfer_queue"


def environment(timeout_s: float) -> dict[str, str]:
    """Variables that every process that touches the queue needs before it imports transfer_queue."""
    return {
        "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": str(max(1, int(timeout_s))),
        "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "1",
        "TQ_LOGGING_LEVEL": "WARNING",
        "TQ_NUM_THREADS": str(min(8, os.cpu_count() or 1)),
    }


def start(storage_units: int) -> None:
    """Start the queue's actors in the Ray cluster that this process is attached to; this process owns them.

    Polling mode, because in blocking mode one unsatisfied request stops the controller for all.
    """
    import transfer_queue as tq
    from omegaconf import OmegaConf

    tq.init(
        OmegaConf.create(
            {
                "controller": {"polling_mode": True},
                "backend": {"SimpleStorage": {"num_data_storage_units": storage_units, "total_storage_size": None}},
            }
        )
    )


def actors(storage_units: int) -> list[tuple[str, str | None]]:
    """Name and namespace of each of the queue's actors; None is the namespace of the process that called `start`."""
    units = [(f"TransferQueueStorageUnit#{number}", None) for number in range(storage_units)]
    return [(CONTROLLER, NAMESPACE), *units]


def shut_down() -> None:
    """Stop the queue's actors. Only the process that called `start` may."""
    import transfer_queue as tq

    tq.close()


class TransferQueue:
    """A client of a running TransferQueue.

    Args:
        columns: Every column that may be written or read.
        producers: Column name -> stage that writes it; decides what is packed together.
        timeout_s: Deadline of every call, in seconds.
    """

    def __init__(self, columns: Mapping[str, Column], producers: Mapping[str, str], timeout_s: float = 30.0) -> None:
        import transfer_queue as tq

        self._tq = tq
        self._columns = dict(columns)
        self._producers = dict(producers)
        self.timeout_s = timeout_s
        self._calls = ThreadPoolExecutor(8, thread_name_prefix="transfer-queue")
        self._call("attach", tq.init)

    def put(self, partition: str, keys: Sequence[str], columns: Mapping[str, pa.Array]) -> None:
        """See `Queue.put`."""
        from tensordict import TensorDict

        check_put(partition, keys, columns)
        fields: dict[str, Any] = {}
        packs: dict[str, dict[str, list[Any]]] = {}
        for name, array in columns.items():
            if array.type != self._column(name).type:
                raise QueueError(
                    f"put into {partition!r}: column {name!r} has type {array.type}, expected {self._column(name).type}"
                )
            if self._is_packed(name):
                packs.setdefault(self._producers[name], {})[name] = array.to_pylist()
            else:
                fields[name] = _jagged(array)
        for pack, values in packs.items():
            rows = zip(*values.values(), strict=True)
            fields[pack] = _texts([json.dumps(dict(zip(values, row, strict=True))) for row in rows])
        data = TensorDict(fields, batch_size=[len(keys)])
        self._call("put", self._tq.kv_batch_put, keys=list(keys), partition_id=partition, fields=data)

    def get(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> dict[str, pa.Array]:
        """See `Queue.get`."""
        check_get(partition, keys, columns)
        wanted = list(dict.fromkeys(self._producers[n] if self._is_packed(n) else n for n in columns))
        data = self._fetch(partition, list(keys), wanted)
        if data is None or len(data) != len(keys) or not set(wanted) <= set(data.keys()):
            raise self._what_is_missing(partition, keys, columns)
        unpacked: dict[str, list[dict[str, Any]]] = {}
        result = {}
        for name in columns:
            column = self._column(name)
            if self._is_packed(name):
                pack = self._producers[name]
                if pack not in unpacked:
                    unpacked[pack] = [json.loads(text) for text in data[pack]]
                if any(name not in row for row in unpacked[pack]):
                    row = next(i for i, row in enumerate(unpacked[pack]) if name not in row)
                    raise missing(partition, keys[row], name, unpacked[pack][row])
                result[name] = column.cast([row[name] for row in unpacked[pack]])
            else:
                result[name] = column.cast([tensor.numpy() for tensor in data[name].unbind()])
        return result

    def keys(self, partition: str) -> list[str]:
        """See `Queue.keys`."""
        return sorted(self._call("list", self._tq.kv_list, partition_id=partition).get(partition, {}))

    def clear(self, partition: str) -> int:
        """See `Queue.clear`."""
        count = len(self.keys(partition))
        if count:
            self._call("clear", self._tq.get_client().clear_partition, partition)
        return count

    def close(self) -> None:
        """See `Queue.close`."""
        self._calls.shutdown(wait=False, cancel_futures=True)

    # ---- inside -------------------------------------------------------------------------------------

    def _is_packed(self, name: str) -> bool:
        column = self._column(name)
        return not column.is_tokens or column.nullable

    def _column(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            raise QueueError(f"unknown column {name!r}; the columns are: {', '.join(sorted(self._columns))}") from None

    def _call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The library's calls have no deadline of their own: with a dead controller they hang for ever.
        future = self._calls.submit(function, *args, **kwargs)
        try:
            return future.result(self.timeout_s)
        except CallTimeout:
            raise QueueError(
                f"TransferQueue did not answer {what!r} within {self.timeout_s:g} s; its controller or storage is "
                "gone or overloaded (queue.timeout_s sets the limit)"
            ) from None
        except Exception as error:
            raise QueueError(f"TransferQueue refused {what!r}: {type(error).__name__}: {error}") from error

    def _fetch(self, partition: str, keys: list[str], fields: list[str]) -> Any:
        try:
            return self._call("get", self._tq.kv_batch_get, keys=keys, partition_id=partition, select_fields=fields)
        except QueueError as error:
            if isinstance(error.__cause__, ValueError | RuntimeError | KeyError):
                return None
            raise

    def _what_is_missing(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> QueueError:
        """Name the first row or column that is not there; a whole get hides which it was."""
        there = set(self.keys(partition))
        for key in keys:
            if key not in there:
                return missing(partition, key, columns[0], None)
            for name in columns:
                field = self._producers[name] if self._is_packed(name) else name
                data = self._fetch(partition, [key], [field])
                if data is None or field not in set(data.keys()):
                    return missing(partition, key, name, {})
        return QueueError(
            f"TransferQueue returned {partition!r} rows {list(keys)[:3]} incompletely, and whole when asked again"
        )


def _texts(values: list[str]) -> Any:
    from tensordict import NonTensorStack

    return NonTensorStack(*values)


def _jagged(array: pa.Array) -> Any:
    import torch

    rows = [torch.from_numpy(row.copy()) for row in to_values(array)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
