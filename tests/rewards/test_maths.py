"""Mathematical match, graded by the real math-verify."""

from __future__ import annotations

import asyncio
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from stages.rewards.base import Scored, score
from stages.rewards.maths import math_match, math_score


def graded(response: str, gold: object, **options: Any) -> Scored:
    return score(functools.partial(math_match, timeout_s=60, **options), response, gold)


def boxed(answer: str) -> str:
    return rf"So it is \boxed{{{answer}}}."


# R01, off the main thread

THIRD = (boxed(r"\frac{1}{3}"), r"\frac{1}{3}")


def test_R01_grading_works_in_the_main_thread() -> None:
    assert threading.current_thread() is threading.main_thread()
    assert graded(*THIRD).reward == 1.0


def test_R01_grading_works_in_a_second_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(graded, *THIRD).result().reward == 1.0


def test_R01_grading_works_in_an_asyncio_executor() -> None:
    async def main() -> Scored:
        return await asyncio.get_running_loop().run_in_executor(None, lambda: graded(*THIRD))

    assert asyncio.run(main()).reward == 1.0


def test_R01_many_threads_may_grade_at_once() -> None:
    answers = [str(i) for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        scored = list(pool.map(lambda answer: graded(boxed(answer), "7"), answers))
    assert [row.reward for row in scored] == [float(answer == "7") for answer in answers]


def test_R01_an_answer_that_never_ends_times_out_and_the_next_is_graded() -> None:
    endless = score(functools.partial(math_match, timeout_s=0.5), boxed("9^{9^{9^{9}}}"), "5")
    assert (endless.reward, endless.status) == (None, "timeout")
    assert "no answer within 0.5 s" in endless.info["error"]
    assert graded(boxed("5"), "5").reward == 1.0


# R06, boxes


@pytest.mark.parametrize(
    ("response", "reward", "reason"),
    [
        (r"\boxed{\frac{7}{8}}", 1.0, None),
        (r"\boxed{3}, no, \boxed{\frac{7}{8}}", 1.0, None),
        (r"\fbox{\frac{7}{8}}", 1.0, None),
        (r"\boxed{\frac{7}{8}", 0.0, "unclosed box"),
        (r"\boxed{\frac{7}{8}}, no, \boxed{3}", 0.0, None),
    ],
)
def test_R06_the_last_box_alone_is_graded(response: str, reward: float, reason: str | None) -> None:
    scored = graded(response, "7/8")
    assert (scored.reward, scored.info.get("reason")) == (reward, reason)


# R07, no box


def test_R07_without_a_box_nothing_is_graded_in_strict_mode() -> None:
    scored = graded("It might be 12 or 15, hard to say.", "12")
    assert (scored.reward, scored.info) == (0.0, {"reason": "no answer"})


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("It might be 12 or 15, hard to say.", 0.0),
        ("The answer is 12.", 1.0),
        ("Answer: $12$", 1.0),
        ("#### 12", 1.0),
        ("<answer>12</answer>", 1.0),
        ("The answer is 12 or 15.", 0.0),
    ],
)
def test_R07_flexible_mode_takes_marked_answers_but_never_the_whole_text(response: str, reward: float) -> None:
    assert graded(response, "12", mode="flexible").reward == reward


def test_R07_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="expected strict or flexible"):
        math_score("", "1", mode="loose")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected strict or flexible"):
        math_match("", "1", mode="loose")  # type: ignore[arg-type]


# R08, several values


@pytest.mark.parametrize("gold", ["3 and 8", "3, 8", r"\{3, 8\}", "$3$ and $8$"])
@pytest.mark.parametrize(
    ("prediction", "reward"), [("8", 0.0), ("3 and 8", 1.0), ("8 and 3", 1.0), ("3, 8 and 9", 0.0)]
)
def test_R08_all_values_are_asked_for_and_no_others(gold: str, prediction: str, reward: float) -> None:
    assert graded(boxed(prediction), gold).reward == reward


def test_R08_a_list_of_guesses_does_not_match_a_single_value() -> None:
    assert graded(boxed("12 or 15"), "12").reward == 0.0
    assert graded(boxed(r"\{12, 15\}"), "12").reward == 0.0


def test_D04_a_list_as_ground_truth_means_any_of_them() -> None:
    assert [graded(boxed(text), ["7/8", 0.5]).reward for text in ("1/2", r"\frac{7}{8}", "1")] == [
        1.0,
        1.0,
        0.0,
    ]
    assert graded(boxed("42"), np.int64(42)).reward == 1.0


# R09, order of the comparison


def test_R09_the_gold_comes_first_in_the_comparison() -> None:
    assert graded(boxed("(1,2)"), "1<x<2").reward == 1.0
    assert graded(boxed("1<x<2"), "(1,2)").reward == 0.0  # what a swapped call would have given above


# R10, golds that cannot be parsed


def test_R10_rows_whose_gold_cannot_be_parsed_are_left_out_and_counted() -> None:
    prose = [graded(boxed(text), "see figure") for text in ("5", "see figure", "7", "")]
    solved = [graded(boxed(text), "5") for text in ("5", "4", "5", "5")]
    assert prose == [Scored(None, "abstain", {"reason": "unscorable"})] * 4
    assert [row.reward for row in solved] == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("gold", [None, "", r"\frac{1}{", "see figure 3", []])
def test_R10_a_gold_that_says_nothing_abstains(gold: object) -> None:
    assert graded(boxed("5"), gold) == Scored(None, "abstain", {"reason": "unscorable"})


# Expressions


@pytest.mark.parametrize(
    ("gold", "prediction", "reward"),
    [
        (r"\frac{1}{2}", "0.5", 1.0),
        ("18 apples", "18", 1.0),
        ("18", "18 dollars", 1.0),
        ("x=3, y=8", "x=3, y=8", 1.0),
        ("x=3, y=8", "8", 0.0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
        ("3x", "3 x", 1.0),
        (r"\[7\]", r"$7$", 1.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "5", 0.0),
        (r"\text{Monday}", r"\text{Monday}", 1.0),
    ],
)
def test_expressions_are_equal_by_value(gold: str, prediction: str, reward: float) -> None:
    assert graded(boxed(prediction), gold).reward == reward


def test_prose_in_a_box_and_overlong_answers_are_not_compared() -> None:
    assert graded(boxed("see the figure"), "5").info == {"reason": "not an expression"}
    assert graded(boxed("1+" * 600 + "1"), "601").info == {"reason": "answer too long"}
