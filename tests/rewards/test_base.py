"""What reward functions may return, and what becomes of it."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.rewards.base import Scored, normalise, score, score_rows
from stages.rewards.summary import ABSENT, info_columns, summarise


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


def test_stopping_the_program_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        score(Scripted(r=KeyboardInterrupt()), "r", None)


# Rows


def test_R12_one_call_that_raises_costs_its_own_row_alone() -> None:
    scorer = Scripted(r0=1, r1=0, r2=ValueError("no digits"), r3=0)
    scored = score_rows(scorer, [{"response": f"r{i}", "ground_truth": None} for i in range(4)])
    assert [row.status for row in scored] == ["ok", "ok", "error", "ok"]
    assert scored[2] == Scored(None, "error", {"error": "ValueError: no digits"})
    assert summarise(scored).statuses == {"ok": 3, "error": 1}
    rewards = np.array([row.reward for row in scored if row.reward is not None])
    # The mean of 1, 0, 0 is 1/3; a silent 0 would have made it 1/4.
    np.testing.assert_allclose(rewards - rewards.mean(), [2 / 3, -1 / 3, -1 / 3])


def test_R16_scores_are_in_the_order_of_the_rows_whatever_finishes_first() -> None:
    finished: list[int] = []
    done = [threading.Event() for _ in range(7)]

    def last_row_first(response: str, ground_truth: object) -> float:
        row = int(response)
        assert done[row + 1].wait(timeout=30)
        finished.append(row)
        done[row].set()
        return row / 10

    rows = [{"response": str(i), "ground_truth": None} for i in range(6)]
    for _ in range(5):
        finished.clear()
        for event in done:
            event.clear()
        done[6].set()
        scored = score_rows(last_row_first, rows, threads=6)
        assert finished == [5, 4, 3, 2, 1, 0]
        assert [row.reward for row in scored] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]


def test_R19_each_row_is_graded_once() -> None:
    calls: list[str] = []

    def counting(response: str, ground_truth: object) -> float:
        calls.append(response)
        return 1.0

    rows = [{"response": f"r{i}", "ground_truth": None} for i in range(10)]
    score_rows(counting, rows, threads=2)
    assert sorted(calls) == [row["response"] for row in rows]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1, 0)])
def test_R11_extra_fields_may_differ_from_row_to_row(order: tuple[int, ...]) -> None:
    raws: list[Any] = [1.0, {"score": 0, "acc": 0, "pred": "7"}, {"score": 1, "acc": 1}]
    scored = [normalise(raws[i]) for i in order]
    assert [row.reward for row in scored] == [[1.0, 0.0, 1.0][i] for i in order]
    assert info_columns([row.info for row in scored]) == {
        "acc": [[ABSENT, 0, 1][i] for i in order],
        "pred": [[ABSENT, "7", ABSENT][i] for i in order],
    }
    summary = summarise(scored)
    assert summary.means == {"acc": 0.5}  # over the two rows that have it
    assert summary.mean_reward == pytest.approx(2 / 3)


def test_R11_a_field_that_is_none_is_not_absent() -> None:
    columns = info_columns([{"pred": None}, {}])
    assert columns == {"pred": [None, ABSENT]}
    assert repr(ABSENT) == "ABSENT"


def test_no_rows_and_no_rewards_have_no_mean() -> None:
    assert summarise([]).mean_reward is None
    assert summarise([Scored(None, "abstain", {"reason": "unscorable"})]).mean_reward is None
