"""The loss of a value function."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.losses import TokenLoss
from stages.algorithms.tokens import policy_tokens


def value_loss(*, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float = 0.5) -> TokenLoss:
    """PPO's clipped value loss, ``ℓ = ½ max((V − G)², (clip(V, V_old − clip, V_old + clip) − G)²)``.

    A value that has moved by more than `clip` towards its target earns no more. Source: the implementation of Schulman
    et al., arXiv 1707.06347; Huang et al., "The 37 Implementation Details of Proximal Policy Optimization", 2022.

    Args:
        values: ``[B, T]``, V, with gradient.
        old_values: ``[B, T]``, V_old, the values that the returns were computed with.
        returns: ``[B, T]``, G, the targets.
        mask: ``[B, T]``, 1 = policy token.
        clip: In the unit of the returns; above 0.

    Returns:
        Loss, and the sum ``clipped`` (tokens where the clip changed the loss).

    Raises:
        ValueError: Shapes differ, or `clip` is not above 0.
    """
    if not clip > 0.0:
        raise ValueError(f"value_loss: expected clip > 0, got {clip}")
    policy = policy_tokens("value_loss", mask, values, old_values, returns)
    values = values.where(policy, 0.0)
    old = old_values.detach().where(policy, 0.0)
    target = returns.detach().where(policy, 0.0)
    plain = (values - target).square()
    clipped = (values.clamp(old - clip, old + clip) - target).square()
    return TokenLoss(torch.maximum(plain, clipped) / 2, {"clipped": (clipped > plain).sum()})
