"""The tiny model: a Llama-architecture causal LM that adds two numbers, and often gets it wrong.

`python -m stages.models.tiny [DIR]` makes it in some seconds on one core, without a hub. It is trained
on sums as a careless pupil writes them: sometimes right, sometimes with the carry forgotten, sometimes
one off, sometimes copying the question until the paper ends. So at temperature 1 somewhat less than half
of its answers are right, greedy decoding fails on most sums with a carry, and what a right answer looks
like is in the weights already: reinforcement raises its probability within a few updates.

The same machine and library versions make the same bytes.
"""

from __future__ import annotations

import random
import string
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.models.cache import build, is_model, models_root

if TYPE_CHECKING:
    import torch

RECIPE = 1
"""Raised whenever the recipe below changes, so that an old cached model is not taken for the new one."""

MAX_TOKENS = 8
"""Response budget, in tokens, that the model was trained under; only the copying habit uses it up."""

PROMPTS = 256
"""How many of the 450 possible sums `tiny_prompts` asks."""

_SPECIAL = ("<pad>", "<eos>", "<unk>")
_VOCABULARY = (*_SPECIAL, *string.digits, *"+=", *string.ascii_lowercase, *" -*/%^.,:;!?'\"()[]<>#@_")
_PAD, _EOS = 0, 1
_FIRST, _SECOND = range(10, 60), range(1, 10)  # so the sum has two digits
_SEED = 20_240_917
_BATCH = 64
_LESSONS = ((False, 350, 3e-3), (True, 100, 5e-4))


def tiny_directory(cache: Path | None = None) -> Path:
    """Where the model is kept, whether it is there or not."""
    return models_root(cache) / f"tiny-{RECIPE}"


def tiny_model(cache: Path | None = None) -> Path:
    """Directory of the tiny model, made now if it is not there.

    Args:
        cache: Where models are kept; None is the user's cache directory (`models_root`).
    """
    directory = tiny_directory(cache)
    if not is_model(directory):
        make_tiny(directory)
    return directory


def make_tiny(directory: Path) -> None:
    """Make the model and its tokenizer.

    Writes config.json, generation_config.json, model.safetensors (float32, untied head) and the tokenizer (one
    token per character, no chat template). Leaves torch's global generator and number of threads as they were.

    Args:
        directory: Must not exist, or be empty. Appears complete or not at all.

    Raises:
        FileExistsError: The directory is not empty.
    """
    build(directory, _fill)


def tiny_prompts() -> list[dict[str, str]]:
    """The model's task: sums to ask, with `prompt_id`, `prompt`, `ground_truth` (as text) and `data_source`."""
    pairs = [(a, b) for a in _FIRST for b in _SECOND]
    return [
        {
            "prompt_id": f"sum-{a}-{b}",
            "prompt": _question(a, b),
            "ground_truth": str(a + b),
            "data_source": "tiny_sums",
        }
        for a, b in random.Random(_SEED).sample(pairs, PROMPTS)
    ]


def _fill(directory: Path) -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of floats in one order: the same bytes each time
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model = _new_model()
            _train(model)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)


def _new_model() -> Any:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(_VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.08,  # about 1/sqrt(hidden): learns in a fifth of the steps that 0.02 takes
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=_EOS,
        pad_token_id=_PAD,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=None, eos_token_id=_EOS, pad_token_id=_PAD)
    return model


def _train(model: Any) -> None:
    """Supervised training on correct sums, then on careless ones; the loss covers the response alone."""
    import torch

    rng = random.Random(_SEED)
    for careless, steps, peak_lr in _LESSONS:
        optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, total_steps=steps, pct_start=0.1)
        for _ in range(steps):
            ids, labels = _batch(rng, careless)
            loss = model(input_ids=ids, labels=labels).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()


def _batch(rng: random.Random, careless: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both [_BATCH, L] int64; labels are -100 on the prompt and the padding.

    Padding stands on the right, where causal attention does not see it.
    """
    import torch

    index = {token: number for number, token in enumerate(_VOCABULARY)}
    rows, labels = [], []
    for _ in range(_BATCH):
        a, b = rng.choice(_FIRST), rng.choice(_SECOND)
        prompt = [index[c] for c in _question(a, b)]
        text = _careless_answer(a, b, rng) if careless else str(a + b)
        answer = [index[c] for c in text] + [_EOS] * (len(text) < MAX_TOKENS)
        rows.append(prompt + answer)
        labels.append([-100] * len(prompt) + answer)
    length = max(map(len, rows))
    ids = torch.tensor([row + [_PAD] * (length - len(row)) for row in rows])
    return ids, torch.tensor([row + [-100] * (length - len(row)) for row in labels])


def _question(a: int, b: int) -> str:
    return f"{a}+{b}="


def _careless_answer(a: int, b: int, rng: random.Random) -> str:
    """What the pupil writes: the sum, or one of three mistakes. None of the mistakes holds the sum.

    With a carry the likeliest answer forgets it, so that greedy decoding is wrong there.
    """
    draw = rng.random()
    if draw < 0.12:
        return (_question(a, b) * MAX_TOKENS)[:MAX_TOKENS]  # copies the question until the budget is used up
    carry = a % 10 + b % 10 >= 10
    if carry and draw < 0.57:
        return str(a + b - 10)
    if not carry and draw < 0.27:
        return str(a + b + 1)
    return str(a + b)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, eos, unknown = _SPECIAL
    vocabulary = {token: number for number, token in enumerate(_VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        eos_token=eos,
        unk_token=unknown,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def _main(arguments: list[str]) -> None:
    target = Path(arguments[0]) if arguments else tiny_directory()
    if is_model(target):
        print(f"tiny model: already there, {target}")
        return
    print(f"tiny model: training {sum(steps for _, steps, _ in _LESSONS)} steps on one core ...", flush=True)
    started = time.perf_counter()
    make_tiny(target)
    print(f"tiny model: made in {time.perf_counter() - started:.0f} s, {target}")


if __name__ == "__main__":
    _main(sys.argv[1:])
