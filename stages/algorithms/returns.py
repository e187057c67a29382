"""From recorded rewards to token rewards and returns.

One mask rule holds for sampled and greedy sessions alike: a reward counts only on policy tokens. So a
baseline and the return that it is subtracted from are always made of the same parts. Importing this module
does not import torch: the baseline join runs without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Semantics = Literal["trajectory", "step", "token"]
"""How the rewards of a session's turns make up its return; see `place_rewards`."""
ROUNDINGS = 8  # Values that differ by less than this many roundings of their parts are equal.


def place_rewards(
    rewards: Sequence[float | None],
    semantics: Semantics,
    masks: Sequence[NDArray[Any]],
    token_rewards: Sequence[NDArray[Any] | None] = (),
) -> NDArray[np.float32]:
    """Put the rewards of one session on the tokens of its concatenated turns.

    - ``trajectory``: each turn carries a copy of the session's one reward; it counts once, on the last policy
      token of the session.
    - ``step``: each turn's own reward, on the last policy token of that turn.
    - ``token``: `token_rewards` as they are, zero where the mask is 0.

    A turn (under ``trajectory``: a session) without a policy token places nothing.

    Args:
        rewards: K scalars, one per turn in order. None is NaN: an unknown reward stays unknown on its token,
            and the caller marks the session invalid.
        semantics: One of the three above.
        masks: K arrays ``[T_k]``, 1 = policy token.
        token_rewards: K arrays ``[T_k]``; read under ``token`` alone.

    Returns:
        ``[T] float32`` with ``T = sum(T_k)``.

    Raises:
        ValueError: Unknown semantics; counts or lengths differ; ``trajectory`` copies that are not equal;
            ``token`` without token rewards.
    """
    if semantics not in get_args(Semantics):
        raise ValueError(f"reward semantics: expected one of {get_args(Semantics)}, got {semantics!r}")
    if len(rewards) != len(masks):
        raise ValueError(f"expected one reward per turn, got {len(rewards)} rewards for {len(masks)} turns")
    turns = [np.asarray(mask) != 0 for mask in masks]
    if semantics == "token":
        placed = _token_rewards(token_rewards, turns)
    else:
        values = [np.nan if reward is None else float(reward) for reward in rewards]
        if semantics == "trajectory":
            values, turns = _one_reward(values), [_joined(turns, np.bool_)]
        placed = [_on_last_policy_token(value, mask) for value, mask in zip(values, turns, strict=True)]
    return _joined(placed, np.float32)


def session_return(
    rewards: Sequence[float | None],
    semantics: Semantics,
    masks: Sequence[NDArray[Any]],
    token_rewards: Sequence[NDArray[Any] | None] = (),
) -> float:
    """Total return of a session: the sum of its placed rewards (arguments and errors of `place_rewards`).

    Under ``trajectory`` the reward counts once, under ``step`` and ``token`` all turns are summed. NaN if a
    reward that counts is unknown.
    """
    return float(place_rewards(rewards, semantics, masks, token_rewards).sum(dtype=np.float64))


def beyond_rounding(spread: Any, size: Any, eps: float) -> Any:
    """Whether returns are apart by more than the rounding of their sums.

    The rounding of a sum is bounded by the size of its parts, not by that of the sum.

    Args:
        spread: Largest minus smallest return of a group; a number, or a tensor of them.
        size: Largest sum of the absolute parts of one of these returns, of the same shape.
        eps: Machine epsilon of the parts' dtype.

    Returns:
        A bool, or a tensor of them.
    """
    return spread > ROUNDINGS * eps * size


def discounted_returns(token_rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Reward to go, discounted per policy token.

    ``G_t = r_t + γ G_{t+1}`` where ``mask_t = 1``, else ``G_t = G_{t+1}``; 0 after the last token.
    Tool tokens between two turns neither stop the return nor discount it. A reward on a masked token is lost.

    Args:
        token_rewards: ``[B, T]``, floating. Masked values may be anything, NaN included.
        mask: ``[B, T]``, 1 = policy token.
        gamma: Discount in [0, 1].

    Returns:
        ``[B, T]`` in the dtype of `token_rewards`, masked positions included; summed in float64.

    Raises:
        ValueError: Ranks or shapes differ, or `gamma` is outside [0, 1].
    """
    if token_rewards.dim() != 2 or token_rewards.shape != mask.shape:
        raise ValueError(
            f"expected token_rewards and mask [B, T], got {list(token_rewards.shape)} and {list(mask.shape)}"
        )
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma: expected a discount in [0, 1], got {gamma}")
    policy = mask != 0
    rewards = token_rewards.double().where(policy, 0.0)
    returns = rewards.new_zeros(rewards.shape)
    to_go = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        to_go = (rewards[:, t] + gamma * to_go).where(policy[:, t], to_go)
        returns[:, t] = to_go
    return returns.to(token_rewards.dtype)


def _one_reward(values: list[float]) -> list[float]:
    """The reward that all turns of a session carry a copy of; an empty session has none, which is NaN."""
    if not values:
        return [np.nan]
    if any(value != values[0] and not (np.isnan(value) and np.isnan(values[0])) for value in values):
        raise ValueError(f"trajectory semantics: expected the same reward on every turn of a session, got {values}")
    return values[:1]


def _token_rewards(
    token_rewards: Sequence[NDArray[Any] | None], turns: list[NDArray[np.bool_]]
) -> list[NDArray[np.float32]]:
    if len(token_rewards) != len(turns):
        raise ValueError(f"token semantics: expected token rewards of {len(turns)} turns, got {len(token_rewards)}")
    placed = []
    for turn, (rewards, mask) in enumerate(zip(token_rewards, turns, strict=True)):
        shape = None if rewards is None else np.shape(rewards)
        if shape != mask.shape:
            raise ValueError(f"turn {turn}: expected token rewards of shape {mask.shape}, got {shape}")
        placed.append(np.where(mask, np.asarray(rewards, np.float32), np.float32(0)))
    return placed


def _on_last_policy_token(value: float, mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    placed = np.zeros(mask.shape, np.float32)
    if mask.any():
        placed[np.flatnonzero(mask)[-1]] = value
    return placed


def _joined(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype) if arrays else np.zeros(0, dtype)
