"""Which tokens clip_cov and kl_cov treat apart."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from stages.algorithms.covariance_losses import select_clip_cov, select_kl_cov

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)
SEEDS = st.integers(0, 10_000)


def batch_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    old, noise, advantages = (torch.randn(6, 5, generator=generator) for _ in range(3))
    mask = (torch.rand(6, 5, generator=generator) < 0.7).long()
    return {"log_probs": old + 0.2 * noise, "old_log_probs": old, "advantages": advantages, "mask": mask}


def highest(batch: dict[str, Any], row_ids: Tensor, share: float = 0.3) -> Tensor:
    given = {name: tensor for name, tensor in batch.items() if name != "old_log_probs"}
    return select_kl_cov(**given, row_ids=row_ids, share=share)


def drawn(batch: dict[str, Any], row_ids: Tensor, share: float = 0.3, seed: int = 0, low: float = 0.0) -> Tensor:
    return select_clip_cov(**batch, row_ids=row_ids, seed=seed, share=share, cov_low=low)


def test_the_highest_covariances_by_hand() -> None:
    # Means over the five policy tokens: A 3, log pi -2. cov = (A - 3) (log pi + 2) = [2, 0, 1, -2, -4].
    chosen = select_kl_cov(
        log_probs=torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 98.0]]),
        advantages=torch.tensor([[5.0, 3.0, 2.0], [4.0, 1.0, 7.0]]),
        mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        row_ids=torch.arange(2),
        share=0.5,
    )
    # Of 5 tokens the highest int(2.5) = 2 are chosen; the masked one's would be 400.
    assert chosen.tolist() == [[True, False, True], [False, False, False]]


def test_at_least_one_token_is_chosen_and_of_equals_the_first_in_canonical_order() -> None:
    batch = {"log_probs": torch.zeros(3, 2), "advantages": torch.zeros(3, 2), "mask": torch.ones(3, 2)}
    chosen = select_kl_cov(**batch, row_ids=torch.tensor([8, 2, 5]), share=1e-4)
    assert chosen.tolist() == [[False, False], [True, False], [False, False]]


def test_candidates_of_clip_cov_by_hand() -> None:
    # Means: A 0, log pi -2; cov = [2, 0, 1, -2, -4]. Within (0.5, 3) are the first and the third, and the third is
    # clipped: A < 0 and its ratio e^-1 is below 0.8.
    batch: dict[str, Any] = {
        "log_probs": torch.tensor([[-1.0, -2.0, -3.0, -4.0, 0.0]]),
        "old_log_probs": torch.tensor([[-1.0, -2.0, -2.0, -4.0, 0.0]]),
        "advantages": torch.tensor([[2.0, 0.0, -1.0, 1.0, -2.0]]),
        "mask": torch.ones(1, 5),
    }
    rows = torch.arange(1)
    assert select_clip_cov(**batch, row_ids=rows, seed=0, share=1.0, cov_low=0.5, cov_high=3.0).tolist() == [
        [True, False, False, False, False]
    ]
    spared = select_clip_cov(**batch, row_ids=rows, seed=0, share=1.0, cov_low=0.5, cov_high=3.0, clip_low=0.9)
    assert spared.tolist() == [[True, False, True, False, False]]
    assert not select_clip_cov(**batch, row_ids=rows, seed=0, share=1.0, cov_low=0.5, cov_high=1.0).any()


@PROPERTY
@given(seed=SEEDS, order=st.permutations(range(6)), width=st.integers(0, 3))
def test_a_selection_depends_on_no_order_no_padding_and_no_masked_value(
    seed: int, order: list[int], width: int
) -> None:
    batch = batch_of(seed)
    ids = torch.tensor([30, 4, 17, 11, 8, 25])
    moved = {
        name: torch.cat([tensor[order], torch.full((6, width), float("nan"))], 1) for name, tensor in batch.items()
    }
    moved["mask"] = torch.cat([batch["mask"][order], torch.zeros(6, width, dtype=torch.int64)], 1)
    for name in ("log_probs", "old_log_probs", "advantages"):
        moved[name] = moved[name].masked_fill(moved["mask"] == 0, float("nan"))
    for select in (highest, drawn):
        chosen = select(batch, ids)
        assert torch.equal(select(moved, ids[order])[:, :5], chosen[order])
        assert chosen.any()
        assert not chosen[batch["mask"] == 0].any()


def test_the_seed_decides_and_every_candidate_is_drawn_as_often() -> None:
    batch = batch_of(1)
    ids = torch.arange(6)
    candidates = drawn(batch, ids, share=1.0)
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(400):
        chosen = drawn(batch, ids, share=0.1, seed=seed)
        assert torch.equal(chosen, drawn(batch, ids, share=0.1, seed=seed))
        assert int(chosen.sum()) == max(int(0.1 * int(batch["mask"].sum())), 1)
        counts.update(tuple(place) for place in chosen.nonzero().tolist())
    assert set(counts) == {tuple(place) for place in candidates.nonzero().tolist()}
    mean = counts.total() / len(counts)
    assert all(abs(count - mean) < 5 * mean**0.5 for count in counts.values())


def test_another_row_in_the_batch_does_not_change_the_draws_of_a_row() -> None:
    # All covariances are candidates, so the draws alone decide which come first within a row.
    batch = batch_of(2)
    chosen = drawn(batch, torch.arange(6), share=0.5, low=-100.0)
    again = drawn(batch, torch.tensor([0, 1, 2, 3, 4, 99]), share=0.5, low=-100.0)
    # Row 5 has other draws now; in the other rows the same tokens come first, at most a few more or fewer.
    for row in range(5):
        first, second = set(chosen[row].nonzero()[:, 0].tolist()), set(again[row].nonzero()[:, 0].tolist())
        assert first <= second or second <= first


def test_without_policy_tokens_nothing_is_chosen() -> None:
    batch = batch_of(0)
    batch["mask"] = torch.zeros(6, 5)
    assert not highest(batch, torch.arange(6)).any()
    assert not drawn(batch, torch.arange(6)).any()


@pytest.mark.parametrize("select", [highest, drawn])
def test_row_ids_that_are_no_order_and_a_share_out_of_range_are_refused(select: object) -> None:
    assert callable(select)
    batch = batch_of(0)
    for ids in ([0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, -1], [0, 1, 2]):
        with pytest.raises(ValueError, match="expected 6 distinct row_ids, none negative"):
            select(batch, torch.tensor(ids))
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match="expected 0 < share <= 1"):
            select(batch, torch.arange(6), share)
