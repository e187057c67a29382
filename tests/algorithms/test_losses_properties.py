"""What holds of every policy loss in the catalogue, with every aggregation that it may have."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dataflow.stage import import_object
from stages.algorithms.aggregation import aggregate
from stages.algorithms.catalog import AGGREGATIONS, LOSSES

PROPERTY = settings(derandomize=True, deadline=None, max_examples=40)
JUNK = st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30])
SEEDS = st.integers(0, 10_000)
PAIRS = [
    pytest.param(name, mode, id=f"{name}-{mode}")
    for name, needs in LOSSES.items()
    for mode in ([needs.aggregation] if needs.aggregation else AGGREGATIONS)
]
# Wide enough that the clips and selections meet some of a few random tokens, and spare others.
OPTIONS: dict[str, dict[str, float]] = {
    "gspo": {"clip_low": 0.3, "clip_high": 0.3},
    "dro": {"beta": 0.5},
    "clip_cov": {"share": 0.3, "cov_low": 0.0},
    "kl_cov": {"share": 0.3},
}
SESSIONS = [[0, 1], [2], [3, 4], [5]]
"""Rows of each session: turns of one session may stand in several rows."""
HORIZON = 5
Batch = dict[str, Tensor]


@pytest.mark.parametrize(("name", "mode"), PAIRS)
@PROPERTY
@given(seed=SEEDS, order=st.permutations(range(4)), cuts=st.lists(st.integers(1, 3), max_size=3))
def test_any_split_into_micro_batches_in_any_order_gives_one_loss_and_gradient(
    name: str, mode: str, seed: int, order: list[int], cuts: list[int]
) -> None:
    batch = random_batch(seed)
    bounds = [0, *sorted(set(cuts)), 4]
    parts = [[row for session in order[a:b] for row in SESSIONS[session]] for a, b in itertools.pairwise(bounds)]
    assert_same(evaluate(name, mode, batch, parts), evaluate(name, mode, batch))


@pytest.mark.parametrize(("name", "mode"), PAIRS)
@PROPERTY
@given(seed=SEEDS, cut=st.integers(1, 3))
def test_the_mean_over_ranks_of_scaled_shares_is_the_loss_of_one_rank(
    name: str, mode: str, seed: int, cut: int
) -> None:
    batch = random_batch(seed)
    whole, gradient, _ = evaluate(name, mode, batch)
    ranks = [[row for session in part for row in session] for part in (SESSIONS[:cut], SESSIONS[cut:])]
    selected = select(name, batch)  # over the rows of all ranks
    shares = [evaluate(name, mode, batch, [rows], selected) for rows in ranks]
    torch.testing.assert_close(sum(2 * share[0] for share in shares) / 2, whole)
    torch.testing.assert_close(sum(2 * share[1] for share in shares) / 2, gradient)


@pytest.mark.parametrize(("name", "mode"), PAIRS)
@PROPERTY
@given(seed=SEEDS, junk=JUNK, width=st.integers(0, 3))
def test_neither_padding_nor_what_masked_tokens_hold_reaches_value_gradient_or_metrics(
    name: str, mode: str, seed: int, junk: float, width: int
) -> None:
    batch = random_batch(seed)
    value, gradient, metrics = evaluate(name, mode, batch)
    padding = torch.full((6, width), junk, dtype=torch.float64)
    spoiled = {
        key: torch.cat([tensor.masked_fill(batch["mask"] == 0, junk), padding], 1)
        for key, tensor in batch.items()
        if key != "mask"
    }
    spoiled["mask"] = torch.cat([batch["mask"], torch.zeros(6, width, dtype=torch.int64)], 1)
    got_value, got_gradient, got_metrics = evaluate(name, mode, spoiled)
    torch.testing.assert_close(got_value, value, atol=1e-14, rtol=1e-14)
    torch.testing.assert_close(got_gradient[:, :HORIZON], gradient, atol=1e-14, rtol=1e-14)
    assert not got_gradient[spoiled["mask"] == 0].any()
    assert not call(name, spoiled)[spoiled["mask"] == 0].any()
    assert got_metrics == pytest.approx(metrics, abs=1e-12)


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_L02_a_batch_without_policy_tokens_gives_zero_loss_and_zero_gradient(name: str, mode: str) -> None:
    batch = random_batch(0)
    batch["mask"] = torch.zeros_like(batch["mask"])
    value, gradient, metrics = evaluate(name, mode, batch)
    assert float(value) == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert not any(metrics.values())


@pytest.mark.parametrize("name", LOSSES)
@PROPERTY
@given(seed=SEEDS)
def test_weights_of_1_are_no_weights_and_others_scale_each_tokens_loss(name: str, seed: int) -> None:
    batch = random_batch(seed)
    weights = batch.pop("weights")
    plain, scaled, ones = (
        call(name, batch | extra) for extra in ({}, {"weights": weights}, {"weights": torch.ones_like(weights)})
    )
    torch.testing.assert_close(ones, plain, atol=1e-9, rtol=1e-9)
    if name != "geo_mean":  # it has one weight for a sequence; see its own test
        torch.testing.assert_close(scaled, plain * weights)


@pytest.mark.parametrize("name", LOSSES)
@PROPERTY
@given(seed=SEEDS)
def test_at_the_old_policy_every_gradient_is_that_of_the_score_function(name: str, seed: int) -> None:
    """Except where a loss means to differ: clip_cov's selected tokens, and geo_mean's mean of A over the sequence."""
    batch = random_batch(seed)
    batch["old_log_probs"] = batch["log_probs"]
    if name == "geo_mean":  # equal where A is constant over the sequence, as with outcome rewards
        of_row = torch.tensor([0, 0, 1, 2, 2, 3])
        batch["advantages"] = torch.randn(4, dtype=torch.float64)[of_row, None].expand(6, HORIZON).contiguous()
        batch.pop("weights")
    mode = "seq-mean-token-mean"
    _, gradient, _ = evaluate(name, mode, batch)
    _, expected, _ = evaluate("policy_gradient", mode, batch)
    selected = select(name, batch) if name == "clip_cov" else torch.zeros_like(batch["mask"], dtype=torch.bool)
    torch.testing.assert_close(gradient, expected.masked_fill(selected, 0.0))


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_trained_policy_has_a_gradient(name: str) -> None:
    batch = random_batch(0)
    inputs = {key: tensor.requires_grad_() for key, tensor in batch.items() if key != "mask"}
    call(name, batch).sum().backward()  # type: ignore[no-untyped-call]
    assert [key for key, tensor in inputs.items() if tensor.grad is not None] == ["log_probs"]


@pytest.mark.parametrize("name", ["ppo_clip", "policy_gradient", "sapo", "geo_mean", "dro", "clip_cov", "kl_cov"])
@PROPERTY
@given(seed=SEEDS)
def test_the_gradient_of_a_loss_without_stopped_gradients_is_the_slope_of_its_value(name: str, seed: int) -> None:
    batch = random_batch(seed)
    selected = select(name, batch)
    log_probs = batch["log_probs"].requires_grad_()

    def value(log_probs: Tensor) -> Tensor:
        return call(name, batch | {"log_probs": log_probs}, selected).sum()

    assert torch.autograd.gradcheck(value, log_probs, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("distance", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_a_runaway_policy_gives_neither_infinity_nor_nan(name: str, distance: float, advantage: float) -> None:
    log_probs = torch.tensor([[-1.0, -300.0]], requires_grad=True)  # exp(200) overflows float32
    batch = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach() - distance,
        "advantages": torch.full((1, 2), advantage),
        "mask": torch.ones(1, 2, dtype=torch.int64),
    }
    loss = call(name, batch, torch.ones(1, 2, dtype=torch.bool)).sum()
    assert loss.isfinite()
    assert torch.autograd.grad(loss, log_probs)[0].isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_unequal_shapes_are_refused(name: str) -> None:
    batch = {key: torch.zeros(2, 3) for key in ("log_probs", "old_log_probs", "advantages", "mask")}
    selected = torch.zeros(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"{name}: expected equal shapes.*\[2, 3\], \[2, 3\], \[2, 1\]"):
        call(name, batch | {"advantages": torch.zeros(2, 1)}, selected)
    with pytest.raises(ValueError, match=rf"{name}: expected equal shapes.*\[2, 4\]"):
        call(name, batch | {"weights": torch.zeros(2, 4)}, selected)


# --- Evaluation --------------------------------------------------------------------------------------------


def random_batch(seed: int) -> Batch:
    """Four sessions in six rows of up to five tokens, one row without a policy token; ratios about e^±0.4."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(6, HORIZON, generator=generator, dtype=torch.float64)

    mask = (torch.rand(6, HORIZON, generator=generator) < 0.6).long()
    mask[int(torch.randint(6, (), generator=generator))] = 0
    old = -normal().abs() - 0.5
    return {
        "log_probs": old + 0.4 * normal(),
        "old_log_probs": old,
        "advantages": normal(),
        "weights": normal().exp(),
        "mask": mask,
    }


def evaluate(
    name: str,
    mode: str,
    batch: Batch,
    parts: Sequence[Sequence[int]] | None = None,
    selected: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Value, gradient by log_probs and metrics, summed over micro-batches of the rows in `parts`."""
    parts = parts or [range(6)]
    log_probs = batch["log_probs"].clone().requires_grad_()
    mask = batch["mask"]
    counts = {
        "token_count": int(mask.sum()),
        "sequence_count": sum(bool(mask[session].any()) for session in SESSIONS),
        "horizon": HORIZON,
    }
    if selected is None:
        selected = select(name, batch, [row for part in parts for row in part])
    total = torch.zeros((), dtype=torch.float64)
    metrics: dict[str, float] = {}
    for rows in map(list, parts):
        columns = {key: tensor[rows] for key, tensor in batch.items()} | {"log_probs": log_probs[rows]}
        sequences = session_numbers(rows)
        loss, sums = import_object(LOSSES[name].function, "loss")(
            **columns, **keywords(name, selected[rows], sequences)
        )
        share = aggregate(loss, mask[rows], mode, **counts, sequences=sequences)
        share.backward()  # type: ignore[no-untyped-call]
        total += share.detach()
        for key, value in sums.items():
            metrics[key] = metrics.get(key, 0.0) + float(value)
    assert log_probs.grad is not None
    return total, log_probs.grad, metrics


def call(name: str, batch: Batch, selected: Tensor | None = None) -> Tensor:
    """Token losses of a whole batch."""
    chosen = select(name, batch) if selected is None else selected
    sequences = session_numbers(range(6)) if len(batch["mask"]) == 6 else None
    loss: Tensor = import_object(LOSSES[name].function, "loss")(**batch, **keywords(name, chosen, sequences)).loss
    return loss


def keywords(name: str, selected: Tensor, sequences: Tensor | None) -> dict[str, object]:
    needs = LOSSES[name]
    options = {key: value for key, value in OPTIONS.get(name, {}).items() if key in needs.options}
    return (
        options
        | ({"selected": selected} if needs.needs_batch else {})
        | ({"sequences": sequences} if needs.sequences else {})
    )


def select(name: str, batch: Batch, rows: Sequence[int] = range(6)) -> Tensor:
    """The selection over the mini-batch whose rows stand in the order of `rows`, put back in the batch's order."""
    needs = LOSSES[name].needs_batch
    chosen = torch.zeros(batch["mask"].shape, dtype=torch.bool)
    if needs is not None:
        given: dict[str, object] = {key: tensor[list(rows)] for key, tensor in batch.items()}
        given |= {"row_ids": torch.tensor(list(rows)), "seed": 3}
        options = {key: value for key, value in OPTIONS[name].items() if key in needs.options}
        function = import_object(needs.function, "selection")
        chosen[list(rows)] = function(**{key: given[key] for key in needs.inputs}, **options)
    return chosen


def session_numbers(rows: Iterable[int]) -> Tensor:
    return torch.tensor([next(n for n, session in enumerate(SESSIONS) if row in session) for row in rows])


def assert_same(
    got: tuple[Tensor, Tensor, dict[str, float]], expected: tuple[Tensor, Tensor, dict[str, float]]
) -> None:
    torch.testing.assert_close(got[0], expected[0], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(got[1], expected[1], atol=1e-9, rtol=1e-9)
    assert got[2] == pytest.approx(expected[2], abs=1e-9)
