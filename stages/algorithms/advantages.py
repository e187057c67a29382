"""Advantage estimators over sessions: tensors in, tensors out.

A row is one session, its turns concatenated and padded, so a session counts once however many turns it has.
Nothing depends on the order of rows or on padding. Every estimator keeps the same rules:

- The mask holds on both sides: a reward on a masked token counts nowhere, neither in a return nor in a
  statistic.
- A row takes part if it is valid (its reward is known) and has a policy token. Any other row gets zeros and
  enters no statistic, whatever its rewards hold, NaN included.
- Group of one: 0. It has no sibling to compare with. (verl's `grpo` and loop form of `rloo` give R there, its
  vectorised `rloo` gives 0.)
- Zero spread: exactly 0. Returns that differ by less than float rounding are equal; an epsilon beside the
  standard deviation alone would turn rounding noise into advantages of order 0.1.
- Standard deviation: sample (divisor K - 1), plus 1e-6.
- Advantages are 0 where the mask is 0.

Sums are taken in float64; results have the dtype of `token_rewards`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stages.algorithms.returns import beyond_rounding, discounted_returns

STD_EPSILON = 1e-6


class Advantages(NamedTuple):
    """What an estimator returns.

    Attributes:
        advantages: ``[B, T]``; 0 where the mask is 0 and on rows that take no part.
        returns: ``[B, T]``. For `remax`, the reward to go at every position, masked ones included. The other
            estimators judge a session as a whole: their returns are the advantages, as in verl.
    """

    advantages: Tensor
    returns: Tensor


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

    Raises:
        ValueError: Shapes differ, or a row that takes part has a reward or a baseline that is not finite.
        TypeError: A dtype is wrong.
    """
    batch = _participants("remax", token_rewards, mask, valid)
    _expect_rows("remax", "baseline", baseline, batch.rows.shape)
    _expect_finite("remax", "baseline", baseline, batch.rows)
    returns = discounted_returns(batch.rewards, batch.policy, gamma=1.0)
    advantages = (returns - baseline.double()[:, None]).where(batch.policy, 0.0)
    return Advantages(advantages.to(batch.dtype), returns.to(batch.dtype))


def grpo(*, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor) -> Advantages:
    """GRPO: session return, centred and scaled within its group.

    ``A_t = m_t (R − μ_g) / (σ_g + 1e-6)`` with ``R = Σ_t m_t r_t`` and the sample standard deviation σ_g.
    Source: Shao et al., "DeepSeekMath", arXiv 2402.03300, section 4.1.

    Args:
        token_rewards: ``[B, T]`` floating.
        mask: ``[B, T]``, 1 = policy token.
        groups: ``[B] int64``, equal for the sessions of one uid; any numbers, in any order.
        valid: ``[B] bool``, false = the reward is unknown.

    Raises:
        ValueError: Shapes differ, or a row that takes part has a reward that is not finite.
        TypeError: A dtype is wrong.
    """
    batch = _participants("grpo", token_rewards, mask, valid)
    group = _compare("grpo", batch, groups)
    return _per_session(group.deviation / (group.std + STD_EPSILON), batch)


def dr_grpo(*, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor) -> Advantages:
    """GRPO without the division by the standard deviation: ``A_t = m_t (R − μ_g)``.

    Arguments and errors of `grpo`. Source: Liu et al., "Understanding R1-Zero-Like Training",
    arXiv 2503.20783.
    """
    batch = _participants("dr_grpo", token_rewards, mask, valid)
    return _per_session(_compare("dr_grpo", batch, groups).deviation, batch)


def rloo(*, token_rewards: Tensor, mask: Tensor, groups: Tensor, valid: Tensor) -> Advantages:
    """RLOO: session return minus the mean return of the other sessions of its group.

    ``A_t = m_t (R − mean of the others) = m_t (R − μ_g) K / (K − 1)``. Arguments and errors of `grpo`.
    Source: Ahmadian et al., "Back to Basics", arXiv 2402.14740.
    """
    batch = _participants("rloo", token_rewards, mask, valid)
    group = _compare("rloo", batch, groups)
    return _per_session(group.deviation * group.size / (group.size - 1).clamp(min=1), batch)


def reinforce(*, token_rewards: Tensor, mask: Tensor, valid: Tensor) -> Advantages:
    """REINFORCE with the batch mean as its baseline: ``A_t = m_t (R − mean over all rows that take part)``.

    The whole batch is one group, so a batch of one gives 0. Arguments and errors of `grpo`, without `groups`.
    Source: Williams, "Simple statistical gradient-following algorithms", 1992.
    """
    batch = _participants("reinforce", token_rewards, mask, valid)
    one_group = torch.zeros_like(batch.rows, dtype=torch.int64)
    return _per_session(_compare("reinforce", batch, one_group).deviation, batch)


class _Batch(NamedTuple):
    """The checked inputs, with mask and validity applied once and for all.

    `rewards` ``[B, T] float64`` and `policy` ``[B, T] bool`` are zero and false off the policy tokens of the
    rows that take part; `rows` ``[B] bool`` says which those are; `dtype` is that of the results.
    """

    rewards: Tensor
    policy: Tensor
    rows: Tensor
    dtype: torch.dtype


class _Group(NamedTuple):
    """A row's standing in its group, each ``[B] float64``; deviation is 0 where nothing can be compared."""

    deviation: Tensor
    size: Tensor
    std: Tensor


def _participants(name: str, token_rewards: Tensor, mask: Tensor, valid: Tensor) -> _Batch:
    if token_rewards.dim() != 2 or mask.shape != token_rewards.shape:
        raise ValueError(
            f"{name}: expected token_rewards and mask of one shape [B, T], "
            f"got {list(token_rewards.shape)} and {list(mask.shape)}"
        )
    if not token_rewards.is_floating_point():
        raise TypeError(f"{name}: expected floating token_rewards, got {token_rewards.dtype}")
    _expect_rows(name, "valid", valid, token_rewards.shape[:1])
    if valid.dtype != torch.bool:
        raise TypeError(f"{name}: expected valid bool, got {valid.dtype}")
    policy = (mask != 0) & valid[:, None]
    rewards = token_rewards.double().where(policy, 0.0)
    rows = policy.any(-1)
    _expect_finite(name, "token_rewards", rewards.sum(-1), rows)
    return _Batch(rewards, policy, rows, token_rewards.dtype)


def _compare(name: str, batch: _Batch, groups: Tensor) -> _Group:
    """Compare the return of each row with its group, over the rows that take part."""
    rows = batch.rows
    _expect_rows(name, "groups", groups, rows.shape)
    if groups.dtype != torch.int64:
        raise TypeError(f"{name}: expected groups int64, got {groups.dtype}")
    names, index = torch.unique(groups, return_inverse=True)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(len(names)).index_add(0, index, values)[index]

    def largest(values: Tensor) -> Tensor:
        values = values.where(rows, -torch.inf)
        return values.new_full((len(names),), -torch.inf).scatter_reduce(0, index, values, "amax")[index]

    score = batch.rewards.sum(-1)
    size = total(rows.double())
    deviation = (score - total(score) / size.clamp(min=1)).where(rows, 0.0)
    std = (total(deviation.square()) / (size - 1).clamp(min=1)).sqrt()
    spread = largest(score) + largest(-score)  # maximum minus minimum
    apart = beyond_rounding(spread, largest(batch.rewards.abs().sum(-1)), torch.finfo(batch.dtype).eps)
    return _Group(deviation.where(apart, 0.0), size, std)


def _per_session(advantage: Tensor, batch: _Batch) -> Advantages:
    """Give every policy token of a session the session's advantage."""
    advantages = advantage[:, None].expand(batch.policy.shape).where(batch.policy, 0.0).to(batch.dtype)
    return Advantages(advantages, advantages)


def _expect_rows(name: str, argument: str, tensor: Tensor, shape: torch.Size) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected {argument} {list(shape)}, got {list(tensor.shape)}")


def _expect_finite(name: str, argument: str, values: Tensor, rows: Tensor) -> None:
    bad = (rows & ~values.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"{name}: {argument} is not finite in rows {bad[:8]}; mark rows without a value as not valid")
