"""Columns: what a value may be, what it becomes, and what is refused with which words."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import Column, ColumnError
from schemas.catalog import CATALOG, TOKENS, catalogued, column, columns, is_reserved
from schemas.column import to_values

TOKEN = Column("ids", TOKENS)
OPTIONAL = Column("ids", TOKENS, nullable=True)


def cast(type_: pa.DataType, *values: Any) -> list[Any]:
    array = Column("c", type_, nullable=True).cast(values)
    assert array.type == type_
    plain: list[Any] = array.to_pylist()
    return plain


def lists(array: pa.Array) -> list[list[float] | None]:
    return [None if value is None else value.tolist() for value in to_values(array)]


# Scalars


@pytest.mark.parametrize(
    ("type_", "value", "stored"),
    [
        (pa.int32(), 7, 7),
        (pa.int32(), 7.0, 7),
        (pa.int32(), np.int64(7), 7),
        (pa.int32(), np.float32(7), 7),
        (pa.int32(), np.array(7), 7),
        (pa.int64(), 2**53 + 1, 2**53 + 1),
        (pa.float32(), 1, 1.0),
        (pa.float32(), np.float64(0.5), 0.5),
        (pa.float32(), math.inf, math.inf),
        (pa.bool_(), np.bool_(True), True),
        (pa.string(), "", ""),
        (pa.string(), np.str_("Ünï 题"), "Ünï 题"),
    ],
)
def test_a_lossless_value_is_converted(type_: pa.DataType, value: object, stored: object) -> None:
    (got,) = cast(type_, value)
    assert (got, type(got)) == (stored, type(stored))


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (pa.int32(), 0.7),
        (pa.int32(), math.nan),
        (pa.int32(), math.inf),
        (pa.int32(), "7"),
        (pa.int32(), True),
        (pa.int32(), 2**31),
        (pa.int32(), 1e30),
        (pa.int32(), [7]),
        (pa.float32(), "0.5"),
        (pa.float32(), True),
        (pa.float32(), [0.5]),
        (pa.bool_(), 1),
        (pa.bool_(), "true"),
        (pa.string(), 7),
        (pa.string(), ["a"]),
    ],
)
def test_a_value_that_would_lose_something_is_refused(type_: pa.DataType, value: object) -> None:
    with pytest.raises(ColumnError, match=f"column 'c', row 0: expected {type_}, got {type(value).__name__}"):
        cast(type_, value)


def test_nan_is_a_value_and_none_is_no_value() -> None:
    array = Column("reward", pa.float32(), nullable=True).cast([math.nan, None])
    assert array.null_count == 1
    assert math.isnan(array[0].as_py())
    assert not array[1].is_valid


def test_none_is_refused_where_the_column_is_not_nullable() -> None:
    with pytest.raises(ColumnError, match=r"column 'uid', row 'w/a': expected string, got None .*not nullable"):
        Column("uid", pa.string()).cast(["x", None], keys=["w/b", "w/a"])


def test_the_error_names_the_first_row_that_does_not_fit_by_its_key() -> None:
    with pytest.raises(ColumnError, match="column 'n', row 'k1': expected int32, got str 'x'"):
        Column("n", pa.int32()).cast([1, "x", "y"], keys=["k0", "k1", "k2"])


def test_a_long_value_is_cut_in_the_error() -> None:
    with pytest.raises(ColumnError) as caught:
        Column("n", pa.int32()).cast(["x" * 10_000])
    assert len(str(caught.value)) < 300


def test_no_rows_give_an_empty_array_of_the_type() -> None:
    assert cast(pa.float32()) == []
    assert to_values(TOKEN.cast([])) == []


# Arrow arrays


def test_an_arrow_array_of_the_type_passes_as_it_is() -> None:
    array = pa.array([1, 2], pa.int32())
    assert Column("n", pa.int32()).cast(array) is array


def test_a_chunked_array_becomes_one_array() -> None:
    array = Column("n", pa.int32()).cast(pa.chunked_array([[1], [2, 3]], pa.int32()))
    assert isinstance(array, pa.Array)
    assert array.to_pylist() == [1, 2, 3]


def test_an_arrow_array_of_another_type_is_converted_or_refused_by_value() -> None:
    wanted = Column("n", pa.int32())
    assert wanted.cast(pa.array([1.0, 2.0])).equals(pa.array([1, 2], pa.int32()))
    with pytest.raises(ColumnError, match="row 1"):
        wanted.cast(pa.array([1.0, 2.5]))


def test_an_arrow_array_with_a_null_is_refused_where_the_column_is_not_nullable() -> None:
    with pytest.raises(ColumnError, match="not nullable"):
        Column("n", pa.int32()).cast(pa.array([1, None], pa.int32()))


# Token columns


def test_token_rows_may_have_any_length_and_none_at_all() -> None:
    values = to_values(TOKEN.cast([[1, 2, 3], [], np.array([4]), np.array([], np.float64)]))
    assert [value.tolist() for value in values] == [[1, 2, 3], [], [4], []]
    assert {value.dtype for value in values} == {np.dtype(np.int32)}


def test_an_empty_token_row_and_an_absent_one_stay_apart() -> None:
    assert lists(OPTIONAL.cast([None, [], [1], None])) == [None, [], [1], None]


def test_rows_that_are_all_absent_or_all_empty_are_read_back() -> None:
    assert lists(OPTIONAL.cast([None, None])) == [None, None]
    assert lists(TOKEN.cast([[], []])) == [[], []]


def test_an_absent_token_row_is_refused_where_the_column_is_not_nullable() -> None:
    with pytest.raises(ColumnError, match=r"row 'k1'.*not nullable"):
        TOKEN.cast([[1], None], keys=["k0", "k1"])


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (7, "got rank 0"),
        ("abc", "got rank 0"),
        ([[1, 2]], "got rank 2"),
        ([0.5], "do not fit int32 without loss"),
        ([2**31], "do not fit int32 without loss"),
        (np.array([math.nan]), "do not fit int32 without loss"),
        ([1, None], "expected numbers"),
        (["1"], "expected numbers"),
    ],
)
def test_a_token_row_that_is_no_row_of_integers_is_refused(value: object, why: str) -> None:
    with pytest.raises(ColumnError, match=rf"column 'ids', row 1: expected list.*{why}"):
        TOKEN.cast([[1], value])


def test_a_mask_of_booleans_becomes_zeros_and_ones() -> None:
    assert lists(Column("m", pa.list_(pa.int8())).cast([np.array([True, False])])) == [[1, 0]]


def test_float_tokens_keep_nan_and_infinity() -> None:
    ((nan, low),) = to_values(Column("x", pa.list_(pa.float32())).cast([[math.nan, -math.inf]]))
    assert math.isnan(nan)
    assert low == -math.inf


def test_a_slice_of_a_token_array_is_read_at_its_place() -> None:
    array = OPTIONAL.cast([[1, 2], None, [3], [], [4, 5]])
    assert lists(array[1:4]) == [None, [3], []]
    assert lists(array[4:]) == [[4, 5]]


def test_chunks_of_a_token_column_are_read_in_order() -> None:
    one, two = OPTIONAL.cast([[1], None]), OPTIONAL.cast([[], [2, 3]])
    assert lists(pa.chunked_array([one, two])) == [[1], None, [], [2, 3]]


def test_a_scalar_column_is_read_as_python_values() -> None:
    assert to_values(pa.array(["a", None])) == ["a", None]


class FakeTensor:
    """Has what a torch tensor has, so that this package needs no torch."""

    def __init__(self, values: Any) -> None:
        self._values = np.array(values)

    def detach(self) -> FakeTensor:
        return self

    def cpu(self) -> FakeTensor:
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        return self._values


def test_tensors_are_taken_as_rows_and_as_scalars() -> None:
    assert lists(TOKEN.cast([FakeTensor([1, 2]), FakeTensor([])])) == [[1, 2], []]
    assert cast(pa.float32(), FakeTensor(0.5)) == [0.5]


# Round trips

INT32 = st.integers(-(2**31), 2**31 - 1)
ROWS = st.lists(st.none() | st.lists(INT32, max_size=5), max_size=8)


@given(rows=ROWS)
def test_token_rows_come_back_as_they_went_in(rows: list[list[int] | None]) -> None:
    assert lists(OPTIONAL.cast(rows)) == rows


@given(rows=ROWS, cut=st.integers(0, 8), as_numpy=st.booleans())
def test_casting_is_the_same_in_parts_and_at_once(rows: list[list[int] | None], cut: int, as_numpy: bool) -> None:
    values = [np.array(row, np.int64) if as_numpy and row is not None else row for row in rows]
    parts = pa.chunked_array([OPTIONAL.cast(values[:cut]), OPTIONAL.cast(values[cut:])])
    assert OPTIONAL.cast(parts).equals(OPTIONAL.cast(rows))


@given(rows=ROWS)
def test_what_was_read_can_be_cast_again(rows: list[list[int] | None]) -> None:
    array = OPTIONAL.cast(rows)
    assert OPTIONAL.cast(to_values(array)).equals(array)


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (pa.int32(), INT32),
        (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
        (pa.float32(), st.floats(allow_nan=False, width=32)),
        (pa.bool_(), st.booleans()),
        (pa.string(), st.text(st.characters(codec="utf-8"))),
    ],
    ids=["int32", "int64", "float32", "bool", "string"],
)
@given(data=st.data())
def test_scalars_come_back_as_they_went_in(
    data: st.DataObject, type_: pa.DataType, value: st.SearchStrategy[Any]
) -> None:
    values = data.draw(st.lists(st.none() | value, max_size=8))
    assert to_values(Column("c", type_, nullable=True).cast(values)) == values


# The declaration and the catalogue


def test_the_field_carries_the_notes_that_are_given() -> None:
    field = Column("n", pa.int32(), "Words.", unit="words", producer="count").field
    assert (field.name, field.type, field.nullable) == ("n", pa.int32(), False)
    assert field.metadata == {b"doc": b"Words.", b"unit": b"words", b"producer": b"count"}


def test_only_lists_of_scalars_are_token_columns() -> None:
    assert TOKEN.is_tokens
    assert not Column("n", pa.int32()).is_tokens
    assert not Column("n", pa.list_(pa.list_(pa.int32()))).is_tokens


def test_the_catalogue_names_every_column_once_with_doc_and_producer() -> None:
    names = [entry.name for entry in CATALOG]
    assert len(set(names)) == len(names)
    assert [entry.name for entry in CATALOG if not (entry.doc and entry.producer)] == []


def test_columns_are_looked_up_by_name() -> None:
    assert [entry.name for entry in columns("uid", "reward")] == ["uid", "reward"]
    assert column("uid") is catalogued("uid")
    assert catalogued("mine") is None
    with pytest.raises(KeyError, match="mine"):
        column("mine")


def test_reserved_are_the_catalogued_names_and_those_with_two_underscores() -> None:
    assert [name for name in ("reward", "__x", "__do_sample__", "_x", "mine") if is_reserved(name)] == [
        "reward",
        "__x",
        "__do_sample__",
    ]
