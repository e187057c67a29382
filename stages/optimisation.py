"""A model and its optimiser, as learner and critic share them: a checked step, and a move to another device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Optimised:
    """A model with AdamW over those of its parameters that are trained.

    Args:
        model: In float32; it is moved to the device and put into evaluation mode, since dropout would make each forward
            pass another policy.
        name: For errors.
        device: cpu or cuda.
        lr: Learning rate.
        betas: Momentum terms.
        weight_decay: Decoupled weight decay.
        grad_clip: Largest norm of the gradient.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        device: str,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
    ) -> None:
        self.model = model.to(device).eval()
        self._name = name
        self._grad_clip = grad_clip
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trained, lr=lr, betas=betas, weight_decay=weight_decay)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def step(self) -> float:
        """Clip the gradient and make one optimiser step; returns the gradient's norm before the clip.

        Raises:
            FloatingPointError: If the norm is not finite; then nothing was changed.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained, self._grad_clip))
        if not np.isfinite(norm):
            raise FloatingPointError(f"{self._name}: the norm of the gradient is {norm}; no step was made")
        self._optimizer.step()
        return norm

    def move(self, device: str) -> None:
        """Move weights and optimiser state; gradients are forgotten."""
        self.zero_grad()
        self.model.to(device)
        for state in self._optimizer.state.values():
            # AdamW counts its steps on the CPU, whatever the device.
            state.update({name: tensor.to(device) for name, tensor in state.items() if name != "step"})
