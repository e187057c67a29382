"""Advantage estimators: laws that hold for every batch, and for every estimator of the catalogue."""

from __future__ import annotations

import math
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dataflow.stage import import_object
from stages.algorithms.catalog import ESTIMATORS
from stages.algorithms.sessions import Advantages

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)


class Law(NamedTuple):
    """What an estimator does when all rewards change alike.

    `shift`: what must get the same constant as every return, so that nothing changes: "rewards", "rewards and
    baseline", or "" if something changes whatever one does.
    `scale`: the degree d in A(s R) = s^d A(R), where baselines, values and options that are rewards are scaled too.
    """

    shift: str
    scale: int


LAWS = {
    "remax": Law("rewards and baseline", 1),
    "grpo": Law("rewards", 0),
    "dr_grpo": Law("rewards", 1),
    "rloo": Law("rewards", 1),
    "reinforce": Law("rewards", 1),
    "remax_clipped": Law("rewards and baseline", 1),
    "grpo_passk": Law("rewards", 0),
    "gdpo": Law("rewards", 0),
    "opo": Law("rewards", 1),
    "gpg": Law("", 1),  # counts the returns that are not 0
    "maxrl": Law("", 0),  # divides by the mean
    "rae": Law("rewards and baseline", 1),
    "reinforce_plus_plus": Law("rewards", 0),
    "reinforce_plus_plus_baseline": Law("rewards", 0),
    "gae": Law("rewards", 0),  # with gamma and lambda 1, as by default
    "optimal_token_baseline": Law("rewards", 1),
    "tir_optimal_token_baseline": Law("rewards", 1),
}
OF_REWARDS = {"remax_clipped": ("kappa", "clip")}  # options with the unit of a reward
WHITENED = ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae")
GROUPED = [name for name, needs in ESTIMATORS.items() if "groups" in needs.inputs]
TOKENS = ("token_rewards", "log_probs", "ref_log_probs", "sum_pi_squared", "values")
# In these every sum of quarters is exact; in the others its last bit, in float64, may depend on the order.
BIT_FOR_BIT = ["remax", "remax_clipped", "grpo", "dr_grpo", "rloo", "reinforce", "grpo_passk", "gpg", "maxrl", "rae"]


class Batch(NamedTuple):
    token_rewards: Tensor
    mask: Tensor
    groups: Tensor
    valid: Tensor
    baseline: Tensor
    log_probs: Tensor
    ref_log_probs: Tensor
    sum_pi_squared: Tensor
    values: Tensor
    components: Tensor

    def run(self, name: str, **options: float) -> Advantages:
        needs = ESTIMATORS[name]
        tensors = self._asdict() | {"weights": torch.tensor([1.0, 0.5])}
        result = import_object(needs.function, name)(**{each: tensors[each] for each in needs.inputs}, **options)
        assert isinstance(result, Advantages)
        return result

    def take(self, rows: Tensor) -> Batch:
        return Batch(*(column[rows] for column in self))

    def at(self, place: Tensor, column: str, amount: float) -> Batch:
        return self._replace(**{column: getattr(self, column) + place * amount})

    @property
    def taking_part(self) -> Tensor:
        return self.valid & (self.mask != 0).any(-1)

    @property
    def last(self) -> Tensor:
        """The last policy token of each row."""
        return (self.mask != 0) & (self.mask.flip(-1).cumsum(-1).flip(-1) == 1)

    @property
    def alone(self) -> Tensor:
        """The rows without a sibling that takes part."""
        return ((self.groups[:, None] == self.groups) & self.taking_part).sum(-1) < 2


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Batches whose rewards are quarters, so that sums are exact and differences are real."""
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 5))

    def table(values: st.SearchStrategy[int], columns: int) -> Tensor:
        row = st.lists(values, min_size=columns, max_size=columns)
        return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))

    pi = table(st.integers(1, 4), width) / 4
    return Batch(
        token_rewards=table(st.integers(-8, 8), width) / 4,
        mask=table(st.integers(0, 1), width),
        groups=table(st.integers(0, 2), 1)[:, 0],
        valid=table(st.integers(0, 4), 1)[:, 0] > 0,
        baseline=table(st.integers(-8, 8), 1)[:, 0] / 4,
        log_probs=pi.log(),
        ref_log_probs=-table(st.integers(0, 8), width) / 4,
        sum_pi_squared=pi.square() + (1 - pi) * table(st.integers(0, 2), width) / 8,
        values=table(st.integers(-8, 8), width) / 4,
        components=table(st.integers(-8, 8), 2) / 4,
    )


def assert_same(got: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_the_table_of_laws_has_every_estimator() -> None:
    assert set(LAWS) == set(ESTIMATORS)


@pytest.mark.parametrize("name", ESTIMATORS)
@PROPERTY
@given(batch=batches(), seed=st.integers(0, 10_000))
def test_permuting_the_rows_permutes_the_result(name: str, batch: Batch, seed: int) -> None:
    order = torch.randperm(len(batch.valid), generator=torch.Generator().manual_seed(seed))
    got, expected = batch.take(order).run(name), batch.run(name)
    for one, other in zip(got, expected, strict=True):
        if name in BIT_FOR_BIT:
            assert torch.equal(one, other[order])
        assert_same(one, other[order])


@pytest.mark.parametrize("name", GROUPED)
@PROPERTY
@given(batch=batches(), names=st.permutations([-3, 0, 2**40]))
def test_other_numbers_for_the_groups_change_nothing(name: str, batch: Batch, names: list[int]) -> None:
    relabelled = batch._replace(groups=torch.tensor(names)[batch.groups])
    assert_same(relabelled.run(name).advantages, batch.run(name).advantages)


@pytest.mark.parametrize("name", ESTIMATORS)
@PROPERTY
@given(batch=batches(), width=st.integers(1, 3))
def test_padding_changes_nothing(name: str, batch: Batch, width: int) -> None:
    def padded(column: Tensor, junk: float) -> Tensor:
        return torch.cat([column, column.new_full((len(column), width), junk)], dim=1)

    wide = {"mask": padded(batch.mask, 0)} | {column: padded(getattr(batch, column), 9) for column in TOKENS}
    got, expected = batch._replace(**wide).run(name), batch.run(name)
    assert_same(got.advantages[:, :-width], expected.advantages)
    assert_same(got.returns[:, :-width], expected.returns)
    assert not got.advantages[:, -width:].any()
    assert not got.returns[:, -width:].any()


@pytest.mark.parametrize("name", ESTIMATORS)
@PROPERTY
@given(batch=batches(), junk=st.sampled_from([7.0, math.nan, math.inf, -math.inf]))
def test_what_masked_tokens_and_invalid_rows_hold_changes_nothing(name: str, batch: Batch, junk: float) -> None:
    dead = (batch.mask == 0) | ~batch.valid[:, None]
    gone = ~batch.taking_part
    spoiled = batch._replace(
        **{column: getattr(batch, column).masked_fill(dead, junk) for column in TOKENS},
        baseline=batch.baseline.masked_fill(gone, junk),
        components=batch.components.masked_fill(gone[:, None], junk),
    )
    got, expected = spoiled.run(name), batch.run(name)
    assert torch.equal(got.advantages, expected.advantages)
    assert torch.equal(got.returns, expected.returns)
    assert not got.advantages[dead].any()
    assert not got.returns[gone].any()


@pytest.mark.parametrize("name", ESTIMATORS)
@PROPERTY
@given(batch=batches())
def test_dropping_the_rows_that_take_no_part_beforehand_gives_the_same(name: str, batch: Batch) -> None:
    rows = batch.taking_part.nonzero().flatten()
    assert_same(batch.take(rows).run(name).advantages, batch.run(name).advantages[rows])


@pytest.mark.parametrize("name", [name for name in GROUPED if name != "gpg"])  # gpg counts all rows of the batch
@PROPERTY
@given(batch=batches())
def test_a_row_without_a_sibling_gets_zero_and_is_as_if_it_were_not_there(name: str, batch: Batch) -> None:
    got = batch.run(name).advantages
    assert not got[batch.alone].any()
    kept = (~batch.alone).nonzero().flatten()
    assert_same(batch.take(kept).run(name).advantages, got[kept])


@pytest.mark.parametrize("name", [name for name, law in LAWS.items() if law.shift])
@PROPERTY
@given(batch=batches(), shift=st.integers(-12, 12))
def test_adding_a_constant_to_every_return_changes_nothing(name: str, batch: Batch, shift: int) -> None:
    shifted = batch.at(batch.last, "token_rewards", shift / 4).at(torch.tensor(1.0), "components", shift / 4)
    if LAWS[name].shift == "rewards and baseline":
        shifted = shifted.at(torch.tensor(1.0), "baseline", shift / 4)
    assert_same(shifted.run(name).advantages, batch.run(name).advantages)


@pytest.mark.parametrize("name", ESTIMATORS)
@PROPERTY
@given(batch=batches(), scale=st.sampled_from([0.5, 2.0, 8.0]))
def test_scaling_the_rewards_scales_the_advantages_or_leaves_them(name: str, batch: Batch, scale: float) -> None:
    of_rewards = ("token_rewards", "baseline", "values", "components")
    scaled = batch._replace(**{column: getattr(batch, column) * scale for column in of_rewards})
    options = {option: ESTIMATORS[name].options[option] * scale for option in OF_REWARDS.get(name, ())}
    # Those of degree 0 divide by a deviation with an epsilon beside it.
    tolerance = 1e-4 if LAWS[name].scale == 0 else 2e-6
    expected = batch.run(name).advantages * scale ** LAWS[name].scale
    assert_same(scaled.run(name, **options).advantages, expected, tolerance)


@pytest.mark.parametrize("name", GROUPED)
@PROPERTY
@given(batch=batches())
def test_a_batch_in_which_every_group_has_equal_returns_gets_exactly_zero(name: str, batch: Batch) -> None:
    per_group = torch.tensor([0.1, 0.7, -1.3])[batch.groups]
    equal = batch._replace(
        token_rewards=batch.last * per_group[:, None], components=torch.stack([per_group, -per_group], dim=-1)
    )
    assert not equal.run(name).advantages.any()


@pytest.mark.parametrize("name", WHITENED)
@PROPERTY
@given(batch=batches())
def test_whitened_advantages_have_mean_zero_and_deviation_one_or_are_all_zero(name: str, batch: Batch) -> None:
    among = (batch.mask != 0) & batch.valid[:, None]
    if "groups" in ESTIMATORS[name].inputs:
        among &= ~batch.alone[:, None]
    got = batch.run(name).advantages[among].double()
    if got.any():
        assert float(got.mean()) == pytest.approx(0, abs=1e-6)
        assert float(got.std()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl"])
@PROPERTY
@given(batch=batches())
def test_the_advantages_of_a_group_sum_to_zero(name: str, batch: Batch) -> None:
    per_session = batch.run(name).advantages.gather(1, batch.mask.argmax(-1, keepdim=True)).flatten()
    for group in set(batch.groups.tolist()):
        of_group = per_session[batch.groups == group]
        assert float(of_group.sum()) == pytest.approx(0, abs=1e-5 * (1 + float(of_group.abs().max())))


@PROPERTY
@given(batch=batches())
def test_rloo_is_the_return_minus_the_mean_of_the_others(batch: Batch) -> None:
    got = batch.run("rloo").advantages
    score = (batch.token_rewards * batch.mask).sum(-1)
    for row in batch.taking_part.nonzero().flatten().tolist():
        others = batch.taking_part & (batch.groups == batch.groups[row])
        others[row] = False
        expected = float(score[row] - score[others].mean()) if others.any() else 0.0
        assert got[row][batch.mask[row] != 0].tolist() == pytest.approx([expected] * int(batch.mask[row].sum()))


@PROPERTY
@given(batch=batches())
def test_remax_with_the_group_mean_as_baseline_starts_like_dr_grpo(batch: Batch) -> None:
    # At a session's first policy token the reward to go is the whole return, so R - b is all there is.
    score = (batch.token_rewards * batch.mask).sum(-1).masked_fill(~batch.taking_part, 0)
    same = (batch.groups[:, None] == batch.groups) & batch.taking_part
    mean = (same * score).sum(-1) / same.sum(-1).clamp(min=1)
    first = batch.mask.argmax(-1, keepdim=True)
    got = batch._replace(baseline=mean).run("remax").advantages.gather(1, first)
    assert_same(got, batch.run("dr_grpo").advantages.gather(1, first))


@PROPERTY
@given(batch=batches())
def test_opo_is_dr_grpo_where_all_sessions_are_of_one_length(batch: Batch) -> None:
    even = batch._replace(mask=torch.ones_like(batch.mask))
    assert_same(even.run("opo").advantages, even.run("dr_grpo").advantages)


@PROPERTY
@given(batch=batches())
def test_gae_with_a_critic_that_says_zero_is_reinforce_plus_plus(batch: Batch) -> None:
    blank = batch._replace(values=torch.zeros_like(batch.values))
    for gamma in (1.0, 0.5):
        for one, other in zip(
            blank.run("gae", gamma=gamma), blank.run("reinforce_plus_plus", gamma=gamma), strict=True
        ):
            assert_same(one, other)


@PROPERTY
@given(batch=batches())
def test_the_two_token_baselines_agree_where_no_tool_speaks(batch: Batch) -> None:
    lengths = batch.mask.sum(-1, keepdim=True)
    plain = batch._replace(mask=(torch.arange(batch.mask.shape[1]) < lengths).long())
    one, other = plain.run("optimal_token_baseline"), plain.run("tir_optimal_token_baseline")
    assert torch.equal(one.advantages, other.advantages)
