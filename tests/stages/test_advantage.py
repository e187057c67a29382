"""The advantage stage: sessions in, advantages per turn out, and what takes no part is dropped by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import ConfigError, Drop, RunError
from dataflow.stage import StageConfig, StageContext
from dataflow.testing import make_batch, run_stage
from stages.advantage import Advantage, AdvantageConfig
from stages.algorithms.catalog import ESTIMATORS
from stages.return_mean import ReturnMean


def stage(estimator: str, run_dir: Path = Path("."), **options: Any) -> Advantage:
    built = Advantage(AdvantageConfig(estimator=estimator, **options))
    built.setup(StageContext("test", run_dir, "advantage-0", 0))
    return built


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
def test_an_estimator_without_a_baseline_reports_no_moments(estimator: str) -> None:
    batch = make_batch(rows_of(a=[1, 0]))
    stage(estimator).process(batch)
    assert not {"return/mean", "return/square", "advantage/square"} & set(batch.metrics)


# What it waits for


REWARDS = {"response_mask", "reward", "reward_semantics", "token_rewards", "reward_status"}
READS = {
    "remax": {"baseline"},
    "remax_clipped": {"baseline", "rollout_log_probs", "ref_log_probs"},
    "gdpo": {"reward_info"},
    "rae": {"data_source"},
    "gae": {"values"},
    "optimal_token_baseline": {"rollout_log_probs", "sum_pi_squared"},
    "tir_optimal_token_baseline": {"rollout_log_probs", "sum_pi_squared"},
}
KEYS = {"gdpo": {"reward_keys": ["correct", "short"]}}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_the_stage_waits_for_and_reads_follows_from_the_estimator(estimator: str) -> None:
    built, needs = stage(estimator, **KEYS.get(estimator, {})), ESTIMATORS[estimator]
    assert (built.granularity, built.min_group) == (needs.granularity, needs.min_group)
    assert set(built.reads) == REWARDS | READS.get(estimator, set())
    assert len(built.reads) == len(set(built.reads))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(data=st.data())
def test_A06_any_order_of_sessions_gives_each_the_same_advantage(estimator: str, data: st.DataObject) -> None:
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=6, max_size=6))
    rows = [
        row("ab"[place % 2], reward, 0.5, session=place, **beside(value=place / 4, correct=reward, short=place % 3))
        for place, reward in enumerate(rewards)
    ]
    order = data.draw(st.permutations(range(6)))
    options = KEYS.get(estimator, {})
    plain = advantages(estimator, rows, **options)
    shuffled = advantages(estimator, [rows[place] for place in order], **options)
    assert shuffled == [plain[place] for place in order]


# What it reads beside the rewards


def beside(tokens: int = 1, value: float = 0.0, **components: float | None) -> dict[str, Any]:
    """The columns that some estimators read beside the rewards, of one row."""
    return {
        "values": np.full(tokens, value, np.float32),
        "rollout_log_probs": np.full(tokens, np.log(0.5), np.float32),
        "ref_log_probs": np.full(tokens, np.log(0.5) - 1, np.float32),
        "sum_pi_squared": np.full(tokens, 0.5, np.float32),
        "reward_info": json.dumps(components),
        "data_source": "sums",
    }


def test_values_of_several_turns_are_joined_and_the_returns_are_cut_for_the_critic() -> None:
    turns = [
        row("a", reward, session=0, turn=turn, reward_semantics="step", values=np.array([value], np.float32))
        for turn, (reward, value) in enumerate([(0.0, 0.25), (1.0, 0.5)])
    ]
    written = run_stage(stage("gae", options={"gamma": 0.5, "lam": 0.0}), turns)
    # Targets r_t + V_{t+1} / 2: 0.25 and 1. Raw advantages 0 and 0.5, whitened.
    assert [one["returns"].tolist() for one in written] == [[0.25], [1.0]]
    assert [float(one["advantages"][0]) for one in written] == pytest.approx([-0.7071, 0.7071], abs=1e-4)


def test_the_clipped_form_of_remax_reads_both_log_probabilities() -> None:
    rows = [row("a", 1.0, 0.0, **beside()), row("b", 0.0, 1.0, **beside())]
    got = advantages("remax_clipped", rows, options={"kappa": 0.1, "gamma": 1.0, "clip": 0.5})
    assert got == [0.4, -0.6]  # +-0.5 minus 0.1 times a log ratio of 1


def test_the_token_baseline_reads_the_sum_of_the_squared_probabilities() -> None:
    rows = [row("a", 1.0, **beside()), row("a", 0.0, **beside() | {"sum_pi_squared": np.array([1.5], np.float32)})]
    assert advantages("optimal_token_baseline", rows) == [0.75, -0.25]  # weights 0.5 and 1.5


@pytest.mark.parametrize(("values", "got"), [(None, "null"), (np.zeros(2, np.float32), "2 values")])
def test_a_token_column_without_a_value_per_token_is_refused_unless_the_session_takes_no_part(
    values: Any, got: str
) -> None:
    bad = row("a", 1.0, tokens=3, values=values)
    with pytest.raises(
        ValueError, match=rf"column 'values', uid 'a', session 1, turn 0: expected .* 3 tokens, got {got}"
    ):
        run_stage(stage("gae"), [row("a", 1.0, **beside()), bad])
    unscored = bad | {"reward": None, "reward_status": "timeout"}
    assert advantages("gae", [row("a", 1.0, **beside()), unscored]) == [0.0, "reward timeout"]


def test_gdpo_compares_the_named_rewards_with_their_weights() -> None:
    rows = [row("a", 1.0, **beside(correct=1, short=0)), row("a", 10.0, **beside(correct=0, short=10))]
    assert advantages("gdpo", rows, reward_keys=["correct"]) == [0.7071, -0.7071]
    assert advantages("gdpo", rows, reward_keys=["short"]) == [-0.7071, 0.7071]
    assert advantages("gdpo", rows, reward_keys=["correct", "short"]) == [0.0, 0.0]
    assert advantages("gdpo", rows, reward_keys={"correct": 2, "short": 1}) == [0.7071, -0.7071]


def test_a_named_reward_follows_the_semantics_of_the_reward() -> None:
    def session(number: int, semantics: str, values: list[float]) -> list[dict[str, Any]]:
        return [
            row("a", 1.0, session=number, turn=turn, reward_semantics=semantics, **beside(correct=value))
            for turn, value in enumerate(values)
        ]

    # Two turns add up to 2 under step; three copies of 2 count once.
    assert (
        advantages("gdpo", session(0, "step", [1, 1]) + session(1, "trajectory", [2] * 3), reward_keys=["correct"])
        == [0.0] * 5
    )


def test_a_reward_without_the_named_number_stops_the_run_with_those_there_are() -> None:
    rows = [row("a", 1.0, **beside(correct=1, short=0)), row("a", 0.0, **beside(short=1))]
    with pytest.raises(RunError, match=r"uid 'a', session 1 has no number 'correct'; its numbers are: short\."):
        run_stage(stage("gdpo", reward_keys=["correct"]), rows)
    unscored = [rows[0], row("a", 0.0, **beside(correct=0)), rows[1] | {"reward": None, "reward_status": "error"}]
    assert advantages("gdpo", unscored, reward_keys=["correct"]) == [0.7071, -0.7071, "reward error"]


@pytest.mark.parametrize("estimator", ["gdpo", "gpg", "reinforce_plus_plus_baseline"])
def test_a_lone_survivor_in_a_window_is_dropped_as_a_partial_group(estimator: str) -> None:
    rewards = [("a", 1.0), ("a", None), ("b", 1.0), ("b", 0.0)]
    rows = [row(uid, reward, **beside(correct=reward, short=0)) for uid, reward in rewards]
    got = advantages(estimator, rows, **KEYS.get(estimator, {}))
    assert got[:2] == ["partial group", "reward error"]
    assert got[2] > 0 > got[3]


# Running means


def noted(run_dir: Path, window: int, rewards: list[float]) -> None:
    """Note the returns of a window, as the stage return_mean does."""
    notes = ReturnMean(StageConfig())
    notes.setup(StageContext("test", run_dir, "return_mean-0", 0))
    batch = make_batch([row("a", reward, **beside()) for reward in rewards])
    batch.window_index = window
    notes.process(batch)


def test_rae_compares_with_the_running_mean_of_the_windows_that_are_surely_trained_on(tmp_path: Path) -> None:
    noted(tmp_path, 0, [1.0, 0.0])
    noted(tmp_path, 1, [1.0])

    def first(window: int, max_staleness: int) -> float:
        built = stage("rae", tmp_path, ema_decay=0.5, max_staleness=max_staleness)
        batch = make_batch([row("a", 1.0, **beside()), row("a", 1.0, **beside() | {"data_source": "words"})])
        batch.window_index = window
        values = built.process(batch)["advantages"]
        assert float(values[1][0]) == 1.0  # a source without a past is compared with 0
        return float(values[0][0])

    assert [first(window, 0) for window in range(3)] == [1.0, 0.5, 0.25]  # means 0, 1/2, (1/2 + 1) / 2
    assert [first(window, 1) for window in range(3)] == [1.0, 1.0, 0.5]


# Declarations of a user's own


OWN = """
from stages.algorithms.catalog import EstimatorNeeds

estimator = EstimatorNeeds(
    "half", "row", ("token_rewards", "mask", "valid", "values"), "{path}:half", "c (G - V)", options={{"c": 0.5}}
)
number = 3

def half(*, token_rewards, mask, valid, values, c):
    from stages.algorithms.sessions import Advantages, participants

    batch = participants("half", token_rewards, mask, valid)
    return batch.to_tokens(c * (batch.score - batch.tokens("values", values).sum(-1)))
"""


def test_an_estimator_of_a_users_own_is_named_by_the_import_path_of_its_declaration(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN.format(path=path), encoding="utf-8")
    rows = [row("a", 1.0, **beside(value=0.5))]
    assert advantages(f"{path}:estimator", rows) == [0.25]
    assert advantages(f"{path}:estimator", rows, options={"c": 2.0}) == [1.0]
    with pytest.raises(ConfigError, match=r"mine\.py:number' is a int; expected a .*EstimatorNeeds"):
        stage(f"{path}:number")
    with pytest.raises(ConfigError, match=r"has no 'nothing'; it has: .*estimator"):
        stage(f"{path}:nothing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "gaee"}, "unknown name 'gaee'; did you mean 'gae'.*the estimators are: remax, "),
        ({"estimator": "gae", "options": {"lambda": 1}}, "unknown name 'lambda'.*the options of gae are: gamma, lam"),
        ({"estimator": "gae", "options": {"lam": 1.5}}, r"lam: gae expects a number in \[0, 1\], got 1\.5"),
        ({"estimator": "gdpo"}, r"'gdpo' compares named rewards; name them, such as reward_keys="),
        ({"estimator": "grpo", "reward_keys": ["a"]}, "'grpo' takes no named rewards; remove reward_keys"),
        ({"estimator": "gdpo", "reward_keys": ["a", "a"]}, "expected each name once, got a, a"),
    ],
)
def test_options_that_do_not_fit_the_estimator_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdvantageConfig(**options)
