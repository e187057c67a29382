"""The noted returns of a window, and the running mean made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.stage import StageConfig, StageContext
from dataflow.testing import make_batch
from stages.return_mean import ReturnMean, RunningMeans, returns_file


def row(uid: str, reward: float | None, **options: Any) -> dict[str, Any]:
    """One trajectory row of two policy tokens."""
    return {
        "uid": uid,
        "reward": reward,
        "reward_semantics": "trajectory",
        "token_rewards": None,
        "reward_status": "ok" if reward is not None else "error",
        "response_mask": np.ones(2, np.int8),
        "data_source": "sums",
        "baseline_source": "greedy",
        **options,
    }


def note(run_dir: Path, rows: list[dict[str, Any]], window: int = 0) -> Any:
    """Run the stage on a window; returns what its file then says."""
    stage = ReturnMean(StageConfig())
    stage.setup(StageContext("test", run_dir, "return_mean-0", 0))
    batch = make_batch(rows)
    batch.window_index = window
    assert stage.process(batch) == {}
    return json.loads(returns_file(run_dir, window).read_text(encoding="utf-8"))


def test_a_window_is_noted_as_sum_and_count_of_the_returns_of_each_data_source(tmp_path: Path) -> None:
    rows = [row("a", 1.0), row("a", 0.5), row("b", 0.25, data_source="words")]
    assert note(tmp_path, rows, window=7) == {"sums": [1.5, 2], "words": [0.25, 1]}
    assert (tmp_path / "state" / "returns" / "000007.json").is_file()


def test_a_session_of_several_turns_counts_with_its_total_return_once(tmp_path: Path) -> None:
    step = [row("a", reward, session=0, turn=turn, reward_semantics="step") for turn, reward in enumerate((1.0, 0.5))]
    trajectory = [row("b", 2.0, session=0, turn=turn) for turn in range(3)]
    assert note(tmp_path, [*step, *trajectory]) == {"sums": [3.5, 2]}


def test_a_session_whose_reward_is_not_ok_does_not_count(tmp_path: Path) -> None:
    assert note(tmp_path, [row("a", 1.0), row("a", None)]) == {"sums": [1.0, 1]}
    assert note(tmp_path, [row("a", None)]) == {}


def test_a_window_that_is_done_twice_leaves_the_same_file_and_nothing_beside_it(tmp_path: Path) -> None:
    rows = [row("a", 0.1 * number) for number in range(5)]
    note(tmp_path, rows)
    path = returns_file(tmp_path, 0)
    first = path.read_bytes()
    note(tmp_path, rows)
    assert path.read_bytes() == first
    assert [one.name for one in path.parent.iterdir()] == ["000000.json"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_running_mean_folds_the_noted_windows_in_order(tmp_path: Path) -> None:
    note(tmp_path, [row("a", 1.0), row("a", 0.0)], window=0)
    note(tmp_path, [row("a", 1.0)], window=1)
    note(tmp_path, [row("a", 0.25, data_source="words")], window=3)
    means = RunningMeans(tmp_path, decay=0.75)
    assert means.after(0) == {}
    assert means.after(1) == {"sums": 0.5}
    assert means.after(2) == {"sums": 0.625}  # 0.75 * 0.5 + 0.25 * 1
    assert means.after(3) == {"sums": 0.625}  # window 2 had no survivor
    assert means.after(4) == {"sums": 0.625, "words": 0.25}
    assert means.after(-1) == {}


def test_a_mean_that_was_handed_out_once_is_the_same_whatever_is_asked_for_later(tmp_path: Path) -> None:
    for window in range(4):
        note(tmp_path, [row("a", float(window))], window)
    means = RunningMeans(tmp_path, decay=0.5)
    late = dict(means.after(4))
    assert means.after(2) == RunningMeans(tmp_path, decay=0.5).after(2)
    assert means.after(4) == late


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.lists(st.lists(st.floats(-4, 4, width=32), max_size=4), max_size=5))
def test_without_a_past_the_mean_is_that_of_the_last_window_with_a_survivor(
    tmp_path_factory: pytest.TempPathFactory, windows: list[list[float]]
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    for window, rewards in enumerate(windows):
        if rewards:
            note(run_dir, [row("a", reward) for reward in rewards], window)
    last = next((rewards for rewards in reversed(windows) if rewards), None)
    expected = {} if last is None else {"sums": pytest.approx(sum(last) / len(last))}
    assert RunningMeans(run_dir, decay=0.0).after(len(windows)) == expected
