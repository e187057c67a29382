"""Between text and token ids: chat templates, stop tokens, and the text that a reward grades.

Tokens that an engine drew are never re-encoded: the queue and the update see the ids themselves, and text is made
from them for people and rewards alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.rewards.text import graded_ids


def load_tokenizer(model: str) -> Any:
    """Load a model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def prompt_ids(tokenizer: Any, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a prompt, exactly as the engine will get them.

    With a chat template, plain text is one user message, and the template alone writes the special tokens, so there
    is one begin token. Without one, text is encoded with the tokenizer's own special tokens.

    Raises:
        ValueError: Messages for a tokenizer without a chat template.
    """
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    if not isinstance(prompt, str):
        raise ValueError("the prompt is a list of messages, but the model's tokenizer has no chat template; give text")
    return [int(token) for token in tokenizer(prompt)["input_ids"]]


def stop_token_ids(model: str, tokenizer: Any) -> tuple[int, ...]:
    """Every token id that ends a response: those of the model's generation config, and the tokenizer's own."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(model) / name
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found |= set(value if isinstance(value, list) else [value] if value is not None else [])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(int(token) for token in found))


def response_text(tokenizer: Any, ids: Sequence[int], stop_ids: Collection[int], removed: Collection[int] = ()) -> str:
    """The text that is graded: everything before the first stop token, less the `removed` ids.

    Special tokens are kept otherwise: a tag like `<think>` may be part of the answer.
    """
    return str(tokenizer.decode(graded_ids(ids, stop_ids, removed), skip_special_tokens=False))
