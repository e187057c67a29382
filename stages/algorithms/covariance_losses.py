"""Policy losses that treat a few tokens apart: those whose probability and advantage go together.

Such tokens make the policy's entropy fall. With ``cov = (A − mean A)(log π − mean log π)``, means over the policy
tokens of the mini-batch. Which tokens are treated apart depends on all of them, so it is decided once per mini-batch
(`select_*`), before it is split; the losses take the decision as ``selected``. Source: Cui et al., "The Entropy
Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617.

A selection is the same whatever the order of the rows and the padding: tokens are taken in the order of ``row_ids`` and
positions. The losses are called as those of `losses`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stages.algorithms.losses import TokenLoss, check_clip, clipped_surrogate, token_loss
from stages.algorithms.tokens import log_ratio, loss_inputs, policy_tokens


def select_clip_cov(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    row_ids: Tensor,
    seed: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """Choose the tokens that `clip_cov` leaves out: at random, among those of high covariance that the clip spares.

    Args:
        log_probs: ``[B, T]``, nats, of all rows of the mini-batch under the current policy.
        old_log_probs: ``[B, T]``, nats.
        advantages: ``[B, T]``.
        mask: ``[B, T]``, 1 = policy token.
        row_ids: ``[B] int64``, distinct and not negative: each row's place in the canonical order.
        seed: Not negative. With the row's id it decides each token's draw, whatever else is in the batch.
        clip_low: As in `clip_cov`.
        clip_high: As in `clip_cov`.
        share: Share of the policy tokens that is chosen, rounded down but at least one; above 0.
        cov_low: Candidates have a covariance above this.
        cov_high: Candidates have a covariance below this.

    Returns:
        ``[B, T] bool``.

    Raises:
        ValueError: Shapes differ, or an option is out of range.
    """
    check_clip("select_clip_cov", clip_low, clip_high)
    policy = policy_tokens("select_clip_cov", mask, log_probs, old_log_probs, advantages)
    places = _canonical_places("select_clip_cov", policy, row_ids)
    ratio = log_ratio(log_probs.detach(), old_log_probs.detach(), policy)[places].exp()
    _, clipped = clipped_surrogate(advantages.detach()[places], ratio, clip_low, clip_high)
    covariance = _covariance(log_probs, advantages, places)
    candidates = ((covariance > cov_low) & (covariance < cov_high) & ~clipped).nonzero()[:, 0]
    width = policy.shape[1]
    draws = [np.random.default_rng((seed, row)).random(width) for row in row_ids.tolist()]
    drawn = torch.from_numpy(np.asarray(draws)).to(policy.device)[places]
    chosen = drawn[candidates].argsort()[: _count("select_clip_cov", share, len(covariance))]
    return _mark(policy, places, candidates[chosen])


def clip_cov(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    selected: Tensor,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """Clip-Cov: PPO's clipped surrogate without the ``selected`` tokens, whose loss and gradient are 0.

    Returns:
        Loss, and the sums ``clipped``, ``selected`` and ``old_kl``.
    """
    check_clip("clip_cov", clip_low, clip_high)
    given = loss_inputs("clip_cov", log_probs, old_log_probs, advantages, mask, weights, selected)
    surrogate, clipped = clipped_surrogate(given.advantages, given.log_ratio.exp(), clip_low, clip_high)
    return token_loss(surrogate.where(selected == 0, 0.0), given, clipped=clipped, selected=selected != 0)


def select_kl_cov(
    *, log_probs: Tensor, advantages: Tensor, mask: Tensor, row_ids: Tensor, share: float = 2e-4
) -> Tensor:
    """Choose the tokens that `kl_cov` holds back: those of the highest covariance.

    Arguments, result and errors of `select_clip_cov`. Of equal covariances the first in canonical order is chosen.
    """
    policy = policy_tokens("select_kl_cov", mask, log_probs, advantages)
    places = _canonical_places("select_kl_cov", policy, row_ids)
    covariance = _covariance(log_probs, advantages, places)
    highest = covariance.argsort(descending=True, stable=True)
    return _mark(policy, places, highest[: _count("select_kl_cov", share, len(covariance))])


def kl_cov(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    selected: Tensor,
    weights: Tensor | None = None,
    coef: float = 0.1,
) -> TokenLoss:
    """KL-Cov: ``ℓ = −A ρ``, plus ``coef · |d|`` on the ``selected`` tokens.

    There is no clip; `coef` is at least 0.

    Returns:
        Loss, and the sums ``selected`` and ``old_kl``.
    """
    if coef < 0.0:
        raise ValueError(f"kl_cov: expected coef >= 0, got {coef}")
    given = loss_inputs("kl_cov", log_probs, old_log_probs, advantages, mask, weights, selected)
    penalty = (coef * given.log_ratio.abs()).where(selected != 0, 0.0)
    return token_loss(-given.advantages * given.log_ratio.exp() + penalty, given, selected=selected != 0)


# ---- inside -----------------------------------------------------------------------------------------


def _canonical_places(name: str, policy: Tensor, row_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each policy token, ordered by the row's id and the position."""
    ordered = row_ids.sort().values
    if row_ids.shape != policy.shape[:1] or bool((ordered[:1] < 0).any() | (ordered[1:] == ordered[:-1]).any()):
        raise ValueError(
            f"{name}: expected {len(policy)} distinct row_ids, none negative, one per row, got {row_ids.tolist()}"
        )
    order = row_ids.argsort()
    rows, columns = policy[order].nonzero(as_tuple=True)
    return order[rows], columns


def _covariance(log_probs: Tensor, advantages: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
    """Of each policy token, in canonical order and in float64, so that a sum's order changes no choice."""
    advantage, log_prob = advantages.detach()[places].double(), log_probs.detach()[places].double()
    return (advantage - advantage.mean()) * (log_prob - log_prob.mean())


def _count(name: str, share: float, tokens: int) -> int:
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{name}: expected 0 < share <= 1, got {share}")
    return max(int(share * tokens), 1)


def _mark(policy: Tensor, places: tuple[Tensor, Tensor], chosen: Tensor) -> Tensor:
    rows, columns = places
    marks = torch.zeros_like(policy)
    marks[rows[chosen], columns[chosen]] = True
    return marks
