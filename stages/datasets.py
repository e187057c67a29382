"""Built-in prompt files, made on the spot. Imports no torch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.models.cache import models_root
from stages.models.tiny import RECIPE, tiny_prompts

ARITHMETIC_PROMPTS = 512
_ARITHMETIC = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}
_SEED = 42


def prompts_path(name: str) -> Path:
    """Path of a prompt file: a built-in data set by name, written now if it is not there, else the path itself."""
    if name not in BUILTIN:
        return Path(name).expanduser()
    file, prompts = BUILTIN[name]
    path = models_root().parent / "data" / file
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        lines = (json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts())
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.rename(path)
    return path


def arithmetic_prompts() -> Iterable[Mapping[str, Any]]:
    """Sums and differences of one-digit numbers from reasoning-gym's own generator, as messages with one example.

    Without an example a small model writes an essay: greedy accuracy of SmolLM2-135M .39 against .69 (64 prompts).

    `extra` of each row carries what reasoning-gym's own scorer needs: `dataset` and `entry`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # its dependency cellpylib has some
        import reasoning_gym

    dataset = reasoning_gym.create_dataset("chain_sum", size=ARITHMETIC_PROMPTS, seed=_SEED, **_ARITHMETIC)
    for number, entry in enumerate(dataset):
        yield {
            "prompt_id": f"chain_sum-{number}",
            "prompt": [
                {"role": "user", "content": "What is 3 + 2?"},
                {"role": "assistant", "content": "3 + 2 = 5"},
                {"role": "user", "content": f"What is {entry['metadata']['expression']}?"},
            ],
            "ground_truth": entry["answer"],
            "data_source": "reasoning_gym/chain_sum",
            "dataset": "chain_sum",
            "entry": json.dumps(entry),
        }


BUILTIN: dict[str, tuple[str, Callable[[], Iterable[Mapping[str, Any]]]]] = {
    "tiny": (f"tiny-{RECIPE}.jsonl", tiny_prompts),
    "arithmetic": ("arithmetic-2.jsonl", arithmetic_prompts),
}
"""Name -> file name, with a version that is raised when the content changes, and what makes it."""
