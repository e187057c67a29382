"""Policy losses of whole sequences: one ratio for all tokens of a session.

Called as the losses of `losses`, with one argument more: ``sequences``, ``[B] int64``, which sequence each row belongs
to. The turns of one session may stand in several rows; rows with equal numbers are one sequence, and have to be in one
micro-batch. Without it, each row is a sequence. ``L`` is the sequence's number of policy tokens.

Both are means over sequences: aggregate them as ``seq-mean-token-mean``, with the same ``sequences``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.losses import TokenLoss, check_clip, clipped_surrogate, token_loss
from stages.algorithms.tokens import loss_inputs, sequence_slots, sum_by_sequence

LOG_SEQUENCE_RATIO_LIMIT = 10.0  # As in verl's gspo; far beyond its clip.
WEIGHT_FLOOR = 1e-10  # As in verl's geo_mean: a weight of 0 would make its logarithm infinite.


def gspo(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    sequences: Tensor | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """GSPO: the geometric mean of the tokens' ratios, clipped as in PPO.

    ``s = exp(Σ_t m_t d_t / L)``, ``s_t = sg(s) · π_t / sg(π_t)`` and
    ``ℓ_t = max(−A s_t, −A clip(s_t, 1 − clip_low, 1 + clip_high))``: each token has the sequence's value and the
    gradient of ``s log π_t``. The clip is the paper's, far tighter than PPO's. Source: Zheng et al., arXiv 2507.18071.
    """
    check_clip("gspo", clip_low, clip_high)
    given = loss_inputs("gspo", log_probs, old_log_probs, advantages, mask, weights)
    slots = sequence_slots("gspo", mask, sequences)
    lengths = sum_by_sequence(given.policy.sum(-1), slots).clamp(min=1)
    mean = (sum_by_sequence(given.log_ratio.detach().sum(-1), slots) / lengths)[slots, None]
    ratio = (given.log_probs - given.log_probs.detach() + mean).clamp(max=LOG_SEQUENCE_RATIO_LIMIT).exp()
    loss, clipped = clipped_surrogate(given.advantages, ratio, clip_low, clip_high)
    return token_loss(loss, given, clipped=clipped)


def geo_mean(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    sequences: Tensor | None = None,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """GMPO: the geometric mean of ratios that are clipped token by token.

    ``ℓ = −Ā exp(Σ_t m_t d̃_t / L)`` with ``d̃ = s · min(s d, s clip(d, −clip_low, clip_high))``, s the sign of A and Ā
    the mean of A over the sequence. The bounds are of the log ratio; both are at least 0. Each policy token carries the
    loss of its sequence. Weights enter by their geometric mean over the sequence. Source: Zhao et al., arXiv
    2507.20673.
    """
    if clip_low < 0.0 or clip_high < 0.0:
        raise ValueError(f"geo_mean: expected clip_low >= 0 and clip_high >= 0, got {clip_low} and {clip_high}")
    given = loss_inputs("geo_mean", log_probs, old_log_probs, advantages, mask, weights)
    slots = sequence_slots("geo_mean", mask, sequences)
    lengths = sum_by_sequence(given.policy.sum(-1), slots).clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return sum_by_sequence(values.sum(-1), slots) / lengths

    sign = given.advantages.sign()
    bounded = sign * torch.minimum(sign * given.log_ratio, sign * given.log_ratio.clamp(-clip_low, clip_high))
    loss = -mean(given.advantages) * mean(bounded).exp()
    if given.weights is not None:
        loss = loss * mean((given.weights + WEIGHT_FLOOR).log().where(given.policy, 0.0)).exp()
    clipped = (bounded != given.log_ratio) & (sign != 0)
    whole = given._replace(weights=None)
    return token_loss(loss[slots, None].expand_as(given.log_probs).where(given.policy, 0.0), whole, clipped=clipped)
