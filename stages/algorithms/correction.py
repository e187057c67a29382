"""Off-policy correction: what to do with tokens that another policy drew.

The rollout policy differs from the trained one where weights are older, or where engine and learner compute in another
precision. With ``x = log π − log π_rollout`` per token, cut to ±20, where π is the policy before the update. Nothing
here is differentiated: weights change what a loss is averaged over, not the loss. Functions take the rows that are
normalised together, a mini-batch or a whole window, so that micro-batches cannot change the result. All take ``[B, T]``
tensors:

- ``log_probs``: nats, of π.
- ``rollout_log_probs``: nats, of the policy that drew the tokens.
- ``mask``: 1 = policy token; what masked positions hold does not count.
- ``sequences``: ``[B] int64``, which sequence each row belongs to; the turns of one session count together. Without it,
  each row is a sequence.

They raise ValueError where shapes differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from stages.algorithms.rules import Rejection, WeightRule
from stages.algorithms.tokens import LOG_RATIO_LIMIT, log_ratio, policy_tokens, sequence_slots, sum_by_sequence


class ImportanceWeights(NamedTuple):
    """What `importance_weights` returns.

    Attributes:
        weights: ``[B, T]`` without gradient; 0 where the mask is 0.
        metrics: Over tokens or over sequences, by the rule's level: ``mean`` and ``max`` of the weights; ``below`` and
            ``above``, the shares outside the bounds; ``effective_sample_size``. All 0 without policy tokens.
    """

    weights: Tensor
    metrics: dict[str, float]


def importance_weights(
    rule: WeightRule,
    *,
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    sequences: Tensor | None = None,
) -> ImportanceWeights:
    """Weights that make rows of another policy count as if π had drawn them, with bounded variance.

    Sources: truncation, Espeholt et al., arXiv 1802.01561; of engine against learner, Yao et al., "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training", 2025; masking, IcePop in arXiv 2510.18855.
    """
    policy = policy_tokens("importance_weights", mask, log_probs, rollout_log_probs)
    x = log_ratio(log_probs.detach(), rollout_log_probs.detach(), policy)
    slots = sequence_slots("importance_weights", mask, sequences)
    # One number for each unit of the level, a token or a sequence's slot; those without a policy token do not count.
    counts = policy
    if rule.level == "sequence":
        x = sum_by_sequence(x.sum(-1), slots).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        counts = sum_by_sequence(policy.sum(-1), slots) > 0
    ratio = x.exp().where(counts, 0.0)
    below, above = ratio < rule.low, ratio > rule.high
    bounded = ratio.clamp(max=rule.high) if rule.mode == "truncate" else ratio.masked_fill(below | above, 0.0)
    units = max(int(counts.sum()), 1)
    mean = bounded.sum() / units
    if rule.normalise and mean > 0:
        bounded = bounded / mean
    metrics = {
        "mean": float(bounded.sum()) / units,
        "max": float(bounded.max()) if bounded.numel() else 0.0,
        "below": float((below & counts).sum()) / units,
        "above": float((above & counts).sum()) / units,
        "effective_sample_size": effective_sample_size(bounded[counts]),
    }
    weights = bounded[slots, None].expand_as(policy) if rule.level == "sequence" else bounded
    return ImportanceWeights(weights.where(policy, 0.0), metrics)


def rejection_mask(
    rules: Sequence[Rejection],
    *,
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    sequences: Tensor | None = None,
) -> Tensor:
    """Which policy tokens pass all rules, as ``[B, T] bool``: the mask to train with.

    Each rule looks at the mask that is given, not at what another rule leaves of it.
    """
    policy = policy_tokens("rejection_mask", mask, log_probs, rollout_log_probs)
    x = log_ratio(log_probs.detach(), rollout_log_probs.detach(), policy)
    slots = sequence_slots("rejection_mask", mask, sequences)
    kept = policy
    for rule in rules:
        kept = kept & _passes(rule, x, policy, slots)
    return kept


def effective_sample_size(weights: Tensor) -> float:
    """``(Σ w)² / (n Σ w²)``: the share of n weights that as many equal ones would be worth.

    Args:
        weights: Any shape, at least 0; computed in float64.

    Returns:
        In [1 / n, 1]; 0 where all weights are 0 or there are none.
    """
    used = weights.detach().double()
    squares = float(used.square().sum())
    return float(used.sum()) ** 2 / (used.numel() * squares) if squares else 0.0


def _passes(rule: Rejection, x: Tensor, policy: Tensor, slots: Tensor) -> Tensor:
    estimate = _estimate(rule.kind, x)
    if rule.level == "seq_max":  # estimates with this level are at least 0, and 0 at masked positions
        largest = estimate.new_zeros(len(slots)).scatter_reduce(0, slots, estimate.amax(-1), "amax")
        estimate = largest[slots, None]
    elif rule.level != "token":
        total = sum_by_sequence(estimate.sum(-1), slots)
        if rule.level == "seq_mean":
            total = total / sum_by_sequence(policy.sum(-1), slots).clamp(min=1)
        estimate = total[slots, None]
    if rule.kind != "k1":
        return estimate <= rule.high
    low = 1.0 / rule.high if rule.low is None else rule.low
    return (estimate <= math.log(rule.high)) & (estimate >= math.log(low))


def _estimate(kind: str, x: Tensor) -> Tensor:
    """Of KL(π_rollout‖π) per token, from a token that π_rollout drew."""
    if kind == "k1":
        return -x
    return x.square() / 2 if kind == "k2" else x.expm1() - x
