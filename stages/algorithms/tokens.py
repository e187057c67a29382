"""What every function over tokens checks and computes first."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is far beyond any clip, and float32 holds it."""


class LossInputs(NamedTuple):
    """Inputs of a policy loss with masked positions replaced, ``[B, T]`` each.

    Attributes:
        policy: ``bool``, where the policy tokens are.
        log_probs: With gradient; 0 elsewhere.
        log_ratio: ``log π − log π_old`` with gradient, cut to ±20; 0 elsewhere.
        advantages: Without gradient; 0 elsewhere.
        weights: Without gradient; 0 elsewhere. None stands for all 1.
    """

    policy: Tensor
    log_probs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    weights: Tensor | None


def loss_inputs(
    name: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    *others: Tensor,
) -> LossInputs:
    """Check the shapes of a policy loss's inputs and replace what masked positions hold.

    Raises:
        ValueError: Shapes differ; names the function and all shapes.
    """
    given = (log_probs, old_log_probs, advantages, *others, *(() if weights is None else (weights,)))
    policy = policy_tokens(name, mask, *given)
    return LossInputs(
        policy,
        log_probs.where(policy, 0.0),
        log_ratio(log_probs, old_log_probs.detach(), policy),
        advantages.detach().where(policy, 0.0),
        None if weights is None else weights.detach().where(policy, 0.0),
    )


def policy_tokens(name: str, mask: Tensor, *tensors: Tensor) -> Tensor:
    """The mask as ``[B, T] bool``, after checking that all have its shape.

    Raises:
        ValueError: Shapes differ; names the function and all shapes.
    """
    if mask.dim() != 2 or any(tensor.shape != mask.shape for tensor in tensors):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (*tensors, mask))
        raise ValueError(f"{name}: expected equal shapes [B, T], got {shapes} (the last is the mask)")
    return mask != 0


def log_ratio(log_probs: Tensor, other: Tensor, policy: Tensor) -> Tensor:
    """``log π − log π_other`` per token, cut to ±20; 0 where the mask is 0.

    Masked positions are replaced before the subtraction, so what they hold reaches neither value nor gradient.
    """
    difference = log_probs.where(policy, 0.0) - other.where(policy, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_slots(name: str, mask: Tensor, sequences: Tensor | None) -> Tensor:
    """Number the sequences of a batch, so that sums over their rows have a place each.

    Args:
        name: The function, for the error.
        mask: ``[B, T]``.
        sequences: ``[B] int64``, equal for the rows of one sequence; without it, each row is a sequence.

    Returns:
        ``[B] int64``: the slot of each row's sequence, in [0, B).

    Raises:
        ValueError: `sequences` has not one number for each row.
    """
    if sequences is None:
        return torch.arange(len(mask), device=mask.device)
    if sequences.shape != mask.shape[:1]:
        raise ValueError(
            f"{name}: expected sequences of shape [{len(mask)}], one number per row, got {list(sequences.shape)}"
        )
    slots: Tensor = torch.unique(sequences, return_inverse=True)[1]
    return slots


def sum_by_sequence(values: Tensor, slots: Tensor) -> Tensor:
    """Sum ``[B]`` values of rows into their sequences' slots: ``[B]``; slots without a row hold 0."""
    return torch.zeros_like(values).index_add(0, slots, values)
