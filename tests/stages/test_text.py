"""Between text and token ids, on toy tokenizers whose every id is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.rewards.text import format_match
from stages.text import load_tokenizer, prompt_ids, response_text, stop_token_ids

from .conftest import CHAT, word_tokenizer


def ids(tokenizer: Any, *tokens: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


@pytest.fixture(scope="module")
def chat() -> Any:
    """A begin token that encoding adds, and a chat template that writes it too."""
    return word_tokenizer({"bos_token": "<s>", "eos_token": "<end>", "pad_token": "<pad>"}, chat=CHAT, begin=True)


def test_O09_a_prompt_has_exactly_one_begin_token_with_a_chat_template(chat: Any) -> None:
    got = prompt_ids(chat, "w1 w2")
    assert got == ids(chat, "<s>", "user", "w1", "w2", "<end>", "assistant")
    assert got.count(chat.bos_token_id) == 1


def test_O09_without_a_chat_template_the_tokenizer_writes_the_begin_token() -> None:
    plain = word_tokenizer({"bos_token": "<s>", "eos_token": "</s>"}, begin=True)
    assert prompt_ids(plain, "w1 w2") == ids(plain, "<s>", "w1", "w2")


@pytest.mark.parametrize(
    "prompt",
    [
        "w3",
        [{"role": "user", "content": "w3"}],
        np.array([{"role": "user", "content": "w3"}], dtype=object),
        ({"role": "user", "content": "w3"},),
    ],
)
def test_D08_text_and_messages_of_one_user_turn_give_the_same_ids(chat: Any, prompt: Any) -> None:
    assert prompt_ids(chat, prompt) == ids(chat, "<s>", "user", "w3", "<end>", "assistant")


def test_D08_messages_keep_their_own_system_text_and_get_no_other(chat: Any) -> None:
    messages = [{"role": "system", "content": "w7"}, {"role": "user", "content": "w3"}]
    assert prompt_ids(chat, messages) == ids(chat, "<s>", "system", "w7", "<end>", "user", "w3", "<end>", "assistant")


def test_D08_messages_without_a_chat_template_are_refused_with_the_remedy() -> None:
    plain = word_tokenizer({"eos_token": "</s>"})
    with pytest.raises(ValueError, match="no chat template; give text"):
        prompt_ids(plain, [{"role": "user", "content": "w3"}])


def test_O07_every_end_token_of_model_and_tokenizer_ends_a_response(tmp_path: Path) -> None:
    tokenizer = word_tokenizer({"eos_token": "</s>"})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert stop_token_ids(str(tmp_path), tokenizer) == (0, 1, 7, 106)


def test_a_model_that_names_no_end_token_ends_at_the_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert stop_token_ids(str(tmp_path), word_tokenizer({"eos_token": "</s>"})) == (0,)
    assert stop_token_ids(str(tmp_path / "hub-id"), word_tokenizer({"pad_token": "<pad>"})) == ()


def test_R17_text_after_the_first_end_token_is_not_graded() -> None:
    tokenizer = word_tokenizer({"eos_token": "</s>", "pad_token": "<pad>"})
    response = ids(tokenizer, "5", "</s>", "w1", "w2")
    assert response_text(tokenizer, response, [tokenizer.eos_token_id]) == "5"


def test_O05_with_end_equal_to_pad_the_end_still_ends_the_text_and_nothing_else_is_lost() -> None:
    tokenizer = word_tokenizer({"eos_token": "</s>", "pad_token": "</s>"})
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    response = ids(tokenizer, "w1", "w2", "</s>", "</s>", "</s>")
    removed = (tokenizer.pad_token_id,)
    assert response_text(tokenizer, response, [tokenizer.eos_token_id], removed) == "w1 w2"
    # A prompt that holds the marker keeps it.
    assert prompt_ids(tokenizer, "w1 </s> w2") == ids(tokenizer, "w1", "</s>", "w2")


def test_R15_end_and_pad_are_removed_and_tags_that_are_special_are_kept() -> None:
    tokenizer = word_tokenizer({"eos_token": "<end>", "pad_token": "<pad>"}, extra=["<think>", "</think>"])
    response = ids(tokenizer, "<think>", "ok", "</think>", "5", "<end>", "<pad>")
    text = response_text(tokenizer, response, [tokenizer.eos_token_id], [tokenizer.pad_token_id])
    assert "".join(text.split()) == "<think>ok</think>5"
    assert format_match("".join(text.split()), pattern=r"<think>.*</think>\d+") == 1.0


def test_pad_tokens_are_removed_wherever_they_stand() -> None:
    tokenizer = word_tokenizer({"eos_token": "<end>", "pad_token": "<pad>"})
    response = ids(tokenizer, "<pad>", "w1", "<pad>", "w2")
    assert response_text(tokenizer, response, [0], [tokenizer.pad_token_id]) == "w1 w2"


def test_an_empty_response_is_empty_text() -> None:
    tokenizer = word_tokenizer({"eos_token": "</s>"})
    assert response_text(tokenizer, [], [0]) == ""
    assert response_text(tokenizer, [0], [0]) == ""


def test_a_tokenizer_is_loaded_from_a_models_folder(tmp_path: Path, chat: Any) -> None:
    chat.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert prompt_ids(loaded, "w1 w2") == prompt_ids(chat, "w1 w2")
