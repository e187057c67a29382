"""The critic: a model that says what return to expect from a prompt and the response so far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stages.algorithms.aggregation import aggregate
from stages.algorithms.critic import value_loss
from stages.optimisation import Optimised
from stages.scoring import MicroBatch, TokenRow, count_sequences, count_tokens, micro_batches, precision, unpad
from stages.training import CriticConfig


class ValueModel:
    """The architecture of a causal language model with a scalar head that starts at zero, so at first every value is 0.

    Args:
        model: Directory of the model that the body starts from.
        dtype: Type of the arithmetic, float32 or bfloat16; the weights are float32.
        device: cpu or cuda.
    """

    def __init__(self, model: str, dtype: str, device: str) -> None:
        from transformers import AutoModelForTokenClassification
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # that the head is new is no news
        self._dtype, self._device = dtype, device
        self.model: Any = AutoModelForTokenClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
        for parameter in self.model.score.parameters():
            torch.nn.init.zeros_(parameter)
        self.model = self.model.to(device).eval()

    def __call__(self, micro: MicroBatch) -> Tensor:
        """Values ``[B, T] float32``: what is expected before each response token is drawn."""
        with precision(self._device, self._dtype):
            logits = self.model(micro.input_ids, attention_mask=micro.attention, use_cache=False).logits
        values: Tensor = logits.squeeze(-1).float().gather(1, micro.place)
        return values

    def score(self, rows: Sequence[TokenRow], most_tokens: int) -> list[NDArray[np.float32]]:
        """Values of each row's response tokens, ``[T] float32`` each."""
        with torch.no_grad():
            micros = micro_batches(rows, most_tokens, self._device)
            return unpad(((micro, self(micro)) for micro in micros), len(rows))

    def save(self, path: Path) -> None:
        """Write the weights as safetensors."""
        from safetensors.torch import save_file

        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in self.model.state_dict().items()}, path)

    def load(self, path: str) -> None:
        """Take the weights of a file that `save` wrote."""
        from safetensors.torch import load_file

        self.model.load_state_dict(load_file(path, device=self._device))


class Critic:
    """Trains a `ValueModel` on returns, with the clipped loss of PPO."""

    def __init__(self, config: CriticConfig, model: str, dtype: str, device: str, micro_batch_tokens: int) -> None:
        self.config = config
        self.values = ValueModel(model, dtype, device)
        self.trained = Optimised(self.values.model, "critic", device, lr=config.lr, grad_clip=config.grad_clip)
        self._device = device
        self._micro_batch_tokens = micro_batch_tokens

    def update(self, rows: Sequence[TokenRow]) -> dict[str, float]:
        """Make `epochs` optimiser steps towards the rows' `returns`, clipped around their `values`.

        Returns:
            Metrics of the first step: loss, gradient norm, and the share of the returns' variance that the values
            explain (1 is perfect, 0 is no better than a constant).
        """
        rows = [row for row in rows if np.any(row.mask)]
        if not rows:
            return {}
        steps = [self._step(rows) for _ in range(self.config.epochs)]
        return steps[0] | {"critic/explained_variance": _explained(rows)}

    def _step(self, rows: Sequence[TokenRow]) -> dict[str, float]:
        self.trained.zero_grad()
        tokens, sequences, total = count_tokens(rows), count_sequences(rows), 0.0
        for micro in micro_batches(rows, self._micro_batch_tokens, self._device):
            token_loss = value_loss(
                values=self.values(micro),
                old_values=micro.values["values"],
                returns=micro.values["returns"],
                mask=micro.mask,
                clip=self.config.clip,
            )
            loss = aggregate(
                token_loss.loss, micro.mask, "token-mean", token_count=tokens, sequence_count=sequences, horizon=1
            )
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return {"critic/loss": total, "critic/grad_norm": self.trained.step()}


def _explained(rows: Sequence[TokenRow]) -> float:
    """Share of the variance of the returns, over policy tokens, that the values explain."""
    used = [(row.values["returns"][row.mask != 0], row.values["values"][row.mask != 0]) for row in rows]
    returns, values = (np.concatenate(of) for of in zip(*used, strict=True))
    spread = float(np.var(returns))
    return 1.0 - float(np.var(returns - values)) / spread if spread else 0.0
