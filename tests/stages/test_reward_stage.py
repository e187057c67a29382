"""The reward stage: every session is graded once, and what cannot be graded says so."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from dataflow.batch import Batch
from dataflow.errors import WorkerBroken
from dataflow.stage import Stage, StageContext
from dataflow.testing import make_batch, run_stage
from stages.reward import Reward, RewardConfig
from stages.rewards import BUILTIN

FUNCTIONS = Path(__file__).parents[1] / "rewards" / "functions.py"


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


def processed(batch: Batch, run_dir: Path, function: str, **options: Any) -> Mapping[str, Sequence[Any]]:
    """Set the stage up, let it grade a batch, and close it."""
    name = function if function in BUILTIN or ":" in function else f"{FUNCTIONS}:{function}"
    stage = Reward(RewardConfig(function=name, **options))
    stage.setup(StageContext("run", run_dir, "reward-0", 0))
    try:
        return stage.process(batch)
    finally:
        stage.close()


def test_a_reward_is_a_number_with_the_status_ok() -> None:
    (one,) = graded([row("42", "42")], "exact_match")
    assert (one["reward"], one["reward_status"], one["reward_semantics"]) == (1.0, "ok", "trajectory")
    assert one["token_rewards"] is None


def test_R12_a_reward_that_raises_has_no_value_its_status_and_its_words() -> None:
    rows = [row(text, "yes") for text in ("yes", "no", "bad", "no")]
    written = graded(rows, f"{FUNCTIONS}:picky")
    assert [one["reward"] for one in written] == [1.0, 0.0, None, 0.0]
    assert [one["reward_status"] for one in written] == ["ok", "ok", "error", "ok"]
    assert "ValueError: cannot grade this" in json.loads(written[2]["reward_info"])["error"]


def test_R16_scores_are_in_the_order_of_the_rows_whatever_finishes_first(tmp_path: Path) -> None:
    for pipe in range(3):
        os.mkfifo(tmp_path / str(pipe))
    rows = [row(str(number)) for number in range(6)]
    # Each even row can finish only after the row behind it.
    written = rewards(rows, f"{FUNCTIONS}:after_the_next", processes=2, options={"folder": str(tmp_path)})
    assert written == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_R19_each_row_is_graded_once_also_by_two_processes(tmp_path: Path) -> None:
    sampled = [row(f"sampled {number}", uid="a") for number in range(8)]
    greedy = [row(f"greedy {number}", uid="a", is_baseline=True) for number in range(2)]
    log = tmp_path / "calls"
    graded([*sampled, *greedy], f"{FUNCTIONS}:logged", processes=2, options={"log": str(log)})
    calls = [line.rpartition(" ")[0] for line in log.read_text().splitlines()]
    assert sorted(calls) == sorted(one["response_text"] for one in [*sampled, *greedy])


def test_R19_a_session_of_several_turns_is_graded_once() -> None:
    rows = [row(f"turn {turn}", session=session, turn=turn) for session in range(2) for turn in range(3)]
    # The function returns how often it was called, in tenths.
    assert rewards(rows, f"{FUNCTIONS}:counted") == pytest.approx([0.1] * 3 + [0.2] * 3)


def test_a_row_that_hangs_or_crashes_costs_its_own_reward_alone() -> None:
    texts = ("fine", "never returns", "fine", "crashes", "raises", "times out itself", "fine")
    written = graded([row(text) for text in texts], f"{FUNCTIONS}:trouble", timeout_s=2)
    assert [one["reward"] for one in written] == [1.0, None, 1.0, None, None, None, 1.0]
    statuses = ["ok", "timeout", "ok", "error", "error", "timeout", "ok"]
    assert [one["reward_status"] for one in written] == statuses
    reasons = [json.loads(one["reward_info"]).get("error") for one in written]
    for reason, part in zip(
        reasons,
        (None, "no answer within 2 s", None, "signal 11", "ValueError: no digits", "the judge did not answer", None),
        strict=True,
    ):
        assert (reason is None) if part is None else part in reason


RETURNED: list[tuple[str, float | None, str, dict[str, Any]]] = [
    ("int", 1.0, "ok", {}),
    ("float", 0.25, "ok", {}),
    ("bool", 1.0, "ok", {}),
    ("numpy bool", 1.0, "ok", {}),
    ("numpy float", 0.5, "ok", {}),
    ("numpy int", -2.0, "ok", {}),
    ("dict", 1.5, "ok", {"picked": [1, 2]}),
    ("scored", 0.5, "ok", {"why": "half"}),
    ("none", None, "abstain", {}),
    ("none in a dict", None, "abstain", {"reason": "no gold"}),
    ("nan", None, "error", {"error": "expected a finite float32, got float nan"}),
    ("infinity", None, "error", {"error": "expected a finite float32, got float inf"}),
    ("beyond float32", None, "error", {"error": "expected a finite float32, got float 1e+39"}),
    ("text", None, "error", {"error": "expected a number, a bool, None or a dict, got str '1.0'"}),
    ("list", None, "error", {"error": "expected a number, a bool, None or a dict, got list [1.0]"}),
    ("dict without a score", None, "error", {"acc": 1, "error": "expected a dict with 'score', got 'acc'"}),
    ("contradiction", None, "error", {"error": "expected no reward beside status 'error', got float 1.0"}),
    ("huge int beside", 1.0, "ok", {"count": hex(10**5000)}),
    ("half a character beside", 1.0, "ok", {"said": "\\ud83d"}),
]


def test_whatever_a_function_returns_has_a_status_and_its_reason() -> None:
    written = graded([row(name) for name, *_ in RETURNED], f"{FUNCTIONS}:value")
    for one, (name, reward, status, info) in zip(written, RETURNED, strict=True):
        got = (name, one["reward"], one["reward_status"], json.loads(one["reward_info"]))
        assert got == (name, reward, status, info)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_R11_extra_fields_may_differ_from_row_to_row(tmp_path: Path, order: tuple[int, ...]) -> None:
    cases: list[tuple[str, float, dict[str, Any]]] = [
        ("int", 1.0, {}),
        ("fields acc pred", 0.0, {"acc": 0, "pred": "7"}),
        ("fields acc", 1.0, {"acc": 1}),
    ]
    batch = make_batch([row(cases[place][0]) for place in order])
    columns = processed(batch, tmp_path, "value")
    assert columns["reward"] == [cases[place][1] for place in order]
    assert [json.loads(info) for info in columns["reward_info"]] == [cases[place][2] for place in order]
    assert batch.metrics["reward/info/acc"] == (1.0, 2.0)  # 0 and 1, over the two rows that have it
    assert "reward/info/pred" not in batch.metrics


def test_R11_a_field_that_is_none_is_not_absent() -> None:
    written = graded([row("field is none"), row("int")], f"{FUNCTIONS}:value")
    assert [json.loads(one["reward_info"]) for one in written] == [{"pred": None}, {}]


def test_R01_the_math_grader_works_off_the_main_thread_and_what_never_ends_is_a_timeout() -> None:
    rows = [row(rf"\boxed{{{text}}}", r"\frac{1}{3}") for text in (r"\frac{1}{3}", "9^{9^{9^{9}}}", "0.5")]
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(graded, rows, "math_match", timeout_s=3).result()
    assert [(one["reward"], one["reward_status"]) for one in written] == [(1.0, "ok"), (None, "timeout"), (0.0, "ok")]


def test_R10_rows_whose_gold_cannot_be_parsed_are_left_out_of_the_mean(tmp_path: Path) -> None:
    figure = [row(f"#### {text}", "see figure", uid="a") for text in ("5", "6", "7", "8")]
    solved = [row(f"#### {text}", 5, uid="b") for text in ("5", "4", "5", "5")]
    batch = make_batch([*figure, *solved])
    columns = processed(batch, tmp_path, "numeric_match")
    assert columns["reward_status"] == ["abstain"] * 4 + ["ok"] * 4
    assert {json.loads(info)["reason"] for info in columns["reward_info"][:4]} == {"unscorable"}
    assert batch.metrics["reward/mean"] == (3.0, 4.0)
    assert batch.metrics["reward/not_ok_share"] == (4.0, 8.0)


@pytest.mark.parametrize(("mode", "right", "unanswered"), [("strict", 1.0, 3.0), ("flexible", 3.0, 1.0)])
def test_R04_answers_that_were_not_found_are_counted(
    tmp_path: Path, mode: str, right: float, unanswered: float
) -> None:
    texts = ("#### 18", "So the answer is 18.", r"\boxed{18}", "I do not know.")
    batch = make_batch([row(text, 18) for text in texts])
    processed(batch, tmp_path, "numeric_match", options={"mode": mode})
    assert batch.metrics["reward/mean"] == (right, 4.0)
    assert batch.metrics["reward/no_answer_share"] == (unanswered, 4.0)


def test_under_trajectory_semantics_the_last_turn_is_graded_for_the_whole_session() -> None:
    rows = [row("x" * length, session=0, turn=turn) for turn, length in enumerate((5, 1, 2))]
    assert rewards(rows, f"{FUNCTIONS}:length") == [2.0, 2.0, 2.0]


def test_under_step_semantics_every_turn_is_graded() -> None:
    rows = [row("x" * length, session=0, turn=turn) for turn, length in enumerate((5, 1, 2))]
    written = graded(rows, f"{FUNCTIONS}:length", semantics="step")
    assert [one["reward"] for one in written] == [5.0, 1.0, 2.0]
    assert {one["reward_semantics"] for one in written} == {"step"}


# Length


def of_length(tokens: int, **options: Any) -> dict[str, Any]:
    return row("42", "42", response_mask=np.ones(tokens, np.int8), **options)


def shaping(buffer: int, penalty: float = 1.0, longest: int = 100) -> dict[str, Any]:
    return {"overlong": {"buffer_tokens": buffer, "penalty": penalty}, "max_tokens": longest}


def test_R18_a_response_near_its_limit_loses_a_growing_part_of_its_reward_and_its_info_has_both() -> None:
    lengths = [60, 80, 81, 85, 90, 100]
    written = graded([of_length(tokens) for tokens in lengths], "exact_match", **shaping(20))
    assert [one["reward"] for one in written] == pytest.approx([1.0, 1.0, 0.95, 0.75, 0.5, 0.0])
    infos = [json.loads(one["reward_info"]) for one in written]
    assert [info["task_reward"] for info in infos] == [1.0] * 6
    assert [info["overlong_penalty"] for info in infos] == pytest.approx([0, 0, -0.05, -0.25, -0.5, -1])


def test_the_whole_penalty_is_the_one_that_was_asked_for_and_makes_a_wrong_answer_negative() -> None:
    rows = [of_length(100), {**of_length(100), "response_text": "41"}]
    written = graded(rows, "exact_match", **shaping(20, penalty=0.25))
    assert [one["reward"] for one in written] == [0.75, -0.25]


def test_greedy_and_sampled_sessions_of_one_length_lose_the_same(tmp_path: Path) -> None:
    greedy = [of_length(tokens, session=session, is_baseline=True) for session, tokens in enumerate((90, 10))]
    batch = make_batch([of_length(90), *greedy])
    columns = processed(batch, tmp_path, "exact_match", **shaping(20))
    assert columns["reward"] == [0.5, 0.5, 1.0]
    assert batch.metrics["reward/mean"] == (0.5, 1.0)
    assert batch.metrics["reward/info/task_reward"] == (1.0, 1.0)
    assert batch.metrics["reward/greedy/info/overlong_penalty"] == (-0.5, 2.0)


def test_only_tokens_that_the_policy_drew_count_for_the_length() -> None:
    mask = np.array([1] * 80 + [0] * 20, np.int8)
    (one,) = graded([{**of_length(1), "response_mask": mask}], "exact_match", **shaping(20))
    assert one["reward"] == 1.0


def test_each_turn_that_is_graded_is_penalised_for_its_own_length() -> None:
    turns = [of_length(tokens, session=0, turn=turn) for turn, tokens in enumerate((100, 90, 80))]
    step = graded(turns, "exact_match", semantics="step", **shaping(20))
    assert [one["reward"] for one in step] == [0.0, 0.5, 1.0]
    once = graded(turns, "exact_match", **shaping(20))
    assert [one["reward"] for one in once] == [1.0, 1.0, 1.0]


def test_a_reward_that_is_not_known_is_not_shaped() -> None:
    rows = [{**of_length(100), "response_text": "bad"}]
    (one,) = graded(rows, f"{FUNCTIONS}:picky", **shaping(20))
    assert (one["reward"], one["reward_status"]) == (None, "error")
    assert "task_reward" not in json.loads(one["reward_info"])


def test_without_a_penalty_the_stage_does_not_wait_for_the_mask_and_rewards_are_as_they_were() -> None:
    assert "response_mask" not in Reward(RewardConfig()).reads
    assert "response_mask" in Reward(RewardConfig(**shaping(20))).reads
    (one,) = graded([row("42", "42")], "exact_match")
    assert (one["reward"], "task_reward" in json.loads(one["reward_info"])) == (1.0, False)


def test_options_reach_the_function() -> None:
    assert rewards([row("xx")], f"{FUNCTIONS}:length", options={"scale": 0.5}) == [1.0]


def test_a_function_gets_the_context_that_it_names() -> None:
    (one,) = graded([row("42", [1, 2], prompt="why", extra='{"level": 3}')], f"{FUNCTIONS}:everything")
    assert json.loads(one["reward_info"])["seen"] == ["42", [1, 2], "why", "test", {"level": 3}]


def test_D04_the_right_answer_keeps_its_type() -> None:
    truths = (42, 42.0, "42", ["42", "x"], {"low": 1}, None)
    written = graded([row("42", truth) for truth in truths], f"{FUNCTIONS}:types")
    types = [json.loads(one["reward_info"])["type"] for one in written]
    assert types == ["int", "float", "str", "list", "dict", "NoneType"]


@pytest.mark.parametrize(("semantics", "mean"), [("trajectory", 3.0), ("step", 5.0)])
def test_a_sessions_return_is_reported_once_and_greedy_sessions_apart(
    tmp_path: Path, semantics: Any, mean: float
) -> None:
    batch = make_batch(
        [row("xx", session=0, turn=0), row("xxx", session=0, turn=1), row("x", session=0, is_baseline=True)]
    )
    processed(batch, tmp_path, "length", semantics=semantics)
    assert batch.metrics["reward/mean"] == (mean, 1.0)
    assert batch.metrics["reward/greedy/mean"] == (1.0, 1.0)


def test_an_unknown_reward_is_counted_and_left_out_of_the_mean(tmp_path: Path) -> None:
    batch = make_batch([row(text, "yes") for text in ("yes", "bad", "no", "bad")])
    processed(batch, tmp_path, "picky")
    assert batch.metrics["reward/mean"] == (1.0, 2.0)
    assert batch.metrics["reward/not_ok_share"] == (2.0, 4.0)


def test_a_kind_of_failure_is_told_once_with_its_reason(tmp_path: Path) -> None:
    batch = make_batch([row(text) for text in ("exits at once", "raises", "exits at once", "raises")])
    processed(batch, tmp_path, "trouble")
    told = list(batch.warnings.values())
    assert len(told) == 2
    assert "error: the process that graded it ended with exit code 4" in told[0]
    assert "error: ValueError: no digits" in told[1]


def test_a_function_that_cannot_be_had_stops_the_run_before_a_row_is_graded(tmp_path: Path) -> None:
    with pytest.raises(WorkerBroken, match="'no_such:reward': the process that grades did not start: ConfigError"):
        processed(make_batch([]), tmp_path, "no_such:reward")


def test_a_batch_without_rows_is_graded(tmp_path: Path) -> None:
    assert set(map(len, processed(make_batch([]), tmp_path, "length").values())) == {0}


@pytest.mark.parametrize(
    ("options", "key"),
    [({"timeout_s": 0}, "timeout_s"), ({"timeout_s": "inf"}, "timeout_s"), ({"processes": 0}, "processes")],
)
def test_limits_that_cannot_hold_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        RewardConfig(**options)


def test_the_deadline_of_a_claim_leaves_every_row_its_time() -> None:
    slow = Reward(RewardConfig(timeout_s=60))
    assert slow.deadline_s >= slow.batch_rows * 60
    assert Reward(RewardConfig(timeout_s=60, processes=8)).deadline_s < slow.deadline_s
    assert Reward(RewardConfig(timeout_s=0.1, processes=64)).deadline_s == Stage.deadline_s
