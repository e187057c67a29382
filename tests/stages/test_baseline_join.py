"""The baseline join as a stage: which session gets which baseline, and what is said when there is none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.batch import Tombstone, Unit
from dataflow.errors import Drop, RunError
from dataflow.testing import make_batch, run_stage
from stages.baseline_join import BaselineJoin, BaselineJoinConfig


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
    batch.baseline.columns = {name: [] for name in BaselineJoin.reads}
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


def test_every_baseline_says_that_it_is_greedy_and_is_reported() -> None:
    batch = make_batch([row("a", 1.0), row("a", 0.0), row("b", 1.0)])
    batch.baseline = make_batch([greedy("a", 0.25)])
    columns = stage().process(batch)
    assert columns["baseline_source"][:2] == ["greedy", "greedy"]
    assert batch.metrics["baseline/mean"] == (0.5, 2.0)


def test_a_reward_of_zero_is_a_baseline_and_an_absent_one_is_not() -> None:
    assert join([row("a", 1.0), row("b", 1.0)], [greedy("a", 0.0), greedy("b", None)]) == [
        0.0,
        "missing baseline: greedy reward is not ok",
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_B02_under_step_semantics_the_baseline_is_the_total_of_all_turns(order: tuple[int, ...]) -> None:
    def turns(maker: Any, session: int, rewards: list[float]) -> list[dict[str, Any]]:
        return [maker("a", rewards[turn], session=session, turn=turn, reward_semantics="step") for turn in order]

    sampled = turns(row, 0, [0.5, 0.0, 1.0]) + turns(row, 1, [0.0, 0.0, 0.4])
    baselines = join(sampled, turns(greedy, 0, [0.2, 0.3, 0.5]))
    assert baselines == [pytest.approx(1.0)] * 6


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
    baseline = [greedy(uid, 0.25 * place) for place, uid in enumerate("dcba")]
    expected = dict(zip("dcba", [0.0, 0.25, 0.5, 0.75], strict=True))
    shuffled = [sampled[place] for place in order]
    assert join(shuffled, baseline) == [expected[one["uid"]] for one in shuffled]
