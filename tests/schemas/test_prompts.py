"""Prompt files: what is read, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.prompt_values import PromptValueError, ground_truth_text, id_text, prompt_value
from schemas.prompts import (
    PromptColumns,
    PromptFileError,
    PromptRecord,
    PromptSummary,
    check_prompts,
    read_prompts,
)

DEFAULT = PromptColumns()


def jsonl(folder: Path, *rows: dict[str, Any], name: str = "train.jsonl") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(folder: Path, columns: dict[str, Any], name: str = "train.parquet") -> Path:
    path = folder / name
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def load(*paths: Path, columns: PromptColumns = DEFAULT, truth: bool = False) -> list[PromptRecord]:
    return list(read_prompts(paths, columns, require_ground_truth=truth))


def refusal(*paths: Path, columns: PromptColumns = DEFAULT, truth: bool = False) -> str:
    with pytest.raises(PromptFileError) as caught:
        check_prompts(paths, columns, require_ground_truth=truth)
    return str(caught.value)


def says(message: str, *parts: object) -> None:
    missing = [part for part in parts if str(part) not in message]
    assert not missing, f"{message!r} lacks {missing}"


# What is read


def test_a_row_becomes_a_record_with_its_other_columns_as_json(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        {
            "prompt": "2+2?",
            "ground_truth": 4,
            "prompt_id": "a",
            "data_source": "sums",
            "level": 3,
            "hint": None,
        },
    )
    assert load(path) == [PromptRecord("a", "2+2?", "4", "sums", '{"level": 3}')]


def test_parquet_and_jsonl_of_the_same_rows_give_the_same_records(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "ground_truth": str(i), "prompt_id": f"p{i}", "n": 2**60 + i} for i in range(5)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert load(jsonl(tmp_path, *rows)) == load(parquet(tmp_path, columns))


def test_renamed_columns_are_read_under_their_names_in_the_file(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"question": ["q"], "answer": ["a"]})
    (record,) = load(path, columns=PromptColumns(prompt="question", ground_truth="answer"), truth=True)
    assert (record.prompt, record.ground_truth, record.extra) == ("q", '"a"', "{}")


def test_records_come_in_the_order_of_files_and_rows(tmp_path: Path) -> None:
    one = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b"}, name="one.jsonl")
    two = parquet(tmp_path, {"prompt": ["c", "d", "e"]}, "two.parquet")
    assert [record.prompt for record in load(two, one)] == ["c", "d", "e", "a", "b"]


def test_the_check_counts_rows_files_and_columns(tmp_path: Path) -> None:
    one = jsonl(tmp_path, {"prompt": "a", "level": 1}, {"prompt": "b", "topic": "x"}, name="one.jsonl")
    two = parquet(tmp_path, {"prompt": ["c"], "ground_truth": ["1"]}, "two.parquet")
    summary = check_prompts([one, two], DEFAULT, require_ground_truth=False)
    assert summary == PromptSummary(3, (str(one), str(two)), ("prompt", "level", "topic", "ground_truth"))


def test_the_data_source_defaults_to_the_stem_of_the_file(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b", "data_source": "sums"}, name="gsm8k.jsonl")
    assert [record.data_source for record in load(path)] == ["gsm8k", "sums"]


def test_large_integers_of_a_jsonl_stay_exact(tmp_path: Path) -> None:
    big = 2**70 + 1
    (record,) = load(jsonl(tmp_path, {"prompt": "a", "ground_truth": big, "prompt_id": big, "n": big}))
    assert (record.ground_truth, record.prompt_id, record.extra) == (
        str(big),
        str(big),
        json.dumps({"n": big}),
    )


def test_nan_in_another_column_counts_as_absent(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"prompt": ["a", "b"], "level": [float("nan"), 1.5]})
    assert [record.extra for record in load(path)] == ["{}", '{"level": 1.5}']


@given(
    rows=st.lists(
        st.tuples(
            st.text(min_size=1).filter(lambda text: text.strip() != ""),
            st.one_of(st.integers(), st.text(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False)),
        ),
        min_size=1,
        max_size=20,
    ),
    line_end=st.sampled_from(["\n", "\r\n", "\n\n", "\r\n \r\n"]),
    bom=st.booleans(),
)
def test_whatever_jsonl_can_say_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, Any]], line_end: str, bom: bool
) -> None:
    path = tmp_path_factory.mktemp("any") / "train.jsonl"
    lines = [json.dumps({"prompt": prompt, "ground_truth": gold}, ensure_ascii=False) for prompt, gold in rows]
    path.write_bytes(("\ufeff" * bom + line_end.join(lines)).encode("utf-8"))
    records = load(path, truth=True)
    assert [record.prompt for record in records] == [prompt for prompt, _ in rows]
    golds = [json.loads(record.ground_truth or "") for record in records]
    assert golds == [gold for _, gold in rows]
    assert [type(gold) for gold in golds] == [type(gold) for _, gold in rows]


# D02, a required column is absent


def test_D02_a_raw_gsm8k_file_is_refused_with_the_columns_and_the_config_keys(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"question": ["q"], "answer": ["a"]})
    message = refusal(path, truth=True)
    says(message, path, "'prompt', 'ground_truth'", "'question', 'answer'")
    says(message, "data.columns.prompt and data.columns.ground_truth", "data.train")


def test_D02_a_jsonl_without_the_column_is_refused_too(tmp_path: Path) -> None:
    message = refusal(jsonl(tmp_path, {"question": "q"}))
    says(message, "'prompt'", "'question'", "data.columns.prompt")
    assert "ground_truth" not in message  # it is not required here


def test_D02_a_renamed_optional_column_that_no_file_has_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "q", "idx": 1})
    says(refusal(path, columns=PromptColumns(prompt_id="id")), "data.columns.prompt_id", "'id'", "'idx'")


# D03, line separators inside a jsonl string


def test_D03_line_separators_inside_strings_do_not_cut_rows(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    prompts = ["a\u2028b", "c\u0085d\u2029", "e\r\nf"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode("utf-8"))
    assert [record.prompt for record in load(path)] == prompts


# D04, ground truths of any type


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (42, "42"),
        ("42", '"42"'),
        (42.0, "42.0"),
        (["42", "forty-two"], '["42", "forty-two"]'),
        (np.int64(42), "42"),
        (np.array(["42", "43"]), '["42", "43"]'),
        (np.float64(0.1), "0.1"),
        (True, "true"),
        ({"style": "rule", "unused": None}, '{"style": "rule"}'),
        (None, None),
        (float("nan"), None),
    ],
)
def test_D04_a_ground_truth_keeps_its_type_as_json(value: object, text: str | None) -> None:
    assert ground_truth_text(value) == text


def test_D04_parquet_integers_and_lists_keep_their_types(tmp_path: Path) -> None:
    integers = parquet(tmp_path, {"prompt": ["a"], "ground_truth": pa.array([42], pa.int64())}, "ints.parquet")
    lists = parquet(tmp_path, {"prompt": ["a"], "ground_truth": [["42", "forty-two"]]}, "lists.parquet")
    assert [record.ground_truth for record in load(integers, lists)] == ["42", '["42", "forty-two"]']


@pytest.mark.parametrize("value", [None, float("nan")])
def test_D04_a_ground_truth_of_none_is_refused_by_row(tmp_path: Path, value: float | None) -> None:
    path = parquet(tmp_path, {"prompt": ["a", "b", "c"], "ground_truth": pa.array([1.0, 2.0, value])})
    says(refusal(path, truth=True), path, "row 2", "'ground_truth'", "null", "data.columns.ground_truth")
    assert [record.ground_truth for record in load(path)] == ["1.0", "2.0", None]


@pytest.mark.parametrize("value", [[], ["42", None], float("inf"), b"42", object()])
def test_D04_a_ground_truth_that_can_never_be_right_is_refused(value: object) -> None:
    with pytest.raises(PromptValueError, match=r"expected .*, got "):
        ground_truth_text(value)


# D05, nested records padded with None


def test_D05_keys_that_arrow_added_are_removed_again(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": None}]}
    path = parquet(
        tmp_path, {"prompt": [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "x"}, call]]}
    )
    padded = pq.read_table(path).column("prompt")[0].as_py()[0]
    assert padded == {"role": "user", "content": "hi", "tool_calls": None}  # what the file really holds
    first, second = load(path)
    assert first.prompt == [{"role": "user", "content": "hi"}]
    assert second.prompt == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]},
    ]


def test_D05_a_content_that_is_none_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "fine"}, {"prompt": [{"role": "user", "content": None}]})
    says(refusal(path), path, "row 1", "'prompt'", "text as content of message 0", "null")


# D06, a column that is null at first


def test_D06_a_jsonl_column_null_for_many_rows_keeps_its_later_texts(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "hint": None if i < 2000 else f"h{i}"} for i in range(2010)]
    extras = [record.extra for record in load(jsonl(tmp_path, *rows))]
    assert extras == ["{}"] * 2000 + [json.dumps({"hint": f"h{i}"}) for i in range(2000, 2010)]


def test_D06_parquet_files_may_differ_in_the_type_of_a_column(tmp_path: Path) -> None:
    none = parquet(tmp_path, {"prompt": ["a"], "hint": pa.nulls(1), "tags": [["x"]]}, "a.parquet")
    tags = pa.array([["x", "y"]], pa.large_list(pa.large_string()))
    text = parquet(tmp_path, {"prompt": ["b"], "hint": ["h"], "tags": tags}, "b.parquet")
    assert [record.extra for record in load(none, text)] == [
        '{"tags": ["x"]}',
        '{"hint": "h", "tags": ["x", "y"]}',
    ]


# D07, integer ids


def test_D07_integer_ids_become_text_and_absent_ids_are_generated(tmp_path: Path) -> None:
    given_ids = parquet(tmp_path, {"prompt": ["a", "b"], "prompt_id": [7, 8]}, "one.parquet")
    no_ids = parquet(tmp_path, {"prompt": ["c", "d"]}, "two.parquet")
    assert [record.prompt_id for record in load(given_ids, no_ids)] == ["7", "8", "two:0", "two:1"]


def test_D07_ids_that_pandas_turned_into_floats_are_integers_again(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"prompt": ["a", "b"], "prompt_id": [7.0, float("nan")]})
    assert [record.prompt_id for record in load(path)] == ["7", "train:1"]


@pytest.mark.parametrize("value", [7.5, True, "", ["7"], 2.0**54])
def test_D07_an_id_that_is_neither_text_nor_integer_is_refused(value: object) -> None:
    with pytest.raises(PromptValueError, match="text or an integer"):
        id_text(value)


def test_D07_files_of_one_stem_generate_ids_that_do_not_depend_on_where_they_lie(tmp_path: Path) -> None:
    def ids(root: Path) -> list[str]:
        names = ["a/train.jsonl", "b/train.jsonl", "b/test.jsonl"]
        return [record.prompt_id for record in load(*(jsonl(root, {"prompt": "q"}, name=name) for name in names))]

    assert ids(tmp_path / "here") == ["a/train.jsonl:0", "b/train.jsonl:0", "test:0"]
    assert ids(tmp_path / "here") == ids(tmp_path / "there" / "deep")


@pytest.mark.parametrize("given_first", [True, False])
def test_D07_a_given_id_that_equals_a_generated_one_is_refused(tmp_path: Path, given_first: bool) -> None:
    one = jsonl(tmp_path, {"prompt": "a", "prompt_id": "two:0"}, name="one.jsonl")
    two = jsonl(tmp_path, {"prompt": "b"}, name="two.jsonl")
    says(refusal(*((one, two) if given_first else (two, one))), "'two:0'", one, two)


# D08, text or messages


def test_D08_text_and_messages_keep_their_form(tmp_path: Path) -> None:
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "be kind"}
    path = jsonl(tmp_path, {"prompt": "hi"}, {"prompt": [user]}, {"prompt": [system, user]})
    assert [record.prompt for record in load(path)] == ["hi", [user], [system, user]]


def test_D08_numpy_arrays_of_messages_are_messages(tmp_path: Path) -> None:
    user = {"role": "user", "content": "hi"}
    array = np.array([user], dtype=object)
    assert prompt_value(array) == [user]
    path = parquet(tmp_path, {"prompt": pa.array([array])})
    assert load(path)[0].prompt == [user]


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (None, "got null"),
        (" \n", "got empty text"),
        (7, "got int 7"),
        ({"role": "user", "content": "hi"}, "Put the message into a list"),
        ([], "got an empty list"),
        (["hi"], "got str 'hi'"),
        ([{"content": "hi"}], "text as role of message 0"),
        ([{"role": "user", "content": "hi"}, {"role": "user"}], "text as content of message 1"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "text as content of message 0"),
        ([{"role": "user", "content": " "}], "whose content is empty"),
    ],
)
def test_D08_a_prompt_that_is_neither_text_nor_messages_is_refused(tmp_path: Path, value: object, got: str) -> None:
    path = jsonl(tmp_path, {"prompt": "fine"}, {"prompt": value})
    says(refusal(path), f"{path}, row 1, column 'prompt': expected", got, "data.columns.prompt")


# Q14, ids are free text


def test_Q14_ids_with_separators_and_letters_of_any_script_are_kept(tmp_path: Path) -> None:
    ids: list[Any] = ["math_7", "math_7_0", "remax_baseline_x", "Ünï 题", "a/b#greedy/0/1", 7]
    path = jsonl(tmp_path, *({"prompt": "q", "prompt_id": prompt_id} for prompt_id in ids))
    assert [record.prompt_id for record in load(path)] == [*ids[:-1], "7"]


@pytest.mark.parametrize("ids", [(7, "7"), ("a", "a"), (7, 7.0)])
def test_Q14_ids_that_are_equal_as_text_are_refused_with_both_places(tmp_path: Path, ids: tuple[Any, Any]) -> None:
    one = jsonl(tmp_path, {"prompt": "x"}, {"prompt": "a", "prompt_id": ids[0]}, name="one.jsonl")
    two = jsonl(tmp_path, {"prompt": "b", "prompt_id": ids[1]}, name="two.jsonl")
    says(refusal(one, two), f"{two}, row 0", f"{one}, row 1", f"{str(ids[0])!r}", "data.columns.prompt_id")


# Reserved names


@pytest.mark.parametrize("name", ["reward", "__do_sample__", "__mine", "extra", "epoch", "uid", "response_ids"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_reserved_column_is_refused_with_the_remedy(tmp_path: Path, name: str, kind: str) -> None:
    path = (
        jsonl(tmp_path, {"prompt": "a", name: 1})
        if kind == "jsonl"
        else parquet(tmp_path, {"prompt": ["a"], name: [1]})
    )
    says(refusal(path), path, repr(name), "is reserved", "Rename the column", "data.train")


def test_a_prompt_column_that_is_mapped_elsewhere_is_refused_with_the_key(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a", "question": "b"})
    says(
        refusal(path, columns=PromptColumns(prompt="question")),
        "'prompt' is reserved",
        "data.columns.prompt (now 'question')",
    )


def test_a_catalogued_name_that_the_user_maps_is_read(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a", "reward": 1})
    assert load(path, columns=PromptColumns(ground_truth="reward"), truth=True)[0].ground_truth == "1"


@pytest.mark.parametrize("name", ["__prompt", ""])
def test_a_mapping_to_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    says(
        refusal(jsonl(tmp_path, {"prompt": "a"}), columns=PromptColumns(prompt=name)),
        "data.columns.prompt",
        repr(name),
    )


# Files that cannot be read


def test_files_are_looked_for_before_the_first_record_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=r"got nothing of that name\. Correct the path in data.train"):
        read_prompts([tmp_path / "absent.jsonl"], DEFAULT, require_ground_truth=False)


@pytest.mark.parametrize(
    ("name", "got"),
    [("train.json", "one JSON object per line"), ("train.csv", "got .csv"), ("train", "got no extension")],
)
def test_an_unknown_extension_is_refused(tmp_path: Path, name: str, got: str) -> None:
    says(refusal(jsonl(tmp_path, {"prompt": "a"}, name=name)), name, got, "data.train")


def test_no_file_at_all_is_refused() -> None:
    says(refusal(), "data.train", "at least one")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").mkdir()
    says(refusal(tmp_path / "train.parquet"), "a folder")


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, name="sub/train.jsonl")
    says(refusal(path, tmp_path / "sub" / ".." / "sub" / "train.jsonl"), "got it twice", "data.train")


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    for path in (jsonl(tmp_path), parquet(tmp_path, {"prompt": pa.array([], pa.string())})):
        says(refusal(path), path, "at least one row", "data.train")


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 not really")
    says(refusal(path), path, "expected a parquet file")


def test_a_parquet_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), path)
    says(refusal(path), "'prompt' is there more than once")


@pytest.mark.parametrize("line", [b'{"prompt": "a"', b'["a"]', b"\xff\xfe{", b'"a"', b"nonsense"])
def test_a_malformed_line_is_refused_by_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")
    says(refusal(path), f"{path}:3:", "expected", "data.train")


def test_rows_are_counted_without_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\n{"prompt": "fine"}\n \r\n{"prompt": ""}\n')
    says(refusal(path), "row 1,")


def test_binary_columns_and_lone_surrogates_are_refused_by_column(tmp_path: Path) -> None:
    says(refusal(parquet(tmp_path, {"prompt": ["a"], "image": [b"\x00"]})), "row 0", "'image'", "bytes")
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "\\ud800"}\n')
    says(refusal(path), "row 0", "'prompt'", "lone surrogate")


def test_dates_and_decimals_of_another_column_become_text(tmp_path: Path) -> None:
    day, price = pa.array(["2024-02-29"]).cast(pa.date32()), pa.array(["1.50"]).cast(pa.decimal128(5, 2))
    (record,) = load(parquet(tmp_path, {"prompt": ["a"], "day": day, "price": price}))
    assert json.loads(record.extra) == {"day": "2024-02-29", "price": "1.50"}
