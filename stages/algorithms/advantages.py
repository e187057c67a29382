"""Advantage estimators that compare the returns of whole sessions: tensors in, tensors out.

`stages.algorithms.sessions` has the rules at the edges, which all of them keep; `stages.algorithms.token_advantages`
has the estimators that compare tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.catalog import ESTIMATORS
from stages.algorithms.returns import discounted_returns
from stages.algorithms.sessions import (
    STD_EPSILON,
    Advantages,
    compare,
    participants,
    rounding_of,
    whiten,
)


def remax(*, token_rewards: Tensor, mask: Tensor, valid: Tensor, baseline: Tensor) -> Advantages:
    """ReMax: return to go minus the return of the greedy session of the same prompt.

    ``A_t = m_t (G_t − b)`` with ``G_t = Σ_{s≥t} m_s r_s``. No discount, no standard deviation, no filter: a
    group whose rewards are all equal still learns if the greedy answer scored otherwise, and a group of one
    is as good as any. Source: Li et al., "ReMax", arXiv 2310.10505, with the reward to go of verl's
    ``compute_remax_outcome_advantage``, whose advantages at masked positions are G_t, not 0.

    Args:
        token_rewards: ``[B, T]`` floating.
        mask: ``[B, T]``, 1 = policy token.
        valid: ``[B] bool``, false = the reward or the baseline is unknown.
        baseline: ``[B]`` floating, total return of the row's greedy session.

    Returns:
        The returns are G_t at every position, masked ones included.

    Raises:
        ValueError: Shapes differ, or a row that takes part has a reward or a baseline that is not finite.
        TypeError: A dtype is wrong.
    """
    batch = participants("remax", token_rewards, mask, valid)
    baseline = batch.per_row("baseline", baseline)
    returns = discounted_returns(batch.rewards, batch.policy, gamma=1.0)
    return Advantages(batch.result(returns - baseline[:, None]), returns.to(batch.dtype))


def remax_clipped(
    *,
    token_rewards: Tensor,
    mask: Tensor,
    valid: Tensor,
    baseline: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    kappa: float = 0.05,
    gamma: float = 0.99,
    clip: float = 5.0,
) -> Advantages:
    """ReMax as its authors train with it: a clipped, discounted difference of returns, and a KL penalty per token.

    ``A_t = m_t (γ^{T−t+1} clip(R − b, −c, c) − κ (log π − log π_ref)_t)``, where t = 1 .. T counts the policy tokens of
    the session from its first: the last one is discounted once, the first one T times, and tool tokens between them
    not at all. The penalty is that of the token alone, not summed to go. Source: Li et al., "ReMax",
    arXiv 2310.10505, in the form of the authors' code (``compute_returns``).

    Args:
        token_rewards: ``[B, T]`` floating.
        mask: ``[B, T]``, 1 = policy token.
        valid: ``[B] bool``, false = the reward or the baseline is unknown.
        baseline: ``[B]`` floating, total return of the row's greedy session.
        log_probs: ``[B, T]``, nats, of the policy that drew the tokens.
        ref_log_probs: ``[B, T]``, nats, of the reference model.
        kappa: Weight κ ≥ 0 of the penalty.
        gamma: Discount γ in [0, 1] per policy token.
        clip: Largest size c ≥ 0 of R − b that counts.

    Returns:
        The returns are the advantages.

    Raises:
        ValueError: Shapes differ, an option is out of range, or something that counts is not finite.
        TypeError: A dtype is wrong.
    """
    ESTIMATORS["remax_clipped"].check({"kappa": kappa, "gamma": gamma, "clip": clip})
    batch = participants("remax_clipped", token_rewards, mask, valid)
    gain = (batch.score - batch.per_row("baseline", baseline)).clamp(-clip, clip)
    penalty = batch.tokens("log_probs", log_probs) - batch.tokens("ref_log_probs", ref_log_probs)
    to_end = batch.policy.double().flip(-1).cumsum(-1).flip(-1)  # T − t + 1 on the policy tokens
    advantages = batch.result(gamma**to_end * gain[:, None] - kappa * penalty)
    return Advantages(advantages, advantages)


def grpo(*, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor) -> Advantages:
    """GRPO: session return, centred and scaled within its group.

    ``A_t = m_t (R − μ_g) / (σ_g + 1e-6)`` with ``R = Σ_t m_t r_t`` and the sample standard deviation σ_g.
    Source: Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1.

    Args:
        token_rewards: ``[B, T]`` floating.
        mask: ``[B, T]``, 1 = policy token.
        groups: ``[B] int64``, equal for the sessions of one uid; any numbers, in any order.
        valid: ``[B] bool``, false = the reward is unknown.

    Returns:
        The returns are the advantages, as for all that follow.

    Raises:
        ValueError: Shapes differ, or a row that takes part has a reward that is not finite.
        TypeError: A dtype is wrong.
    """
    batch = participants("grpo", token_rewards, mask, valid)
    group = compare(batch, groups)
    return batch.to_tokens(group.deviation / (group.std + STD_EPSILON))


def dr_grpo(*, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor) -> Advantages:
    """GRPO without the division by the standard deviation: ``A_t = m_t (R − μ_g)``.

    Arguments and errors of `grpo`. Source: Liu et al., "Understanding R1-Zero-Like Training",
    arXiv 2503.20783.
    """
    batch = participants("dr_grpo", token_rewards, mask, valid)
    return batch.to_tokens(compare(batch, groups).deviation)


def grpo_passk(*, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor) -> Advantages:
    """GRPO for the best of a group: only the best session learns, from its lead over the second.

    ``A_t = m_t (R_(1) − R_(2)) / (σ_g + 1e-6)`` for the session with the largest return of its group, 0 for the others;
    0 for all where the best two are equal. Arguments and errors of `grpo`. Source: Tang et al., "Optimizing language
    models for inference time objectives using reinforcement learning", arXiv 2503.19595.
    """
    batch = participants("grpo_passk", token_rewards, mask, valid)
    group = compare(batch, groups)
    best = batch.rows & (group.deviation == group.groups.largest(group.deviation, batch.rows))
    lead = group.deviation - group.groups.largest(group.deviation, batch.rows & ~best)
    one_leads = best & (group.groups.total(best.double()) == 1) & (group.members > 1) & (lead > group.rounding)
    return batch.to_tokens(lead.where(one_leads, 0.0) / (group.std + STD_EPSILON))


def gdpo(*, components: Tensor, weights: Tensor, mask: Tensor, groups: Tensor, valid: Tensor) -> Advantages:
    """GDPO: each named reward is centred and scaled within its group by itself; then they are summed and whitened.

    ``A_t = m_t W(Σ_k w_k (R_k − μ_{g,k}) / σ_{g,k})``, W being `whiten`. A reward with a wide spread cannot drown one
    with a narrow one, as it does where rewards are summed first. A reward without spread in the group adds nothing;
    so σ needs no epsilon, which would leave a remainder of opposite rewards for W to blow up. Source: Liu et al.,
    "GDPO", arXiv 2601.05242.

    Args:
        components: ``[B, K]`` floating, each session's total of each named reward.
        weights: ``[K]`` floating.
        mask: ``[B, T]``, 1 = policy token.
        groups: ``[B] int64``, equal for the sessions of one uid.
        valid: ``[B] bool``, false = a reward is unknown.

    Raises:
        ValueError: Shapes differ, or a row that takes part has a component that is not finite.
        TypeError: A dtype is wrong.
    """
    if components.dim() != 2 or not components.shape[1] or not components.is_floating_point():
        raise ValueError(
            f"gdpo: expected floating components [B, K > 0], got {components.dtype} {list(components.shape)}"
        )
    if weights.shape != components.shape[1:] or mask.shape[:1] != components.shape[:1]:
        raise ValueError(
            f"gdpo: expected weights [K] and mask [B, T] for components {list(components.shape)}, "
            f"got {list(weights.shape)} and {list(mask.shape)}"
        )
    batch = participants("gdpo", components.new_zeros(mask.shape), mask, valid)
    batch.expect_finite("components", components.double().sum(-1))
    # A component is the return of a session of one token.
    one_token = [participants("gdpo", part, batch.rows[:, None], batch.rows) for part in components.T[..., None]]
    standings = [compare(part, groups) for part in one_token]
    parts = [group.deviation / group.std.where(group.std > 0, 1.0) for group in standings]
    scaled = torch.stack(parts, dim=-1) * weights.double()
    tokens = scaled.sum(-1)[:, None].expand(batch.policy.shape)
    compared = batch.policy & (standings[0].members > 1)[:, None]
    advantages = batch.result(whiten(tokens, compared, scaled.abs().sum(-1), batch.dtype))
    return Advantages(advantages, advantages)


def rloo(*, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor) -> Advantages:
    """RLOO: session return minus the mean return of the other sessions of its group.

    ``A_t = m_t (R − mean of the others) = m_t (R − μ_g) K / (K − 1)``. Arguments and errors of `grpo`.
    Source: Ahmadian et al., "Back to Basics", arXiv 2402.14740.
    """
    batch = participants("rloo", token_rewards, mask, valid)
    group = compare(batch, groups)
    return batch.to_tokens(group.deviation * group.members / (group.members - 1).clamp(min=1))


def opo(*, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor) -> Advantages:
    """OPO: session return minus the mean return of its group, weighted by length.

    ``A_t = m_t (R − Σ_j L_j R_j / Σ_j L_j)`` with L the number of policy tokens: the baseline of least variance if
    the squared gradient of a session grows with its length. Arguments and errors of `grpo`. Source: Hao et al.,
    "On-policy RL with optimal reward baseline", arXiv 2505.23585.
    """
    batch = participants("opo", token_rewards, mask, valid)
    group = compare(batch, groups)
    length = batch.policy.sum(-1).double()
    baseline = group.groups.total(length * group.deviation) / group.groups.total(length).clamp(min=1)
    return batch.to_tokens(group.deviation - baseline)


def gpg(*, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor) -> Advantages:
    """GPG: session return minus the mean of its group, scaled up by the share of rows with a reward.

    ``A_t = m_t α (R − μ_g)`` with ``α = B / max(#{R ≠ 0}, 1)`` over the B rows that take part. Arguments and errors of
    `grpo`. Source: Chu et al., "GPG", arXiv 2504.02546.
    """
    batch = participants("gpg", token_rewards, mask, valid)
    rewarded = batch.score.abs() > rounding_of(batch.magnitude, batch.dtype)
    scale = batch.rows.double().sum() / rewarded.sum().clamp(min=1)
    return batch.to_tokens(scale * compare(batch, groups).deviation)


def maxrl(*, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor) -> Advantages:
    """MaxRL: session return, centred and divided by the mean of its group.

    ``A_t = m_t (R − μ_g) / μ_g``: hard prompts, where μ is small, weigh more, as under maximum likelihood. It is made
    for rewards that are never negative. Where μ_g is not above 0 (by more than rounding) nothing was solved, and all
    are 0. Arguments and errors of `grpo`. Source: Tajwar et al., "Maximum likelihood reinforcement learning",
    arXiv 2602.02710.
    """
    batch = participants("maxrl", token_rewards, mask, valid)
    group = compare(batch, groups)
    solved = group.mean > group.rounding
    return batch.to_tokens((group.deviation / group.mean.where(solved, 1.0)).where(solved, 0.0))


def reinforce(*, token_rewards: Tensor, mask: Tensor, valid: Tensor) -> Advantages:
    """REINFORCE with the batch mean as its baseline: ``A_t = m_t (R − mean over all rows that take part)``.

    The whole batch is one group, so a batch of one gives 0. Arguments and errors of `grpo`, without `groups`.
    Source: Williams, "Simple statistical gradient-following algorithms", 1992.
    """
    batch = participants("reinforce", token_rewards, mask, valid)
    one_group = torch.zeros_like(batch.rows, dtype=torch.int64)
    return batch.to_tokens(compare(batch, one_group).deviation)


def rae(*, token_rewards: Tensor, mask: Tensor, valid: Tensor, baseline: Tensor) -> Advantages:
    """RAE: session return minus the running mean of earlier returns of the same role: ``A_t = m_t (R − b)``.

    Unbiased, since b is made of the past alone, and a group of one is as good as any. Source: Liu et al., "SPIRAL",
    arXiv 2506.24119, section on role-conditioned advantage estimation.

    Args:
        token_rewards: ``[B, T]`` floating.
        mask: ``[B, T]``, 1 = policy token.
        valid: ``[B] bool``, false = the reward is unknown.
        baseline: ``[B]`` floating, running mean of the row's role; 0 as long as there is none.

    Raises:
        ValueError: Shapes differ, or a row that takes part has a reward or a baseline that is not finite.
        TypeError: A dtype is wrong.
    """
    batch = participants("rae", token_rewards, mask, valid)
    return batch.to_tokens(batch.score - batch.per_row("baseline", baseline))


def reinforce_plus_plus_baseline(*, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor) -> Advantages:
    """REINFORCE++ with a baseline: session return minus the mean of its group, whitened over the batch.

    ``A_t = m_t W(R − μ_g)``, W being `whiten` over tokens, so that long sessions weigh more in its statistics. A group
    without spread has deviation 0 and stays in them. Arguments and errors of `grpo`. Source: Hu, "REINFORCE++",
    arXiv 2501.03262.
    """
    batch = participants("reinforce_plus_plus_baseline", token_rewards, mask, valid)
    group = compare(batch, groups)
    tokens = group.deviation[:, None].expand(batch.policy.shape)
    compared = batch.policy & (group.members > 1)[:, None]
    advantages = batch.result(whiten(tokens, compared, batch.magnitude, batch.dtype))
    return Advantages(advantages, advantages)
