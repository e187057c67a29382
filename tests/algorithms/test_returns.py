"""Placing rewards on tokens, and returns."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from stages.algorithms.returns import Semantics, discounted_returns, place_rewards, session_return

PROPERTY = settings(derandomize=True, deadline=None, max_examples=100)


def masks(*turns: list[int]) -> list[np.ndarray[Any, Any]]:
    return [np.array(turn, np.int8) for turn in turns]


def test_a_trajectory_reward_lands_once_on_the_last_policy_token_of_the_session() -> None:
    placed = place_rewards([1.0, 1.0], "trajectory", masks([1, 1, 0], [1, 1, 0]))
    assert placed.tolist() == [0, 0, 0, 0, 1, 0]
    assert placed.dtype == np.float32


def test_a_trajectory_reward_moves_back_when_the_last_turn_has_no_policy_token() -> None:
    assert place_rewards([1.0, 1.0], "trajectory", masks([1, 1, 0], [0, 0])).tolist() == [0, 1, 0, 0, 0]


def test_a_step_reward_lands_on_the_last_policy_token_of_its_turn() -> None:
    assert place_rewards([0.5, 0.25], "step", masks([1, 1, 0], [1, 1])).tolist() == [0, 0.5, 0, 0, 0.25]


def test_token_rewards_count_on_policy_tokens_only() -> None:
    tokens = [np.array([0.5, 9.0]), np.array([float("nan"), 1.0])]
    placed = place_rewards([0.0, 0.0], "token", masks([1, 0], [0, 1]), tokens)
    assert placed.tolist() == [0.5, 0, 0, 1]


@pytest.mark.parametrize("semantics", ["trajectory", "step"])
def test_R14_an_empty_response_places_nothing(semantics: Semantics) -> None:
    rows = [([1, 1, 1], 1.0), ([], 1.0), ([1], 0.0)]
    padded = []
    for mask, reward in rows:
        placed = place_rewards([reward], semantics, masks(mask))
        padded.append([*placed.tolist(), *[0.0] * (4 - len(placed))])
    assert padded == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert session_return([1.0], semantics, masks([])) == 0


def test_R14_an_empty_turn_in_the_middle_places_nothing_on_its_neighbours() -> None:
    assert place_rewards([0.5, 2.0, 0.25], "step", masks([1, 1], [0], [1])).tolist() == [0, 0.5, 0, 0.25]


def test_an_unknown_reward_stays_unknown_on_its_token() -> None:
    placed = place_rewards([0.5, None], "step", masks([1], [1, 1]))
    assert placed[:2].tolist() == [0.5, 0]
    assert np.isnan(placed[2])
    assert np.isnan(session_return([float("nan")], "trajectory", masks([1])))


def test_total_returns_by_hand() -> None:
    turns = masks([1, 0], [1, 1], [1])
    assert session_return([0.2, 0.3, 0.5], "step", turns) == pytest.approx(1.0)
    assert session_return([0.7, 0.7, 0.7], "trajectory", turns) == pytest.approx(0.7)
    tokens = [np.array([0.1, 5.0]), np.array([0.2, 0.3]), np.array([0.4])]
    assert session_return([0, 0, 0], "token", turns, tokens) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], "trajectroy", masks([1])), "'trajectroy'"),
        (([1.0], "step", masks([1], [1])), "1 rewards for 2 turns"),
        (([1.0, 0.5], "trajectory", masks([1], [1])), r"same reward on every turn.*1\.0, 0\.5"),
        (([1.0], "token", masks([1])), "token rewards of 1 turns, got 0"),
        (([1.0], "token", masks([1]), [None]), "turn 0"),
        (
            ([1.0], "token", masks([1, 1]), [np.zeros(3)]),
            r"turn 0: expected token rewards of shape \(2,\), got \(3,\)",
        ),
    ],
)
def test_rewards_that_do_not_fit_their_session_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place_rewards(*arguments)


def test_A14_a_discounted_return_carries_through_a_tool_result() -> None:
    got = discounted_returns(torch.tensor([[0.0, 0, 0, 0, 2]]), torch.tensor([[1, 1, 0, 0, 1]]), gamma=0.5)
    assert got[0, [0, 1, 4]].tolist() == [0.5, 1.0, 2.0]


def test_discounted_returns_by_hand_for_rewards_along_the_way() -> None:
    # G_3 = .7, G_2 = .7 (masked), G_1 = .3 + .9 * .7 = .93, G_0 = .9 * .93 = .837
    got = discounted_returns(torch.tensor([[0, 0.3, 9.0, 0.7]]), torch.tensor([[1, 1, 0, 1]]), gamma=0.9)
    torch.testing.assert_close(got, torch.tensor([[0.837, 0.93, 0.7, 0.7]]))


def test_a_discount_above_one_and_unequal_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="gamma"):
        discounted_returns(torch.zeros(1, 2), torch.ones(1, 2), gamma=1.5)
    with pytest.raises(ValueError, match=r"\[1, 2\] and \[1, 3\]"):
        discounted_returns(torch.zeros(1, 2), torch.ones(1, 3), gamma=1.0)


Row = list[tuple[int, int]]
ROWS: st.SearchStrategy[Row] = st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 1)), min_size=1, max_size=8)


def as_tensors(row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, mask = zip(*row, strict=True)
    return torch.tensor([rewards], dtype=torch.float32), torch.tensor([mask])


@PROPERTY
@given(row=ROWS)
def test_without_discount_the_return_is_the_suffix_sum_of_unmasked_rewards(row: Row) -> None:
    rewards, mask = as_tensors(row)
    expected = (rewards * mask).flip(-1).cumsum(-1).flip(-1)
    assert torch.equal(discounted_returns(rewards, mask, gamma=1.0), expected)


@PROPERTY
@given(row=ROWS, at=st.integers(0, 8), width=st.integers(1, 3))
def test_inserting_masked_tokens_leaves_the_returns_of_policy_tokens(row: Row, at: int, width: int) -> None:
    rewards, mask = as_tensors(row)
    longer, longer_mask = as_tensors([*row[:at], *[(7, 0)] * width, *row[at:]])
    got = discounted_returns(longer, longer_mask, gamma=0.75)[longer_mask != 0]
    assert torch.equal(got, discounted_returns(rewards, mask, gamma=0.75)[mask != 0])


TURN = st.tuples(st.integers(-8, 8), st.lists(st.integers(0, 1), max_size=4))


@PROPERTY
@given(turns=st.lists(TURN, min_size=1, max_size=4), semantics=st.sampled_from(["trajectory", "step"]))
def test_the_session_return_is_the_return_of_its_placed_rewards(
    turns: list[tuple[int, list[int]]], semantics: Semantics
) -> None:
    rewards = [reward / 4 for reward, _ in turns]
    if semantics == "trajectory":
        rewards = rewards[:1] * len(turns)
    turn_masks = masks(*(mask for _, mask in turns))
    placed = place_rewards(rewards, semantics, turn_masks)
    assert len(placed) == sum(len(mask) for _, mask in turns)
    joined = np.concatenate(turn_masks)
    assert not placed[joined == 0].any()
    total = session_return(rewards, semantics, turn_masks)
    assert total == placed.sum()
    if all(mask and mask[-1] for _, mask in turns):
        assert total == (sum(rewards) if semantics == "step" else rewards[0])
