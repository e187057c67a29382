"""Advantage estimators: laws that hold for every batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from stages.algorithms import advantages
from stages.algorithms.sessions import Advantages

PROPERTY = settings(derandomize=True, deadline=None, max_examples=80)
NAMES = ["remax", "grpo", "dr_grpo", "rloo", "reinforce"]
INVARIANT = ["grpo", "dr_grpo", "rloo", "reinforce"]


class Batch(NamedTuple):
    token_rewards: Tensor
    mask: Tensor
    groups: Tensor
    valid: Tensor
    baseline: Tensor

    def run(self, name: str) -> Advantages:
        function: Callable[..., Advantages] = getattr(advantages, name)
        columns = {"token_rewards": self.token_rewards, "mask": self.mask, "valid": self.valid}
        if name == "remax":
            return function(**columns, baseline=self.baseline)
        return function(**columns) if name == "reinforce" else function(**columns, groups=self.groups)

    def take(self, rows: Tensor) -> Batch:
        return Batch(*(column[rows] for column in self))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Batches whose rewards are quarters, so that sums are exact and differences are real."""
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 5))

    def table(values: st.SearchStrategy[int], columns: int) -> Tensor:
        row = st.lists(values, min_size=columns, max_size=columns)
        return torch.tensor(draw(st.lists(row, min_size=rows, max_size=rows)))

    return Batch(
        token_rewards=table(st.integers(-8, 8), width).float() / 4,
        mask=table(st.integers(0, 1), width),
        groups=table(st.integers(0, 2), 1)[:, 0],
        valid=table(st.integers(0, 4), 1)[:, 0] > 0,
        baseline=table(st.integers(-8, 8), 1)[:, 0].float() / 4,
    )


def assert_same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@PROPERTY
@given(batch=batches(), seed=st.integers(0, 10_000))
def test_permuting_the_rows_permutes_the_result_bit_for_bit(name: str, batch: Batch, seed: int) -> None:
    order = torch.randperm(len(batch.valid), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(batch.take(order).run(name).advantages, batch.run(name).advantages[order])


@pytest.mark.parametrize("name", NAMES)
@PROPERTY
@given(batch=batches(), width=st.integers(1, 3))
def test_padding_changes_nothing(name: str, batch: Batch, width: int) -> None:
    rows = len(batch.valid)
    padded = batch._replace(
        token_rewards=torch.cat([batch.token_rewards, torch.full((rows, width), 9.0)], dim=1),
        mask=torch.cat([batch.mask, torch.zeros(rows, width, dtype=batch.mask.dtype)], dim=1),
    )
    got = padded.run(name)
    assert torch.equal(got.advantages[:, :-width], batch.run(name).advantages)
    assert not got.advantages[:, -width:].any()
    assert not got.returns[:, -width:].any()


@pytest.mark.parametrize("name", NAMES)
@PROPERTY
@given(batch=batches(), junk=st.sampled_from([7.0, float("nan"), float("inf")]))
def test_what_masked_tokens_and_invalid_rows_hold_changes_nothing(name: str, batch: Batch, junk: float) -> None:
    dead = (batch.mask == 0) | ~batch.valid[:, None]
    spoiled = batch._replace(
        token_rewards=batch.token_rewards.masked_fill(dead, junk),
        baseline=batch.baseline.masked_fill(~batch.valid, junk),
    )
    got, expected = spoiled.run(name), batch.run(name)
    assert torch.equal(got.advantages, expected.advantages)
    assert torch.equal(got.returns, expected.returns)
    assert not got.advantages[dead].any()


@pytest.mark.parametrize("name", NAMES)
@PROPERTY
@given(batch=batches())
def test_dropping_the_invalid_rows_beforehand_gives_the_same(name: str, batch: Batch) -> None:
    rows = batch.valid.nonzero().flatten()
    assert torch.equal(batch.take(rows).run(name).advantages, batch.run(name).advantages[rows])


@pytest.mark.parametrize("name", INVARIANT)
@PROPERTY
@given(batch=batches(), shift=st.integers(-12, 12))
def test_adding_a_constant_to_every_return_changes_nothing(name: str, batch: Batch, shift: int) -> None:
    first = (batch.mask != 0) & (batch.mask.cumsum(-1) == 1)
    shifted = batch._replace(token_rewards=batch.token_rewards + first * (shift / 4))
    assert_same(shifted.run(name).advantages, batch.run(name).advantages)


@pytest.mark.parametrize("name", ["remax", "dr_grpo", "rloo", "reinforce"])
@PROPERTY
@given(batch=batches(), scale=st.sampled_from([0.5, 2.0, 8.0]))
def test_scaling_the_rewards_scales_the_advantages(name: str, batch: Batch, scale: float) -> None:
    scaled = batch._replace(token_rewards=batch.token_rewards * scale, baseline=batch.baseline * scale)
    assert_same(scaled.run(name).advantages, batch.run(name).advantages * scale)


@PROPERTY
@given(batch=batches(), scale=st.sampled_from([0.5, 2.0, 8.0]))
def test_scaling_the_rewards_leaves_grpo_as_it_is(batch: Batch, scale: float) -> None:
    scaled = batch._replace(token_rewards=batch.token_rewards * scale)
    torch.testing.assert_close(scaled.run("grpo").advantages, batch.run("grpo").advantages, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@PROPERTY
@given(batch=batches())
def test_the_advantages_of_a_group_sum_to_zero(name: str, batch: Batch) -> None:
    per_session = batch.run(name).advantages.gather(1, batch.mask.argmax(-1, keepdim=True)).flatten()
    for group in set(batch.groups.tolist()):
        assert float(per_session[batch.groups == group].sum()) == pytest.approx(0, abs=1e-5)


@PROPERTY
@given(batch=batches())
def test_rloo_is_the_return_minus_the_mean_of_the_others(batch: Batch) -> None:
    got = batch.run("rloo").advantages
    taking_part = batch.valid & (batch.mask != 0).any(-1)
    score = (batch.token_rewards * batch.mask).sum(-1)
    for row in taking_part.nonzero().flatten().tolist():
        others = taking_part & (batch.groups == batch.groups[row])
        others[row] = False
        expected = float(score[row] - score[others].mean()) if others.any() else 0.0
        assert got[row][batch.mask[row] != 0].tolist() == pytest.approx([expected] * int(batch.mask[row].sum()))


@PROPERTY
@given(batch=batches())
def test_remax_with_the_group_mean_as_baseline_starts_like_dr_grpo(batch: Batch) -> None:
    # At a session's first policy token the reward to go is the whole return, so R - b is all there is.
    taking_part = batch.valid & (batch.mask != 0).any(-1)
    score = (batch.token_rewards * batch.mask).sum(-1).masked_fill(~taking_part, 0)
    same = (batch.groups[:, None] == batch.groups) & taking_part
    mean = (same * score).sum(-1) / same.sum(-1).clamp(min=1)
    first = batch.mask.argmax(-1, keepdim=True)
    got = batch._replace(baseline=mean).run("remax").advantages.gather(1, first)
    assert_same(got, batch.run("dr_grpo").advantages.gather(1, first))
