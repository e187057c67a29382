"""The baseline join: values, reasons, and independence of order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from stages.algorithms.advantages import remax
from stages.algorithms.join import (
    Baseline,
    Missing,
    MissingReason,
    Session,
    Turn,
    is_greedy,
    join_baselines,
)
from stages.algorithms.returns import Semantics

PROPERTY = settings(derandomize=True, deadline=None, max_examples=80)
GREEDY: dict[str, object] = {
    "greedy": True, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": None, "n": 1, "max_tokens": 8
}  # fmt: skip
SAMPLED: dict[str, object] = {
    **GREEDY,
    "greedy": False,
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 50,
    "seed": 7,
}


def session(
    uid: str,
    rewards: Sequence[float | None],
    number: int = 0,
    *,
    sampling: dict[str, object] = SAMPLED,
    semantics: Semantics = "step",
    version: int = 3,
    length: int = 2,
    **turn: Any,
) -> Session:
    """A session with one turn per reward, each of `length` policy tokens."""
    turns = [
        Turn(
            **{
                "turn": place,
                "reward": reward,
                "status": "ok",
                "mask": np.ones(length, np.int8),
                "sampling": sampling,
                "version_min": version,
                "version_max": version,
            }
            | turn
        )
        for place, reward in enumerate(rewards)
    ]
    return Session(uid, number, semantics, turns)


def greedy(uid: str, rewards: Sequence[float | None], **changes: Any) -> Session:
    return session(uid, rewards, sampling=changes.pop("sampling", GREEDY), **changes)


def advantages(sampled: Sequence[Session], baselines: Sequence[Baseline | Missing]) -> list[float]:
    """ReMax at the first token of each session; a session without a baseline is not valid."""
    values = [found.value if isinstance(found, Baseline) else float("nan") for found in baselines]
    result = remax(
        token_rewards=torch.tensor([[one.total_return] for one in sampled]),
        mask=torch.ones(len(sampled), 1),
        valid=torch.tensor([isinstance(found, Baseline) for found in baselines]),
        baseline=torch.tensor(values),
    )
    return [float(value) for value in result.advantages[:, 0]]


def reason(found: Baseline | Missing) -> MissingReason:
    assert isinstance(found, Missing)
    return found.reason


def test_B01_a_missing_baseline_is_reported_and_never_zero() -> None:
    sampled = [session("a", [1], 0), session("a", [0], 1), session("b", [1], 0), session("b", [1], 1)]
    failed = Session("b", 0, "step", failure="engine died twice")
    got = join_baselines(sampled, [greedy("a", [1]), failed], max_version_gap=0)
    assert got[:2] == [Baseline(1.0, "greedy")] * 2
    missing = [one.uid for one, found in zip(sampled, got, strict=True) if isinstance(found, Missing)]
    assert Counter(missing) == {"b": 2}
    assert str(got[2]) == "greedy session failed: engine died twice"
    assert advantages(sampled, got) == [0, -1, 0, 0]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_B02_the_baseline_is_the_total_return_of_all_turns(order: list[int]) -> None:
    def shuffled(one: Session) -> Session:
        return replace(one, turns=[one.turns[place] for place in order])

    sampled = [shuffled(session("a", [0.5, 0, 1.0], 0)), shuffled(session("a", [0, 0, 0.4], 1))]
    got = join_baselines(sampled, [shuffled(greedy("a", [0.2, 0.3, 0.5]))], max_version_gap=0)
    assert [found.value for found in got if isinstance(found, Baseline)] == pytest.approx([1.0, 1.0])
    assert advantages(sampled, got) == pytest.approx([0.5, -0.6])


def test_a_trajectory_reward_that_every_turn_repeats_counts_once() -> None:
    sampled = [session("a", [1.0] * 3, semantics="trajectory")]
    got = join_baselines(sampled, [greedy("a", [0.5] * 2, semantics="trajectory")], max_version_gap=0)
    assert got == [Baseline(0.5)]
    assert advantages(sampled, got) == [0.5]


def test_token_rewards_of_the_greedy_session_count_on_policy_tokens_only() -> None:
    tokens: dict[str, Any] = {"mask": np.array([1, 0, 1]), "token_rewards": np.array([0.25, 9.0, 0.5])}
    got = join_baselines(
        [session("a", [0], semantics="token", **tokens)],
        [greedy("a", [0, 0], semantics="token", **tokens)],
        max_version_gap=0,
    )
    assert got == [Baseline(1.5)]


def test_a_reward_on_a_turn_without_policy_tokens_counts_on_neither_side() -> None:
    def with_tool_turn(one: Session) -> Session:
        return replace(one, turns=[one.turns[0], replace(one.turns[1], mask=np.zeros(2))])

    sampled = [with_tool_turn(session("a", [1.0, 5.0]))]
    got = join_baselines(sampled, [with_tool_turn(greedy("a", [0.25, 5.0]))], max_version_gap=0)
    assert got == [Baseline(0.25)]
    assert advantages(sampled, got) == [0.75]


@pytest.mark.parametrize(
    ("semantics", "total"),
    [
        ("trajectory", 3.0),  # one reward of the session, which each turn repeats
        ("step", 6.0),  # 3 + 3: the turn without a policy token does not count
        ("token", 4.0),  # 1 + 1 + 2: masked tokens do not count
    ],
)
def test_under_every_semantics_both_sides_count_the_same_parts_of_several_turns(
    semantics: Semantics, total: float
) -> None:
    def several_turns(one: Session) -> Session:
        parts = (([1, 0, 1], [1.0, 8.0, 1.0]), ([0, 0], [8.0, 8.0]), ([1], [2.0]))
        turns = [
            replace(one.turns[0], turn=place, mask=np.array(mask), token_rewards=np.array(tokens))
            for place, (mask, tokens) in enumerate(parts)
        ]
        return replace(one, turns=turns)

    sampled = several_turns(session("a", [3.0], semantics=semantics))
    (found,) = join_baselines([sampled], [several_turns(greedy("a", [3.0], semantics=semantics))], max_version_gap=0)
    assert found == Baseline(total)
    assert sampled.total_return == total


def test_the_status_of_a_session_is_that_of_its_first_turn_that_is_not_ok() -> None:
    good = session("a", [1.0, 1.0, 1.0])
    assert good.status == "ok"
    turns = [
        good.turns[0],
        *(replace(turn, status=status) for turn, status in zip(good.turns[1:], ("timeout", "error"), strict=True)),
    ]
    assert replace(good, turns=turns).status == "timeout"


def test_a_greedy_return_of_zero_is_a_baseline() -> None:
    assert join_baselines([session("a", [1])], [greedy("a", [0])], max_version_gap=0) == [Baseline(0.0)]


@pytest.mark.parametrize(
    ("found", "expected", "detail"),
    [
        ([], MissingReason.NO_SESSION, "no greedy session"),
        ([greedy("b", [1])], MissingReason.NO_SESSION, "no greedy session"),
        ([greedy("a", [1]), greedy("a", [0])], MissingReason.SEVERAL, "expected one, got 2"),
        ([Session("a", 0, "step", failure="timeout after 60 s")], MissingReason.FAILED, "timeout after 60 s"),
        ([greedy("a", [1], sampling=SAMPLED)], MissingReason.NOT_GREEDY, "turn 0.*0.8"),
        ([greedy("a", [1], sampling={"max_tokens": 8})], MissingReason.NOT_GREEDY, "turn 0"),
        ([greedy("a", [1], mask=np.zeros(3))], MissingReason.EMPTY, "no policy token"),
        ([greedy("a", [None], status="timeout")], MissingReason.REWARD, "turn 0: timeout"),
        ([greedy("a", [0.0], status="error")], MissingReason.REWARD, "turn 0: error"),
        ([greedy("a", [float("nan")])], MissingReason.REWARD, "total return is nan"),
        ([greedy("a", [1], semantics="trajectory")], MissingReason.SEMANTICS, "greedy trajectory"),
        ([greedy("a", [1], version=4)], MissingReason.VERSION, r"4\.\.4, sampled 3\.\.3, allowed gap 0"),
    ],
)  # fmt: skip
def test_what_is_no_baseline_is_refused_with_its_reason(
    found: list[Session], expected: MissingReason, detail: str
) -> None:
    (got,) = join_baselines([session("a", [1])], found, max_version_gap=0)
    assert reason(got) is expected
    assert str(got).startswith(str(expected))
    assert re.search(detail, str(got)), str(got)


def test_one_turn_that_is_not_greedy_or_not_scored_spoils_the_session() -> None:
    good = greedy("a", [1, 1])
    for change, expected in (
        ({"sampling": SAMPLED}, MissingReason.NOT_GREEDY),
        ({"status": "abstain", "reward": None}, MissingReason.REWARD),
    ):
        spoiled = replace(good, turns=[good.turns[0], replace(good.turns[1], **change)])
        (got,) = join_baselines([session("a", [1])], [spoiled], max_version_gap=0)
        assert reason(got) is expected


@pytest.mark.parametrize(("gap", "accepted"), [(0, [2]), (1, [1, 2, 3]), (2, [0, 1, 2, 3, 4])])
def test_B08_a_baseline_of_another_policy_version_is_refused_beyond_the_bound(gap: int, accepted: list[int]) -> None:
    sampled = [session("a", [1], version=version) for version in range(5)]
    got = join_baselines(sampled, [greedy("a", [1], version=2)], max_version_gap=gap)
    assert [version for version, found in enumerate(got) if isinstance(found, Baseline)] == accepted
    assert {reason(found) for found in got if isinstance(found, Missing)} <= {MissingReason.VERSION}


def test_B08_versions_are_compared_over_every_token_of_both_sessions() -> None:
    across = [greedy("a", [1], version_min=2, version_max=4)]
    assert reason(join_baselines([session("a", [1], version=4)], across, max_version_gap=1)[0]) is MissingReason.VERSION
    assert join_baselines([session("a", [1], version=3)], across, max_version_gap=1) == [Baseline(1.0)]
    (got,) = join_baselines(
        [session("a", [1], version_min=2, version_max=4)], [greedy("a", [1], version=2)], max_version_gap=1
    )
    assert reason(got) is MissingReason.VERSION


@pytest.mark.parametrize(
    ("greedy_budget", "sampled_budget", "length", "good"),
    [
        (8, 8, 8, True),  # cut off, as the sampled session would have been
        (4, 8, 4, False),  # cut off where the sampled session was not
        (4, 8, 3, True),  # it stopped by itself, within both budgets
        (8, 4, 3, True),
        (8, 4, 4, False),  # the sampled session could not have come so far
        (8, 4, 6, False),
        (None, 8, 2, False),  # not recorded: nothing is proved
    ],
)
def test_a_greedy_session_cut_off_by_another_budget_is_refused(
    greedy_budget: int | None, sampled_budget: int, length: int, good: bool
) -> None:
    (got,) = join_baselines(
        [session("a", [1], sampling={**SAMPLED, "max_tokens": sampled_budget})],
        [greedy("a", [1], sampling={**GREEDY, "max_tokens": greedy_budget}, length=length)],
        max_version_gap=0,
    )
    assert got == Baseline(1.0) if good else reason(got) is MissingReason.BUDGET


def test_a_later_turn_cut_off_by_its_own_budget_counts_once_the_first_budgets_differ() -> None:
    sampled = [session("a", [1, 1], sampling={**SAMPLED, "max_tokens": 16})]
    good = greedy("a", [1, 1])
    cut = replace(good, turns=[good.turns[0], replace(good.turns[1], sampling={**GREEDY, "max_tokens": 2})])
    assert join_baselines(sampled, [good], max_version_gap=0) == [Baseline(2.0)]
    assert reason(join_baselines(sampled, [cut], max_version_gap=0)[0]) is MissingReason.BUDGET


def test_the_budgets_of_later_turns_follow_the_conversation_and_are_not_compared() -> None:
    short = {**GREEDY, "max_tokens": 5}
    good = greedy("a", [1, 1])
    found = replace(good, turns=[good.turns[0], replace(good.turns[1], sampling=short)])
    assert join_baselines([session("a", [1, 1])], [found], max_version_gap=0) == [Baseline(2.0)]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (GREEDY, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 50}, True),
        (SAMPLED, False),
        ({}, False),
        ({"greedy": True}, False),
        ({"greedy": True, "temperature": 0.8}, False),
        ({"greedy": False, "temperature": 0.0}, False),
        ({"greedy": "false", "temperature": 0.0}, False),
        ({"temperature": "0"}, False),
        ({"temperature": False}, False),
        ({"temperature": None}, False),
        ({"temperature": float("nan")}, False),
        ({"temperature": 0, "n": 4}, False),
    ],
)
def test_only_a_recorded_temperature_of_zero_proves_greedy(sampling: dict[str, object], expected: bool) -> None:
    assert is_greedy(sampling) is expected


@pytest.mark.parametrize("places", [[0, 2], [0, 0], [1]])
def test_a_session_with_a_turn_missing_or_twice_is_refused(places: list[int]) -> None:
    (turn,) = session("a", [1]).turns
    with pytest.raises(ValueError, match=r"uid 'a', session 0: expected turns 0, 1, .. once each"):
        Session("a", 0, "step", [replace(turn, turn=place) for place in places])


def test_a_session_without_turns_must_say_why() -> None:
    with pytest.raises(ValueError, match="expected turns"):
        Session("a", 0, "step")


UIDS = ["math_7", "math_7_0", "remax_baseline_x", "Ünï 题", "7"]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Session], list[Session]]:
    """Sampled and greedy sessions of awkward uids; some greedy ones are absent, failed or unusable."""
    sampled, found = [], []
    for place, uid in enumerate(UIDS):
        for number in range(draw(st.integers(0, 3))):
            sampled.append(session(uid, [float(number), 1.0], number, version=draw(st.integers(3, 4))))
        kind = draw(st.sampled_from(["good", "good", "absent", "failed", "unscored", "sampled"]))
        if kind == "failed":
            found.append(Session(uid, 0, "step", failure="lost"))
        elif kind == "unscored":
            found.append(greedy(uid, [None, 1.0], status="error"))
        elif kind != "absent":
            how = GREEDY if kind == "good" else SAMPLED
            found.append(greedy(uid, [float(place), 0.5], sampling=how))
    return sampled, found


@PROPERTY
@given(world=worlds(), data=st.data())
def test_any_order_of_sessions_and_turns_gives_the_same_join(
    world: tuple[list[Session], list[Session]], data: st.DataObject
) -> None:
    def reversed_turns(one: Session) -> Session:
        return replace(one, turns=one.turns[::-1])

    sampled, found = world
    expected = join_baselines(sampled, found, max_version_gap=0)
    order = data.draw(st.permutations(range(len(sampled))))
    others = data.draw(st.permutations(found))
    got = join_baselines(
        [reversed_turns(sampled[place]) for place in order], map(reversed_turns, others), max_version_gap=0
    )
    assert got == [expected[place] for place in order]


@PROPERTY
@given(world=worlds())
def test_every_sampled_session_gets_its_own_uids_return_or_a_reason(
    world: tuple[list[Session], list[Session]],
) -> None:
    sampled, found = world
    returns = {one.uid: one.total_return for one in found if not one.failure}
    for one, got in zip(sampled, join_baselines(sampled, found, max_version_gap=1), strict=True):
        if isinstance(got, Baseline):
            assert got == Baseline(returns[one.uid])
            assert got.value == UIDS.index(one.uid) + 0.5
        else:
            assert got.reason in set(MissingReason)
            assert got.reason is not MissingReason.VERSION


@PROPERTY
@given(world=worlds(), lost=st.sampled_from(UIDS))
def test_losing_one_greedy_session_changes_its_own_uid_alone(
    world: tuple[list[Session], list[Session]], lost: str
) -> None:
    sampled, found = world
    before = join_baselines(sampled, found, max_version_gap=1)
    after = join_baselines(sampled, [one for one in found if one.uid != lost], max_version_gap=1)
    for one, was, now in zip(sampled, before, after, strict=True):
        assert now == (Missing(MissingReason.NO_SESSION) if one.uid == lost else was)
