"""What reward functions may return, and what becomes of it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.rewards.base import Scored, normalise, score


class Scripted:
    """A scorer that gives, or raises, what the ground truth asks for."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __call__(self, response: str, ground_truth: object) -> Any:
        answer = self._answers[response]
        if isinstance(answer, BaseException):
            raise answer
        return answer


# Values


@pytest.mark.parametrize(
    ("raw", "reward"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (-3.5, -3.5),
        (True, 1.0),
        (False, 0.0),
        (np.bool_(True), 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.array(0.5), 0.5),
    ],
)
def test_numbers_and_booleans_of_any_kind_become_floats(raw: object, reward: float) -> None:
    scored = normalise(raw)
    assert scored == Scored(reward, "ok", {})
    assert type(scored.reward) is float


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (math.nan, "got float nan"),
        (math.inf, "got float inf"),
        (np.float32("nan"), "finite"),
        (1e39, "float32"),
        (10**400, "float32"),
        ("1.0", "got str '1.0'"),
        ([1.0], "got list [1.0]"),
        (np.array([1.0]), "got ndarray"),
        (1j, "got complex"),
        ({"acc": 1}, "expected a dict with 'score', got 'acc'"),
        ({}, "got no keys"),
        ({"score": "1"}, "got str '1'"),
        ({"score": math.nan}, "finite"),
        (object, "got type"),
    ],
)
def test_what_is_no_number_is_an_error_that_names_it_and_never_a_zero(raw: object, text: str) -> None:
    scored = normalise(raw)
    assert (scored.reward, scored.status) == (None, "error")
    assert text in scored.info["error"]


def test_none_abstains() -> None:
    assert normalise(None) == Scored(None, "abstain", {})
    assert normalise({"score": None, "why": "no gold"}) == Scored(None, "abstain", {"why": "no gold"})


def test_a_dict_gives_its_score_and_keeps_the_rest() -> None:
    assert normalise({"score": np.float64(1), "acc": 1, "pred": "7"}) == Scored(1.0, "ok", {"acc": 1, "pred": "7"})


def test_an_error_keeps_what_else_the_scorer_said() -> None:
    assert normalise({"score": "x", "pred": "7"}).info["pred"] == "7"


@pytest.mark.parametrize(
    "scored",
    [Scored(0.5), Scored(None, "timeout"), Scored(None, "error", {"error": "x"}), Scored(None, "abstain")],
)
def test_a_well_formed_scored_passes_as_it_is(scored: Scored) -> None:
    assert normalise(scored) == scored


@pytest.mark.parametrize(
    ("scored", "text"),
    [
        (Scored(1.0, "error"), "expected no reward beside status 'error'"),
        (Scored(math.nan), "finite"),
        (Scored(1.0, "fine"), "got 'fine'"),  # type: ignore[arg-type]
    ],
)
def test_a_contradictory_scored_is_an_error(scored: Scored, text: str) -> None:
    got = normalise(scored)
    assert (got.reward, got.status) == (None, "error")
    assert text in got.info["error"]


def test_a_scored_that_is_ok_without_a_reward_abstains() -> None:
    assert normalise(Scored(None)) == Scored(None, "abstain")


@given(
    st.dictionaries(
        st.text(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
            lambda inner: st.lists(inner) | st.dictionaries(st.integers(), inner) | st.sets(st.integers()),
            max_leaves=8,
        ),
    )
)
def test_whatever_a_scorer_adds_is_stored_as_valid_json(fields: dict[str, Any]) -> None:
    scored = normalise({**fields, "score": 1, "array": np.array([1.0, math.nan]), "scalar": np.int64(3)})
    again = json.loads(json.dumps(scored.info, allow_nan=False))
    assert (again["array"], again["scalar"]) == ([1.0, "nan"], 3)
    assert set(again) == (set(fields) | {"array", "scalar"}) - {"score"}


# Calls


def test_a_function_gets_the_context_that_it_names_and_nothing_else() -> None:
    def reward(response: str, ground_truth: object, *, data_source: str) -> dict[str, Any]:
        return {"score": 1, "got": [response, ground_truth, data_source]}

    scored = score(reward, "r", [1], data_source="sums", prompt="p", extra={})
    assert scored.info["got"] == ["r", [1], "sums"]


def test_a_function_with_open_keywords_gets_everything_but_reserved_names() -> None:
    def reward(response: str, ground_truth: object, **context: object) -> dict[str, Any]:
        return {"score": 1, "names": sorted(context)}

    context = {"prompt": "p", "extra": {}, "mine": 1, "__do_sample__": True, "__rollout_n__": 4}
    assert score(reward, "r", None, **context).info["names"] == ["extra", "mine", "prompt"]


def test_a_function_cannot_ask_for_a_reserved_name() -> None:
    def reward(response: str, ground_truth: object, __do_sample__: object = "hidden") -> dict[str, Any]:
        return {"score": 1, "seen": __do_sample__}

    assert score(reward, "r", None, __do_sample__=False).info["seen"] == "hidden"


def test_the_first_two_arguments_may_have_any_name() -> None:
    def reward(prompt: str, extra: object) -> float:
        return float(prompt == extra)

    assert score(reward, "x", "x", prompt="p", extra={}).reward == 1.0


def test_a_builtin_without_a_signature_is_called_with_the_two_arguments() -> None:
    assert score(max, "a", "b", prompt="p").info["error"] == "expected a number, a bool, None or a dict, got str 'b'"


def test_an_async_function_is_an_error_and_leaves_no_warning() -> None:
    async def reward(response: str, ground_truth: object) -> float:
        return 1.0

    assert "must not be async" in score(reward, "r", None).info["error"]


def test_a_timeout_is_told_from_an_error() -> None:
    scored = score(Scripted(r=TimeoutError("5 s")), "r", None)
    assert scored == Scored(None, "timeout", {"error": "TimeoutError: 5 s"})


def test_a_function_that_exits_is_an_error_of_its_row() -> None:
    assert score(Scripted(r=SystemExit(3)), "r", None) == Scored(None, "error", {"error": "SystemExit: 3"})


def test_stopping_the_program_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        score(Scripted(r=KeyboardInterrupt()), "r", None)


def test_a_number_too_long_to_write_and_half_a_character_become_text() -> None:
    info = normalise({"score": 1, "count": 10**5000, "said": "\ud83d", "\ud83d": 1}).info
    assert info == {"count": hex(10**5000), "said": "\\ud83d", "\\ud83d": 1}
    assert json.loads(json.dumps(info, ensure_ascii=False).encode()) == info


def test_the_text_of_an_exception_can_always_be_stored() -> None:
    for error in (ValueError("\ud83d"), TimeoutError("\ud83d")):
        assert score(Scripted(r=error), "r", None).info["error"].encode() == f"{type(error).__name__}: \\ud83d".encode()


def test_the_examples_of_the_page_of_rewards_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    space: dict[str, Any] = {}
    for example in examples:
        exec(example, space)
    assert len(examples) == 2
