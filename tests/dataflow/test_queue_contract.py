"""One contract, every queue: in memory, and TransferQueue on a real Ray cluster."""

from __future__ import annotations

import math
import os
import signal
import time
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.batch import address
from dataflow.errors import QueueError
from dataflow.queue import MemoryQueue, Queue
from schemas.column import Column, to_values

ROLLOUT = [
    Column("ids", pa.list_(pa.int32())),
    Column("mask", pa.list_(pa.int8())),
    Column("log_probs", pa.list_(pa.float32())),
    Column("text", pa.string()),
    Column("is_baseline", pa.bool_()),
    Column("version", pa.int32()),
]
REWARD = [
    Column("score", pa.float32(), nullable=True),
    Column("token_rewards", pa.list_(pa.float32()), nullable=True),
    Column("note", pa.string(), nullable=True),
]
COLUMNS = {column.name: column for column in [*ROLLOUT, *REWARD]}
PRODUCERS = {column.name: "rollout" for column in ROLLOUT} | {column.name: "reward" for column in REWARD}


def open_transfer_queue(timeout_s: float = 30.0) -> Any:
    from dataflow.tq import TransferQueue

    return TransferQueue(COLUMNS, PRODUCERS, timeout_s)


@pytest.fixture(scope="module", params=["memory", pytest.param("transfer_queue", marks=pytest.mark.ray)])
def queue(request: pytest.FixtureRequest) -> Any:
    if request.param == "memory":
        yield MemoryQueue()
    else:
        request.getfixturevalue("ray_cluster")
        client = open_transfer_queue()
        yield client
        client.close()


@pytest.fixture
def partition() -> str:
    return fresh()


def fresh() -> str:
    return f"run/train/{uuid.uuid4().hex}"


def arrays(**values: list[Any]) -> dict[str, pa.Array]:
    return {name: COLUMNS[name].cast(rows) for name, rows in values.items()}


def rollout_rows(count: int) -> dict[str, pa.Array]:
    """Rows of every kind of column that rollout writes, ragged, one of them without tokens."""
    lengths = [(3 * row) % 5 for row in range(count)]
    return arrays(
        ids=[np.arange(length) + row for row, length in enumerate(lengths)],
        mask=[np.ones(length, np.int8) for length in lengths],
        log_probs=[-0.25 * np.arange(length) for length in lengths],
        text=[f"row {row}" for row in range(count)],
        is_baseline=[row % 2 == 0 for row in range(count)],
        version=list(range(count)),
    )


def plain(array: pa.Array) -> list[Any]:
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in to_values(array)]


# Values


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ids", [[5, 6, 2], [7], [2**31 - 1, -(2**31)]]),
        ("ids", [[1, 2], [3, 4]]),
        ("ids", [[], [1, 2], []]),
        ("ids", [[], []]),
        ("ids", [[]]),
        ("mask", [[1, 0, -128], [127]]),
        ("mask", [[], [1]]),
        ("log_probs", [[-0.5], [-1.5, 0.1], []]),
        ("log_probs", [[math.inf, -math.inf]]),
        ("text", ["", "two\nlines", "Ünï 题 \u2028 🙂", 'a "quoted" \\ text', "nul \x00 byte"]),
        ("is_baseline", [True, False, True]),
        ("version", [0, -1, 2**31 - 1]),
        ("score", [1.0, None, 0.1]),
        ("score", [None, None]),
        ("token_rewards", [[0.5, 0.25], None, []]),
        ("token_rewards", [None]),
        ("note", [None, "", "why"]),
    ],
)
def test_every_kind_of_column_comes_back_with_its_values_and_its_type(
    queue: Queue, partition: str, name: str, values: list[Any]
) -> None:
    array = COLUMNS[name].cast(values)
    keys = [f"k{row}" for row in range(len(values))]
    queue.put(partition, keys, {name: array})
    got = queue.get(partition, keys, [name])[name]
    assert got.type == array.type
    assert got.equals(array)


def test_nan_and_null_are_two_things(queue: Queue, partition: str) -> None:
    queue.put(partition, ["a", "b"], arrays(score=[math.nan, None]))
    nan, null = queue.get(partition, ["a", "b"], ["score"])["score"].to_pylist()
    assert math.isnan(nan)
    assert null is None


def test_Q06_scalars_come_back_flat_also_from_a_single_row(queue: Queue, partition: str) -> None:
    scores = Column("score", pa.float32(), nullable=True)
    for number, value in enumerate([0.5, np.float32(0.5), np.array(0.5)]):
        key = f"k{number}"
        queue.put(partition, [key], {"score": scores.cast([value])})
        assert queue.get(partition, [key], ["score"])["score"].to_pylist() == [0.5]
    queue.put(partition, ["t1", "t2"], arrays(token_rewards=[[1.0], [1.0, 2.0]]))
    assert plain(queue.get(partition, ["t1", "t2"], ["token_rewards"])["token_rewards"]) == [[1], [1, 2]]


def test_all_columns_of_a_row_are_read_in_one_get(queue: Queue, partition: str) -> None:
    rows = rollout_rows(6)
    keys = [f"k{row}" for row in range(6)]
    queue.put(partition, keys, rows)
    got = queue.get(partition, keys, list(rows))
    assert {name: got[name].equals(array) for name, array in rows.items()} == dict.fromkeys(rows, True)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8),
        st.tuples(
            st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
            st.text(st.characters(exclude_categories=["Cs"])),
            st.none() | st.floats(width=32, allow_nan=False),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_rows_under_any_keys_come_back_as_they_went(queue: Queue, rows: dict[str, Any]) -> None:
    partition, keys = fresh(), list(rows)
    ids, texts, scores = (list(column) for column in zip(*rows.values(), strict=True))
    written = arrays(ids=ids, text=texts, score=scores)
    queue.put(partition, keys, written)
    got = queue.get(partition, keys[::-1], list(written))
    assert {name: plain(array)[::-1] for name, array in got.items()} == {
        name: plain(array) for name, array in written.items()
    }
    assert queue.clear(partition) == len(keys)


# Rows and columns


def test_Q13_columns_written_later_join_the_rows_that_are_there(queue: Queue, partition: str) -> None:
    queue.put(partition, ["k1", "k2"], rollout_rows(2))
    queue.put(partition, ["k2", "k1"], arrays(score=[0.0, 1.0], token_rewards=[None, [1.0]], note=["b", "a"]))
    got = queue.get(partition, ["k1", "k2"], ["text", "score", "note"])
    assert queue.keys(partition) == ["k1", "k2"]
    assert {name: plain(array) for name, array in got.items()} == {
        "text": ["row 0", "row 1"],
        "score": [1.0, 0.0],
        "note": ["a", "b"],
    }


def test_rows_come_in_the_order_of_the_keys_asked_for(queue: Queue, partition: str) -> None:
    queue.put(partition, ["c", "a", "b"], arrays(version=[3, 1, 2], ids=[[3], [1, 1], []]))
    got = queue.get(partition, ["b", "c", "a"], ["version", "ids"])
    assert (plain(got["version"]), plain(got["ids"])) == ([2, 3, 1], [[], [3], [1, 1]])


def test_keys_are_listed_in_order_of_text(queue: Queue, partition: str) -> None:
    queue.put(partition, ["b", "a10", "a9"], arrays(version=[0, 1, 2]))
    assert queue.keys(partition) == ["a10", "a9", "b"]


def test_a_value_written_again_replaces_the_old_one(queue: Queue, partition: str) -> None:
    queue.put(partition, ["a", "b"], arrays(version=[1, 2], ids=[[1], [2]]))
    queue.put(partition, ["b"], arrays(version=[7], ids=[[7, 7, 7]]))
    got = queue.get(partition, ["a", "b"], ["version", "ids"])
    assert (plain(got["version"]), plain(got["ids"])) == ([1, 7], [[1], [7, 7, 7]])


def test_Q03_rows_written_in_chunks_are_all_there(queue: Queue, partition: str) -> None:
    queue.put(partition, ["k0", "k1"], arrays(score=[1.0, 0.0]))
    queue.put(partition, ["k2", "k3"], arrays(score=[1.0, 1.0]))
    got = queue.get(partition, ["k0", "k1", "k2", "k3"], ["score"])
    assert plain(got["score"]) == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_Q04_three_rows_read_in_chunks_of_any_size_are_three_rows(queue: Queue, partition: str, size: int) -> None:
    keys = ["k0", "k1", "k2"]
    queue.put(partition, keys, arrays(version=[0, 1, 2], ids=[[0], [1], [2]]))
    chunks = [keys[start : start + size] for start in range(0, len(keys), size)]
    got = [plain(queue.get(partition, chunk, ["version", "ids"])["version"]) for chunk in chunks]
    assert [value for chunk in got for value in chunk] == [0, 1, 2]


@pytest.mark.parametrize("uid", ["math_7", "math_7_0", "remax_baseline_x", "Ünï 题", "7", "a/b#greedy~1/0", " "])
def test_Q14_keys_with_separators_find_their_own_rows(queue: Queue, partition: str, uid: str) -> None:
    keys = [f"{uid}/0", f"{uid}/1", f"{uid}#greedy/0"]
    queue.put(partition, keys, arrays(text=keys))
    for key in keys:
        assert plain(queue.get(partition, [key], ["text"])["text"]) == [key]
    assert queue.keys(partition) == sorted(keys)


def test_Q10_a_late_write_reaches_only_an_address_that_is_not_read(queue: Queue, partition: str) -> None:
    queue.put(partition, [address("k", 1)], arrays(score=[1.0]))
    queue.put(partition, [address("k", 0)], arrays(score=[0.0]))
    queue.put(partition, [address("k", 2)], arrays(score=[9.0]))
    assert plain(queue.get(partition, ["k~1"], ["score"])["score"]) == [1.0]
    assert queue.keys(partition) == ["k", "k~1", "k~2"]


def test_I03_reading_changes_nothing(queue: Queue, partition: str) -> None:
    keys = [f"k{row}" for row in range(8)]
    queue.put(partition, keys, rollout_rows(8))
    first = [queue.get(partition, keys, ["ids", "text"]) for _ in range(3)]
    assert all(got["ids"].equals(first[0]["ids"]) and got["text"].equals(first[0]["text"]) for got in first)
    assert queue.keys(partition) == keys
    assert queue.clear(partition) == 8


# What is not there


def test_Q01_a_column_that_one_row_lacks_is_an_error_that_names_row_and_column(queue: Queue, partition: str) -> None:
    queue.put(partition, ["p1", "p2"], arrays(ids=[[1], [2]], version=[1, 2]))
    queue.put(partition, ["p2"], arrays(score=[1.0]))
    with pytest.raises(QueueError, match=r"row 'p1' .*no column 'score'"):
        queue.get(partition, ["p1", "p2"], ["score"])
    with pytest.raises(QueueError, match=r"row 'p1' .*no column 'score'"):
        queue.get(partition, ["p2", "p1"], ["ids", "score"])


def test_a_token_column_that_one_row_lacks_is_an_error_that_names_row_and_column(queue: Queue, partition: str) -> None:
    queue.put(partition, ["p1", "p2"], arrays(version=[1, 2]))
    queue.put(partition, ["p2"], arrays(ids=[[1]]))
    with pytest.raises(QueueError, match=r"row 'p1' .*no column 'ids'"):
        queue.get(partition, ["p2", "p1"], ["ids"])


def test_Q01_an_unknown_column_is_an_error_that_names_it(queue: Queue, partition: str) -> None:
    queue.put(partition, ["p2"], arrays(version=[1]))
    with pytest.raises(QueueError, match="'zzz'"):
        queue.get(partition, ["p2"], ["zzz"])


def test_a_missing_row_is_an_error_that_names_partition_and_row(queue: Queue, partition: str) -> None:
    queue.put(partition, ["a"], arrays(version=[1]))
    with pytest.raises(QueueError, match=f"'{partition}' has no row 'b'"):
        queue.get(partition, ["a", "b"], ["version"])


def test_a_missing_partition_is_an_error_that_names_it(queue: Queue, partition: str) -> None:
    with pytest.raises(QueueError, match=f"'{partition}' has no row 'a'"):
        queue.get(partition, ["a"], ["version"])
    assert queue.keys(partition) == []


@pytest.mark.parametrize(("keys", "columns"), [([], ["version"]), (["a"], [])])
def test_a_get_of_nothing_is_refused(queue: Queue, partition: str, keys: list[str], columns: list[str]) -> None:
    queue.put(partition, ["a"], arrays(version=[1]))
    with pytest.raises(QueueError, match="ask for at least one each"):
        queue.get(partition, keys, columns)


@pytest.mark.parametrize(
    ("keys", "message"),
    [([], "no keys"), (["a", "a"], r"duplicate keys \['a'\]"), (["a", 7], "7"), (["a"], "2 values for 1 keys")],
)
def test_a_put_that_could_not_be_stored_faithfully_is_refused_and_stores_nothing(
    queue: Queue, partition: str, keys: list[Any], message: str
) -> None:
    with pytest.raises(QueueError, match=message):
        queue.put(partition, keys, arrays(version=[1, 2]))
    assert queue.keys(partition) == []


# Clearing


def test_Q05_clearing_twice_or_what_never_existed_counts_no_rows(queue: Queue, partition: str) -> None:
    queue.put(partition, ["a"], arrays(version=[1]))
    assert [queue.clear(partition), queue.clear(partition), queue.clear("run/train/never")] == [1, 0, 0]
    assert queue.keys(partition) == []


def test_Q02_a_cleared_partition_does_not_show_the_rows_of_another(queue: Queue, partition: str) -> None:
    other = fresh()
    queue.put(partition, ["x"], arrays(version=[1], ids=[[1]]))
    queue.clear(partition)
    queue.put(other, ["x"], arrays(version=[2], ids=[[2, 2]]))
    assert queue.keys(partition) == []
    with pytest.raises(QueueError, match="has no row 'x'"):
        queue.get(partition, ["x"], ["version"])
    assert plain(queue.get(other, ["x"], ["ids"])["ids"]) == [[2, 2]]


def test_a_cleared_partition_can_be_filled_again(queue: Queue, partition: str) -> None:
    queue.put(partition, ["a", "b"], arrays(version=[1, 2], score=[1.0, 1.0]))
    queue.clear(partition)
    queue.put(partition, ["b"], arrays(version=[5]))
    assert queue.keys(partition) == ["b"]
    with pytest.raises(QueueError, match="no column 'score'"):
        queue.get(partition, ["b"], ["score"])


def test_Q12_rows_are_bounded_over_thirty_windows(queue: Queue) -> None:
    run, counts = fresh(), []
    for window in range(30):
        keys = [f"{window}/{row}" for row in range(8)]
        queue.put(f"{run}/{window:06d}", keys, rollout_rows(8))
        assert queue.clear(f"{run}/{window - 1:06d}") == (8 if window else 0)
        counts.append(sum(len(queue.keys(f"{run}/{index:06d}")) for index in range(window + 1)))
    assert counts == [8] * 30


# TransferQueue alone


@pytest.mark.ray
def test_Q12_storage_memory_is_bounded_over_thirty_windows(ray_cluster: None) -> None:
    client, run = open_transfer_queue(), fresh()
    tokens = arrays(ids=[np.arange(1 << 18)] * 4)  # 1 MiB each
    used = {}
    for window in range(30):
        client.put(f"{run}/{window}", [str(row) for row in range(4)], tokens)
        client.clear(f"{run}/{window}")
        used[window] = storage_mib()
    client.close()
    # 80 MiB went through the storage between the two.
    assert used[29] < used[9] + 40


def storage_mib() -> float:
    """Memory of the storage process of this test's own Ray cluster, in MiB."""
    import psutil  # type: ignore[import-untyped]

    ours = psutil.Process().children(recursive=True)
    (storage,) = [process for process in ours if "ray::SimpleStorageUnit" in " ".join(process.cmdline())]
    resident: int = storage.memory_info().rss
    return resident / (1 << 20)


@pytest.mark.ray
def test_a_put_of_another_type_than_the_columns_is_refused(ray_cluster: None, partition: str) -> None:
    client = open_transfer_queue()
    with pytest.raises(QueueError, match="column 'version' has type double, expected int32"):
        client.put(partition, ["a"], {"version": pa.array([1.0])})
    with pytest.raises(QueueError, match="unknown column 'zzz'; the columns are: ids, "):
        client.put(partition, ["a"], {"zzz": pa.array([1])})
    assert client.keys(partition) == []
    client.close()


@pytest.mark.ray
def test_a_controller_that_does_not_answer_is_an_error_within_the_deadline(ray_cluster: None, partition: str) -> None:
    import ray

    from dataflow import tq

    client = open_transfer_queue(timeout_s=2.0)
    client.put(partition, ["a"], arrays(version=[1]))
    call: Any = ray.get_actor(tq.CONTROLLER, namespace=tq.NAMESPACE).__ray_call__
    pid: int = ray.get(call.remote(lambda _: os.getpid()))
    stop(pid)
    try:
        started = time.monotonic()
        with pytest.raises(QueueError, match=r"did not answer 'list' within 2 s.*queue\.timeout_s"):
            client.keys(partition)
        assert time.monotonic() - started < 10
    finally:
        os.kill(pid, signal.SIGCONT)
    client.close()
    again = open_transfer_queue()
    assert again.keys(partition) == ["a"]
    again.close()


def stop(pid: int) -> None:
    """Suspend a process, and wait until all its threads have stopped."""
    import psutil

    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, f"process {pid} does not stop"
