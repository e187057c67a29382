"""Toy tokenizers and a toy model, made by the tests themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

WORDS = [*(f"w{number}" for number in range(16)), "he", "llo", "hello", "ok", "5", "user", "system", "assistant"]
CHAT = (
    "<s>{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def word_tokenizer(
    specials: Mapping[str, str], *, chat: str | None = None, extra: Sequence[str] = (), begin: bool = False
) -> Any:
    """A tokenizer of whole words. Ids: the specials in their order, then `extra`, then `WORDS`, then [UNK].

    Args:
        specials: Such as ``{"eos_token": "</s>"}``; equal texts share an id.
        chat: A chat template.
        extra: More special tokens.
        begin: Whether encoding puts the begin token in front.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = list(dict.fromkeys([*specials.values(), *extra, *WORDS, "[UNK]"]))
    vocabulary = {name: number for number, name in enumerate(names)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begin:
        token = specials["bos_token"]
        raw.post_processor = processors.TemplateProcessing(
            single=f"{token} $A", special_tokens=[(token, vocabulary[token])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="[UNK]",
        additional_special_tokens=list(extra),
        clean_up_tokenization_spaces=False,
        **specials,
    )
    tokenizer.chat_template = chat
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer, hidden size 32 and 32 tokens, in float32, with a word tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    word_tokenizer({"eos_token": "</s>", "pad_token": "<pad>"}).save_pretrained(folder)
    return folder
