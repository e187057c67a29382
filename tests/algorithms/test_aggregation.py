"""From token losses to one number."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from stages.algorithms.aggregation import aggregate
from stages.algorithms.catalog import AGGREGATIONS

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)


def test_aggregations_by_hand() -> None:
    loss = torch.tensor([[1.0, 2, 3, 9], [4, 9, 9, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    got = {
        mode: float(aggregate(loss, mask, mode, token_count=4, sequence_count=2, horizon=4)) for mode in AGGREGATIONS
    }
    assert got == {
        "token-mean": 2.5,  # (6 + 4) / 4
        "token-sum": 10,
        "seq-mean-token-sum": 5,  # (6 + 4) / 2
        "seq-mean-token-mean": 3,  # (2 + 4) / 2
        "seq-mean-token-sum-norm": 1.25,  # 5 / 4
    }


def test_turns_in_several_rows_are_one_sequence() -> None:
    # Session 7 has rows 0 and 2 with the losses 1, 2, 6: mean 3. Session 3 has the mean 4.
    loss = torch.tensor([[1.0, 2], [4, 0], [6, 0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 0]])
    counts = {"token_count": 4, "sequence_count": 2, "horizon": 2}
    sequences = torch.tensor([7, 3, 7])
    got = {mode: float(aggregate(loss, mask, mode, **counts, sequences=sequences)) for mode in AGGREGATIONS}
    assert got == {
        "token-mean": 3.25,
        "token-sum": 13,
        "seq-mean-token-sum": 6.5,  # (9 + 4) / 2
        "seq-mean-token-mean": 3.5,  # (3 + 4) / 2
        "seq-mean-token-sum-norm": 3.25,
    }


@pytest.mark.parametrize("mode", AGGREGATIONS)
@PROPERTY
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5))
def test_a_session_counts_the_same_in_one_row_or_in_two(mode: str, seed: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    mask = (torch.rand(2, 6, generator=generator) < 0.7).long()
    counts: dict[str, Any] = {"token_count": int(mask.sum()), "sequence_count": int(mask.any(-1).sum()), "horizon": 6}
    # Each half stands where it stood; the other half's places are masked.
    first, second = mask.clone(), mask.clone()
    first[:, cut:], second[:, :cut] = 0, 0
    halves = aggregate(
        torch.cat([loss, loss]), torch.cat([first, second]), mode, **counts, sequences=torch.tensor([0, 1, 0, 1])
    )
    torch.testing.assert_close(halves, aggregate(loss, mask, mode, **counts))


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 2.0), ("seq-mean-token-mean", 3.5)])
def test_L01_the_loss_is_the_same_whatever_the_micro_batch(mode: str, expected: float) -> None:
    scale = torch.ones(2, 4, requires_grad=True)
    loss = scale * torch.tensor([[1.0, 1, 1, 1], [6, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    gradients = []
    for size in (1, 2):
        parts = [
            aggregate(loss[i : i + size], mask[i : i + size], mode, token_count=5, sequence_count=2, horizon=4)
            for i in range(0, 2, size)
        ]
        total = torch.stack(parts).sum()
        assert float(total.detach()) == pytest.approx(expected)
        gradients.append(torch.autograd.grad(total, scale, retain_graph=True)[0])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_L02_an_empty_row_is_in_no_denominator(mode: str) -> None:
    loss = torch.tensor([[float("nan")] * 3, [2.0, 2, 2]])
    mask = torch.tensor([[0, 0, 0], [1, 1, 1]])
    assert float(aggregate(loss, mask, mode, token_count=3, sequence_count=1, horizon=3)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "mean"}, "expected one of token-mean, token-sum.*'mean'"),
        ({"token_count": -1}, "token_count >= 0"),
        ({"sequence_count": -1}, "sequence_count >= 0"),
        ({"horizon": 0}, "horizon >= 1"),
        ({"mask": torch.ones(1, 3)}, r"\[1, 2\], \[1, 3\]"),
        ({"mode": "seq-mean-token-mean", "sequences": torch.zeros(2)}, r"sequences of shape \[1\].*got \[2\]"),
    ],
)
def test_an_aggregation_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    good = {"loss": torch.zeros(1, 2), "mask": torch.ones(1, 2), "mode": "token-mean"}
    counts = {"token_count": 2, "sequence_count": 1, "horizon": 2}
    with pytest.raises(ValueError, match=message):
        aggregate(**good | counts | change)  # type: ignore[arg-type]
