"""The journal: what is written is read back, also while it grows and after it was cut off."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dataflow.batch import Failure, Unit
from dataflow.events import ATTEMPT_FAILED, Settled
from dataflow.journal import JournalWriter, append_json, read_batches
from schemas.column import Column

IDS = Column("ids", pa.list_(pa.int32()))
SCORE = Column("score", pa.float32(), nullable=True)
TEXT = Column("text", pa.string())

UNIT = Unit("run/train/000000/0-a/1", "run/train/000000", "0-a", 1, False, "run/train/000000/0-a")


def write(journal: JournalWriter, *names: str) -> None:
    """One batch of rows under the given keys."""
    columns = {
        "ids": IDS.cast([np.arange(len(name)) for name in names]),
        "score": SCORE.cast([None if name == "none" else math.nan for name in names]),
        "text": TEXT.cast([f"Ünï {name}" for name in names]),
    }
    journal.rows("run/train/000000", names, [f"{name}~1" for name in names], columns)


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.arrows")
    return path


def keys(path: Path) -> list[list[str]]:
    return [batch.column("__key__").to_pylist() for batch in read_batches(path)]


def test_rows_are_read_back_with_their_addresses_and_types(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "journal", "reward", "reward-0")
    write(journal, "a", "none")
    journal.close()
    (batch,) = read_batches(only_file(tmp_path / "journal"))
    assert batch.schema.field("ids").type == IDS.type
    first, second = batch.drop_columns(["__at__"]).to_pylist()
    assert math.isnan(first.pop("score"))
    assert first == {
        "__window__": "run/train/000000",
        "__key__": "a",
        "__address__": "a~1",
        "ids": [0],
        "text": "Ünï a",
    }
    assert (second["score"], second["ids"]) == (None, [0, 1, 2, 3])


def test_what_became_of_a_unit_is_read_back(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, "ledger", "coordinator")
    journal.settled([Settled(UNIT, "reward", "done", "", 1, 3, None, "reward-0")])
    journal.settled([Settled(UNIT, "advantage", "dropped: partial group", "1 of 2 units survived", -1, 3)])
    journal.close()
    first, second = [batch.drop_columns(["at"]).to_pylist()[0] for batch in read_batches(only_file(tmp_path))]
    assert first == {
        "window": "run/train/000000",
        "unit": "run/train/000000/0-a/1",
        "uid": "0-a",
        "session": 1,
        "is_baseline": False,
        "stage": "reward",
        "outcome": "done",
        "reason": "",
        "delivery": 1,
        "rows": 3,
        "worker": "reward-0",
        "attempt": None,
        "error": None,
        "message": None,
        "traceback": None,
    }
    assert (second["outcome"], second["reason"], second["worker"]) == (
        "dropped: partial group",
        "1 of 2 units survived",
        "",
    )


def test_a_failed_attempt_is_read_back_with_its_exception(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, "ledger", "coordinator")
    failure = Failure("ValueError", "Ünï", "Traceback (most recent call last): ...", attempt=2)
    journal.settled([Settled(UNIT, "reward", ATTEMPT_FAILED, str(failure), 1, 3, failure, "reward-0")])
    journal.close()
    (batch,) = read_batches(only_file(tmp_path))
    (record,) = batch.select(["outcome", "worker", "attempt", "error", "message", "traceback"]).to_pylist()
    assert record == {
        "outcome": "attempt failed",
        "worker": "reward-0",
        "attempt": 2,
        "error": "ValueError",
        "message": "Ünï",
        "traceback": "Traceback (most recent call last): ...",
    }


def test_a_growing_file_shows_every_batch_written_so_far(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, "reward", "reward-0")
    for count, name in enumerate("abc", start=1):
        write(journal, name)
        assert keys(only_file(tmp_path)) == [[letter] for letter in "abc"[:count]]
    journal.close()
    assert keys(only_file(tmp_path)) == [["a"], ["b"], ["c"]]


def test_a_file_cut_anywhere_is_read_up_to_its_last_whole_batch(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "whole", "reward", "reward-0")
    ends = []
    for name in ("a", "b"):
        write(journal, name)
        ends.append(only_file(tmp_path / "whole").stat().st_size)
    whole = only_file(tmp_path / "whole").read_bytes()
    journal.close()
    cut = tmp_path / "cut.arrows"
    for size in range(len(whole)):
        cut.write_bytes(whole[:size])
        assert keys(cut) == [["a"], ["b"]][: sum(size >= end for end in ends)]


def test_a_worker_that_starts_again_writes_a_file_of_its_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        journal = JournalWriter(tmp_path, "reward", "reward-0")
        write(journal, name)
        journal.close()
    assert sorted(keys(path)[0][0] for path in tmp_path.glob("reward.reward-0.*.arrows")) == ["a", "b"]


def test_journal_files_are_private_and_hold_no_pickle(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, "reward", "reward-0")
    write(journal, "a")
    journal.close()
    path = only_file(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    # Plain Arrow reads it all: no extension type, no binary column that something else would have to decode.
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    assert not [field for field in table.schema if pa.types.is_binary(field.type)]
    assert not [field for field in table.schema if isinstance(field.type, pa.BaseExtensionType)]


def test_a_journal_of_nothing_makes_no_file(tmp_path: Path) -> None:
    JournalWriter(tmp_path, "reward", "reward-0").close()
    nowhere = JournalWriter(None, "reward", "reward-0")
    write(nowhere, "a")
    nowhere.close()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_has_no_batches(tmp_path: Path) -> None:
    path = tmp_path / "empty.arrows"
    path.touch()
    assert list(read_batches(path)) == []


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_batches(tmp_path / "none.arrows"))


def test_json_records_are_appended_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_json(path, {"a": 1})
    append_json(path, {"b": "题"})
    assert path.read_text(encoding="utf-8") == '{"a": 1}\n{"b": "题"}\n'


def test_two_claims_of_one_worker_may_write_at_the_same_time(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    journal = JournalWriter(tmp_path / "journal", "rollout", "rollout-0")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: write(journal, f"k{number}"), range(400)))
    journal.close()
    assert sorted(keys(only_file(tmp_path / "journal"))) == sorted([f"k{number}"] for number in range(400))
