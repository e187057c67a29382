"""Policy losses per token, their aggregation, and distances between log-probabilities.

A loss is computed per token and aggregated apart, with divisors counted over the whole mini-batch: the sum
over micro-batches is then the same number, and the same gradient, however the rows are split. Masked
positions are replaced before the first operation, so what they hold (NaN and infinity included) reaches
neither value nor gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stages.algorithms.catalog import AGGREGATIONS

LOG_RATIO_LIMIT = 20.0  # exp(20) is far beyond any clip and far below float32's overflow.
K3_LIMIT = 10.0  # As in verl's `low_var_kl`.


class TokenLoss(NamedTuple):
    """What a policy loss returns.

    Attributes:
        loss: ``[B, T]``, to be minimised; 0 where the mask is 0.
        metrics: Scalar tensors without gradient. Each is a *sum* over policy tokens: add them over
            micro-batches, then divide by the token count of the mini-batch.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def ppo_clip(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> TokenLoss:
    """PPO's clipped surrogate with the dual clip.

    With ``ρ = exp(log π − log π_old)``: ``ℓ = max(−A ρ, −A clip(ρ, 1 − clip_low, 1 + clip_high))``, and where
    A < 0 at most ``−A dual_clip``. Sources: Schulman et al., arXiv 1707.06347; for the dual clip Ye et al.,
    arXiv 1912.09729.

    Args:
        log_probs: ``[B, T]``, nats, with gradient.
        old_log_probs: ``[B, T]``, nats, of the policy that the trust region is around.
        advantages: ``[B, T]``.
        mask: ``[B, T]``, 1 = policy token.
        clip_low: How far below 1 the ratio may fall.
        clip_high: How far above 1 the ratio may rise.
        dual_clip: Largest ratio that counts where A < 0; above 1.

    Returns:
        Loss and the sums ``clipped`` (tokens where the clip changed the loss), ``dual_clipped`` (tokens where
        the dual clip did) and ``old_kl`` (``log π_old − log π``).

    Raises:
        ValueError: Shapes differ, or an option is out of range.
    """
    if dual_clip <= 1.0 or not 0.0 <= clip_low < 1.0 or clip_high < 0.0:
        raise ValueError(
            "ppo_clip: expected dual_clip > 1, 0 <= clip_low < 1 and clip_high >= 0, "
            f"got {dual_clip}, {clip_low} and {clip_high}"
        )
    policy = _policy_tokens("ppo_clip", mask, log_probs, old_log_probs, advantages)
    advantages = advantages.detach().where(policy, 0.0)
    log_ratio = _difference(log_probs, old_log_probs.detach(), policy)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate = torch.maximum(plain, clipped)
    ceiling = -advantages * dual_clip
    loss = torch.minimum(surrogate, ceiling).where(advantages < 0, surrogate)
    metrics = {
        "clipped": (clipped > plain).sum(),
        "dual_clipped": ((surrogate > ceiling) & (advantages < 0)).sum(),
        "old_kl": -log_ratio.detach().sum(),
    }
    return TokenLoss(loss, metrics)


def policy_gradient(*, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """The score-function loss ``ℓ = −A log π``: its gradient is the policy gradient at the current weights.

    No ratio: it is exact for rows that the current policy drew, and for one optimiser step on them.

    Args:
        log_probs: ``[B, T]``, nats, with gradient.
        old_log_probs: ``[B, T]``, nats; for the metric only.
        advantages: ``[B, T]``.
        mask: ``[B, T]``, 1 = policy token.

    Returns:
        Loss and the sum ``old_kl`` (``log π_old − log π``).

    Raises:
        ValueError: Shapes differ.
    """
    policy = _policy_tokens("policy_gradient", mask, log_probs, old_log_probs, advantages)
    loss = -advantages.detach().where(policy, 0.0) * log_probs.where(policy, 0.0)
    return TokenLoss(loss, {"old_kl": -_difference(log_probs.detach(), old_log_probs.detach(), policy).sum()})


def aggregate(loss: Tensor, mask: Tensor, mode: str, *, tokens: int, sequences: int, horizon: int) -> Tensor:
    """Reduce the token losses of one micro-batch to its share of the mini-batch's loss.

    Divisors are global, so the shares of all micro-batches add up to the loss of the mini-batch. A row (a
    session) must not be split. Where gradients are averaged over D data-parallel ranks, multiply by D.

    Args:
        loss: ``[B, T]``.
        mask: ``[B, T]``, 1 = policy token.
        mode: A key of `AGGREGATIONS`. With ``ℓ_i = Σ_t m_it ℓ_it`` and ``L_i = Σ_t m_it``: ``token-mean``
            ``Σ_i ℓ_i / tokens``; ``token-sum`` ``Σ_i ℓ_i``; ``seq-mean-token-sum`` ``Σ_i ℓ_i / sequences``;
            ``seq-mean-token-mean`` ``Σ_i (ℓ_i / L_i) / sequences``;
            ``seq-mean-token-sum-norm`` ``Σ_i ℓ_i / (sequences · horizon)``.
        tokens: Policy tokens in the whole mini-batch.
        sequences: Rows with a policy token in the whole mini-batch.
        horizon: The longest possible response in tokens; a constant of the run, never the padded width.

    Returns:
        A scalar. If the mini-batch has no policy token it is 0, with gradient 0.

    Raises:
        ValueError: Shapes differ, unknown mode, a negative count, or a horizon below 1.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregate: expected one of {', '.join(AGGREGATIONS)}, got {mode!r}")
    if tokens < 0 or sequences < 0 or horizon < 1:
        raise ValueError(
            f"aggregate: expected tokens >= 0, sequences >= 0 and horizon >= 1, got {tokens}, {sequences} and {horizon}"
        )
    policy = _policy_tokens("aggregate", mask, loss)
    per_row = loss.where(policy, 0.0).sum(-1)
    if mode == "seq-mean-token-mean":
        per_row = per_row / policy.sum(-1).clamp(min=1)
    divisors = {"tokens": tokens, "sequences": sequences, "horizon": horizon}
    total = per_row.sum()
    for name in AGGREGATIONS[mode].divisors:
        total = total / max(divisors[name], 1)
    return total


def k1(*, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """``d = log π − log π_ref`` per token: unbiased for KL(π‖π_ref) under π, high variance, may be negative.

    Source of k1, k2 and k3: Schulman, "Approximating KL divergence", 2020.

    Args:
        log_probs: ``[B, T]``, nats, of the policy that drew the tokens.
        ref_log_probs: ``[B, T]``, nats.
        mask: ``[B, T]``, 1 = policy token.

    Returns:
        ``[B, T]``, nats; 0 where the mask is 0.

    Raises:
        ValueError: Shapes differ.
    """
    policy = _policy_tokens("k1", mask, log_probs, ref_log_probs)
    return log_probs.where(policy, 0.0) - ref_log_probs.where(policy, 0.0)


def k2(*, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """``d² / 2`` per token: biased, low variance, its gradient is that of the KL. Arguments of `k1`."""
    return k1(log_probs=log_probs, ref_log_probs=ref_log_probs, mask=mask).square() / 2


def k3(*, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """``e^{−d} + d − 1`` per token: unbiased, never negative; −d is cut to ±20 and the result to ±10.

    Arguments of `k1`.
    """
    d = k1(log_probs=log_probs, ref_log_probs=ref_log_probs, mask=mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.exp(-d) + d - 1).clamp(-K3_LIMIT, K3_LIMIT)


def mismatch(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the learner's log-probabilities are from those of the engine that drew the tokens.

    Args:
        log_probs: ``[B, T]``, nats, of the learner at the same policy version.
        rollout_log_probs: ``[B, T]``, nats, of the engine.
        mask: ``[B, T]``, 1 = policy token.

    Returns:
        ``mean_abs`` and ``max_abs`` difference, and ``k3``, the mean estimate of KL(engine‖learner); nats,
        over policy tokens, 0 if there are none. Computed in float64.

    Raises:
        ValueError: Shapes differ.
    """
    policy = _policy_tokens("mismatch", mask, log_probs, rollout_log_probs)
    learner, engine = log_probs.detach().double(), rollout_log_probs.detach().double()
    distance = k1(log_probs=engine, ref_log_probs=learner, mask=policy).abs()
    divergence = k3(log_probs=engine, ref_log_probs=learner, mask=policy)
    tokens = max(int(policy.sum()), 1)
    return {
        "mean_abs": float(distance.sum()) / tokens,
        "max_abs": float(distance.max()) if distance.numel() else 0.0,
        "k3": float(divergence.sum()) / tokens,
    }


def _policy_tokens(name: str, mask: Tensor, *tensors: Tensor) -> Tensor:
    """The mask as ``[B, T] bool``, after checking that all have its shape."""
    if mask.dim() != 2 or any(tensor.shape != mask.shape for tensor in tensors):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (*tensors, mask))
        raise ValueError(f"{name}: expected equal shapes [B, T], got {shapes} (the last is the mask)")
    return mask != 0


def _difference(log_probs: Tensor, old_log_probs: Tensor, policy: Tensor) -> Tensor:
    """Log ratio per token, cut to ±20; 0 where the mask is 0."""
    difference = log_probs.where(policy, 0.0) - old_log_probs.where(policy, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
