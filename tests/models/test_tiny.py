"""The tiny model: the same each time, and neither good nor hopeless at its task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.models.tiny import MAX_TOKENS, make_tiny, tiny_prompts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(directory)
    return directory


@pytest.fixture(scope="module")
def loaded(made: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(made), AutoTokenizer.from_pretrained(made)


def accuracy(model: Any, tokenizer: Any, *, sample: bool) -> float:
    """Share of exact answers over all prompts, one each."""
    torch.manual_seed(0)
    prompts = tiny_prompts()
    ids = tokenizer([row["prompt"] for row in prompts], return_tensors="pt")
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
    drawn = model.generate(**ids, max_new_tokens=MAX_TOKENS, **options)[:, ids["input_ids"].shape[1] :]
    answers: list[str] = tokenizer.batch_decode(drawn, skip_special_tokens=True)
    return sum(a == row["ground_truth"] for a, row in zip(answers, prompts, strict=True)) / len(prompts)


@pytest.mark.slow
def test_it_is_made_the_same_twice(made: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "again")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (made / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_it_is_sometimes_right_when_sampled_and_often_wrong_when_greedy(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    assert 0.3 <= accuracy(model, tokenizer, sample=True) <= 0.6
    assert 0.4 <= accuracy(model, tokenizer, sample=False) <= 0.8


def test_its_tokenizer_keeps_every_character(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    for row in tiny_prompts():
        ids = tokenizer(row["prompt"])["input_ids"]
        assert len(ids) == len(row["prompt"])
        assert tokenizer.decode(ids) == row["prompt"]


def test_a_directory_that_holds_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        make_tiny(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_prompts_are_distinct_sums_with_their_answers() -> None:
    prompts = tiny_prompts()
    assert len({row["prompt_id"] for row in prompts}) == len(prompts) == 256
    for row in prompts:
        first, second = row["prompt"].rstrip("=").split("+")
        assert int(first) + int(second) == int(row["ground_truth"])
