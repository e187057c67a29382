"""What stands in for a missing baseline: each policy's number, the order of a chain, and what counts in a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from stages.algorithms.fallback import POLICIES, advance, check_chain, fall_back
from stages.algorithms.join import Baseline, Missing, MissingReason, Session, Turn

PROPERTY = settings(derandomize=True, deadline=None, max_examples=80)
FAILED = Missing(MissingReason.FAILED, "killed")


def session(reward: float | None, number: int, uid: str = "a", *, version: int = 0) -> Session:
    """A sampled session of one turn; its status is "error" where the reward is None."""
    status = "ok" if reward is not None else "error"
    turn = Turn(0, reward, status, np.ones(2), {"temperature": 1.0}, version, version)
    return Session(uid, number, "trajectory", [turn])


def group(*rewards: float | None, uid: str = "a") -> list[Session]:
    return [session(reward, number, uid) for number, reward in enumerate(rewards)]


def values(sampled: Sequence[Session], *chain: str, running: float | None = None) -> list[float | str]:
    """Each session's baseline where the greedy one is missing, or why there is none."""
    missing: list[Baseline | Missing] = [FAILED] * len(sampled)
    found = fall_back(sampled, missing, chain, [running] * len(sampled))
    return [one.value if isinstance(one, Baseline) else str(one.reason) for one in found]


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    # The mean of 0 and 0.5, of 1 and 0.5, of 1 and 0.
    assert values(group(1.0, 0.0, 0.5), "leave_one_out", "drop") == [0.25, 0.75, 0.5]


def test_the_group_mean_counts_the_session_itself() -> None:
    assert values(group(1.0, 0.0, 0.5), "group_mean", "drop") == [0.5, 0.5, 0.5]


def test_the_running_mean_is_taken_where_there_is_one() -> None:
    assert values(group(1.0, 0.0), "ema", "drop", running=0.3) == [0.3, 0.3]
    assert values(group(1.0, 0.0), "ema", "drop") == ["greedy session failed"] * 2


def test_zero_is_zero_only_by_name() -> None:
    assert values(group(1.0, 0.0), "zero") == [0.0, 0.0]


@pytest.mark.parametrize("last", ["drop", "fail"])
def test_what_is_dropped_or_stops_the_run_stays_missing_with_its_reason(last: str) -> None:
    assert values(group(1.0, 0.0), last) == ["greedy session failed"] * 2


@pytest.mark.parametrize(
    ("chain", "rewards", "running", "expected"),
    [
        (("leave_one_out", "ema", "zero"), (1.0, 0.5), 0.3, "leave_one_out"),
        (("ema", "leave_one_out", "zero"), (1.0, 0.5), 0.3, "ema"),
        (("ema", "leave_one_out", "zero"), (1.0, 0.5), None, "leave_one_out"),
        (("leave_one_out", "ema", "zero"), (1.0,), 0.3, "ema"),
        (("leave_one_out", "ema", "zero"), (1.0,), None, "zero"),
        (("group_mean", "zero"), (1.0,), 0.3, "zero"),  # a mean of the session alone would make its advantage 0
    ],
)
def test_the_first_policy_that_applies_is_taken_and_named(
    chain: tuple[str, ...], rewards: tuple[float, ...], running: float | None, expected: str
) -> None:
    sampled = group(*rewards)
    found = fall_back(sampled, [FAILED] * len(sampled), chain, [running] * len(sampled))
    assert [one.source for one in found if isinstance(one, Baseline)] == [expected] * len(sampled)


def test_a_session_that_has_a_greedy_baseline_keeps_it_and_still_counts_as_a_sibling() -> None:
    found = fall_back(group(1.0, 0.5), [Baseline(0.125), FAILED], ["leave_one_out", "drop"], [None, None])
    assert found == [Baseline(0.125), Baseline(1.0, "leave_one_out")]


def test_a_session_whose_reward_is_not_ok_counts_in_no_mean_and_gets_no_baseline() -> None:
    sampled = group(1.0, None, 0.5)
    assert values(sampled, "leave_one_out", "drop") == [0.5, "greedy session failed", 1.0]
    assert values(sampled, "group_mean", "drop") == [0.75, "greedy session failed", 0.75]
    assert values(group(1.0, None), "leave_one_out", "group_mean", "drop") == ["greedy session failed"] * 2
    assert values(group(None), "zero") == ["greedy session failed"]


def test_siblings_are_of_the_same_uid_alone() -> None:
    sampled = [*group(1.0, 0.0, uid="a"), *group(5.0, 7.0, uid="b")]
    assert values(sampled, "leave_one_out", "drop") == [0.0, 1.0, 7.0, 5.0]


def test_siblings_of_another_policy_version_count() -> None:
    sampled = [session(1.0, 0, version=3), session(0.5, 1, version=2)]
    assert values(sampled, "leave_one_out", "drop") == [0.5, 1.0]


def test_a_sibling_of_several_turns_counts_with_its_total_return_once() -> None:
    turns = [Turn(place, reward, "ok", np.ones(1), {}, 0, 0) for place, reward in enumerate([0.5, 0.0, 1.0])]
    sampled = [Session("a", 0, "step", turns), Session("a", 1, "step", turns[:1])]
    assert values(sampled, "leave_one_out", "drop") == [0.5, 1.5]


rewards_of_a_group = st.lists(st.one_of(st.none(), st.floats(-8, 8, width=32)), min_size=1, max_size=6)


@PROPERTY
@given(rewards=rewards_of_a_group, data=st.data())
def test_no_order_of_the_sessions_changes_a_bit(rewards: list[float | None], data: st.DataObject) -> None:
    sampled = group(*rewards)
    order = data.draw(st.permutations(range(len(sampled))))
    chain = data.draw(st.sampled_from([("leave_one_out", "zero"), ("group_mean", "zero")]))
    expected = values(sampled, *chain)
    assert values([sampled[place] for place in order], *chain) == [expected[place] for place in order]


@PROPERTY
@given(rewards=st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=6))
def test_against_the_group_mean_the_advantages_are_those_of_leave_one_out_shrunk_by_one_minus_one_over_k(
    rewards: list[float],
) -> None:
    sampled = group(*rewards)
    shrunk = 1 - 1 / len(rewards)
    for reward, without, within in zip(
        rewards, values(sampled, "leave_one_out", "drop"), values(sampled, "group_mean", "drop"), strict=True
    ):
        assert isinstance(without, float)
        assert isinstance(within, float)
        assert reward - within == pytest.approx(shrunk * (reward - without), abs=1e-9)


# A two-armed bandit, worked out exactly: the policy takes arm 1 with p = 1/4; arm 1 pays 1, arm 0 pays 0. The score of
# the one logit is 1 - p for arm 1 and -p for arm 0, so the true gradient is E[score * reward] = p (1 - p) = 3/16.


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (("leave_one_out", "fail"), Fraction(3, 16)),
        (("group_mean", "fail"), Fraction(1, 2) * Fraction(3, 16)),  # K = 2: shrunk by 1 - 1/2
        (("ema", "fail"), Fraction(3, 16)),
        (("zero",), Fraction(3, 16)),
    ],
)
def test_the_expected_gradient_under_each_policy_is_the_true_one_but_shrunk_under_the_group_mean(
    chain: tuple[str, ...], expected: Fraction
) -> None:
    p = Fraction(1, 4)
    gradient = Fraction(0)
    for arms in ((0, 0), (0, 1), (1, 0), (1, 1)):
        probability = math.prod((p if arm else 1 - p for arm in arms), start=Fraction(1))
        for arm, baseline in zip(arms, values(group(*map(float, arms)), *chain, running=0.75), strict=True):
            score = 1 - p if arm else -p
            gradient += probability * score * (arm - Fraction(baseline)) / len(arms)
    assert gradient == expected


def test_a_running_mean_starts_with_the_first_windows_mean_and_then_decays() -> None:
    first = advance({}, {"sums": (3.0, 4)}, 0.9)
    assert first == {"sums": 0.75}
    # 0.9 * 0.75 + 0.1 * 0.25
    assert advance(first, {"sums": (0.5, 2)}, 0.9) == pytest.approx({"sums": 0.7})


def test_a_data_source_that_a_window_lacks_keeps_its_mean_and_a_new_one_starts_its_own() -> None:
    assert advance({"sums": 0.5}, {"words": (1.0, 1)}, 0.9) == {"sums": 0.5, "words": 1.0}


@pytest.mark.parametrize(
    "chain", [["drop"], ["fail"], ["zero"], ["leave_one_out", "drop"], ["leave_one_out", "group_mean", "ema", "fail"]]
)
def test_a_chain_that_ends_with_what_always_applies_is_accepted(chain: list[str]) -> None:
    check_chain(chain)


@pytest.mark.parametrize(
    ("chain", "said"),
    [
        ([], "is empty; end it with one of: drop, fail, zero"),
        (["ema"], "ends with 'ema', which does not always apply"),
        (["drop", "leave_one_out"], "ends with 'leave_one_out'"),
        (["zero", "ema", "drop"], "'zero' always applies, so that 'ema', 'drop' behind it could never be reached"),
        (["ema", "ema", "drop"], "'ema' is there twice"),
    ],
)
def test_a_chain_that_leaves_a_case_open_or_a_policy_unreachable_is_refused(chain: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_chain(chain)


@PROPERTY
@given(st.lists(st.sampled_from(POLICIES), max_size=7))
def test_an_accepted_chain_has_each_policy_once_and_decides_every_case(chain: list[str]) -> None:
    always = {"zero", "drop", "fail"}
    good = bool(chain) and chain[-1] in always and not always & set(chain[:-1]) and len(set(chain)) == len(chain)
    try:
        check_chain(chain)
    except ValueError:
        assert not good
    else:
        assert good
