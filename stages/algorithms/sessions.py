"""What all advantage estimators share: who takes part, how a session compares with its group, whitening.

A row is one session, its turns concatenated and padded, so a session counts once however many turns it has.
Nothing depends on the order of rows or on padding. Every estimator keeps the same rules at the edges:

- **Masked token.** The mask holds on both sides: a reward on a masked token counts nowhere, neither in a return nor
  in a statistic. Advantages are 0 where the mask is 0.
- **Unscorable row.** A row takes part if it is valid (its reward is known) and has a policy token. Any other row
  gets zeros and enters no statistic, whatever it holds, NaN included. A number that is not finite where it counts
  is an error that names the rows.
- **Group of one.** 0: it has no sibling to compare with.
- **Partial and uneven groups.** A group is compared within itself, over the rows of it that take part; K is their
  number, and no group needs the size of another.
- **Zero spread.** Exactly 0. Values whose maximum and minimum differ by less than float rounding are equal; an
  epsilon beside a standard deviation alone would turn rounding noise into advantages of order 0.1.
- **Standard deviation.** Of a sample (divisor K - 1), plus 1e-6.
- **Whitening** is over all policy tokens of the rows that take part and, for an estimator that compares within
  groups, have a sibling. Over no token or one it gives 0.

Sums are taken in float64; results have the dtype of the rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stages.algorithms.returns import ROUNDINGS

STD_EPSILON = 1e-6
VARIANCE_EPSILON = 1e-8


class Advantages(NamedTuple):
    """What an estimator returns.

    Attributes:
        advantages: ``[B, T]``; 0 where the mask is 0 and on rows that take no part.
        returns: ``[B, T]``; 0 on rows that take no part. What it is, is the estimator's to say. For those that judge
            a session as a whole it is the advantages.
    """

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class Sessions:
    """The checked inputs, with mask and validity applied once and for all.

    Attributes:
        name: The estimator, for errors.
        rewards: ``[B, T] float64``; 0 off the policy tokens of the rows that take part.
        policy: ``[B, T] bool``; false off them.
        rows: ``[B] bool``, which rows take part.
        dtype: Of the results.
    """

    name: str
    rewards: Tensor
    policy: Tensor
    rows: Tensor
    dtype: torch.dtype

    @property
    def score(self) -> Tensor:
        """``[B] float64``: the total return of each session."""
        return self.rewards.sum(-1)

    @property
    def magnitude(self) -> Tensor:
        """``[B] float64``: Σ|r|, which bounds the rounding of a return, also of one that is near 0."""
        return self.rewards.abs().sum(-1)

    def tokens(self, argument: str, values: Tensor) -> Tensor:
        """Check an input per token and put zeros where it does not count: ``[B, T] float64``.

        Raises:
            ValueError: The shape is not ``[B, T]``, or a value that counts is not finite.
        """
        if values.shape != self.policy.shape:
            raise ValueError(
                f"{self.name}: expected {argument} of the shape of mask {list(self.policy.shape)}, "
                f"got {list(values.shape)}"
            )
        values = values.double().where(self.policy, 0.0)
        self.expect_finite(argument, values.sum(-1))
        return values

    def per_row(self, argument: str, values: Tensor) -> Tensor:
        """Check an input per row and put zeros where it does not count: ``[B] float64``.

        Raises:
            ValueError: The shape is not ``[B]``, or a value that counts is not finite.
        """
        expect_rows(self.name, argument, values, self.rows.shape)
        values = values.double().where(self.rows, 0.0)
        self.expect_finite(argument, values)
        return values

    def expect_finite(self, argument: str, values: Tensor) -> None:
        """Refuse a row that takes part and holds a number that is none."""
        bad = (self.rows & ~values.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise ValueError(
                f"{self.name}: {argument} is not finite in rows {bad[:8]}; mark rows without a value as not valid"
            )

    def to_tokens(self, advantage: Tensor) -> Advantages:
        """Give every policy token of a session the session's advantage ``[B]``; the returns are the same."""
        advantages = self.result(advantage[:, None].expand(self.policy.shape))
        return Advantages(advantages, advantages)

    def result(self, values: Tensor) -> Tensor:
        """``[B, T]`` in the dtype of the results, 0 where the mask is 0."""
        return values.where(self.policy, 0.0).to(self.dtype)


def participants(name: str, token_rewards: Tensor, mask: Tensor, valid: Tensor) -> Sessions:
    """Check what every estimator takes, and note which rows take part.

    Args:
        name: The estimator, for errors.
        token_rewards: ``[B, T]`` floating.
        mask: ``[B, T]``, 1 = policy token.
        valid: ``[B] bool``, false = something that the row needs is unknown.

    Raises:
        ValueError: Shapes differ, or a row that takes part has a reward that is not finite.
        TypeError: A dtype is wrong.
    """
    if token_rewards.dim() != 2 or mask.shape != token_rewards.shape:
        raise ValueError(
            f"{name}: expected token_rewards and mask of one shape [B, T], "
            f"got {list(token_rewards.shape)} and {list(mask.shape)}"
        )
    if not token_rewards.is_floating_point():
        raise TypeError(f"{name}: expected floating token_rewards, got {token_rewards.dtype}")
    expect_rows(name, "valid", valid, token_rewards.shape[:1])
    if valid.dtype != torch.bool:
        raise TypeError(f"{name}: expected valid bool, got {valid.dtype}")
    policy = (mask != 0) & valid[:, None]
    rewards = token_rewards.double().where(policy, 0.0)
    sessions = Sessions(name, rewards, policy, policy.any(-1), token_rewards.dtype)
    sessions.expect_finite("token_rewards", rewards.sum(-1))
    return sessions


class Groups:
    """Sums and maxima over the rows of equal group.

    Args:
        labels: ``[B] int64``, equal for the members of a group; any numbers, in any order.
    """

    def __init__(self, labels: Tensor) -> None:
        names, self._index = torch.unique(labels, return_inverse=True)
        self._count = len(names)

    def total(self, values: Tensor) -> Tensor:
        """For each row, the sum over its group."""
        return values.new_zeros(self._count).index_add(0, self._index, values)[self._index]

    def largest(self, values: Tensor, among: Tensor) -> Tensor:
        """For each row, the maximum over the rows of its group that are `among`; −∞ if there are none."""
        lowest = values.new_full((self._count,), -torch.inf)
        values = values.where(among, -torch.inf)
        return lowest.scatter_reduce(0, self._index, values, "amax")[self._index]

    def spread(self, values: Tensor, among: Tensor) -> Tensor:
        """For each row, maximum minus minimum over the rows of its group that are `among`."""
        return self.largest(values, among) + self.largest(-values, among)


class Standing(NamedTuple):
    """How the rows stand in their groups, over the rows that take part.

    Attributes:
        groups: For further sums over the same groups.
        deviation: ``[B] float64``, return minus the mean of its group; exactly 0 where nothing can be compared.
        mean: ``[B] float64``.
        members: ``[B] float64``, how many rows take part.
        std: ``[B] float64``, of the sample.
        rounding: ``[B] float64``, the largest difference that is none.
    """

    groups: Groups
    deviation: Tensor
    mean: Tensor
    members: Tensor
    std: Tensor
    rounding: Tensor


def compare(sessions: Sessions, groups: Tensor) -> Standing:
    """Compare the return of each row with its group.

    Args:
        sessions: See `participants`.
        groups: ``[B] int64``, equal for the sessions of one uid; any numbers, in any order.

    Raises:
        ValueError: The shape is not ``[B]``.
        TypeError: The dtype is not int64.
    """
    rows = sessions.rows
    expect_groups(sessions, groups)
    grouped = Groups(groups)
    score = sessions.score
    members = grouped.total(rows.double())
    mean = grouped.total(score) / members.clamp(min=1)
    deviation = (score - mean).where(rows, 0.0)
    std = (grouped.total(deviation.square()) / (members - 1).clamp(min=1)).sqrt()
    rounding = rounding_of(grouped.largest(sessions.magnitude, rows), sessions.dtype)
    differs = grouped.spread(score, rows) > rounding
    return Standing(grouped, deviation.where(differs, 0.0), mean, members, std, rounding)


def whiten(values: Tensor, among: Tensor, magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Centre and scale token values over a whole batch: ``(x − μ) / √(v + 1e-8)``, v with the divisor N − 1.

    Args:
        values: ``[B, T] float64``.
        among: ``[B, T] bool``, the N tokens that the statistics are over.
        magnitude: Sizes of the parts that the values were summed from, of any shape; the largest bounds their
            rounding.
        dtype: Of the inputs that the values were made from.

    Returns:
        ``[B, T] float64``; 0 off the N tokens, and everywhere if they do not differ by more than rounding (so for N
        of 0 or 1).
    """
    chosen = values[among]
    whitened = torch.zeros_like(values)
    if not len(chosen) or chosen.max() - chosen.min() <= rounding_of(magnitude.max(), dtype):
        return whitened
    centred = chosen - chosen.mean()
    variance = centred.square().sum() / (len(chosen) - 1)
    whitened[among] = centred / (variance + VARIANCE_EPSILON).sqrt()
    return whitened


def rounding_of(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest difference that rounding may make between two sums; `magnitude` is the sum of their parts' sizes."""
    return ROUNDINGS * torch.finfo(dtype).eps * magnitude


def expect_groups(sessions: Sessions, groups: Tensor) -> None:
    """Refuse groups that are not ``[B] int64``."""
    expect_rows(sessions.name, "groups", groups, sessions.rows.shape)
    if groups.dtype != torch.int64:
        raise TypeError(f"{sessions.name}: expected groups int64, got {groups.dtype}")


def expect_rows(name: str, argument: str, tensor: Tensor, shape: torch.Size) -> None:
    """Refuse a tensor that has not one value per row."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected {argument} {list(shape)}, got {list(tensor.shape)}")
