"""Estimators that compare tokens: hand-worked values and the rules at the edges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stages.algorithms.sessions import whiten
from stages.algorithms.token_advantages import (
    gae,
    optimal_token_baseline,
    reinforce_plus_plus,
    tir_optimal_token_baseline,
)

NAN = float("nan")


def assert_close(got: Tensor, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=tolerance, rtol=0)


def one(**tensors: Any) -> dict[str, Tensor]:
    """A batch of one valid session."""
    return {name: torch.tensor([values]) for name, values in tensors.items()} | {"valid": torch.tensor([True])}


# GAE


def test_gae_hand_values_with_a_tool_token_between_policy_tokens() -> None:
    got = gae(
        **one(token_rewards=[0.0, 0, 1, 0], mask=[1, 0, 1, 0], values=[0.2, NAN, 0.6, 9.0]),
        gamma=0.9,
        lam=0.8,
    )
    # Last token: 1 - 0.6 = 0.4. First: 0.9 * 0.6 - 0.2 + 0.72 * 0.4 = 0.628. Targets: with the values added.
    assert_close(got.returns, [[0.828, 0, 1.0, 0]])
    # Two numbers are whitened to +-1 / sqrt(2), whatever they are.
    assert_close(got.advantages, [[0.707107, 0, -0.707107, 0]], 1e-5)


def test_gae_with_lambda_zero_is_the_error_of_one_step_and_with_one_that_of_the_whole_return() -> None:
    session = one(token_rewards=[0.0, 0, 1], mask=[1, 1, 1], values=[0.5, 0.25, 0.75])
    assert_close(gae(**session, gamma=1.0, lam=0.0).returns, [[0.25, 0.75, 1.0]])  # r_t + V_{t+1}
    assert_close(gae(**session, gamma=1.0, lam=1.0).returns, [[1.0, 1.0, 1.0]])  # G_t
    assert_close(gae(**session, gamma=0.5, lam=1.0).returns, [[0.25, 0.5, 1.0]])


def test_a_critic_that_is_right_leaves_no_advantage() -> None:
    values = torch.tensor([[0.1, 0.1, 0.1], [0.7, 0.7, 0.7]])
    rewards = torch.tensor([[0.0, 0, 0.1], [0.3, 0.3, 0.1]])  # the second sums to 0.7 only up to rounding
    got = gae(
        token_rewards=rewards,
        mask=torch.ones(2, 3),
        valid=torch.tensor([True, True]),
        values=values - torch.tensor([[0.0, 0, 0], [0.0, 0.3, 0.6]]),
    )
    assert not got.advantages.any()


@pytest.mark.parametrize("values", [[[0.0, NAN]], [[0.0, float("inf")]]])
def test_a_value_that_is_not_finite_on_a_policy_token_is_refused(values: list[list[float]]) -> None:
    session = one(token_rewards=[0.0, 1], mask=[1, 1])
    with pytest.raises(ValueError, match=r"gae: values is not finite in rows \[0\]"):
        gae(**session, values=torch.tensor(values))
    with pytest.raises(ValueError, match=r"gae: expected values of the shape of mask \[1, 2\], got \[2, 1\]"):
        gae(**session, values=torch.zeros(2, 1))


# REINFORCE++


def test_reinforce_plus_plus_hand_values() -> None:
    # Rewards 1, 0, 1/2, 1/2 on the last of 2, 4, 3, 1 tokens, discount 0.9.
    got = reinforce_plus_plus(
        token_rewards=torch.tensor([[0, 1.0, 0, 0], [0, 0, 0, 0], [0, 0, 0.5, 0], [0.5, 0, 0, 0]]),
        mask=torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]]),
        valid=torch.ones(4, dtype=torch.bool),
        gamma=0.9,
    )
    assert_close(got.returns, [[0.9, 1, 0, 0], [0, 0, 0, 0], [0.405, 0.45, 0.5, 0], [0.5, 0, 0, 0]])
    # Mean 0.3755, sample variance (2.676525 - 10 * 0.3755²) / 9 = 0.140725 over the ten tokens.
    low = -1.000978
    expected = [[1.398171, 1.664743, 0, 0], [low] * 4, [0.078639, 0.198597, 0.331883, 0], [0.331883, 0, 0, 0]]
    assert_close(got.advantages, expected, 1e-5)


def test_A14_the_discount_counts_policy_tokens_and_a_tool_does_not_stop_the_return() -> None:
    session = one(token_rewards=[0.0, 0, 7, 0, 2], mask=[1, 1, 0, 0, 1])
    assert_close(reinforce_plus_plus(**session, gamma=0.5).returns, [[0.5, 1, 0, 0, 2]])


# Whitening


@pytest.mark.parametrize("estimator", [gae, reinforce_plus_plus])
@pytest.mark.parametrize("tokens", [0, 1])
def test_whitening_no_token_or_one_gives_zero(estimator: Any, tokens: int) -> None:
    session = one(token_rewards=[3.0, 3.0], mask=[int(tokens > 0), 0])
    values = {"values": torch.tensor([[1.0, 1.0]])} if estimator is gae else {}
    got = estimator(**session, **values)
    assert got.advantages.tolist() == [[0, 0]]
    assert got.returns.tolist() == [[3.0 * tokens, 0]]


def test_whitened_tokens_have_mean_zero_and_sample_deviation_one() -> None:
    values = torch.tensor([[1.0, 2, 9], [4, 9, 9]], dtype=torch.float64)
    among = torch.tensor([[True, True, False], [True, False, False]])
    got = whiten(values, among, values, torch.float32)
    # 1, 2 and 4: mean 7/3, sample variance 7/3.
    assert_close(got, [[-0.872872, -0.218218, 0], [1.091089, 0, 0]])


def test_equal_returns_that_differ_by_rounding_are_not_whitened() -> None:
    parts = [0.1, 0.2, 0.3, 0.7, 1.1]
    rewards = torch.tensor([parts[shift:] + parts[:shift] for shift in range(5)])
    first = torch.zeros(5, 5)
    first[:, 0] = rewards.sum(-1)  # in float32
    assert len(set(first[:, 0].tolist())) > 1
    mask = torch.tensor([[1, 0, 0, 0, 0]]).expand(5, 5)
    got = reinforce_plus_plus(token_rewards=first, mask=mask, valid=torch.ones(5, dtype=torch.bool))
    assert not got.advantages.any()


# The optimal token baseline

# One group. The first session: probability 1/2 of two equal tokens, so 1 - 1 + 1/2 = 0.5 per token. The second: 1/4 of
# four, so 1 - 1/2 + 1/4 = 0.75.
PI = torch.tensor([[0.5], [0.25]]).expand(2, 3)
PROBABILITIES = {"log_probs": PI.log(), "sum_pi_squared": PI}


def group(rewards: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {
        "token_rewards": rewards,
        "mask": mask,
        "groups": torch.zeros(len(mask), dtype=torch.int64),
        "valid": torch.ones(len(mask), dtype=torch.bool),
    }


def test_each_place_has_the_mean_of_the_returns_weighted_by_the_squared_gradients_up_to_there() -> None:
    rewards = torch.tensor([[0, 1.0, 0], [0, 0, 0]])
    two_and_three = group(rewards, torch.tensor([[1, 1, 0], [1, 1, 1]]))
    got = optimal_token_baseline(**two_and_three, **PROBABILITIES)
    # 0.5 / (0.5 + 0.75) and 1 / (1 + 1.5); the third place has one session alone.
    assert_close(got.advantages, [[0.6, 0.6, 0], [-0.4, -0.4, 0]])
    assert got.returns.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert torch.equal(tir_optimal_token_baseline(**two_and_three, **PROBABILITIES).advantages, got.advantages)


def test_a_place_counts_policy_tokens_alone_under_tir() -> None:
    with_a_tool = group(torch.tensor([[0, 0, 1.0], [0, 0, 0]]), torch.tensor([[1, 0, 1], [1, 1, 1]]))
    got = optimal_token_baseline(**with_a_tool, **PROBABILITIES)
    # Third token: 1 against 0.75 * 3; the tool's token has the other session alone.
    assert_close(got.advantages, [[0.6, 0, 1 - 1 / 3.25], [-0.4, 0, -1 / 3.25]])
    got = tir_optimal_token_baseline(**with_a_tool, **PROBABILITIES)
    assert_close(got.advantages, [[0.6, 0, 0.6], [-0.4, -0.4, 0]])


def test_where_all_weights_are_zero_the_sessions_count_alike() -> None:
    certain = {"log_probs": torch.zeros(2, 1), "sum_pi_squared": torch.tensor([[1.0], [1.0 - 1e-7]])}
    got = optimal_token_baseline(**group(torch.tensor([[1.0], [0.0]]), torch.ones(2, 1)), **certain)
    assert got.advantages.tolist() == [[0.5], [-0.5]]


def test_a_group_of_equal_returns_is_not_pushed_at_the_end_of_its_longest_session() -> None:
    rewards = torch.tensor([[0, 1.0, 0], [0, 0, 1.0]])
    got = optimal_token_baseline(**group(rewards, torch.tensor([[1, 1, 0], [1, 1, 1]])), **PROBABILITIES)
    assert not got.advantages.any()
