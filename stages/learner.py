"""The learner: holds the trained policy, takes rows and makes optimiser steps, and writes weights.

It knows no queue and no stage. Its interface, rows in and metrics and a state dict out, is what a distributed
learner has to offer too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dataflow.stage import import_object
from dataflow.weights import WeightsDirectory, WeightsRef
from stages.algorithms.aggregation import aggregate
from stages.algorithms.catalog import LOSSES, SelectionNeeds
from stages.algorithms.correction import importance_weights, rejection_mask
from stages.algorithms.kl import entropy, kl_penalty, mismatch
from stages.engines.fingerprint import fingerprint
from stages.optimisation import Optimised
from stages.scoring import (
    MicroBatch,
    TokenRow,
    chosen_log_probs,
    count_sequences,
    count_tokens,
    micro_batches,
    number_sequences,
    precision,
    response_logits,
    unpad,
)
from stages.training import CorrectionConfig, LearnerConfig

PROBE_TOKENS = 24
METRIC_NAMES = ("mean_abs", "max_abs", "k3")
Measured = list[tuple[dict[str, float], int]]
"""Figures of micro-batches, each with its number of tokens."""


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
        if config.lora is not None:
            from stages.lora import add_adapter

            self.model = add_adapter(self.model, config.lora)
        self._trained = Optimised(
            self.model,
            "policy",
            config.device,
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            grad_clip=config.grad_clip,
        )
        self._needs = LOSSES[config.loss]
        self._loss: Callable[..., Any] = import_object(self._needs.function, "update.loss")
        self._weights = weights
        vocabulary = int(self.model.config.vocab_size)
        self._probe = tuple(int(i) for i in np.random.default_rng(0).integers(0, vocabulary, PROBE_TOKENS))
        self._probe_log_probs = self._score_probe()

    def update(self, rows: Sequence[TokenRow]) -> dict[str, float]:
        """Train on rows and advance the version by one.

        Rows with no policy token change nothing. With no policy token at all there is no optimiser step and the
        weights stay as they are, bit for bit.

        Args:
            rows: In canonical order, with the values `advantages`, `rollout_log_probs`, and `ref_log_probs` if there is
                a KL loss and no adapter.

        Returns:
            Metrics: loss, gradient norm, log-probability mismatch, clipping; means over policy tokens.
        """
        cfg = self.config
        rows = [row for row in rows if np.any(row.mask)]
        metrics: dict[str, float] = {"update/optimizer_steps": 0.0, "update/tokens": float(count_tokens(rows))}
        if rows:
            before: dict[str, float] = {}
            if cfg.looks_first:
                rows, before = self._look(rows)
                rows = [row for row in rows if np.any(row.mask)]  # what was rejected is in no denominator
            steps = [
                (self._step(batch, compare=not cfg.looks_first), count_tokens(batch))
                for _ in range(cfg.epochs)
                for batch in self._mini_batches(rows)
            ]
            metrics["update/optimizer_steps"] = float(len(steps))
            metrics |= _merged(steps) | before
        self.version += 1
        return metrics

    def publish(self, others: Mapping[str, Callable[[Path], object]] | None = None) -> WeightsRef:
        """Write the current version to its file and return its reference, probe included.

        Args:
            others: Name -> what writes a further file of the version.
        """
        from safetensors.torch import save_file

        previous, self._probe_log_probs = self._probe_log_probs, self._score_probe()
        tensors = self._state_dict()
        path = self._weights.write(lambda place: save_file(tensors, place), self.version)
        step = max(abs(new - old) for new, old in zip(self._probe_log_probs, previous, strict=True))
        return WeightsRef(
            self.version,
            str(path),
            self._probe,
            tuple(self._probe_log_probs),
            step,
            tuple((name, fingerprint(tensor)) for name, tensor in tensors.items()),
            {name: str(self._weights.write(write, self.version, name)) for name, write in (others or {}).items()},
        )

    def move(self, device: str) -> None:
        """Move everything, so that another process can have the device, or back to it; what is there stays."""
        self._trained.move(device)

    def save(self, directory: Path) -> None:
        """Write the model in Hugging Face layout, tokenizer included, an adapter merged into the weights."""
        from transformers import AutoTokenizer

        model, state = self.model, None
        if self.config.lora is not None:
            model, state = self.model.get_base_model(), self._merged()
        model.save_pretrained(directory, state_dict=state)
        AutoTokenizer.from_pretrained(self.config.model).save_pretrained(directory)

    # ---- inside -------------------------------------------------------------------------------------

    def _merged(self) -> dict[str, Tensor]:
        if self.config.lora is None:
            return dict(self.model.state_dict())
        from stages.lora import merged_state

        return merged_state(self.model)

    def _state_dict(self) -> dict[str, Tensor]:
        dtype = getattr(torch, self.config.dtype)
        tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in self._merged().items()}
        if getattr(self.model.config, "tie_word_embeddings", False):
            tensors.pop("lm_head.weight", None)
        return tensors

    def _mini_batches(self, rows: Sequence[TokenRow]) -> list[list[TokenRow]]:
        """Cut rows into mini-batches of whole groups, in their order; none if rejection left no row."""
        if not rows:
            return []
        groups: dict[str, list[TokenRow]] = {}
        for row in rows:
            groups.setdefault(row.group, []).append(row)
        count = min(self.config.mini_batches, len(groups))
        lots = np.array_split(np.arange(len(groups)), count)
        whole = list(groups.values())
        return [[row for index in lot for row in whole[index]] for lot in lots]

    def _micro_batches(self, rows: Sequence[TokenRow]) -> list[MicroBatch]:
        return micro_batches(rows, self.config.micro_batch_tokens, self.config.device)

    def _look(self, rows: Sequence[TokenRow]) -> tuple[list[TokenRow], dict[str, float]]:
        """What the policy says of the rows before the first step, and what follows from it.

        Returns:
            The rows with what the configuration asks for: `old_log_probs`, `ref_log_probs`, `weights`, and the mask
            that rejection leaves. And engine against learner.
        """
        cfg = self.config
        compared: Measured = []
        policy, reference = [], []
        with torch.no_grad():
            for micro in self._micro_batches(rows):
                policy.append((micro, self._log_probs(micro)))
                compared += _mismatches(policy[-1][1], micro)
                if cfg.kl_loss is not None and cfg.lora is not None:
                    with self.model.disable_adapter():
                        reference.append((micro, self._log_probs(micro)))
        looked = _with(rows, "now", unpad(policy, len(rows)))
        if reference:
            looked = _with(looked, "ref_log_probs", unpad(reference, len(rows)))
        metrics = _merged(compared)
        if cfg.correction is not None:
            looked, figures = _corrected(looked, cfg.correction)
            metrics |= figures
        if cfg.old_log_probs == "recomputed":
            looked = [row.with_values(rollout_log_probs=row.values["now"]) for row in looked]
        return looked, metrics

    def _step(self, rows: Sequence[TokenRow], *, compare: bool) -> dict[str, float]:
        """One optimiser step over a mini-batch, accumulated over micro-batches."""
        cfg, needs = self.config, self._needs
        if needs.needs_batch is not None:
            rows = self._select(rows, needs.needs_batch)
        tokens, sequences = count_tokens(rows), count_sequences(rows)
        self._trained.zero_grad()
        sums: dict[str, float] = {}
        compared: Measured = []
        for micro in self._micro_batches(rows):
            reduce = partial(
                aggregate,
                mask=micro.mask,
                mode=cfg.aggregation,
                token_count=tokens,
                sequence_count=sequences,
                horizon=cfg.horizon,
                sequences=micro.sequences,
            )
            logits = self._logits(micro)
            log_probs = chosen_log_probs(logits, micro)
            token_loss = self._loss(
                log_probs=log_probs,
                old_log_probs=micro.values["rollout_log_probs"],
                advantages=micro.values["advantages"],
                mask=micro.mask,
                weights=micro.values.get("weights"),
                **({"sequences": micro.sequences} if needs.sequences else {}),
                **({"selected": micro.values["selected"]} if needs.needs_batch else {}),
                **{name: value for name, value in cfg.loss_options.items() if name in needs.options},
            )
            loss = policy_loss = reduce(token_loss.loss)
            if cfg.kl_loss is not None:
                kl = kl_penalty(
                    cfg.kl_loss.kind, log_probs=log_probs, ref_log_probs=micro.values["ref_log_probs"], mask=micro.mask
                )
                loss = loss + cfg.kl_loss.coef * reduce(kl)
                _add(sums, "policy/ref_kl", kl.sum() / tokens)
            with torch.set_grad_enabled(cfg.entropy_coef != 0):
                spread = entropy(logits) * micro.mask
            _add(sums, "policy/entropy", spread.sum() / tokens)
            if cfg.entropy_coef:
                loss = loss - cfg.entropy_coef * reduce(spread)
            loss.backward()  # type: ignore[no-untyped-call]
            _add(sums, "loss/policy", policy_loss)
            _add(sums, "policy/nll", -(log_probs * micro.mask).sum() / tokens)
            for name, value in token_loss.metrics.items():
                _add(sums, f"update/{name}", value / tokens)
            if compare:
                compared += _mismatches(log_probs.detach(), micro)
        return sums | {"grad_norm": self._trained.step()} | _merged(compared)

    def _select(self, rows: Sequence[TokenRow], needs: SelectionNeeds) -> list[TokenRow]:
        """Let the loss choose tokens over the whole mini-batch, as the policy is now."""
        with torch.no_grad():
            now = unpad(((micro, self._log_probs(micro)) for micro in self._micro_batches(rows)), len(rows))
        inputs = {
            "log_probs": _padded(now),
            "old_log_probs": _padded([row.values["rollout_log_probs"] for row in rows]),
            "advantages": _padded([row.values["advantages"] for row in rows]),
            "mask": _padded([row.mask for row in rows]),
            "row_ids": torch.arange(len(rows)),
            "seed": self.config.seed + self.version,
        }
        select = import_object(needs.function, "update.loss")
        options = {name: self.config.loss_options[name] for name in needs.options}
        selected = select(**{name: inputs[name] for name in needs.inputs}, **options)
        return _with(rows, "selected", _cut(selected, rows))

    def _logits(self, micro: MicroBatch) -> Tensor:
        with precision(self.config.device, self.config.dtype):
            return response_logits(self.model, micro, self.config.temperature)

    def _log_probs(self, micro: MicroBatch) -> Tensor:
        return chosen_log_probs(self._logits(micro), micro)

    def _score_probe(self) -> list[float]:
        ids = torch.tensor([self._probe], device=self.config.device)
        with torch.no_grad(), precision(self.config.device, self.config.dtype):
            logits = self.model(ids, use_cache=False).logits[0, :-1].float()
        chosen = torch.log_softmax(logits, dim=-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        return [float(value) for value in chosen]


def _corrected(rows: Sequence[TokenRow], config: CorrectionConfig) -> tuple[list[TokenRow], dict[str, float]]:
    """Rows with importance weights, and without the tokens that a rule rejects."""
    mask = _padded([row.mask for row in rows])
    inputs: dict[str, Tensor] = {
        "log_probs": _padded([row.values["now"] for row in rows]),
        "rollout_log_probs": _padded([row.values["rollout_log_probs"] for row in rows]),
        "mask": mask,
        "sequences": number_sequences(rows),
    }
    metrics: dict[str, float] = {}
    corrected = list(rows)
    if config.reject:
        left = rejection_mask([rule.rule() for rule in config.reject], **inputs)
        metrics["correction/rejected_share"] = 1.0 - float(left.count_nonzero() / mask.count_nonzero())
        masks = _cut(left, rows)
        corrected = [replace(row, mask=of.astype(np.int8)) for row, of in zip(corrected, masks, strict=True)]
    if config.weights is not None:
        found = importance_weights(config.weights.rule(), **inputs)
        corrected = _with(corrected, "weights", _cut(found.weights, rows))
        metrics |= {f"correction/weight_{name}": value for name, value in found.metrics.items()}
    return corrected, metrics


def _padded(arrays: Sequence[NDArray[Any]]) -> Tensor:
    """Stack ``[T]`` arrays into ``[N, T] float32``, zeros behind."""
    return pad_sequence([torch.from_numpy(array.astype(np.float32)) for array in arrays], batch_first=True)


def _cut(values: Tensor, rows: Sequence[TokenRow]) -> list[NDArray[Any]]:
    """The opposite of `_padded`."""
    return [found[: len(row.response_ids)].numpy() for row, found in zip(rows, values, strict=True)]


def _with(rows: Sequence[TokenRow], name: str, values: Sequence[NDArray[Any]]) -> list[TokenRow]:
    return [row.with_values(**{name: of}) for row, of in zip(rows, values, strict=True)]


def _add(sums: dict[str, float], name: str, value: Tensor) -> None:
    sums[name] = sums.get(name, 0.0) + float(value.detach())


def _mismatches(log_probs: Tensor, micro: MicroBatch) -> Measured:
    """Engine against learner: rows of the current version (mismatch) apart from stale ones (drift)."""
    current = torch.tensor([row.current for row in micro.rows], device=micro.mask.device)[:, None]
    found = []
    for prefix, chosen in (("mismatch", current), ("drift", ~current)):
        mask = micro.mask * chosen
        tokens = int(mask.sum())
        if tokens:
            values = mismatch(log_probs, micro.values["rollout_log_probs"], mask)
            found.append(({f"{prefix}/{name}": values[name] for name in METRIC_NAMES}, tokens))
    return found


def _merged(parts: Measured) -> dict[str, float]:
    """Merge the figures of micro-batches or steps: maxima stay maxima, means are weighted by tokens."""
    merged: dict[str, float] = {}
    for name in {name for values, _ in parts for name in values}:
        of = [(values[name], tokens) for values, tokens in parts if name in values]
        if name.endswith("max_abs") or name == "grad_norm":
            merged[name] = max(value for value, _ in of)
        else:
            merged[name] = sum(value * tokens for value, tokens in of) / sum(tokens for _, tokens in of)
    return merged
