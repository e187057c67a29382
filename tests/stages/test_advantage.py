"""The advantage stage: sessions in, advantages per turn out, and what takes no part is dropped by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import Drop
from dataflow.testing import make_batch, run_stage
from stages.advantage import Advantage, AdvantageConfig

ESTIMATORS = ["remax", "grpo", "dr_grpo", "rloo", "reinforce"]


def stage(estimator: str, **options: Any) -> Advantage:
    return Advantage(AdvantageConfig(estimator=estimator, **options))


def row(uid: str, reward: float | None, baseline: float = 0.0, *, tokens: int = 1, **options: Any) -> dict[str, Any]:
    """One trajectory row of so many policy tokens."""
    return {
        "uid": uid,
        "response_mask": np.ones(tokens, np.int8),
        "reward": reward,
        "reward_semantics": "trajectory",
        "token_rewards": None,
        "reward_status": "ok" if reward is not None else "error",
        "baseline": baseline,
        **options,
    }


def rows_of(**rewards: list[float | None]) -> list[dict[str, Any]]:
    """Sessions of one token each, uid by uid."""
    return [row(uid, reward) for uid, values in rewards.items() for reward in values]


def advantages(estimator: str, rows: list[dict[str, Any]], **options: Any) -> list[Any]:
    """The advantage of each row's first token, to 4 places, or why it was dropped."""
    return [
        one["advantages"].reason if isinstance(one["advantages"], Drop) else round(float(one["advantages"][0]), 4)
        for one in run_stage(stage(estimator, **options), rows)
    ]


# Golden values; GRPO: (r - mean) / (sample standard deviation + 1e-6), RLOO: r - mean of the others.


def test_A09_four_rollouts_of_one_uid_are_compared_with_each_other() -> None:
    assert advantages("dr_grpo", rows_of(a=[1, 0, 1, 0])) == [0.5, -0.5, 0.5, -0.5]


def test_A06_rows_reordered_between_reward_and_advantage_keep_their_values() -> None:
    a, b = [1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]
    order = ["b0", "a0", "b2", "a2", "a1", "b1", "a3", "b3"]
    rows = [row(name[0], (a if name[0] == "a" else b)[int(name[1])], session=int(name[1])) for name in order]
    # Centred by hand: a has mean 0.75, b 0.25.
    assert advantages("dr_grpo", rows) == [-0.25, 0.25, 0.75, 0.25, -0.75, -0.25, 0.25, -0.25]
    # Divided by the sample standard deviation 0.5.
    assert advantages("grpo", rows) == [-0.5, 0.5, 1.5, 0.5, -1.5, -0.5, 0.5, -0.5]


def test_A07_tile_order_gives_the_same_values_as_interleaved_order() -> None:
    a, b = [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]
    tiled = [row(uid, values[index], session=index) for index in range(3) for uid, values in (("a", a), ("b", b))]
    got = advantages("grpo", tiled)
    assert got[0::2] == pytest.approx([0.5773, 0.5773, -1.1547], abs=1e-4)
    assert got[1::2] == pytest.approx([-0.5773, -0.5773, 1.1547], abs=1e-4)


def test_A04_uneven_groups_are_each_centred_on_their_own_mean() -> None:
    got = advantages("dr_grpo", rows_of(a=[1, 0, 0, 1], b=[5, 5, 5], c=[2, 0, 0, 0]))
    assert got == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 1.5, -0.5, -0.5, -0.5]


def test_A11_a_session_without_a_reward_is_dropped_and_shifts_no_other() -> None:
    rows = rows_of(a=[1, None, 0, 1])
    assert advantages("rloo", rows) == [0.5, "reward error", -1.0, 0.5]
    assert advantages("dr_grpo", rows) == [0.3333, "reward error", -0.6667, 0.3333]


def test_R12_three_scored_sessions_beside_an_error_are_centred_over_three() -> None:
    assert advantages("dr_grpo", rows_of(a=[1, 0, None, 0])) == [0.6667, -0.3333, "reward error", -0.3333]


@pytest.mark.parametrize("status", ["timeout", "error", "abstain"])
def test_a_session_is_dropped_under_the_status_of_its_reward(status: str) -> None:
    rows = [row("a", None, reward_status=status), row("a", 1.0), row("a", 0.0)]
    assert advantages("rloo", rows) == [f"reward {status}", 1.0, -1.0]
    assert advantages("remax", rows)[0] == f"reward {status}"


def test_A15_survivors_of_a_group_are_compared_with_each_other_alone() -> None:
    rows = rows_of(a=[1, 0, 0])  # the fourth failed in rollout and is not here
    assert advantages("rloo", rows) == [1.0, -0.5, -0.5]
    assert advantages("grpo", rows) == pytest.approx([1.1547, -0.5773, -0.5773], abs=1e-4)


def test_A15_a_lone_survivor_among_unscored_sessions_is_dropped_as_a_partial_group() -> None:
    rows = rows_of(a=[1, None, None, None], b=[1, 0])
    assert advantages("grpo", rows)[:4] == ["partial group", *["reward error"] * 3]
    assert advantages("rloo", rows)[4:] == [1.0, -1.0]


def test_A10_a_session_of_several_turns_counts_once() -> None:
    turns = [row("a", 1.0, session=0, turn=turn, tokens=turn + 1) for turn in range(3)]
    rows = [*turns, row("a", 0.0, session=1)]
    # Two sessions with returns 1 and 0: mean 0.5, not 0.75.
    assert advantages("dr_grpo", rows) == [0.5, 0.5, 0.5, -0.5]
    written = run_stage(stage("dr_grpo"), rows)
    assert [len(one["advantages"]) for one in written] == [1, 2, 3, 1]
    assert all((one["advantages"] == 0.5).all() for one in written[:3])


def test_B07_equal_sampled_rewards_beside_another_greedy_one_keep_their_signal() -> None:
    rows = [*(row("a", 1.0, 0.0) for _ in range(4)), row("b", 0.0, 1.0)]
    assert advantages("remax", rows) == [1.0, 1.0, 1.0, 1.0, -1.0]


def test_B06_remax_subtracts_the_baseline_and_without_the_column_names_it() -> None:
    rows = [row("a", reward, 1.0) for reward in (1.0, 0.0, 1.0, 1.0)]
    assert advantages("remax", rows) == [0.0, -1.0, 0.0, 0.0]
    with pytest.raises(KeyError, match="no column 'baseline'"):
        advantages("remax", [{name: value for name, value in one.items() if name != "baseline"} for one in rows])


def test_B02_remax_compares_total_returns_under_step_semantics() -> None:
    sessions = {0: [0.5, 0.0, 1.0], 1: [0.0, 0.0, 0.4]}
    rows = [
        row("a", reward, 1.0, session=session, turn=turn, reward_semantics="step")
        for session, rewards in sessions.items()
        for turn, reward in enumerate(rewards)
    ]
    got = advantages("remax", rows)
    # Return to go of the first turn minus 1.0: 1.5 - 1 and 0.4 - 1.
    assert (got[0], got[3]) == (0.5, -0.6)


def test_R14_an_empty_response_takes_no_part_and_gives_an_empty_array() -> None:
    written = run_stage(stage("remax"), [row("a", 1.0, tokens=3), row("a", 1.0, tokens=0), row("b", 0.0, 1.0)])
    assert [one["advantages"].tolist() for one in written] == [[1.0, 1.0, 1.0], [], [-1.0]]


def test_advantages_are_zero_on_tokens_that_the_policy_did_not_draw() -> None:
    rows = [row("a", 1.0, response_mask=np.array([1, 0, 1], np.int8)), row("a", 0.0)]
    first, _ = run_stage(stage("dr_grpo"), rows)
    assert first["advantages"].tolist() == [0.5, 0.0, 0.5]


def test_reinforce_compares_with_the_whole_window() -> None:
    assert advantages("reinforce", rows_of(a=[1], b=[0], c=[0], d=[1])) == [0.5, -0.5, -0.5, 0.5]


# Reports


def test_A03_the_share_of_groups_without_spread_is_reported_and_they_get_exactly_zero() -> None:
    batch = make_batch(rows_of(a=[0, 0, 0, 0], b=[1, 1, 1, 1], c=[1, 0, 0, 0]))
    columns = stage("grpo").process(batch)
    values = [round(float(array[0]), 4) for array in columns["advantages"]]
    assert values == [0.0] * 8 + [1.5, -0.5, -0.5, -0.5]
    total, groups = batch.metrics["advantage/zero_group_share"]
    assert (total, groups) == (2.0, 3.0)


def test_the_mean_size_of_an_advantage_is_reported_per_session() -> None:
    batch = make_batch(rows_of(a=[1, 0]))
    stage("dr_grpo").process(batch)
    assert batch.metrics["advantage/abs_mean"] == (1.0, 2.0)


def test_the_moments_of_returns_and_advantages_are_reported_of_every_session_that_can_be_trained_on() -> None:
    two_turns = [
        row("a", reward, 0.5, session=0, turn=turn, reward_semantics="step") for turn, reward in enumerate((1.0, 0.5))
    ]
    unused = [row("a", None, 0.5), row("a", 9.0, 0.5, tokens=0)]
    batch = make_batch([*two_turns, row("a", 0.25, 0.5, session=1), *unused])
    stage("remax").process(batch)
    # Total returns 1.5 and 0.25 against 0.5: sums 1.75, 2.25 + 0.0625, 1 + 0.0625.
    moments = {name: value for name, value in batch.metrics.items() if name.split("/")[1] in ("mean", "square")}
    assert moments == {
        "return/mean": (1.75, 2.0),
        "return/square": (2.3125, 2.0),
        "advantage/square": (1.0625, 2.0),
    }


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce"])
def test_an_estimator_without_a_greedy_baseline_reports_no_moments(estimator: str) -> None:
    batch = make_batch(rows_of(a=[1, 0]))
    stage(estimator).process(batch)
    assert not {"return/mean", "return/square", "advantage/square"} & set(batch.metrics)


# What it waits for


@pytest.mark.parametrize(
    ("estimator", "granularity", "min_group"),
    [
        ("remax", "row", 1),
        ("grpo", "group", 2),
        ("dr_grpo", "group", 2),
        ("rloo", "group", 2),
        ("reinforce", "window", 1),
    ],
)
def test_what_the_stage_waits_for_follows_from_the_estimator(estimator: str, granularity: str, min_group: int) -> None:
    built = stage(estimator)
    assert (built.granularity, built.min_group) == (granularity, min_group)
    assert ("baseline" in built.reads) == (estimator == "remax")


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(data=st.data())
def test_A06_any_order_of_sessions_gives_each_the_same_advantage(estimator: str, data: st.DataObject) -> None:
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=6, max_size=6))
    rows = [row("ab"[place % 2], reward, 0.5, session=place) for place, reward in enumerate(rewards)]
    order = data.draw(st.permutations(range(6)))
    plain = advantages(estimator, rows)
    shuffled = advantages(estimator, [rows[place] for place in order])
    assert shuffled == [plain[place] for place in order]
