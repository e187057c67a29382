"""The baseline join as a stage: which session gets which baseline, and what is said when there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dataflow.batch import Batch, Tombstone, Unit
from dataflow.errors import Drop, RunError
from dataflow.stage import StageContext
from dataflow.testing import make_batch, run_stage
from stages.baseline_join import BaselineJoin, BaselineJoinConfig
from stages.return_mean import returns_file


def row(uid: str, reward: float | None, **options: Any) -> dict[str, Any]:
    """One trajectory row of two policy tokens."""
    greedy = options.get("is_baseline", False)
    sampling = {"temperature": 0.0 if greedy else 1.0, "greedy": greedy, "n": 1, "max_tokens": 8}
    return {
        "uid": uid,
        "reward": reward,
        "reward_semantics": "trajectory",
        "token_rewards": None,
        "reward_status": "ok" if reward is not None else "error",
        "response_mask": [1, 1],
        "sampling": json.dumps(sampling),
        "policy_version_min": 0,
        "policy_version_max": 0,
        **options,
    }


def greedy(uid: str, reward: float | None, **options: Any) -> dict[str, Any]:
    return row(uid, reward, is_baseline=True, **options)


def stage(**options: Any) -> BaselineJoin:
    return BaselineJoin(BaselineJoinConfig(**options))


def join(sampled: list[dict[str, Any]], baseline: list[dict[str, Any]], **options: Any) -> list[Any]:
    """The baseline of each row, or why it has none."""
    written = run_stage(stage(**options), sampled, baseline=baseline)
    values = [one["baseline"] for one in written]
    return [value.reason if isinstance(value, Drop) else value for value in values]


def test_B01_a_uid_whose_greedy_session_is_missing_is_dropped_by_name_and_the_others_go_on() -> None:
    sampled = [row("a", 1.0), row("a", 0.0), row("b", 1.0), row("b", 1.0)]
    assert join(sampled, [greedy("a", 1.0)]) == [
        1.0,
        1.0,
        "missing baseline: no greedy session",
        "missing baseline: no greedy session",
    ]


def test_B01_a_greedy_session_that_failed_is_named_as_failed() -> None:
    batch = make_batch([row("b", 1.0)])
    batch.baseline = make_batch([])
    batch.baseline.columns = {name: [] for name in stage().reads}
    unit = Unit("w/b#greedy/0", "w", "b", 0, True, "w/b#greedy")
    batch.tombstones = [Tombstone(unit, "rollout", "failed: rollout", "RuntimeError: boom")]
    (value,) = stage().process(batch)["baseline"]
    assert value.reason == "missing baseline: greedy session failed"


def test_a_sampled_tombstone_is_no_baseline_and_no_failure_of_one() -> None:
    batch = make_batch([row("a", 1.0)])
    batch.baseline = make_batch([greedy("a", 0.5)])
    unit = Unit("w/a/1", "w", "a", 1, False, "w/a")
    batch.tombstones = [Tombstone(unit, "reward", "failed: reward", "boom")]
    assert stage().process(batch)["baseline"] == [0.5]


def test_B01_a_missing_baseline_stops_the_run_where_that_is_asked_for() -> None:
    with pytest.raises(RunError, match=r"no baseline for uid 'b': no greedy session; baseline\.on_missing is 'fail'"):
        join([row("b", 1.0)], [greedy("a", 1.0)], on_missing="fail")


def test_every_baseline_says_where_it_came_from_and_every_source_is_counted() -> None:
    batch = make_batch([row("a", 1.0), row("a", 0.0), row("b", 1.0), row("b", 0.5), row("c", 1.0)])
    batch.baseline = make_batch([greedy("a", 0.25)])
    columns = stage(on_missing=["leave_one_out", "drop"]).process(batch)
    assert columns["baseline_source"][:4] == ["greedy", "greedy", "leave_one_out", "leave_one_out"]
    # Per joined session (5): how many of each source; their sum is 5.
    counts = {name: total for name, (total, weight) in batch.metrics.items() if weight == 5.0}
    assert counts == {
        "baseline_source/greedy": 2.0,
        "baseline_source/leave_one_out": 2.0,
        "baseline_source/group_mean": 0.0,
        "baseline_source/ema": 0.0,
        "baseline_source/zero": 0.0,
        "baseline_source/missing": 1.0,
    }
    assert batch.metrics["baseline/mean"] == (0.25 + 0.25 + 0.5 + 1.0, 4.0)


def test_a_session_of_several_turns_is_counted_once() -> None:
    batch = make_batch([row("a", 1.0, session=0, turn=turn) for turn in range(3)])
    batch.baseline = make_batch([greedy("a", 0.25)])
    stage().process(batch)
    assert batch.metrics["baseline_source/greedy"] == (1.0, 1.0)
    assert batch.metrics["baseline/mean"] == (0.25, 1.0)


def test_a_reward_of_zero_is_a_baseline_and_an_absent_one_is_not() -> None:
    assert join([row("a", 1.0), row("b", 1.0)], [greedy("a", 0.0), greedy("b", None)]) == [
        0.0,
        "missing baseline: greedy reward is not ok",
    ]


@pytest.mark.parametrize("on_missing", ["drop", "fail", "zero", ["leave_one_out", "fail"]])
@pytest.mark.parametrize("baseline", [[], [greedy("a", 0.5)]])
def test_a_session_whose_own_reward_is_not_ok_is_dropped_under_its_status_whatever_its_baseline(
    baseline: list[dict[str, Any]], on_missing: str | list[str]
) -> None:
    assert join([row("a", None), row("a", None, reward_status="timeout")], baseline, on_missing=on_missing) == [
        "reward error",
        "reward timeout",
    ]


def test_a_session_whose_own_reward_is_not_ok_counts_in_no_share() -> None:
    batch = make_batch([row("a", None), row("a", 1.0)])
    batch.baseline = make_batch([greedy("a", 0.25)])
    stage().process(batch)
    assert batch.metrics["baseline_source/greedy"] == (1.0, 1.0)


# Fallbacks: which sessions they look at. `test_fallback` has their numbers.


def test_siblings_stand_in_for_a_greedy_session_that_is_refused_and_unscored_ones_do_not_count() -> None:
    sampled = [row("a", 1.0), row("a", None), row("a", 0.5)]
    not_greedy = greedy("a", 9.0, sampling=json.dumps({"temperature": 0.7}))
    assert join(sampled, [not_greedy], on_missing=["leave_one_out", "drop"]) == [0.5, "reward error", 1.0]
    assert join(sampled, [not_greedy], on_missing=["group_mean", "drop"]) == [0.75, "reward error", 0.75]


@pytest.mark.parametrize(
    "spoiled",
    [
        {"sampling": json.dumps({"temperature": 0.7, "max_tokens": 8})},
        {"sampling": json.dumps({"temperature": 0.0, "max_tokens": 2})},
        {"policy_version_max": 1},
        {"reward_semantics": "step"},
        {"reward_status": "timeout", "reward": None},
        {"response_mask": [0, 0]},
    ],
)
def test_whatever_makes_a_greedy_session_no_baseline_calls_the_fallback(spoiled: dict[str, Any]) -> None:
    sampled = [row("a", 1.0), row("a", 0.5)]
    assert join(sampled, [greedy("a", 0.25)], on_missing=["leave_one_out", "drop"]) == [0.25, 0.25]
    assert join(sampled, [greedy("a", 0.25) | spoiled], on_missing=["leave_one_out", "drop"]) == [0.5, 1.0]


def test_too_few_siblings_call_the_next_policy_and_the_reason_stays_the_first() -> None:
    sampled = [row("a", 1.0), row("a", None)]
    assert join(sampled, [], on_missing=["leave_one_out", "zero"]) == [0.0, "reward error"]
    assert join(sampled, [], on_missing=["leave_one_out", "drop"])[0] == "missing baseline: no greedy session"
    with pytest.raises(RunError, match=r"baseline\.on_missing is 'leave_one_out, fail'"):
        join(sampled, [], on_missing=["leave_one_out", "fail"])


def running(tmp_path: Path, window: int, **options: Any) -> list[Any]:
    """What sessions of the data sources "sums" and "words" get of the running mean in a window."""
    for number, mean in ((0, 0.5), (1, 0.75), (2, 0.25)):
        path = returns_file(tmp_path, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"sums": [4 * mean, 4]}))
    built = stage(on_missing=["ema", "zero"], ema_decay=0.5, **options)
    built.setup(StageContext("test", tmp_path, "baseline_join-0", 0))
    batch: Batch = make_batch([row("a", 1.0, data_source="sums"), row("b", 1.0, data_source="words")])
    batch.baseline = make_batch([])
    batch.baseline.columns = {name: [] for name in built.reads}
    batch.window_index = window
    columns = built.process(batch)
    return list(zip(columns["baseline"], columns["baseline_source"], strict=True))


@pytest.mark.parametrize(
    ("window", "staleness", "expected"),
    [
        (0, 0, (0.0, "zero")),  # no window before
        (1, 0, (0.5, "ema")),
        (2, 0, (0.625, "ema")),  # 0.5 * 0.5 + 0.5 * 0.75
        (3, 0, (0.4375, "ema")),  # 0.5 * 0.625 + 0.5 * 0.25
        (5, 0, (0.4375, "ema")),  # windows 3 and 4 had no survivor
        (1, 1, (0.0, "zero")),  # window 0 may not be trained on yet
        (3, 1, (0.625, "ema")),
        (3, 5, (0.0, "zero")),
    ],
)
def test_the_running_mean_is_of_the_windows_before_that_are_trained_on_and_of_the_same_data_source(
    tmp_path: Path, window: int, staleness: int, expected: tuple[float, str]
) -> None:
    assert running(tmp_path, window, max_staleness=staleness) == [expected, (0.0, "zero")]


@pytest.mark.parametrize(
    ("on_missing", "granularity"),
    [
        ("drop", "join"),
        ("zero", "join"),
        (["ema", "drop"], "join"),
        (["leave_one_out", "drop"], "group_join"),
        (["ema", "group_mean", "fail"], "group_join"),
    ],
)
def test_a_join_that_may_look_at_siblings_waits_for_whole_groups(on_missing: str | list[str], granularity: str) -> None:
    built = stage(on_missing=on_missing)
    assert (built.granularity, built.min_group) == (granularity, 1)
    assert ("data_source" in built.reads) == ("ema" in on_missing)


@pytest.mark.parametrize(
    ("on_missing", "said"),
    [
        ("leave_one", "unknown name 'leave_one'; did you mean 'leave_one_out'?"),
        (["ema", "dorp"], "did you mean 'drop'?"),
        ("ema", "the chain ends with 'ema', which does not always apply"),
        ([], "the chain is empty"),
        (["drop", "zero"], "'drop' always applies"),
    ],
)
def test_a_chain_that_cannot_work_is_refused(on_missing: str | list[str], said: str) -> None:
    with pytest.raises(ValidationError, match="on_missing") as refused:
        BaselineJoinConfig(on_missing=on_missing)
    assert said in str(refused.value)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_B02_under_step_semantics_the_baseline_is_the_total_of_all_turns(order: tuple[int, ...]) -> None:
    def turns(maker: Any, session: int, rewards: list[float]) -> list[dict[str, Any]]:
        return [maker("a", rewards[turn], session=session, turn=turn, reward_semantics="step") for turn in order]

    sampled = turns(row, 0, [0.5, 0.0, 1.0]) + turns(row, 1, [0.0, 0.0, 0.4])
    baselines = join(sampled, turns(greedy, 0, [0.2, 0.3, 0.5]))
    assert baselines == [pytest.approx(1.0)] * 6


def test_B02_under_token_semantics_masked_tokens_count_on_neither_side() -> None:
    tokens = {"reward_semantics": "token", "response_mask": [1, 0], "token_rewards": [0.25, 8.0]}
    turns = [greedy("a", 0.0, session=0, turn=turn, **tokens) for turn in range(2)]
    sampled = [row("a", 0.0, session=session, **tokens) for session in range(2)]
    assert join(sampled, turns) == [0.5, 0.5]  # two turns of 0.25
    assert join(sampled, [], on_missing=["leave_one_out", "drop"]) == [0.25, 0.25]


def test_B02_under_trajectory_semantics_the_reward_of_several_turns_counts_once() -> None:
    turns = [greedy("a", 0.5, session=0, turn=turn) for turn in range(3)]
    assert join([row("a", 1.0)], turns) == [0.5]


def test_B04_a_greedy_session_whose_recorded_sampling_was_not_greedy_is_no_baseline() -> None:
    sampling = json.dumps({"temperature": 0.7, "greedy": False, "n": 1, "max_tokens": 8})
    assert join([row("a", 1.0)], [greedy("a", 1.0, sampling=sampling)]) == [
        "missing baseline: recorded sampling is not greedy"
    ]


@pytest.mark.parametrize(
    ("gap", "expected"), [(0, "missing baseline: policy versions are too far apart"), (1, 1.0), (2, 1.0)]
)
def test_B08_a_greedy_session_of_another_policy_version_is_a_baseline_within_the_bound_alone(
    gap: int, expected: object
) -> None:
    sampled = [row("a", 1.0, policy_version_min=3, policy_version_max=3)]
    baseline = [greedy("a", 1.0, policy_version_min=2, policy_version_max=2)]
    assert join(sampled, baseline, max_version_gap=gap) == [expected]


def test_all_turns_of_a_session_get_its_one_baseline_or_its_one_reason() -> None:
    sampled = [row(uid, 1.0, session=0, turn=turn) for uid in "ab" for turn in range(2)]
    assert join(sampled, [greedy("b", 0.5)]) == [*["missing baseline: no greedy session"] * 2, 0.5, 0.5]


@given(st.permutations(list(range(8))))
def test_A06_the_order_of_the_sessions_does_not_matter(order: list[int]) -> None:
    sampled = [row(uid, float(session), session=session) for uid in "abcd" for session in range(2)]
    baseline = [greedy(uid, 0.25 * place) for place, uid in enumerate("dcb")]
    expected = dict(zip("dcb", [0.0, 0.25, 0.5], strict=True))
    shuffled = [sampled[place] for place in order]
    # Without a greedy session, a's sessions of returns 0 and 1 are each compared with the other.
    assert join(shuffled, baseline, on_missing=["leave_one_out", "drop"]) == [
        expected.get(one["uid"], 1.0 - one["session"]) for one in shuffled
    ]
