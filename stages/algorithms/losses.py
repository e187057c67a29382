"""Policy losses per token.

All policy losses, those of `sequence_losses` and `covariance_losses` included, are called alike, by keyword, with
tensors of shape ``[B, T]``:

- ``log_probs``: nats, of the policy that is trained; the only input with gradient.
- ``old_log_probs``: nats, of the policy that the trust region is around.
- ``advantages``.
- ``mask``: 1 = policy token. Masked positions are replaced before the first operation, so what they hold (NaN and
  infinity included) reaches neither value nor gradient.
- ``weights``: importance weights that multiply the loss of each token, see `correction`; None stands for all 1.

With ``d = log π − log π_old`` cut to ±20 and ``ρ = e^d``. A loss is aggregated apart (`aggregation.aggregate`), and no
statistic of a batch enters it, so it does not depend on the split into micro-batches. Each returns a `TokenLoss`, and
raises ValueError where shapes differ or an option is out of range.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stages.algorithms.tokens import LossInputs, loss_inputs

PROBABILITY_FLOOR = 1e-8  # As in verl's dppo_kl: keeps the logarithm of 1 − π finite.


class TokenLoss(NamedTuple):
    """What a policy loss returns.

    Attributes:
        loss: ``[B, T]``, to be minimised; 0 where the mask is 0.
        metrics: Scalar tensors without gradient. Each is a *sum* over policy tokens: add them over
            micro-batches, then divide by the token count of the mini-batch. All losses have ``old_kl``
            (``log π_old − log π``), those with a trust region ``clipped``.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def ppo_clip(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> TokenLoss:
    """PPO's clipped surrogate with the dual clip.

    ``ℓ = max(−A ρ, −A clip(ρ, 1 − clip_low, 1 + clip_high))``, and where A < 0 at most ``−A dual_clip``, which is above
    1. Sources: Schulman et al., arXiv 1707.06347; for the dual clip Ye et al., arXiv 1912.09729.

    Returns:
        Loss, and the sums ``clipped`` (tokens where the clip changed the loss), ``dual_clipped`` (tokens where
        the dual clip did) and ``old_kl``.
    """
    check_clip("ppo_clip", clip_low, clip_high)
    if dual_clip <= 1.0:
        raise ValueError(f"ppo_clip: expected dual_clip > 1, got {dual_clip}")
    given = loss_inputs("ppo_clip", log_probs, old_log_probs, advantages, mask, weights)
    surrogate, clipped = clipped_surrogate(given.advantages, given.log_ratio.exp(), clip_low, clip_high)
    ceiling = -given.advantages * dual_clip
    loss = torch.minimum(surrogate, ceiling).where(given.advantages < 0, surrogate)
    return token_loss(loss, given, clipped=clipped, dual_clipped=(surrogate > ceiling) & (given.advantages < 0))


def policy_gradient(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
) -> TokenLoss:
    """The score-function loss ``ℓ = −A log π``: its gradient is the policy gradient at the current weights.

    No ratio: it is exact for rows that the current policy drew, and for one optimiser step on them. `old_log_probs`
    enter the metric alone. Source: Williams, "Simple statistical gradient-following algorithms", 1992.
    """
    given = loss_inputs("policy_gradient", log_probs, old_log_probs, advantages, mask, weights)
    return token_loss(-given.advantages * given.log_probs, given)


def sapo(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenLoss:
    """SAPO: a soft gate in place of the clip, ``ℓ = −A · σ(τ (ρ − 1)) · 4 / τ``.

    τ is `tau_positive` where A > 0, else `tau_negative`; both are above 0. The gradient is that of ``−A ρ`` at ρ = 1
    and fades on both sides. Source: Gao et al., arXiv 2511.20347.
    """
    if min(tau_positive, tau_negative) <= 0.0:
        raise ValueError(f"sapo: expected temperatures above 0, got {tau_positive} and {tau_negative}")
    given = loss_inputs("sapo", log_probs, old_log_probs, advantages, mask, weights)
    tau = torch.full_like(given.advantages, tau_negative).masked_fill(given.advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (given.log_ratio.exp() - 1.0)) * 4.0 / tau
    return token_loss(-given.advantages * gate, given)


def cispo(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> TokenLoss:
    """CISPO: the clipped ratio as a weight without gradient.

    ``ℓ = −A · sg(clip(ρ, 1 − clip_low, 1 + clip_high)) · log π``: no token loses its gradient to the clip. Source:
    MiniMax-M1, arXiv 2506.13585.
    """
    check_clip("cispo", clip_low, clip_high)
    given = loss_inputs("cispo", log_probs, old_log_probs, advantages, mask, weights)
    ratio = given.log_ratio.detach().exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return token_loss(-given.advantages * bounded * given.log_probs, given, clipped=ratio != bounded)


def dro(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    beta: float,
) -> TokenLoss:
    """Direct reward optimisation: a quadratic pull to the old policy in place of a ratio.

    ``ℓ = −A log π + (β / 2) d²``. β is above 0; it has no default, since its scale is that of the advantages. Source:
    Richemond et al., arXiv 2405.19107.
    """
    if beta <= 0.0:
        raise ValueError(f"dro: expected beta > 0, got {beta}")
    given = loss_inputs("dro", log_probs, old_log_probs, advantages, mask, weights)
    return token_loss(-given.advantages * given.log_probs + beta / 2 * given.log_ratio.square(), given)


def dppo_tv(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_ratio: float = 20.0,
) -> TokenLoss:
    """DPPO with total variation: a token counts unless its probability has moved too far in the advantage's direction.

    ``ℓ = −A · sg(min(ρ, max_ratio)) · log π · v`` with v = 1 where A > 0 and ``π − π_old ≤ clip_high``, or A ≤ 0 and
    ``π − π_old ≥ −clip_low``. The bounds are of probabilities, not of ratios. Source: arXiv 2602.04879.
    """
    given = _divergence_inputs(
        "dppo_tv", log_probs, old_log_probs, advantages, mask, weights, clip_low, clip_high, max_ratio
    )
    new, old = _probabilities(given, old_log_probs)
    return _within(given, torch.where(given.advantages > 0, new - old <= clip_high, new - old >= -clip_low), max_ratio)


def dppo_kl(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    max_ratio: float = 20.0,
) -> TokenLoss:
    """DPPO with the KL of "this token or another" in place of the difference of `dppo_tv`.

    ``KL = π_old log(π_old / π) + (1 − π_old) log((1 − π_old) / (1 − π))`` is at most `clip_high` where A > 0, else
    `clip_low`; a move towards the old policy always counts. Source: arXiv 2602.04879.
    """
    given = _divergence_inputs(
        "dppo_kl", log_probs, old_log_probs, advantages, mask, weights, clip_low, clip_high, max_ratio
    )
    new, old = _probabilities(given, old_log_probs)
    others = torch.log((1.0 - old + PROBABILITY_FLOOR) / (1.0 - new + PROBABILITY_FLOOR))
    divergence = -old * given.log_ratio.detach() + (1.0 - old) * others
    up = (divergence <= clip_high) | (new <= old)
    down = (divergence <= clip_low) | (new >= old)
    return _within(given, torch.where(given.advantages > 0, up, down), max_ratio)


# ---- shared with the other modules of losses --------------------------------------------------------


def token_loss(loss: Tensor, given: LossInputs, **counts: Tensor) -> TokenLoss:
    """Apply the weights, and sum up ``[B, T] bool`` counts over policy tokens."""
    metrics = {name: (count & given.policy).sum() for name, count in counts.items()}
    metrics["old_kl"] = -given.log_ratio.detach().sum()
    return TokenLoss(loss if given.weights is None else loss * given.weights, metrics)


def clipped_surrogate(advantages: Tensor, ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """``max(−A ρ, −A clip(ρ, 1 − low, 1 + high))``, and where the clip changed it."""
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(plain, clipped), clipped > plain


def check_clip(name: str, low: float, high: float) -> None:
    """Refuse bounds of a ratio that do not contain 1, or let it fall to 0."""
    if not 0.0 <= low < 1.0 or high < 0.0:
        raise ValueError(f"{name}: expected 0 <= clip_low < 1 and clip_high >= 0, got {low} and {high}")


# ---- inside -----------------------------------------------------------------------------------------


def _divergence_inputs(
    name: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    low: float,
    high: float,
    max_ratio: float,
) -> LossInputs:
    if low < 0.0 or high < 0.0 or max_ratio < 1.0:
        raise ValueError(
            f"{name}: expected clip_low >= 0, clip_high >= 0 and max_ratio >= 1, got {low}, {high} and {max_ratio}"
        )
    return loss_inputs(name, log_probs, old_log_probs, advantages, mask, weights)


def _probabilities(given: LossInputs, old_log_probs: Tensor) -> tuple[Tensor, Tensor]:
    return given.log_probs.detach().exp(), old_log_probs.detach().where(given.policy, 0.0).exp()


def _within(given: LossInputs, inside: Tensor, max_ratio: float) -> TokenLoss:
    """The weighted score-function loss of the tokens inside the trust region."""
    ratio = given.log_ratio.detach().exp().clamp(max=max_ratio)
    loss = (-given.advantages * ratio * given.log_probs).where(inside, 0.0)
    return token_loss(loss, given, clipped=~inside)
