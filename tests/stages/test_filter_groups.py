"""Which groups are kept: those that a group estimator learns something from, by the same measure as it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dataflow.errors import Drop, RunError
from dataflow.stage import StageContext
from dataflow.testing import make_batch, run_stage
from stages.advantage import Advantage, AdvantageConfig
from stages.filter_groups import FilterConfig, FilterGroups

Row = dict[str, Any]


def row(uid: str, reward: float | None, *, info: Mapping[str, Any] | None = None, **columns: Any) -> Row:
    """A session of one turn and two tokens."""
    return {
        "uid": uid,
        "reward": reward,
        "reward_semantics": "trajectory",
        "token_rewards": None,
        "reward_status": "ok" if reward is not None else "error",
        "reward_info": json.dumps(info or {}),
        "response_mask": np.ones(2, np.int8),
        **columns,
    }


def rows_of(**groups: Sequence[float | None]) -> list[Row]:
    return [row(uid, reward) for uid, rewards in groups.items() for reward in rewards]


def stage(min_group: int = 2, **options: Any) -> FilterGroups:
    built = FilterGroups(FilterConfig.model_validate(options))
    built.min_group = min_group
    return built


def verdicts(rows: Sequence[Row], **options: Any) -> list[float | str]:
    """For each row: the spread of its group, or why it is dropped."""
    written = run_stage(stage(**options), rows)
    found = [one["group_spread"] for one in written]
    return [value.reason if isinstance(value, Drop) else value for value in found]


def kept(rows: Sequence[Row], **options: Any) -> list[str]:
    found = zip(rows, verdicts(rows, **options), strict=True)
    return sorted({one["uid"] for one, value in found if not isinstance(value, str)})


def test_groups_whose_returns_are_all_equal_are_dropped_whole_and_others_get_their_spread() -> None:
    rows = rows_of(right=[1, 1, 1], wrong=[0, 0, 0], mixed=[1, 0, 0.25])
    assert verdicts(rows) == ["no spread"] * 6 + [1.0] * 3


def test_C03_all_zero_groups_are_dropped_and_the_mean_of_what_was_dropped_is_reported() -> None:
    batch = make_batch(rows_of(**{f"g{number}": [0.0] * 4 for number in range(8)}, easy=[1.0] * 4, fit=[1.0, 0.0]))
    stage().process(batch)
    assert batch.metrics == {"filter/no_spread_mean": (1.0, 9.0)}


def test_returns_that_differ_by_rounding_alone_are_equal() -> None:
    thirds = [np.float32(1) / np.float32(3), np.float32(1) / np.float32(3) + np.float32(3e-8)]
    assert thirds[0] != thirds[1]
    assert verdicts(rows_of(a=thirds)) == ["no spread"] * 2
    assert kept(rows_of(a=[0.3333, 0.3334])) == ["a"]


def test_steps_of_a_session_add_up_before_they_are_compared() -> None:
    turns = [
        row(uid, reward, session=session, turn=turn, reward_semantics="step")
        for uid, sessions in {"same": [(1.0, 0.0), (0.5, 0.5)], "other": [(1.0, 0.0), (0.5, 0.25)]}.items()
        for session, rewards in enumerate(sessions)
        for turn, reward in enumerate(rewards)
    ]
    assert verdicts(turns) == ["no spread"] * 4 + [0.25] * 4


def test_sessions_without_a_reward_are_not_compared_and_go_with_their_group_under_their_status() -> None:
    rows = [row("a", 1.0), row("a", 1.0), row("a", None, reward_status="timeout")]
    assert verdicts(rows) == ["no spread", "no spread", "reward timeout"]
    assert verdicts([*rows, row("a", 0.0)]) == [1.0] * 4  # the advantage drops it, with its siblings kept


def test_a_group_with_fewer_known_rewards_than_the_estimator_compares_is_partial() -> None:
    assert verdicts(rows_of(a=[1, None], b=[None, None])) == ["partial group"] + ["reward error"] * 3


def test_a_session_without_a_policy_token_is_not_compared() -> None:
    rows = [row("a", 1.0), row("a", 1.0), row("a", 0.0, response_mask=np.zeros(2, np.int8))]
    assert verdicts(rows) == ["no spread"] * 3


def test_a_group_may_be_bounded_by_its_mean() -> None:
    rows = rows_of(hard=[0, 0, 0, 1], fit=[0, 1, 0, 1], easy=[1, 1, 1, 0])
    assert verdicts(rows, min_mean=0.25, max_mean=0.75) == [1.0] * 12
    assert kept(rows, min_mean=0.3) == ["easy", "fit"]
    assert kept(rows, max_mean=0.7) == ["fit", "hard"]
    assert verdicts(rows, min_mean=0.3, max_mean=0.7)[::4] == ["group mean too low", 1.0, "group mean too high"]


def test_bounds_that_keep_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"min_mean 0\.6 is above max_mean 0\.5; no group would be kept"):
        FilterConfig(min_mean=0.6, max_mean=0.5)


ACCURACY = {"a": [1, 1, 1], "b": [1, 0, 1]}
SHAPED = {"a": [1.1, 1.0, 0.75], "b": [0.5, 0.5, 0.5]}


def test_C04_the_filter_compares_accuracies_where_the_reward_reports_them_and_returns_else() -> None:
    rows = [
        row(uid, shaped, info={"accuracy": right})
        for uid in "ab"
        for right, shaped in zip(ACCURACY[uid], SHAPED[uid], strict=True)
    ]
    assert kept(rows, by="accuracy") == ["b"]
    assert kept(rows) == ["a"]


def test_C04_a_number_that_the_reward_does_not_report_stops_the_run_with_those_it_does() -> None:
    rows = [row("a", 1.0, info={"acc": 1, "reason": "ok"}), row("a", 0.0, info={"acc": 0})]
    with pytest.raises(RunError, match=r"no number 'accuracy' beside the score \(got None\); its numbers are: acc\."):
        run_stage(stage(by="accuracy"), rows)


def test_numbers_of_steps_add_up_and_those_of_a_trajectory_count_once() -> None:
    for semantics, expected in (("step", [0.5] * 4), ("trajectory", ["no spread"] * 4)):
        turns = [
            row("a", 1.0, info={"hits": hits}, session=session, turn=turn, reward_semantics=semantics)
            for session, both in enumerate([(1, 0.5), (0.5, 0.5)])
            for turn, hits in enumerate(both)
        ]
        assert verdicts(turns, by="hits") == expected


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@given(data=st.data())
def test_a_group_is_kept_exactly_if_the_estimator_gives_it_an_advantage(estimator: str, data: st.DataObject) -> None:
    base = data.draw(st.sampled_from([0.0, 1 / 3, 1.0, 1e6, -0.7]))
    steps = st.sampled_from([0.0, 1e-8, 1e-7, 1e-6, 0.25])
    rewards = [float(np.float32(base + data.draw(steps))) for _ in range(4)]
    rows = rows_of(a=rewards)
    advantage = Advantage(AdvantageConfig(estimator=estimator))
    advantage.setup(StageContext("test", Path(), "advantage-0", 0))
    (advantages,) = {any(map(np.any, columns["advantages"])) for columns in [advantage.process(make_batch(rows))]}
    assert (kept(rows) == ["a"]) == advantages
