"""The reward stage: every session is graded once, and what cannot be graded says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dataflow.stage import StageContext
from dataflow.testing import make_batch, run_stage
from stages.reward import Reward, RewardConfig

FUNCTIONS = """\
calls = []

def length(response, ground_truth, *, scale=1.0):
    return len(response) * scale

def picky(response, ground_truth):
    if response == "bad":
        raise ValueError("cannot grade this")
    return float(response == ground_truth)

def counted(response, ground_truth):
    calls.append(response)
    return len(calls) / 10

def everything(response, ground_truth, *, prompt, data_source, extra):
    return {"score": 1.0, "seen": [response, ground_truth, prompt, data_source, extra]}

def types(response, ground_truth):
    return {"score": 0.0, "type": type(ground_truth).__name__}
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


def row(response: str, truth: object = None, **options: Any) -> dict[str, Any]:
    return {
        "uid": "a",
        "response_text": response,
        "ground_truth": None if truth is None else json.dumps(truth),
        "prompt": "w1",
        "data_source": "test",
        "extra": "{}",
        **options,
    }


def graded(rows: list[dict[str, Any]], function: str, **options: Any) -> list[dict[str, Any]]:
    return run_stage(Reward(RewardConfig(function=function, **options)), rows)


def rewards(rows: list[dict[str, Any]], function: str, **options: Any) -> list[float | None]:
    return [one["reward"] for one in graded(rows, function, **options)]


def test_a_reward_is_a_number_with_the_status_ok() -> None:
    (one,) = graded([row("42", "42")], "exact_match")
    assert (one["reward"], one["reward_status"], one["reward_semantics"]) == (1.0, "ok", "trajectory")
    assert one["token_rewards"] is None


def test_R12_a_reward_that_raises_has_no_value_its_status_and_its_words(functions: Path) -> None:
    rows = [row(text, "yes") for text in ("yes", "no", "bad", "no")]
    written = graded(rows, f"{functions}:picky")
    assert [one["reward"] for one in written] == [1.0, 0.0, None, 0.0]
    assert [one["reward_status"] for one in written] == ["ok", "ok", "error", "ok"]
    assert "ValueError: cannot grade this" in json.loads(written[2]["reward_info"])["error"]


def test_R16_rewards_stay_with_their_rows(functions: Path) -> None:
    rows = [row("x" * length) for length in (3, 0, 2, 1)]
    assert rewards(rows, f"{functions}:length") == [3.0, 0.0, 2.0, 1.0]


def test_R19_each_session_is_graded_once(functions: Path) -> None:
    rows = [row(f"turn {turn}", session=session, turn=turn) for session in range(2) for turn in range(3)]
    # The function returns how often it was called, in tenths.
    assert rewards(rows, f"{functions}:counted") == pytest.approx([0.1] * 3 + [0.2] * 3)


def test_under_trajectory_semantics_the_last_turn_is_graded_for_the_whole_session(functions: Path) -> None:
    rows = [row("x" * length, session=0, turn=turn) for turn, length in enumerate((5, 1, 2))]
    assert rewards(rows, f"{functions}:length") == [2.0, 2.0, 2.0]


def test_under_step_semantics_every_turn_is_graded(functions: Path) -> None:
    rows = [row("x" * length, session=0, turn=turn) for turn, length in enumerate((5, 1, 2))]
    written = graded(rows, f"{functions}:length", semantics="step")
    assert [one["reward"] for one in written] == [5.0, 1.0, 2.0]
    assert {one["reward_semantics"] for one in written} == {"step"}


def test_options_reach_the_function(functions: Path) -> None:
    assert rewards([row("xx")], f"{functions}:length", options={"scale": 0.5}) == [1.0]


def test_a_function_gets_the_context_that_it_names(functions: Path) -> None:
    (one,) = graded([row("42", [1, 2], prompt="why", extra='{"level": 3}')], f"{functions}:everything")
    assert json.loads(one["reward_info"])["seen"] == ["42", [1, 2], "why", "test", {"level": 3}]


@pytest.mark.parametrize(
    ("truth", "name"), [(42, "int"), (42.0, "float"), ("42", "str"), (["42", "x"], "list"), (None, "NoneType")]
)
def test_D04_the_right_answer_keeps_its_type(functions: Path, truth: object, name: str) -> None:
    (one,) = graded([row("42", truth)], f"{functions}:types")
    assert json.loads(one["reward_info"])["type"] == name


@pytest.mark.parametrize(("semantics", "mean"), [("trajectory", 3.0), ("step", 5.0)])
def test_a_sessions_return_is_reported_once_and_greedy_sessions_apart(
    functions: Path, tmp_path: Path, semantics: Any, mean: float
) -> None:
    stage = Reward(RewardConfig(function=f"{functions}:length", semantics=semantics))
    stage.setup(StageContext("run", tmp_path, "reward-0", 0))
    batch = make_batch(
        [row("xx", session=0, turn=0), row("xxx", session=0, turn=1), row("x", session=0, is_baseline=True)]
    )
    stage.process(batch)
    assert batch.metrics["reward/mean"] == (mean, 1.0)
    assert batch.metrics["reward/greedy/mean"] == (1.0, 1.0)


def test_an_unknown_reward_is_counted_and_left_out_of_the_mean(functions: Path, tmp_path: Path) -> None:
    stage = Reward(RewardConfig(function=f"{functions}:picky"))
    stage.setup(StageContext("run", tmp_path, "reward-0", 0))
    batch = make_batch([row(text, "yes") for text in ("yes", "bad", "no", "bad")])
    stage.process(batch)
    assert batch.metrics["reward/mean"] == (1.0, 2.0)
    assert batch.metrics["reward/not_ok_share"] == (2.0, 4.0)
