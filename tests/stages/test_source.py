"""The source: which prompts a window holds, and how its rows are tagged."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.draws import Draw, Draws, windows_per_epoch
from dataflow.errors import ConfigError, Drop
from dataflow.stage import StageContext
from stages.source import Source, SourceConfig

from .conftest import CHAT, word_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    word_tokenizer({"eos_token": "</s>", "pad_token": "<pad>"}).save_pretrained(folder)
    return str(folder)


def source(folder: Path, model: str, prompts: list[Any], /, *, seed: int = 0, **options: Any) -> Source:
    """A source that has been set up on the given prompts."""
    path = folder / "prompts.jsonl"
    rows = [{"prompt_id": f"p{n}", "prompt": prompt, "ground_truth": n} for n, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = {
        "files": [str(path)],
        "model": model,
        "prompts": len(prompts),
        "rollout_n": 3,
        "greedy_baseline": False,
        "max_prompt_tokens": 16,
        **options,
    }
    built = Source(SourceConfig.model_validate(config))
    built.setup(StageContext("run", folder, "source-0", seed))
    return built


def write(built: Source, draw: Draw, window: int = 0) -> dict[str, list[Any]]:
    """The prompt rows of a draw, column by column."""
    columns = built.process(Batch({}, (), (), f"run/train/{window:06d}", window, draw=draw))
    return {name: list(values) for name, values in columns.items()}


def fill(built: Source, window: int, per_window: int = 4) -> dict[str, list[Any]]:
    """The prompt rows of a window as a run without further draws fills it."""
    draws = Draws(built.config.prompts, per_window)
    draw = [draws.take(0, per_window) for _ in range(window + 1)][-1]
    return write(built, draw, window)


def ten(folder: Path, model: str, **options: Any) -> Source:
    return source(folder, model, [f"w{n}" for n in range(10)], **options)


# Windows and epochs


def test_D01_S01_ten_prompts_in_windows_of_four_are_four_four_and_two_in_every_epoch(
    tmp_path: Path, model: str
) -> None:
    built = ten(tmp_path, model)
    windows = [fill(built, window) for window in range(6)]
    assert [len(rows["uid"]) for rows in windows] == [4, 4, 2, 4, 4, 2]
    assert [set(rows["epoch"]) for rows in windows] == [{0}, {0}, {0}, {1}, {1}, {1}]
    everything = {f"p{n}" for n in range(10)}
    for epoch in (windows[:3], windows[3:]):
        ids = [prompt for rows in epoch for prompt in rows["prompt_id"]]
        assert (set(ids), len(ids)) == (everything, 10)


def test_S01_the_window_after_an_epoch_begins_the_next_one(tmp_path: Path, model: str) -> None:
    built = source(tmp_path, model, [f"w{n}" for n in range(8)])
    assert (fill(built, 3, 2)["epoch"], fill(built, 4, 2)["epoch"]) == ([0, 0], [1, 1])
    counts = Counter(prompt for window in range(8) for prompt in fill(built, window, 2)["prompt_id"])
    assert set(counts.values()) == {2}


def test_D01_fewer_prompts_than_a_window_are_one_window_of_what_there_is(tmp_path: Path, model: str) -> None:
    built = source(tmp_path, model, ["w1", "w2", "w3"])
    assert len(fill(built, 0, 8)["uid"]) == 3
    assert (windows_per_epoch(3, 8), windows_per_epoch(10, 4), windows_per_epoch(8, 4)) == (1, 3, 2)


def order(built: Source, epoch: int) -> list[str]:
    return [prompt for window in range(3) for prompt in fill(built, epoch * 3 + window)["prompt_id"]]


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides(tmp_path: Path, model: str) -> None:
    first, again, other = (ten(tmp_path, model, seed=seed) for seed in (1, 1, 2))
    assert order(first, 0) == order(again, 0)
    assert order(first, 0) != order(first, 1)
    assert order(first, 0) != order(other, 0)


def test_a_window_is_the_same_whoever_asks_and_however_often(tmp_path: Path, model: str) -> None:
    built = ten(tmp_path, model)
    later = fill(built, 4)
    fill(built, 0)
    assert fill(built, 4) == later


def test_without_shuffling_every_epoch_is_in_file_order(tmp_path: Path, model: str) -> None:
    built = ten(tmp_path, model, shuffle=False)
    assert order(built, 0) == order(built, 1) == [f"p{n}" for n in range(10)]


def test_a_further_draw_goes_on_where_the_last_one_ended_and_is_marked_in_its_rows(tmp_path: Path, model: str) -> None:
    built = ten(tmp_path, model, shuffle=False)
    rows = write(built, Draw(number=2, epoch=1, first=5, count=3), window=4)
    assert rows["uid"] == ["1-p5", "1-p6", "1-p7"]
    assert (rows["draw"], set(rows["window"])) == ([2, 2, 2], {"run/train/000004"})


# Rows


def test_O01_every_prompt_is_one_row_that_asks_for_n_sessions(tmp_path: Path, model: str) -> None:
    rows = fill(source(tmp_path, model, ["w1", "w2"], shuffle=False), 0)
    assert rows["uid"] == ["0-p0", "0-p1"]
    assert (rows["__rollout_n__"], rows["__do_sample__"]) == ([3, 3], [True, True])


def test_O01_with_a_greedy_baseline_every_uid_has_a_second_row_of_one_greedy_session(
    tmp_path: Path, model: str
) -> None:
    rows = fill(source(tmp_path, model, ["w1", "w2"], shuffle=False, greedy_baseline=True), 0)
    assert rows["uid"] == ["0-p0", "0-p0", "0-p1", "0-p1"]
    assert rows["__rollout_n__"] == [3, 1, 3, 1]
    assert rows["__do_sample__"] == [True, False, True, False]
    assert rows["prompt_ids"][0] == rows["prompt_ids"][1]


def test_a_prompt_drawn_in_another_epoch_is_another_uid(tmp_path: Path, model: str) -> None:
    built = source(tmp_path, model, ["w1"])
    assert [fill(built, window)["uid"] for window in range(2)] == [["0-p0"], ["1-p0"]]


def test_a_row_carries_the_prompt_its_ids_its_answer_and_its_window(tmp_path: Path, model: str) -> None:
    rows = fill(source(tmp_path, model, ["w0 w1"]), 0)
    tokenizer = word_tokenizer({"eos_token": "</s>", "pad_token": "<pad>"})
    assert rows["prompt"] == ["w0 w1"]
    assert rows["prompt_ids"] == [tokenizer.convert_tokens_to_ids(["w0", "w1"])]
    assert (rows["ground_truth"], rows["window"]) == (["0"], ["run/train/000000"])


def test_every_row_has_exactly_the_declared_columns_and_fits_their_types(tmp_path: Path, model: str) -> None:
    rows = fill(ten(tmp_path, model, greedy_baseline=True), 0)
    assert set(rows) == {column.name for column in Source.writes}
    assert {len(column.cast(rows[column.name])) for column in Source.writes} == {8}


def test_D08_messages_are_kept_as_json_and_rendered_by_the_chat_template(tmp_path: Path) -> None:
    chat = word_tokenizer({"bos_token": "<s>", "eos_token": "<end>"}, chat=CHAT, begin=True)
    chat.save_pretrained(tmp_path / "chat")
    messages = [{"role": "user", "content": "w1"}]
    rows = fill(source(tmp_path, str(tmp_path / "chat"), ["w1", messages], shuffle=False), 0)
    assert rows["prompt_ids"][0] == rows["prompt_ids"][1]
    assert json.loads(rows["prompt"][1]) == messages


# Prompts longer than the limit


def words(count: int) -> str:
    return " ".join(f"w{n}" for n in range(count))


LENGTHS = [5, 12, 7, 10]


def overlong(folder: Path, model: str, mode: str) -> Source:
    prompts = [words(count) for count in LENGTHS]
    return source(folder, model, prompts, shuffle=False, max_prompt_tokens=10, overlong=mode)


def test_O03_a_longer_prompt_is_dropped_by_name_and_the_others_stay(tmp_path: Path, model: str) -> None:
    lengths = fill(overlong(tmp_path, model, "drop"), 0)["prompt_ids"]
    assert [ids.reason if isinstance(ids, Drop) else len(ids) for ids in lengths] == [5, "prompt too long", 7, 10]


@pytest.mark.parametrize(("mode", "first"), [("cut_left", 2), ("cut_right", 0)])
def test_O03_a_longer_prompt_is_cut_on_the_side_that_was_asked_for(
    tmp_path: Path, model: str, mode: str, first: int
) -> None:
    tokenizer = word_tokenizer({"eos_token": "</s>", "pad_token": "<pad>"})
    ids = fill(overlong(tmp_path, model, mode), 0)["prompt_ids"]
    assert [len(one) for one in ids] == [5, 10, 7, 10]
    assert ids[1] == tokenizer.convert_tokens_to_ids([f"w{n}" for n in range(first, first + 10)])


def test_O03_a_longer_prompt_stops_the_run_before_it_begins_and_is_named(tmp_path: Path, model: str) -> None:
    with pytest.raises(
        ConfigError, match=r"prompt 1 \(id 'p1'\) has 12 tokens, data\.max_prompt_tokens is 10; raise it"
    ):
        overlong(tmp_path, model, "error")


def test_a_file_that_changed_since_it_was_checked_is_refused_at_set_up(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        source(tmp_path, model, ["w1"], files=[str(tmp_path / "none.jsonl")])
    with pytest.raises(ConfigError, match=r"had 2 prompts when the run was checked, and 1 now"):
        source(tmp_path, model, ["w1"], prompts=2)
