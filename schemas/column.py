"""What a column is, and the one place where values become typed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa


class ColumnError(ValueError):
    """Raised when values do not fit the column they are written to."""


@dataclass(frozen=True)
class Column:
    """A named, typed field of rows.

    A column has one Arrow type and one rank everywhere: in the queue, in the journal, in a
    notebook. Values enter it through `cast` alone.

    Attributes:
        name: Unique in a pipeline. Names that begin with ``__`` are reserved.
        type: Arrow type of one row's value. ``pa.list_(number)`` is a token column: one 1-D array
            per row, of any length.
        doc: One sentence.
        unit: What a number counts or measures ("tokens", "nats"); empty if it has none.
        shape: Shape of one row's value in symbols, ``""`` for a scalar, ``"[T]"`` for T tokens.
        nullable: Whether a row may have no value (Arrow null).
        producer: Name of the stage that writes it; empty for a user's own column, whose producer is
            the stage that declares it.
    """

    name: str
    type: pa.DataType
    doc: str = ""
    unit: str = ""
    shape: str = ""
    nullable: bool = False
    producer: str = ""

    @property
    def is_tokens(self) -> bool:
        """Whether one row's value is a 1-D array of numbers."""
        return _is_tokens(self.type)

    @property
    def field(self) -> pa.Field:
        """The Arrow field, with doc, unit, shape and producer as metadata."""
        notes = {"doc": self.doc, "unit": self.unit, "shape": self.shape, "producer": self.producer}
        return pa.field(self.name, self.type, nullable=self.nullable, metadata={k: v for k, v in notes.items() if v})

    def cast(self, values: Sequence[Any] | pa.Array, keys: Sequence[str] | None = None) -> pa.Array:
        """Check and convert one value per row.

        Lossless conversions are made (int to float, numpy scalar to number, tensor to list); anything
        that would lose information is refused: 0.7 is no int, text is no number, NaN is kept.

        Args:
            values: One value per row: Python values, numpy arrays or scalars, torch tensors, or an
                Arrow array.
            keys: Row keys, to name the culprit in the error.

        Returns:
            An Arrow array of exactly `type`.

        Raises:
            ColumnError: Names the column, the first row that does not fit, what was expected and what
                came.
        """
        if (
            isinstance(values, pa.Array)
            and values.type == self.type
            and not (self.is_tokens and values.values.null_count)
        ):
            array = values
        else:
            plain = values.to_pylist() if isinstance(values, pa.Array | pa.ChunkedArray) else values
            array = self._convert([_plain(value) for value in plain], keys)
        if array.null_count and not self.nullable:
            row = next(i for i in range(len(array)) if not array[i].is_valid)
            raise ColumnError(self._message(row, keys, "None", "this column is not nullable"))
        return array

    def _convert(self, values: list[Any], keys: Sequence[str] | None) -> pa.Array:
        try:
            return self._array(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as cause:
            for row, value in enumerate(values):
                try:
                    self._array([value])
                except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                    raise ColumnError(self._message(row, keys, _show(value), str(error))) from cause
            raise ColumnError(f"column {self.name!r}: expected {self.type}, got {_show(values)}: {cause}") from cause

    def _array(self, values: list[Any]) -> pa.Array:
        if self.is_tokens:
            return self._tokens(values)
        if pa.types.is_boolean(self.type) and any(value is not None and type(value) is not bool for value in values):
            raise TypeError("only True and False are booleans")
        if pa.types.is_floating(self.type):
            if any(isinstance(value, str | bool) for value in values):
                raise TypeError("text and booleans are no numbers")
            numbers = [None if v is None else float(v) for v in values]
            _refuse_overflow(np.array([v for v in numbers if v is not None]), self.type.to_pandas_dtype())
            return pa.array(numbers, pa.float64()).cast(self.type, safe=False)
        if pa.types.is_integer(self.type):
            if any(isinstance(value, str | bool) for value in values):
                raise TypeError("text and booleans are no integers")
            if any(isinstance(value, float) and not value.is_integer() for value in values):
                raise TypeError("the value has a fraction or is not finite")
            return pa.array([None if v is None else int(v) for v in values], self.type)
        if pa.types.is_string(self.type) and any(value is not None and not isinstance(value, str) for value in values):
            raise TypeError("only text is text")
        return pa.array(values, self.type)

    def _tokens(self, values: list[Any]) -> pa.Array:
        item = np.dtype(self.type.value_type.to_pandas_dtype())
        arrays = [None if value is None else self._row(value, item) for value in values]
        lengths = [0 if array is None else len(array) for array in arrays]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)
        flat = np.concatenate([array for array in arrays if array is not None] or [np.empty(0, item)])
        absent = [array is None for array in arrays]
        mask = pa.array(absent, pa.bool_()) if any(absent) else None
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat), type=self.type, mask=mask)

    def _row(self, value: Any, item: np.dtype[Any]) -> np.ndarray[Any, Any]:
        array = np.asarray(value)
        if array.ndim != 1:
            raise TypeError(f"expected a 1-D array, got rank {array.ndim}")
        if array.size == 0:
            return np.empty(0, item)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"expected numbers, got {array.dtype}")
        with np.errstate(invalid="ignore", over="ignore"):
            converted = array.astype(item)
        if item.kind in "biu" and not np.array_equal(converted, array):
            raise TypeError(f"{array.dtype} values do not fit {item} without loss")
        if item.kind == "f":
            _refuse_overflow(array, item)
        return converted

    def _message(self, row: int, keys: Sequence[str] | None, got: str, why: str) -> str:
        where = f"row {keys[row]!r}" if keys is not None and row < len(keys) else f"row {row}"
        return f"column {self.name!r}, {where}: expected {self.type}, got {got} ({why})"


def _is_tokens(type_: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(type_) and (pa.types.is_integer(type_.value_type) or pa.types.is_floating(type_.value_type))
    )


def _refuse_overflow(array: np.ndarray[Any, Any], item: Any) -> None:
    """Infinity may be stored; a finite number that would become infinity may not."""
    finite = array[np.isfinite(array)] if array.size else array
    if finite.size and np.abs(finite).max() > np.finfo(item).max:
        raise OverflowError(f"the value is beyond {np.dtype(item)}")


def _plain(value: Any) -> Any:
    """Turn numpy scalars and torch tensors into Python numbers and numpy arrays."""
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "detach") and hasattr(value, "cpu"):  # a torch tensor, without importing torch
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.item()
    return value


def _show(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else text[:77] + "..."


def to_values(array: pa.Array) -> list[Any]:
    """Turn an Arrow array into what stages see: numpy arrays for token columns, else Python values."""
    if _is_tokens(array.type):
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        flat, offsets = array.values.to_numpy(zero_copy_only=False), array.offsets.to_numpy()
        if array.null_count == 0:
            return [flat[start:stop] for start, stop in pairwise(offsets)]
        valid = array.is_valid().to_pylist()
        return [flat[start:stop] if ok else None for (start, stop), ok in zip(pairwise(offsets), valid, strict=True)]
    values: list[Any] = array.to_pylist()
    return values
