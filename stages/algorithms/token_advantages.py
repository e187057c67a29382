"""Advantage estimators that compare tokens: tensors in, tensors out.

`stages.algorithms.sessions` has the rules at the edges, which all of them keep. Tokens between the policy's own, such
as a tool's answer, neither stop a return nor discount it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.catalog import ESTIMATORS
from stages.algorithms.returns import discounted_returns
from stages.algorithms.sessions import (
    Advantages,
    Groups,
    Sessions,
    expect_groups,
    participants,
    rounding_of,
    whiten,
)


def gae(
    *, token_rewards: Tensor, mask: Tensor, valid: Tensor, values: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> Advantages:
    """Generalised advantage estimation with a critic, whitened over the batch.

    Backwards over the policy tokens: ``δ_t = r_t + γ V_{t+1} − V_t``, ``a_t = δ_t + γ λ a_{t+1}``, where t + 1 is the
    next policy token and both are 0 after the last; ``A = m W(a)``, W being `whiten`. Source: Schulman et al.,
    "High-dimensional continuous control using generalized advantage estimation", arXiv 1506.02438.

    Args:
        token_rewards: ``[B, T]`` floating.
        mask: ``[B, T]``, 1 = policy token.
        valid: ``[B] bool``, false = the reward is unknown.
        values: ``[B, T]`` floating, what the critic expects from each token on.
        gamma: Discount γ in [0, 1] per policy token.
        lam: λ in [0, 1]: 0 trusts the critic after one token, 1 not at all.

    Returns:
        The returns are the targets of the critic, ``a + V`` before whitening; 0 where the mask is 0.

    Raises:
        ValueError: Shapes differ, an option is out of range, or something that counts is not finite.
        TypeError: A dtype is wrong.
    """
    ESTIMATORS["gae"].check({"gamma": gamma, "lam": lam})
    batch = participants("gae", token_rewards, mask, valid)
    values = batch.tokens("values", values)
    raw = torch.zeros_like(values)
    next_value = next_raw = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        policy = batch.policy[:, t]
        delta = batch.rewards[:, t] + gamma * next_value - values[:, t]
        next_raw = (delta + gamma * lam * next_raw).where(policy, next_raw)
        next_value = values[:, t].where(policy, next_value)
        raw[:, t] = next_raw
    magnitude = batch.magnitude[:, None] + values.abs()
    whitened = whiten(raw, batch.policy, magnitude, batch.dtype)
    return Advantages(batch.result(whitened), batch.result(raw + values))


def reinforce_plus_plus(*, token_rewards: Tensor, mask: Tensor, valid: Tensor, gamma: float = 1.0) -> Advantages:
    """REINFORCE++: discounted return to go, whitened over the batch.

    ``A = m W(G)`` with ``G_t = r_t + γ G_{t+1}`` over the policy tokens, W being `whiten`: one session changes the
    advantages of all. Source: Hu, "REINFORCE++", arXiv 2501.03262.

    Args:
        token_rewards: ``[B, T]`` floating.
        mask: ``[B, T]``, 1 = policy token.
        valid: ``[B] bool``, false = the reward is unknown.
        gamma: Discount γ in [0, 1] per policy token.

    Returns:
        The returns are G; 0 where the mask is 0.

    Raises:
        ValueError: Shapes differ, the option is out of range, or a reward that counts is not finite.
        TypeError: A dtype is wrong.
    """
    ESTIMATORS["reinforce_plus_plus"].check({"gamma": gamma})
    batch = participants("reinforce_plus_plus", token_rewards, mask, valid)
    returns = discounted_returns(batch.rewards, batch.policy, gamma)
    whitened = whiten(returns, batch.policy, batch.magnitude, batch.dtype)
    return Advantages(batch.result(whitened), batch.result(returns))


def optimal_token_baseline(
    *, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor, log_probs: Tensor, sum_pi_squared: Tensor
) -> Advantages:
    """Return to go minus the baseline of least variance at that place of the response.

    ``A_{i,t} = m (G_{i,t} − b_t)`` with ``b_t = Σ_j W_{j,t} G_{j,t} / Σ_j W_{j,t}`` over the sessions j of the group
    whose token t is the policy's, and ``W_{j,t} = Σ_{s≤t} m (1 − 2 π_s + Σ_v π_{s,v}²)``: the squared gradient of
    log π with respect to the logits, summed up to t. What of it is no more than rounding is 0; where all W of a place
    are 0 they count alike. A place that one session alone reaches has nothing to be compared with: 0, as a group of
    one.
    Source: Li et al., "The optimal token baseline: variance reduction for long-horizon LLM-RL", PMLR 306.

    Args:
        token_rewards: ``[B, T]`` floating.
        mask: ``[B, T]``, 1 = policy token.
        groups: ``[B] int64``, equal for the sessions of one uid; any numbers, in any order.
        valid: ``[B] bool``, false = the reward is unknown.
        log_probs: ``[B, T]``, nats, of the tokens that were drawn.
        sum_pi_squared: ``[B, T]``, sum over the vocabulary of the squared probabilities, at each token.

    Returns:
        The returns are G; 0 where the mask is 0.

    Raises:
        ValueError: Shapes differ, or something that counts is not finite.
        TypeError: A dtype is wrong.
    """
    batch = participants("optimal_token_baseline", token_rewards, mask, valid)
    places = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    return _against_token_baseline(batch, groups, log_probs, sum_pi_squared, places)


def tir_optimal_token_baseline(
    *, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor, log_probs: Tensor, sum_pi_squared: Tensor
) -> Advantages:
    """`optimal_token_baseline` for tool-integrated reasoning: a place is a number of policy tokens, not of tokens.

    So the n-th token that the policy drew is compared with the n-th of its siblings, however long the answers of
    tools between them were. Arguments, returns, errors and source of `optimal_token_baseline`.
    """
    batch = participants("tir_optimal_token_baseline", token_rewards, mask, valid)
    return _against_token_baseline(batch, groups, log_probs, sum_pi_squared, batch.policy.cumsum(-1))


def _against_token_baseline(
    batch: Sessions, groups: Tensor, log_probs: Tensor, sum_pi_squared: Tensor, places: Tensor
) -> Advantages:
    expect_groups(batch, groups)
    policy = batch.policy
    pi, squared = batch.tokens("log_probs", log_probs).exp(), batch.tokens("sum_pi_squared", sum_pi_squared)
    energy = (1 - 2 * pi + squared).where(policy, 0.0)
    energy = energy.where(energy.abs() > rounding_of(1 + 2 * pi + squared, batch.dtype), 0.0)
    returns = discounted_returns(batch.rewards, policy, gamma=1.0)
    # From here on one entry per policy token; those of equal group and place are compared.
    _, group = torch.unique(groups, return_inverse=True)
    cells = Groups((group[:, None] * (places.shape[1] + 1) + places)[policy])
    value, weight = returns[policy], energy.cumsum(-1)[policy]
    one = torch.ones_like(value)
    weight = weight.where(cells.total(weight) != 0, one)
    # Deviations from the plain mean, so that the weighted one of equal returns is 0 and not almost 0.
    deviation = value - cells.total(value) / cells.total(one)
    baseline = cells.total(weight * deviation) / cells.total(weight)
    every = one.bool()
    magnitude = batch.magnitude[:, None].expand(policy.shape)[policy]
    rounding = rounding_of(cells.largest(magnitude, every), batch.dtype)
    differs = cells.spread(value, every) > rounding
    advantages = torch.zeros_like(returns)
    advantages[policy] = (deviation - baseline).where(differs, 0.0)
    return Advantages(batch.result(advantages), batch.result(returns))
