"""Length penalties, what part of a response is graded, reasoning-gym, and names of rewards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import ConfigError
from stages.rewards import BUILTIN, PACKAGES, resolve
from stages.rewards.base import score
from stages.rewards.length import SoftOverlongPenalty
from stages.rewards.numeric import numeric_match
from stages.rewards.reasoning_gym import reasoning_gym_score
from stages.rewards.text import format_match, graded_ids

# R18, length


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(60, 0), (80, 0), (81, -0.05), (85, -0.25), (90, -0.5), (100, -1), (101, -1)]
)
def test_R18_the_penalty_ramps_up_over_the_buffer_before_the_maximum(tokens: int, penalty: float) -> None:
    # 20 tokens of buffer before 100: one twentieth per token beyond 80.
    assert SoftOverlongPenalty(max_tokens=100, buffer=20)(tokens) == pytest.approx(penalty)


@pytest.mark.parametrize("buffer", [120, 101, 0, -1])
def test_R18_a_buffer_that_would_penalise_every_answer_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=rf"expected 1 to max_tokens \(100\), got {buffer}"):
        SoftOverlongPenalty(max_tokens=100, buffer=buffer)


def test_R18_a_negative_factor_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 or more"):
        SoftOverlongPenalty(max_tokens=100, buffer=20, factor=-1.0)


@given(st.integers(1, 500).flatmap(lambda m: st.tuples(st.just(m), st.integers(1, m))), st.floats(0, 10))
def test_R18_the_penalty_never_rises_with_length_and_stays_in_its_bounds(sizes: tuple[int, int], factor: float) -> None:
    penalty = SoftOverlongPenalty(*sizes, factor=factor)
    values = [penalty(tokens) for tokens in range(sizes[0] + 3)]
    assert values == sorted(values, reverse=True)
    assert (values[0], values[-1]) == (0, -factor)


# R15, R17, what is graded

VOCABULARY = {
    1: "<answer>5</answer>",
    2: "<eos>",
    3: "6",
    4: "<pad>",
    5: "<think>",
    6: "</think>",
    7: "ok",
    8: "5",
    9: "\n",
}


def decode(ids: list[int]) -> str:
    return "".join(VOCABULARY[token] for token in ids)


@pytest.mark.parametrize("ids", [[1, 2, 3, 3], [1, 2], [1], [1, 9, 2, 3], [1, 4, 2, 4, 4]])
def test_R17_text_after_the_end_token_is_not_graded(ids: list[int]) -> None:
    text = decode(graded_ids(ids, end_ids={2}, drop_ids={4}))
    assert score(numeric_match, text, 5).reward == 1.0
    assert score(format_match, text, 5).reward == 1.0


def test_R17_without_the_cut_both_would_be_wrong() -> None:
    text = decode([1, 2, 3])
    assert score(format_match, text, 5).reward == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>5</answer>", 1.0),
        ("so <answer>5</answer> \n", 1.0),
        ("<answer>5</answer>6", 0.0),
        ("<answer>5", 0.0),
        ("5", 0.0),
        ("", 0.0),
        ("a\nb <answer>\n5\n</answer>", 1.0),
    ],
)
def test_R17_the_form_asks_for_an_answer_block_at_the_end(text: str, expected: float) -> None:
    assert format_match(text) == expected


def test_R15_end_and_pad_are_removed_and_other_special_tokens_are_kept() -> None:
    text = decode(graded_ids([5, 7, 6, 8, 2, 4], end_ids={2}, drop_ids={4}))
    assert text == "<think>ok</think>5"
    assert format_match(text, pattern=r"<think>.*</think>\d+") == 1.0


@given(st.lists(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_graded_ids_end_before_the_first_end_token(ids: list[int], end: set[int], drop: set[int]) -> None:
    first = next((i for i, token in enumerate(ids) if token in end), len(ids))
    assert graded_ids(ids, end, drop) == [token for token in ids[:first] if token not in drop]


# reasoning-gym

SUM = {
    "question": "4 - 1 - 7 =",
    "answer": "-4",
    "metadata": {"source_dataset": "chain_sum", "source_index": 0},
}
SUM_EXTRA = {"dataset": "chain_sum", "entry": json.dumps(SUM)}


@pytest.mark.parametrize(
    ("response", "strict", "flexible"),
    [
        ("<answer>-4</answer>", 1.0, 1.0),
        (r"\boxed{-4}", 0.0, 1.0),
        ("4 - 1 = 3, minus 7 is -4.", 0.0, 1.0),
        ("The answer is -4. I used 2 steps.", 0.0, 1.0),
        ("<answer>5</answer>", 0.0, 0.0),
        ("I do not know.", 0.0, 0.0),
        (r"\boxed{-4", 0.0, 0.0),
    ],
)
def test_the_data_sets_own_scorer_grades_the_answer(response: str, strict: float, flexible: float) -> None:
    assert reasoning_gym_score(response, extra=SUM_EXTRA, mode="strict")["score"] == strict
    assert reasoning_gym_score(response, extra=SUM_EXTRA)["score"] == flexible


def test_answers_generated_by_reasoning_gym_score_one_after_a_trip_through_json() -> None:
    reasoning_gym_score("<answer>-4</answer>", extra=SUM_EXTRA)  # imports it without its SyntaxWarnings
    import reasoning_gym as gym

    for name in ("chain_sum", "basic_arithmetic", "letter_counting", "propositional_logic", "word_sorting"):
        entry = gym.create_dataset(name, size=1, seed=3)[0]
        answer = entry["answer"] or entry["metadata"]["example_answer"]
        extra = json.dumps({"dataset": name, "entry": entry}, default=str)
        scored = score(reasoning_gym_score, f"<answer>{answer}</answer>", None, extra=extra)
        assert scored.reward == 1.0, name


def test_a_row_may_name_its_data_set_in_the_entry_alone() -> None:
    assert reasoning_gym_score("-4", extra={"entry": SUM})["score"] == 1.0


def test_text_answers_are_taken_from_the_sentence_or_else_whole() -> None:
    entry = {
        "question": "Sort: b, a",
        "answer": "a, b",
        "metadata": {"source_dataset": "word_sorting", "sorted_words": ["a", "b"]},
    }
    assert reasoning_gym_score("a, b\n", extra={"entry": entry})["score"] == 1.0
    assert reasoning_gym_score("The answer is a, b", extra={"entry": entry})["answer"] == "a, b"


def test_no_answer_is_counted_by_its_reason() -> None:
    assert reasoning_gym_score("I do not know.", extra=SUM_EXTRA) == {"score": 0.0, "reason": "no answer"}


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({}, "KeyError: \"extra: expected 'entry', found nothing\""),
        ({"entry": {"answer": "1"}}, "expected 'metadata', found 'answer'"),
        ({"dataset": "no_such", "entry": SUM}, "'no_such' not registered"),
    ],
)
def test_a_row_that_cannot_be_scored_is_an_error(extra: dict[str, object], error: str) -> None:
    scored = score(reasoning_gym_score, "5", None, extra=extra)
    assert (scored.reward, scored.status) == (None, "error")
    assert error in scored.info["error"]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="expected strict or flexible"):
        reasoning_gym_score("5", extra=SUM_EXTRA, mode="loose")  # type: ignore[arg-type]


# Names


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_every_built_in_name_is_a_function(name: str) -> None:
    assert callable(resolve(name))


def test_an_import_path_and_a_file_are_found_too(tmp_path: Path) -> None:
    assert resolve("operator:eq")("a", "a") is True
    path = tmp_path / "json.py"  # hides no installed module
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Point:\n    x: int\n"
        "def reward(response, ground_truth):\n    return len(response)\n"
    )
    assert resolve(f"{path}:reward")("abc", None) == 3
    assert sys.modules["json"] is json


def test_options_are_bound() -> None:
    strict = resolve("numeric_match", {"mode": "strict"})
    assert score(strict, r"\boxed{18}", 18).reward == 0.0
    assert score(resolve("numeric_match"), r"\boxed{18}", 18).reward == 1.0


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'numeric_match': expected options out of mode, tolerance, got moed"):
        resolve("numeric_match", {"moed": "strict"})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("math_macth", "expected 'package.module:name'"),
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        ("math:no_such", "'math' has no 'no_such'"),
        ("math:pi", "it is a float"),
        ("asyncio:sleep", "it is async"),
        ("no_such.py:f", "cannot be imported: FileNotFoundError"),
        (":f", "expected 'package.module:name'"),
        ("math:", "expected 'package.module:name'"),
    ],
)
def test_a_name_that_is_no_reward_is_refused_with_the_known_ones(name: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(name)
    message = str(caught.value)
    assert repr(name) in message
    assert why in message
    assert all(known in message for known in BUILTIN)


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_built_in_whose_package_is_not_installed_is_refused_with_the_package(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGES, name, "no_such_package")
    with pytest.raises(ConfigError, match=f"'{name}': the package 'no_such_package' .* install no-such-package"):
        resolve(name)


def test_naming_a_reward_imports_no_torch_and_no_grader() -> None:
    code = (
        "import sys\nfrom stages.rewards import BUILTIN, resolve\n[resolve(name) for name in BUILTIN]\n"
        "heavy = {'torch', 'sympy', 'math_verify', 'reasoning_gym', 'ray'} & set(sys.modules)\n"
        "sys.exit(','.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
