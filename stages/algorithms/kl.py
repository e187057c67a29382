"""Distances between policies, token by token, and the coefficient of a KL penalty."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.catalog import KL_KINDS
from stages.algorithms.tokens import LOG_RATIO_LIMIT, policy_tokens

K3_LIMIT = 10.0  # As in verl's `low_var_kl`.
LARGEST_STEP = 0.2  # How far the error of one step of `adapt` counts.


def kl_penalty(kind: str, *, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """An estimate of KL(π‖π_ref) per token, from the token that was drawn.

    With ``d = log π − log π_ref``: ``k1`` is d (unbiased for the KL under π, high variance, may be negative); ``abs``
    |d|; ``k2`` d²/2 (biased, low variance); ``k3`` ``e^{−d} + d − 1`` (unbiased, never negative; −d is cut to ±20 and
    the result to ±10). As a term of the loss their *gradients* count: that of k1 has mean 0, that of k3 is of
    KL(π_ref‖π), and that of k2 is of KL(π‖π_ref) itself. So a ``+`` behind the name keeps the value and takes the
    gradient of k2. Source of k1, k2 and k3: Schulman, "Approximating KL divergence", 2020.

    Args:
        kind: A key of `KL_KINDS`.
        log_probs: ``[B, T]``, nats, of the policy that drew the tokens.
        ref_log_probs: ``[B, T]``, nats.
        mask: ``[B, T]``, 1 = policy token.

    Returns:
        ``[B, T]``, nats; 0 where the mask is 0.

    Raises:
        ValueError: Unknown kind, or shapes differ.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"kl_penalty: expected one of {', '.join(KL_KINDS)}, got {kind!r}")
    policy = policy_tokens("kl_penalty", mask, log_probs, ref_log_probs)
    d = log_probs.where(policy, 0.0) - ref_log_probs.where(policy, 0.0)
    value = _estimate(kind.removesuffix("+"), d)
    if not kind.endswith("+"):
        return value
    half_square = d.square() / 2
    return half_square - half_square.detach() + value.detach()


def adapt(coef: float, kl: float, *, target: float, horizon: float, rows: int) -> float:
    """The next coefficient of a KL penalty that is steered towards a target; a fixed one is not passed through here.

    ``β ← β · (1 + clip(KL / target − 1, −0.2, 0.2) · rows / horizon)``. Source: Ziegler et al., arXiv 1909.08593,
    section 2.2.

    Args:
        coef: β so far, at least 0.
        kl: Mean over rows of each row's mean KL per token, nats.
        target: Wanted `kl`, nats; above 0.
        horizon: Rows after which a full error has changed β by a fifth; at least `rows`.
        rows: Rows that `kl` is a mean of.

    Returns:
        β for the next rows, at least 0.

    Raises:
        ValueError: An argument is out of range, or `kl` is not finite.
    """
    if coef < 0.0 or target <= 0.0 or not 0 < rows <= horizon or not abs(kl) < float("inf"):
        raise ValueError(
            "adapt: expected coef >= 0, a finite kl, target > 0 and 0 < rows <= horizon, "
            f"got {coef}, {kl}, {target}, {rows} and {horizon}"
        )
    error = min(max(kl / target - 1.0, -LARGEST_STEP), LARGEST_STEP)
    return coef * (1.0 + error * rows / horizon)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the distributions that logits give.

    Args:
        logits: ``[..., V]``; −∞ for tokens that cannot be drawn.

    Returns:
        ``[...]``, nats, with gradient.
    """
    log_probs = torch.log_softmax(logits, dim=-1)
    # 0 · log 0 is 0 in an entropy and NaN in floating point.
    return -(log_probs.exp() * log_probs.where(log_probs > -torch.inf, 0.0)).sum(-1)


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
    policy = policy_tokens("mismatch", mask, log_probs, rollout_log_probs)
    learner, engine = log_probs.detach().double(), rollout_log_probs.detach().double()
    distance = kl_penalty("abs", log_probs=engine, ref_log_probs=learner, mask=policy)
    divergence = kl_penalty("k3", log_probs=engine, ref_log_probs=learner, mask=policy)
    tokens = max(int(policy.sum()), 1)
    return {
        "mean_abs": float(distance.sum()) / tokens,
        "max_abs": float(distance.max()) if distance.numel() else 0.0,
        "k3": float(divergence.sum()) / tokens,
    }


def _estimate(kind: str, d: Tensor) -> Tensor:
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "k2":
        return d.square() / 2
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.exp(-d) + d - 1).clamp(-K3_LIMIT, K3_LIMIT)
