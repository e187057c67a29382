"""What a model directory or a weight file holds, read from safetensors headers alone."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open


def parameter_sizes(path: str) -> dict[str, int]:
    """Parameter name -> number of elements of one safetensors file, in the file's order."""
    with safe_open(path, framework="pt") as file:
        # A safetensors file is no dict: it cannot be iterated.
        names = file.keys()
        return {name: _numel(file.get_slice(name).get_shape()) for name in names}


def model_parameters(model: str) -> set[str]:
    """Names of the parameters of a model directory; a tied output head is not one of its own."""
    folder = Path(model)
    names = {name for path in folder.glob("*.safetensors") for name in parameter_sizes(str(path))}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return names - {"lm_head.weight"} if config.get("tie_word_embeddings") else names


def _numel(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
