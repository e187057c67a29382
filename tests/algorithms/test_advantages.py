"""Advantage estimators: hand-worked values and the rules at the edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from stages.algorithms.advantages import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    rae,
    reinforce,
    reinforce_plus_plus_baseline,
    remax,
    remax_clipped,
    rloo,
)
from stages.algorithms.returns import place_rewards, session_return
from stages.algorithms.sessions import Advantages

NAN = float("nan")
Estimator = Callable[..., Advantages]
GROUPED: list[Estimator] = [grpo, dr_grpo, rloo, grpo_passk, opo, gpg, maxrl, reinforce_plus_plus_baseline]


def batch(rewards: Sequence[float | None], uids: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Sessions of one policy token; None is a session whose reward is unknown."""
    names = sorted(set(uids or "u"))
    return {
        "token_rewards": torch.tensor([[NAN if reward is None else float(reward)] for reward in rewards]),
        "mask": torch.ones(len(rewards), 1),
        "groups": torch.tensor([names.index(uid) for uid in uids or ["u"] * len(rewards)]),
        "valid": torch.tensor([reward is not None for reward in rewards]),
    }


def ungrouped(rewards: Sequence[float | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch(rewards).items() if name != "groups"}


def per_row(result: Advantages) -> list[float]:
    assert result.advantages.dtype == torch.float32
    return [float(value) for value in result.advantages[:, 0]]


def approx(values: Sequence[float]) -> object:
    return pytest.approx(values, abs=1e-4)


# --- Values ------------------------------------------------------------------------------------------------


def test_hand_values_of_one_group_under_every_estimator() -> None:
    # R = [1, 0, 1/2, 1/2]: mean 1/2, sample variance (1/4 + 1/4) / 3 = 1/6, std 0.408248.
    rewards = [1, 0, 0.5, 0.5]
    assert per_row(grpo(**batch(rewards))) == pytest.approx([1.224742, -1.224742, 0, 0], abs=1e-6)
    assert per_row(dr_grpo(**batch(rewards))) == [0.5, -0.5, 0, 0]
    # The others of the first row have mean 1/3, those of the second 2/3.
    assert per_row(rloo(**batch(rewards))) == pytest.approx([2 / 3, -2 / 3, 0, 0], abs=1e-7)
    assert per_row(reinforce(**ungrouped(rewards))) == [0.5, -0.5, 0, 0]
    assert per_row(grpo_passk(**batch(rewards))) == pytest.approx([1.224742, 0, 0, 0], abs=1e-6)  # (1 - 1/2) / std
    assert per_row(maxrl(**batch(rewards))) == [1, -1, 0, 0]  # divided by the mean 1/2
    # Three of four have a reward: 4/3 times the deviation.
    assert per_row(gpg(**batch(rewards))) == pytest.approx([2 / 3, -2 / 3, 0, 0], abs=1e-7)
    assert per_row(rae(**ungrouped(rewards), baseline=torch.full((4,), 0.25))) == [0.75, -0.25, 0.25, 0.25]


def test_hand_values_of_the_estimators_that_weigh_by_length() -> None:
    lengths = torch.tensor([2, 4, 3, 1])
    mask = (torch.arange(4) < lengths[:, None]).float()
    last = torch.nn.functional.one_hot(lengths - 1, 4)
    of_lengths = batch([1, 0, 0.5, 0.5]) | {
        "token_rewards": last * torch.tensor([[1.0], [0.0], [0.5], [0.5]]),
        "mask": mask,
    }
    # b = (2 * 1 + 3 / 2 + 1 / 2) / 10 = 0.4.
    expected = torch.tensor([[0.6], [-0.4], [0.1], [0.1]])
    torch.testing.assert_close(opo(**of_lengths).advantages, expected * mask)
    # Deviations 1/2, -1/2, 0, 0 on 2, 4, 3 and 1 tokens: mean -0.1, variance (2 * .36 + 4 * .16 + 4 * .01) / 9.
    expected = torch.tensor([[1.521278], [-1.014185], [0.253546], [0.253546]])
    got = reinforce_plus_plus_baseline(**of_lengths)
    torch.testing.assert_close(got.advantages, expected * mask, atol=1e-6, rtol=0)


def test_gdpo_hears_a_narrow_reward_beside_a_wide_one() -> None:
    # Each reward alone gives its winner +0.7071 and the other -0.7071, however wide it is.
    sides = {name: tensor for name, tensor in batch([0, 0]).items() if name != "token_rewards"}
    components = torch.tensor([[1.0, 0.0], [0.0, 10.0]])
    assert per_row(gdpo(components=components, weights=torch.tensor([1.0, 1.0]), **sides)) == [0, 0]
    got = per_row(gdpo(components=components, weights=torch.tensor([2.0, 1.0]), **sides))
    assert got == approx([0.7071, -0.7071])  # whitened: +-0.7071 has the sample deviation 1
    assert per_row(grpo(**batch([1, 10]))) == approx([-0.7071, 0.7071])  # what the sum of both says


def test_gdpo_agrees_with_grpo_where_there_is_one_reward_and_whitening_changes_nothing() -> None:
    rewards, uids = [1, 0, 1, 0, 1, 0], list("aabbcc")
    sides = {name: tensor for name, tensor in batch(rewards, uids).items() if name != "token_rewards"}
    got = gdpo(components=torch.tensor(rewards).float()[:, None], weights=torch.ones(1), **sides)
    # GRPO gives +-0.7071; over six tokens of mean 0 the sample variance is 6 / 5 * 0.5.
    assert per_row(got) == approx([0.9129, -0.9129] * 3)


def test_remax_clipped_hand_values_with_a_tool_token_between_policy_tokens() -> None:
    got = remax_clipped(
        token_rewards=torch.tensor([[0, 0, 1.0, 0]]),
        mask=torch.tensor([[1, 0, 1, 0]]),
        valid=torch.tensor([True]),
        baseline=torch.tensor([0.5]),
        log_probs=torch.tensor([[-0.7, NAN, -1.2, NAN]]),
        ref_log_probs=torch.tensor([[-1.0, NAN, -1.0, NAN]]),
        kappa=0.1,
        gamma=0.9,
        clip=0.25,
    )
    # R - b = 0.5, cut to 0.25; two policy tokens: 0.81 and 0.9 of it, minus 0.1 * 0.3 and plus 0.1 * 0.2.
    torch.testing.assert_close(got.advantages, torch.tensor([[0.1725, 0, 0.245, 0]]))
    assert torch.equal(got.returns, got.advantages)


def test_remax_clipped_without_discount_clip_and_penalty_is_the_difference_of_the_returns() -> None:
    known = ungrouped([1, 0, 0.5]) | {"baseline": torch.tensor([0.0, 1.0, 0.25])}
    probs = {"log_probs": torch.full((3, 1), -1.0), "ref_log_probs": torch.full((3, 1), -2.0)}
    got = remax_clipped(**known, **probs, kappa=0.0, gamma=1.0, clip=9.0)
    assert per_row(got) == [1, -1, 0.25]


def test_maxrl_weighs_a_prompt_by_how_seldom_it_is_solved_and_gives_nothing_where_it_never_is() -> None:
    rewards = [1, 0, 0, 0, 1, 1, 0, 0, 0, 0, -1, -3, 1, -1]
    got = per_row(maxrl(**batch(rewards, list("aaaabbbbccddee"))))
    assert got == [3, -1, -1, -1, 1, 1, -1, -1, 0, 0, 0, 0, 0, 0]  # means 1/4, 1/2, 0, -2 and 0


def test_a_mean_that_is_rounding_is_no_mean_to_divide_by() -> None:
    rewards = torch.tensor([[-0.1, -0.2, 0.3], [-0.7, 0.8, -0.1]])
    assert rewards.double().sum(-1).mean() > 0
    got = maxrl(
        token_rewards=rewards,
        mask=torch.ones(2, 3),
        groups=torch.zeros(2, dtype=torch.int64),
        valid=torch.ones(2, dtype=torch.bool),
    )
    assert not got.advantages.any()


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 1, 0], [0, 0, 0]),  # two lead
        ([2, 1, 0], [1, 0, 0]),  # std 1
        ([0, 1], [0, 1 / 0.707107]),
        ([1, None, 0], [1 / 0.707107, 0, 0]),
        ([-2, None, -1], [0, 0, 1 / 0.707107]),
    ],
)
def test_only_the_best_of_a_group_learns_from_its_lead(rewards: list[float | None], expected: list[float]) -> None:
    assert per_row(grpo_passk(**batch(rewards))) == approx(expected)


def test_a_lead_that_is_rounding_is_none() -> None:
    rewards = torch.tensor([[0.1, 0.2], [0.3, 0.0], [0.0, 0.0]])
    assert rewards.double().sum(-1)[:2].diff() != 0
    got = grpo_passk(
        token_rewards=rewards,
        mask=torch.ones(3, 2),
        groups=torch.zeros(3, dtype=torch.int64),
        valid=torch.ones(3, dtype=torch.bool),
    )
    assert not got.advantages.any()


def test_gpg_scales_by_the_rows_that_take_part_and_a_lone_session_is_one_of_them() -> None:
    # 5 rows, 2 of them rewarded: a has deviations +-1/2, b is alone, c is not valid.
    assert per_row(gpg(**batch([1, 0, 1, 0, 0, None], list("aabccd")))) == [1.25, -1.25, 0, 0, 0, 0]
    assert per_row(gpg(**batch([0, 0]))) == [0, 0]


def test_remax_hand_values_with_a_tool_token_between_policy_tokens() -> None:
    # G = [.3+.7, .3+.7, .7, .7]; A = G - .5 on policy tokens. verl has .7 at the masked third position.
    got = remax(
        token_rewards=torch.tensor([[0, 0.3, 0, 0.7]]),
        mask=torch.tensor([[1, 1, 0, 1]]),
        valid=torch.tensor([True]),
        baseline=torch.tensor([0.5]),
    )
    torch.testing.assert_close(got.returns, torch.tensor([[1, 1, 0.7, 0.7]]))
    torch.testing.assert_close(got.advantages, torch.tensor([[0.5, 0.5, 0, 0.2]]))


def test_remax_gives_zero_when_the_sample_scores_what_greedy_scored() -> None:
    got = remax(
        token_rewards=torch.tensor([[0.0, 0, 1, 0]]),
        mask=torch.tensor([[1, 1, 1, 0]]),
        valid=torch.tensor([True]),
        baseline=torch.tensor([1.0]),
    )
    assert got.advantages.tolist() == [[0, 0, 0, 0]]
    assert got.returns.tolist() == [[1, 1, 1, 0]]


def test_A01_a_group_of_one_gets_zero_from_every_group_estimator() -> None:
    rewards, uids = [0.7, 1, 0, 1, 0], ["a", "b", "b", "b", "b"]
    for estimator in GROUPED:
        assert per_row(estimator(**batch(rewards, uids)))[0] == 0
    assert per_row(rloo(**batch(rewards, uids)))[1:] == approx([0.6667, -0.6667, 0.6667, -0.6667])


def test_A03_all_zero_and_all_one_groups_get_exactly_zero() -> None:
    rewards = [0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
    got = per_row(grpo(**batch(rewards, list("aaaabbbbcccc"))))
    assert got[:8] == [0] * 8
    assert got[8:] == approx([1.5, -0.5, -0.5, -0.5])


def test_A04_uneven_interleaved_groups_keep_their_own_mean() -> None:
    order = ["a", "b", "c", "a", "b", "c", "a", "b", "c", "a", "c"]
    rewards = [1, 5, 2, 0, 5, 0, 0, 5, 0, 1, 0]

    def of(values: list[float], uid: str) -> list[float]:
        return [value for value, name in zip(values, order, strict=True) if name == uid]

    centred = per_row(dr_grpo(**batch(rewards, order)))
    assert of(centred, "a") == [0.5, -0.5, -0.5, 0.5]
    assert of(centred, "b") == [0, 0, 0]
    assert of(centred, "c") == [1.5, -0.5, -0.5, -0.5]
    scaled = per_row(grpo(**batch(rewards, order)))
    assert of(scaled, "a") == approx([0.866, -0.866, -0.866, 0.866])
    assert of(scaled, "c") == approx([1.5, -0.5, -0.5, -0.5])


def test_A06_reordered_rows_keep_their_advantages() -> None:
    # b0, a0, b2, a2, a1, b1, a3, b3 of a = [1, 0, 1, 1] and b = [0, 0, 1, 0].
    got = per_row(grpo(**batch([0, 1, 1, 1, 0, 0, 1, 0], list("babaabab"))))
    assert got == approx([-0.5, 0.5, 1.5, 0.5, -1.5, -0.5, 0.5, -0.5])


def test_A07_tile_order_gives_the_same_values_as_interleave_order() -> None:
    got = per_row(grpo(**batch([1, 0, 1, 0, 0, 1], list("ababab"))))
    assert got[0::2] == approx([0.5773, 0.5773, -1.1547])
    assert got[1::2] == approx([-0.5773, -0.5773, 1.1547])


def test_A09_rollouts_that_share_a_uid_are_one_group() -> None:
    assert per_row(dr_grpo(**batch([1, 0, 1, 0]))) == [0.5, -0.5, 0.5, -0.5]


def test_A10_a_session_counts_once_however_many_turns_it_has() -> None:
    turns = [3, 1, 2]
    masks = [[np.ones(1)] * count for count in turns]
    rewards = [[reward] * count for reward, count in zip([1.0, 0.0, 0.0], turns, strict=True)]
    returns = [session_return(r, "trajectory", m) for r, m in zip(rewards, masks, strict=True)]
    assert sum(returns) / 3 == pytest.approx(1 / 3)
    padded = np.zeros((3, 3), np.float32)
    mask = np.zeros((3, 3))
    for row, count in enumerate(turns):
        padded[row, :count] = place_rewards(rewards[row], "trajectory", masks[row])
        mask[row, :count] = 1
    sessions = {
        "token_rewards": torch.tensor(padded),
        "mask": torch.tensor(mask),
        "groups": torch.zeros(3, dtype=torch.int64),
        "valid": torch.ones(3, dtype=torch.bool),
    }
    expected = torch.tensor([[1.0, 1, 1], [-0.5, 0, 0], [-0.5, -0.5, 0]])
    torch.testing.assert_close(dr_grpo(**sessions).advantages, expected * 2 / 3)
    torch.testing.assert_close(grpo(**sessions).advantages, expected * 1.1547, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["A11", "R12"])
def test_A11_R12_a_row_without_a_reward_shifts_nobody(case: str) -> None:
    if case == "A11":
        assert per_row(rloo(**batch([1, None, 0, 1]))) == approx([0.5, 0, -1, 0.5])
        assert per_row(dr_grpo(**batch([1, None, 0, 1]))) == approx([0.3333, 0, -0.6667, 0.3333])
    else:
        assert per_row(dr_grpo(**batch([1, 0, None, 0]))) == approx([0.6667, -0.3333, 0, -0.3333])


def test_A12_the_standard_deviation_is_that_of_a_sample() -> None:
    got = per_row(grpo(**batch([1, 0, 0, 0, 1, 0], list("aaaabb"))))
    assert got == approx([1.5, -0.5, -0.5, -0.5, 0.7071, -0.7071])
    rewards = [1, 1, 0, 0, 0, 0]
    assert per_row(rloo(**batch(rewards))) == approx([0.8, 0.8, -0.4, -0.4, -0.4, -0.4])
    assert per_row(dr_grpo(**batch(rewards))) == approx([0.6667, 0.6667, *[-0.3333] * 4])


def test_A15_a_partial_group_uses_its_ok_sessions_and_a_lone_survivor_gets_zero() -> None:
    rewards, uids = [1, 0, 0, None, 1, None, None, None], list("aaaabbbb")
    assert per_row(rloo(**batch(rewards, uids))) == approx([1, -0.5, -0.5, 0, 0, 0, 0, 0])
    assert per_row(grpo(**batch(rewards, uids))) == approx([1.1547, -0.5773, -0.5773, 0, 0, 0, 0, 0])


def test_B06_remax_without_its_baseline_is_an_error_that_names_both() -> None:
    known = ungrouped([1, 0, 1, 1])
    got = remax(**known, baseline=torch.ones(4))
    assert per_row(got) == [0, -1, 0, 0]
    with pytest.raises(TypeError, match=r"remax\(\).*'baseline'"):
        remax(**known)


def test_B07_equal_sampled_rewards_still_learn_from_a_different_greedy_reward() -> None:
    got = remax(**ungrouped([1, 1, 1, 1, 0]), baseline=torch.tensor([0.0, 0, 0, 0, 1]))
    assert per_row(got) == [1, 1, 1, 1, -1]


# --- Edges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", GROUPED)
@pytest.mark.parametrize("parts", [[0.1, 0.2, 0.3, 0.7, 1.1], [1000.1, -999.9, 0.3]])
def test_equal_returns_that_differ_by_rounding_count_as_zero_spread(estimator: Estimator, parts: list[float]) -> None:
    rewards = torch.tensor([parts[shift:] + parts[:shift] for shift in range(len(parts))])
    # One row holds the same total in one number: float32 rounds it once more. One is not valid.
    total = torch.tensor([[sum(parts), *[0.0] * (len(parts) - 1)], [NAN] * len(parts)])
    rewards = torch.cat([rewards, total])
    assert len(set(rewards[:-1].sum(-1).tolist())) > 1
    got = estimator(
        token_rewards=rewards,
        mask=torch.ones_like(rewards),
        groups=torch.zeros(len(rewards), dtype=torch.int64),
        valid=~rewards.isnan().any(-1),
    )
    assert torch.equal(got.advantages, torch.zeros_like(rewards))


def test_a_small_but_real_spread_is_no_zero_spread() -> None:
    got = per_row(grpo(**batch([1.0, 1.001, 1.0, 1.001])))
    # Deviation 0.0005, std 0.00057735 + 0.000001.
    assert got == pytest.approx([-0.8645, 0.8645, -0.8645, 0.8645], abs=1e-3)


@pytest.mark.parametrize("estimator", [*GROUPED, reinforce, remax])
def test_a_row_without_policy_tokens_gets_zeros_and_enters_no_statistic(estimator: Estimator) -> None:
    rewards = torch.tensor([[0.0, 1.0], [5.0, 5.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [0, 0], [1, 1]])
    extra = _needed(estimator, torch.zeros(3, dtype=torch.int64), torch.zeros(3))
    got = estimator(token_rewards=rewards, mask=mask, valid=torch.ones(3, dtype=torch.bool), **extra)
    kept = torch.tensor([0, 2])
    fewer = {name: tensor[kept] for name, tensor in extra.items()}
    alone = estimator(token_rewards=rewards[kept], mask=mask[kept], valid=torch.ones(2, dtype=torch.bool), **fewer)
    assert got.advantages[1].tolist() == [0, 0]
    assert got.returns[1].tolist() == [0, 0]
    assert torch.equal(got.advantages[kept], alone.advantages)
    assert alone.advantages.abs().sum() > 0


@pytest.mark.parametrize("estimator", [*GROUPED, reinforce, remax])
def test_nan_in_an_invalid_row_or_on_a_masked_token_reaches_nobody(estimator: Estimator) -> None:
    rewards = torch.tensor([[1.0, NAN], [NAN, NAN], [0.0, float("inf")]])
    mask = torch.tensor([[1, 0], [1, 1], [1, 0]])
    valid = torch.tensor([True, False, True])
    extra = _needed(estimator, torch.zeros(3, dtype=torch.int64), torch.tensor([0.0, NAN, 0.5]))
    got = estimator(token_rewards=rewards, mask=mask, valid=valid, **extra)
    assert got.advantages.isfinite().all()
    assert got.returns.isfinite().all()
    assert got.advantages[1].tolist() == [0, 0]
    assert got.advantages[:, 1].tolist() == [0, 0, 0]
    assert got.advantages[0, 0] > got.advantages[2, 0]


@pytest.mark.parametrize("estimator", [*GROUPED, reinforce, remax])
def test_an_unknown_reward_in_a_valid_row_is_refused_by_row(estimator: Estimator) -> None:
    extra = _needed(estimator, torch.zeros(3, dtype=torch.int64), torch.zeros(3))
    with pytest.raises(ValueError, match=r"token_rewards is not finite in rows \[1\]"):
        estimator(
            token_rewards=torch.tensor([[1.0], [NAN], [0.0]]),
            mask=torch.ones(3, 1),
            valid=torch.ones(3, dtype=torch.bool),
            **extra,
        )


def test_an_unknown_baseline_in_a_valid_row_is_refused_by_row() -> None:
    with pytest.raises(ValueError, match=r"remax: baseline is not finite in rows \[2\]"):
        remax(**ungrouped([1, 0, 1]), baseline=torch.tensor([1.0, 0.0, NAN]))


@pytest.mark.parametrize("estimator", [*GROUPED, reinforce, remax])
def test_an_empty_batch_gives_an_empty_result(estimator: Estimator) -> None:
    extra = _needed(estimator, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    got = estimator(
        token_rewards=torch.zeros(0, 4),
        mask=torch.zeros(0, 4),
        valid=torch.zeros(0, dtype=torch.bool),
        **extra,
    )
    assert got.advantages.shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mask": torch.ones(2, 2)}, ValueError, r"mask of one shape \[B, T\]"),
        ({"token_rewards": torch.ones(2, 1, dtype=torch.int64)}, TypeError, "floating token_rewards"),
        ({"valid": torch.ones(2)}, TypeError, "valid bool"),
        ({"valid": torch.ones(3, dtype=torch.bool)}, ValueError, r"expected valid \[2\], got \[3\]"),
        ({"groups": torch.zeros(2)}, TypeError, "groups int64"),
        ({"groups": torch.zeros(1, dtype=torch.int64)}, ValueError, r"expected groups \[2\], got \[1\]"),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused_with_the_argument(
    change: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        grpo(**batch([1, 0]) | change)


def _needed(estimator: Estimator, groups: Tensor, baseline: Tensor) -> dict[str, Tensor]:
    if estimator is remax:
        return {"baseline": baseline}
    return {} if estimator is reinforce else {"groups": groups}
