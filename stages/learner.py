"""The learner: holds the trained policy, takes rows and makes optimiser steps, and writes weights.

It knows no queue and no stage. Its interface, rows in and metrics and a state dict out, is what a distributed
learner has to offer too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataflow.stage import import_object
from dataflow.weights import WeightsDirectory, WeightsRef
from stages.algorithms.aggregation import aggregate
from stages.algorithms.catalog import LOSSES
from stages.algorithms.kl import mismatch
from stages.engines.fingerprint import fingerprint
from stages.training import LearnerConfig

PROBE_TOKENS = 24
METRIC_NAMES = ("mean_abs", "max_abs", "k3")


@dataclass(frozen=True)
class TrainRow:
    """One trajectory row.

    Attributes:
        group: What a mini-batch must not split (the uid).
        prompt_ids: ``[P] int``.
        response_ids: ``[T] int``.
        mask: ``[T]``, 1 = policy token.
        rollout_log_probs: ``[T] float32``, nats, at the sampling temperature.
        advantages: ``[T] float32``.
        current: Whether the tokens were drawn by the weights that the learner holds now.
    """

    group: str
    prompt_ids: NDArray[Any]
    response_ids: NDArray[Any]
    mask: NDArray[Any]
    rollout_log_probs: NDArray[Any]
    advantages: NDArray[Any]
    current: bool


@dataclass(frozen=True)
class _MicroBatch:
    """Padded rows, ``[B, P+T]`` on the left side and ``[B, T]`` on the right."""

    rows: Sequence[TrainRow]
    input_ids: Tensor
    attention: Tensor
    targets: Tensor
    place: Tensor
    mask: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor


class Learner:
    """A causal language model, its optimiser, and the files of its versions."""

    def __init__(self, config: LearnerConfig, weights: WeightsDirectory) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(config.threads)
        self.config = config
        self.version = 0
        self.model: Any = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
        self.model = self.model.to(config.device).eval()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self._loss: Callable[..., Any] = import_object(LOSSES[config.loss].function, "update.loss")
        self._weights = weights
        vocabulary = int(self.model.config.vocab_size)
        self._probe = tuple(int(i) for i in np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS))
        self._probe_log_probs = self._score_probe()

    def update(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """Train on rows and advance the version by one.

        Rows with no policy token change nothing. With no policy token at all there is no optimiser step and the
        weights stay as they are, bit for bit.

        Args:
            rows: In canonical order.

        Returns:
            Metrics: loss, gradient norm, log-probability mismatch, clipping; means over policy tokens.
        """
        cfg = self.config
        rows = [row for row in rows if np.any(row.mask)]
        metrics: dict[str, float] = {"update/optimizer_steps": 0.0, "update/tokens": float(_tokens(rows))}
        if rows:
            before = None if cfg.epochs * cfg.mini_batches == 1 else self._compare(rows)
            steps = [
                (self._step(batch, compare=before is None), _tokens(batch))
                for _ in range(cfg.epochs)
                for batch in self._mini_batches(rows)
            ]
            metrics["update/optimizer_steps"] = float(len(steps))
            metrics |= _merged(steps) | (before or {})
        self.version += 1
        return metrics

    def publish(self) -> WeightsRef:
        """Write the current version to its file and return its reference, probe included."""
        from safetensors.torch import save_file

        previous, self._probe_log_probs = self._probe_log_probs, self._score_probe()
        tensors = self._state_dict()
        temporary = self._weights.path / f".{self.version:06d}.tmp"
        save_file(tensors, temporary)
        path = self._weights.commit(temporary, self.version)
        step = max(abs(new - old) for new, old in zip(self._probe_log_probs, previous, strict=True))
        return WeightsRef(
            self.version,
            str(path),
            self._probe,
            tuple(self._probe_log_probs),
            step,
            tuple((name, fingerprint(tensor)) for name, tensor in tensors.items()),
        )

    def offload(self) -> None:
        """Keep everything in the host's memory, so that another process can have the device. On a CPU nothing moves."""
        self._optimizer.zero_grad(set_to_none=True)
        self._move("cpu")
        torch.cuda.empty_cache()  # what the allocator keeps, no other process can have

    def reload(self) -> None:
        """Move everything back to the device; what is there stays."""
        self._move(self.config.device)

    def save(self, directory: Path) -> None:
        """Write the model in Hugging Face layout, tokenizer included."""
        from transformers import AutoTokenizer

        self.model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(self.config.model).save_pretrained(directory)

    # ---- inside -------------------------------------------------------------------------------------

    def _move(self, device: str) -> None:
        self.model.to(device)
        for state in self._optimizer.state.values():
            # AdamW counts its steps on the CPU, whatever the device.
            state.update({name: tensor.to(device) for name, tensor in state.items() if name != "step"})

    def _state_dict(self) -> dict[str, Tensor]:
        dtype = getattr(torch, self.config.dtype)
        state = self.model.state_dict().items()
        tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state}
        if getattr(self.model.config, "tie_word_embeddings", False):
            tensors.pop("lm_head.weight", None)
        return tensors

    def _mini_batches(self, rows: Sequence[TrainRow]) -> list[list[TrainRow]]:
        """Cut rows into mini-batches of whole groups, in their order."""
        groups: dict[str, list[TrainRow]] = {}
        for row in rows:
            groups.setdefault(row.group, []).append(row)
        count = min(self.config.mini_batches, len(groups))
        lots = np.array_split(np.arange(len(groups)), count)
        whole = list(groups.values())
        return [[row for index in lot for row in whole[index]] for lot in lots]

    def _step(self, rows: Sequence[TrainRow], *, compare: bool) -> dict[str, float]:
        """One optimiser step over a mini-batch, accumulated over micro-batches."""
        cfg = self.config
        tokens = _tokens(rows)
        self._optimizer.zero_grad(set_to_none=True)
        total, sums = 0.0, dict[str, float]()
        compared: list[tuple[dict[str, float], int]] = []
        negative_log_prob = 0.0
        for micro in self._micro_batches(rows):
            log_probs = self._log_probs(micro)
            token_loss, metrics = self._loss(
                log_probs=log_probs,
                old_log_probs=micro.rollout_log_probs,
                advantages=micro.advantages,
                mask=micro.mask,
                **cfg.loss_options,
            )
            loss = aggregate(
                token_loss,
                micro.mask,
                cfg.aggregation,
                token_count=tokens,
                sequence_count=len(rows),
                horizon=cfg.horizon,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            negative_log_prob -= float((log_probs.detach() * micro.mask).sum())
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            if compare:
                compared += _mismatches(log_probs.detach(), micro)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), cfg.grad_clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {float(norm)}; loss {total}, {tokens} tokens")
        self._optimizer.step()
        result = {f"update/{name}": value / tokens for name, value in sums.items()}
        result |= {"loss/policy": total, "grad_norm": float(norm), "policy/nll": negative_log_prob / tokens}
        return result | _merged(compared)

    def _compare(self, rows: Sequence[TrainRow]) -> dict[str, float]:
        """Engine against learner before the first of several steps."""
        compared: list[tuple[dict[str, float], int]] = []
        with torch.no_grad():
            for micro in self._micro_batches(rows):
                compared += _mismatches(self._log_probs(micro), micro)
        return _merged(compared)

    def _micro_batches(self, rows: Sequence[TrainRow]) -> list[_MicroBatch]:
        """Compose micro-batches by length, so that padding is small and the split depends on content alone."""
        ordered = sorted(rows, key=lambda row: len(row.prompt_ids) + len(row.response_ids))
        lots: list[list[TrainRow]] = []
        for row in ordered:
            width = len(row.prompt_ids) + len(row.response_ids)
            if lots and width * (len(lots[-1]) + 1) <= self.config.micro_batch_tokens:
                lots[-1].append(row)
            else:
                lots.append([row])
        return [self._pad(lot) for lot in lots]

    def _pad(self, rows: Sequence[TrainRow]) -> _MicroBatch:
        width = max(len(row.prompt_ids) + len(row.response_ids) for row in rows)
        length = max(len(row.response_ids) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        attention = torch.zeros(len(rows), width, dtype=torch.long)
        targets = torch.zeros(len(rows), length, dtype=torch.long)
        place = torch.zeros(len(rows), length, dtype=torch.long)
        mask, engine, advantages = (torch.zeros(len(rows), length) for _ in range(3))
        for index, row in enumerate(rows):
            prompt, count = len(row.prompt_ids), len(row.response_ids)
            ids[index, : prompt + count] = torch.from_numpy(
                np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64)
            )
            attention[index, : prompt + count] = 1
            targets[index, :count] = torch.from_numpy(row.response_ids.astype(np.int64))
            # The logits at a token predict the next one.
            place[index, :count] = torch.arange(prompt - 1, prompt - 1 + count)
            mask[index, :count] = torch.from_numpy(row.mask.astype(np.float32))
            engine[index, :count] = torch.from_numpy(row.rollout_log_probs.astype(np.float32))
            advantages[index, :count] = torch.from_numpy(row.advantages.astype(np.float32))
        device = self.config.device
        tensors = (t.to(device) for t in (ids, attention, targets, place, mask, engine, advantages))
        return _MicroBatch(rows, *tensors)

    def _log_probs(self, micro: _MicroBatch) -> Tensor:
        """Log-probabilities ``[B, T] float32`` of the response tokens at the sampling temperature."""
        with self._precision():
            logits = self.model(micro.input_ids, attention_mask=micro.attention, use_cache=False).logits
        picked = logits.gather(1, micro.place[:, :, None].expand(-1, -1, logits.shape[-1]))
        scaled = picked.float() / self.config.temperature
        return torch.log_softmax(scaled, dim=-1).gather(-1, micro.targets[:, :, None]).squeeze(-1)

    def _precision(self) -> Any:
        """The arithmetic of a forward pass.

        The weights stay float32, since AdamW's small steps would round away in bfloat16; they are cast when published.
        """
        return torch.autocast(
            self.config.device, getattr(torch, self.config.dtype), enabled=self.config.dtype != "float32"
        )

    def _score_probe(self) -> list[float]:
        ids = torch.tensor([self._probe], device=self.config.device)
        with torch.no_grad(), self._precision():
            logits = self.model(ids, use_cache=False).logits[0, :-1].float()
        chosen = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        return [float(value) for value in chosen]


def _tokens(rows: Sequence[TrainRow]) -> int:
    return int(sum(np.count_nonzero(row.mask) for row in rows))


def _mismatches(log_probs: Tensor, micro: _MicroBatch) -> list[tuple[dict[str, float], int]]:
    """Engine against learner: rows of the current version (mismatch) apart from stale ones (drift)."""
    current = torch.tensor([row.current for row in micro.rows], device=micro.mask.device)[:, None]
    found = []
    for prefix, chosen in (("mismatch", current), ("drift", ~current)):
        mask = micro.mask * chosen
        tokens = int(mask.sum())
        if tokens:
            values = mismatch(log_probs, micro.rollout_log_probs, mask)
            found.append(({f"{prefix}/{name}": values[name] for name in METRIC_NAMES}, tokens))
    return found


def _merged(parts: Sequence[tuple[Mapping[str, float], int]]) -> dict[str, float]:
    """Merge per-micro-batch figures: maxima stay maxima, means are weighted by tokens."""
    merged: dict[str, float] = {}
    for name in {name for values, _ in parts for name in values}:
        of = [(values[name], tokens) for values, tokens in parts if name in values]
        if name.endswith("max_abs") or name == "grad_norm":
            merged[name] = max(value for value, _ in of)
        else:
            merged[name] = sum(value * tokens for value, tokens in of) / sum(tokens for _, tokens in of)
    return merged
