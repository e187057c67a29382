"""Exact and numeric match, and the reading of answers, numbers and judge scores."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.rewards.base import Scored, score
from stages.rewards.exact import exact_match
from stages.rewards.extract import Found, gold_texts, last_box, last_number, parse_number, parse_score
from stages.rewards.numeric import numeric_match


def reward(response: str, gold: object, **options: Any) -> float | None:
    return score(lambda r, g: numeric_match(r, g, **options), response, gold).reward


def reason(response: str, gold: object, **options: Any) -> object:
    return score(lambda r, g: numeric_match(r, g, **options), response, gold).info.get("reason")


# R04, the answer marker


@pytest.mark.parametrize(
    ("mode", "rewards", "unanswered"),
    [("strict", [1.0, 0.0, 0.0, 0.0], 3), ("flexible", [1.0, 1.0, 1.0, 0.0], 1)],
)
def test_R04_flexible_mode_finds_answers_without_the_marker_and_both_count_the_rest(
    mode: str, rewards: list[float], unanswered: int
) -> None:
    responses = ["#### 18", "So the answer is 18.", r"\boxed{18}", "I do not know."]
    scored = [score(lambda r, g: numeric_match(r, g, mode=mode), text, "18") for text in responses]  # type: ignore[arg-type]
    assert [row.reward for row in scored] == rewards
    assert [row.info.get("reason") for row in scored].count("no answer") == unanswered


def test_R04_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="expected strict or flexible, got 'lenient'"):
        numeric_match("18", "18", mode="lenient")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "response",
    [
        "#### 18",
        "3*6\n#### 18 apples\n",
        "#### 17\n#### $18",
        "####18.",
        r"\boxed{18 \text{ dollars}}",
        r"\boxed{x = 18}",
        r"$\boxed{\$18}$",
        "<answer>18</answer>",
        "The answer is 3 * 6 = 18. I used 2 steps.",
        "Answer: **18**",
        "We need 10 and 8, so 18 in all.",
        "10 + 8 makes 18",
    ],
)
def test_R04_flexible_mode_takes_the_most_explicit_answer(response: str) -> None:
    assert reward(response, 18) == 1.0


@pytest.mark.parametrize(
    "response", ["#### 12 or 15", r"\boxed{12, 15}", r"\boxed{12 or 15}", "<answer>12 15</answer>"]
)
@pytest.mark.parametrize("gold", [12, 15])
def test_R04_a_marked_list_of_guesses_is_no_answer(response: str, gold: int) -> None:
    assert (reward(response, gold), reason(response, gold)) == (0.0, "not a number")


# R05, spellings


@pytest.mark.parametrize(
    ("spelling", "right"),
    [
        ("1234", 1),
        ("1,234", 1),
        ("$1,234", 1),
        ("1234.00", 1),
        ("1234.", 1),
        ("12345", 0),
        ("-1234", 0),
        ("1,2345", 0),
        ("123", 0),
        ("-$1,234", 0),
        ("1234%", 1),
        ("1.234e3", 1),
        ("2468/2", 1),
    ],
)
@pytest.mark.parametrize("form", ["#### {}", r"\boxed{{{}}}", "The answer is {}", "That makes {}"])
def test_R05_a_number_is_the_same_in_every_spelling(spelling: str, right: int, form: str) -> None:
    assert reward(form.format(spelling), 1234) == right


@pytest.mark.parametrize("gold", ["-5", -5, "-5.0", "−5", "-$5"])
def test_R05_a_negative_answer_keeps_its_sign(gold: object) -> None:
    for response in ("#### -5", "so it is -5.", "x = -5", r"\boxed{-\$5}", "−5"):
        assert (reward(response, gold), reward(response, 5)) == (1.0, 0.0)


@pytest.mark.parametrize("text", ["10-5", "(10)-5", "from 10 - 5", "x2-5"])
def test_R05_a_minus_between_numbers_is_no_sign(text: str) -> None:
    assert last_number(text) == 5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Reward: 10", 10.0),
        ("Reward: 1e-1", 0.1),
        ("Reward: -0.5", -0.5),
        ("Reward: nan", None),
        ("Reward: inf", None),
        ("Reward: 7/10", None),
        ("Reward: 10abc", None),
        ("Reward:", None),
        ("no score", None),
        ("Reward: 1. Reward = **2.5**.", 2.5),
        ("Reward: 1, later Reward: nan", None),
        ("reward: .5", 0.5),
        ("Unreward: 3", None),
    ],
)
def test_R05_a_judge_score_is_read_whole_or_not_at_all(text: str, value: float | None) -> None:
    assert parse_score(text) == value


def test_R05_the_label_of_a_judge_score_can_be_chosen() -> None:
    assert parse_score("Reward: 1\nScore (final): 4", "Score (final)") == 4.0


@given(st.integers(-(10**15), 10**15))
def test_R05_any_integer_is_read_from_any_of_its_spellings(number: int) -> None:
    for text in (f"{number}", f"{number:,}", f"{number}.00", f" {number}. ", f"{number} km", f"${number:,}$"):
        assert parse_number(text) == number
        assert last_number(f"we get {text}") == number


@given(st.fractions(max_denominator=10**6))
def test_R05_fractions_and_their_tex_are_read_exactly(number: Fraction) -> None:
    sign, top = ("-" if number < 0 else ""), abs(number.numerator)
    assert parse_number(f"{number.numerator}/{number.denominator}") == number
    assert parse_number(rf"{sign}\frac{{{top}}}{{{number.denominator}}}") == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_R05_a_float_gold_equals_its_own_text(number: float) -> None:
    assert reward(f"#### {number!r}", number) == 1.0


@pytest.mark.parametrize(
    "text", ["", "abc", "1/0", "12 or 15", "1 2", "x", "1e9999", "9" * 10_000, "x=3, y=8", "x <= 5"]
)
def test_R05_what_is_not_one_number_is_none(text: str) -> None:
    assert parse_number(text) is None


def test_R05_a_tolerance_admits_near_answers() -> None:
    assert [reward("#### 3.14", 3.14159, tolerance=t) for t in (0.0, 0.01)] == [0.0, 1.0]


# R06, boxes


@pytest.mark.parametrize(
    ("response", "found"),
    [
        (r"\boxed{\frac{7}{8}}", Found(r"\frac{7}{8}")),
        (r"\boxed{3} then \boxed{\frac{7}{8}}", Found(r"\frac{7}{8}")),
        (r"\fbox{\frac{7}{8}}", Found(r"\frac{7}{8}")),
        (r"\boxed{\frac{7}{8} cut", Found(None, "unclosed box")),
        (r"\boxed{\frac{7}{8}} then \boxed{3}", Found("3")),
        (r"\boxed{\frac{7}{8}} then \boxed{3", Found(None, "unclosed box")),
        (r"\boxed{\{3, 8\}}", Found(r"\{3, 8\}")),
        (r"\boxed {5}", Found("5")),
        (r"\boxed{ }", Found(None, "no answer")),
        (r"no box", Found(None, "no answer")),
        ("\\boxed{5\\", Found(None, "unclosed box")),
    ],
)
def test_R06_the_last_box_is_taken_with_its_braces_balanced(response: str, found: Found) -> None:
    assert last_box(response) == found


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"\boxed{\frac{7}{8}}", 1.0),
        (r"\boxed{3} then \boxed{\frac{7}{8}}", 1.0),
        (r"\fbox{\dfrac{7}{8}}", 1.0),
        (r"\boxed{\frac{7}{8} cut", 0.0),
        (r"\boxed{\frac{7}{8}} then \boxed{3}", 0.0),
    ],
)
def test_R06_numeric_match_grades_the_last_box(response: str, expected: float) -> None:
    assert reward(response, "7/8") == expected


def test_R06_a_box_that_was_cut_off_is_no_answer_even_in_flexible_mode() -> None:
    assert (reward(r"\boxed{18", 18), reason(r"\boxed{18", 18)) == (0.0, "unclosed box")


@given(
    st.recursive(st.text("ab 1", max_size=3), lambda inner: st.lists(inner.map(lambda t: "{" + t + "}")).map("".join))
)
def test_R06_any_balanced_content_comes_out_whole(content: str) -> None:
    box = last_box(r"x \boxed{1} y \boxed{" + content + "} z }")
    assert box == (Found(content.strip()) if content.strip() else Found(None, "no answer"))


# R07, mentioned in passing


def test_R07_a_number_mentioned_in_passing_is_no_answer_in_strict_mode() -> None:
    response = "It might be 12 or 15, hard to say."
    assert (reward(response, 12, mode="strict"), reason(response, 12, mode="strict")) == (0.0, "no answer")
    assert reward(response, 12) == 0.0  # flexible mode takes the last number, and no other


# D04, ground truths of any type


@pytest.mark.parametrize("gold", [42, "42", 42.0, ["42", "forty-two"], np.int64(42), np.array([41, 42])])
def test_D04_a_right_answer_may_be_of_any_type(gold: object) -> None:
    assert reward("#### 42", gold) == 1.0
    assert reward("#### 43", gold) == 0.0


@pytest.mark.parametrize("gold", [None, "see figure", [], ["a", "b"]])
def test_D04_a_row_without_a_numeric_answer_abstains(gold: object) -> None:
    assert score(numeric_match, "#### 42", gold) == Scored(None, "abstain", {"reason": "unscorable"})


def test_D04_a_raw_gsm8k_answer_counts_from_its_marker() -> None:
    assert reward("#### 72", "48/2 = <<48/2=24>>24\n#### 72") == 1.0


def test_D04_a_gold_of_another_kind_is_an_error() -> None:
    scored = score(numeric_match, "#### 42", {"answer": 42})
    assert (scored.status, scored.info["error"][:9]) == ("error", "TypeError")


def test_D04_golds_are_listed_as_json_writes_them() -> None:
    assert gold_texts([1, 1.0, True, "x", np.array([2, 3])]) == ["1", "1.0", "true", "x", "2", "3"]
    assert gold_texts(None) == []


# Exact match


@pytest.mark.parametrize(
    ("response", "gold", "options", "expected"),
    [
        ("yes\n", "yes", {}, 1.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"ignore_case": True}, 1.0),
        ("yes\n", "yes", {"strip": False}, 0.0),
        ("no", ["yes", "no"], {}, 1.0),
        ("42", 42, {}, 1.0),
        ("42", 42.0, {}, 0.0),
        ("yes yes", "yes", {}, 0.0),
    ],
)
def test_exact_match_compares_the_whole_response(
    response: str, gold: object, options: dict[str, bool], expected: float
) -> None:
    assert score(lambda r, g: exact_match(r, g, **options), response, gold).reward == expected


def test_exact_match_abstains_without_a_right_answer() -> None:
    assert score(exact_match, "x", None) == Scored(None, "abstain", {"reason": "unscorable"})
