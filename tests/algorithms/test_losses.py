"""Policy losses, their aggregation, KL estimators and the train/inference mismatch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from stages.algorithms.catalog import AGGREGATIONS
from stages.algorithms.losses import TokenLoss, aggregate, k1, k2, k3, mismatch, policy_gradient, ppo_clip

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)
LOSSES = [ppo_clip, policy_gradient]
JUNK = st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30])
Loss = Callable[..., TokenLoss]


def at_ratio(ratio: float, advantage: float, function: Loss = ppo_clip, **options: float) -> tuple[float, float]:
    """Loss and gradient with respect to log pi of one token with that ratio, where log pi_old = -1."""
    log_probs = torch.tensor([[-1.0 + math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    loss = function(
        log_probs=log_probs, old_log_probs=old, advantages=advantages, mask=torch.ones(1, 1), **options
    ).loss
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return float(loss.detach()), float(gradient)


# --- Policy losses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the clip: -A r, and d r / d log pi = r
        (1.5, 2.0, -2.4, 0.0),  # above it with A > 0: -A * 1.2, no push further away
        (0.5, 2.0, -1.0, -1.0),  # below it with A > 0: -A r, it is pulled back
        (0.5, -2.0, 1.6, 0.0),  # below it with A < 0: -A * 0.8
        (1.5, -2.0, 3.0, 3.0),  # above it with A < 0: -A r
        (5.0, -2.0, 6.0, 0.0),  # beyond the dual clip: -A * 3
        (5.0, 0.0, 0.0, 0.0),
    ],
)
def test_ppo_clip_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert at_ratio(ratio, advantage) == pytest.approx((loss, gradient))


def test_the_two_clips_and_the_dual_clip_are_set_apart() -> None:
    assert at_ratio(1.5, 1.0, clip_high=0.28)[0] == pytest.approx(-1.28)
    assert at_ratio(0.5, -1.0, clip_low=0.1)[0] == pytest.approx(0.9)
    assert at_ratio(5.0, -1.0, dual_clip=4.0)[0] == pytest.approx(4.0)


def test_ppo_clip_counts_what_it_clipped() -> None:
    ratios = torch.tensor([[1.5, 1.1, 0.5, 5.0, 1.5]])
    token_loss = ppo_clip(
        log_probs=ratios.log(),
        old_log_probs=torch.zeros_like(ratios),
        advantages=torch.tensor([[1.0, 1, -1, -1, 1]]),
        mask=torch.tensor([[1, 1, 1, 1, 0]]),
    )
    assert {name: float(value) for name, value in token_loss.metrics.items()} == {
        "clipped": 2,
        "dual_clipped": 1,
        "old_kl": pytest.approx(-math.log(1.5 * 1.1 * 0.5 * 5.0), abs=1e-6),
    }


def test_a_runaway_ratio_gives_neither_infinity_nor_nan() -> None:
    log_probs = torch.tensor([[200.0]], requires_grad=True)  # exp(200) overflows float32
    one = torch.ones(1, 1)
    loss = ppo_clip(log_probs=log_probs, old_log_probs=0 * one, advantages=-one, mask=one).loss.sum()
    assert float(loss.detach()) == 3
    assert float(torch.autograd.grad(loss, log_probs)[0]) == 0


def test_policy_gradient_is_minus_advantage_times_log_prob() -> None:
    # log pi = -1 + log 2 = -0.306853; the ratio of 2 plays no part.
    assert at_ratio(2.0, 3.0, policy_gradient) == pytest.approx((3 * 0.306853, -3.0), abs=1e-5)


def test_both_losses_have_one_gradient_at_the_old_policy() -> None:
    for advantage in (-1.5, 0.0, 2.0):
        assert at_ratio(1.0, advantage)[1] == at_ratio(1.0, advantage, policy_gradient)[1]


def test_an_impossible_clip_is_refused() -> None:
    for options in ({"dual_clip": 1.0}, {"clip_low": 1.0}, {"clip_high": -0.1}):
        with pytest.raises(ValueError, match="ppo_clip: expected dual_clip > 1"):
            at_ratio(1.0, 1.0, ppo_clip, **options)


@pytest.mark.parametrize("function", LOSSES)
def test_unequal_shapes_are_refused(function: Loss) -> None:
    batch = {name: torch.zeros(2, 3) for name in ("log_probs", "old_log_probs", "advantages", "mask")}
    with pytest.raises(ValueError, match=r"\[2, 3\], \[2, 3\], \[2, 1\], \[2, 3\]"):
        function(**batch | {"advantages": torch.zeros(2, 1)})


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize("mode", AGGREGATIONS)
@PROPERTY
@given(junk=JUNK, seed=st.integers(0, 10_000))
def test_what_masked_tokens_hold_reaches_neither_value_nor_gradient(
    function: Loss, mode: str, junk: float, seed: int
) -> None:
    batch, mask = random_batch(seed)
    value, gradient, metrics = evaluate(function, batch, mask, mode)
    spoiled = {name: tensor.masked_fill(mask == 0, junk) for name, tensor in batch.items()}
    got_value, got_gradient, got_metrics = evaluate(function, spoiled, mask, mode)
    assert torch.equal(got_value, value)
    assert torch.equal(got_gradient, gradient)
    assert got_metrics == metrics
    assert not got_gradient[mask == 0].any()
    assert not function(**spoiled, mask=mask).loss[mask == 0].any()


# --- Aggregation -------------------------------------------------------------------------------------------


def test_aggregations_by_hand() -> None:
    loss = torch.tensor([[1.0, 2, 3, 9], [4, 9, 9, 9]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    got = {mode: float(aggregate(loss, mask, mode, tokens=4, sequences=2, horizon=4)) for mode in AGGREGATIONS}
    assert got == {
        "token-mean": 2.5,  # (6 + 4) / 4
        "token-sum": 10,
        "seq-mean-token-sum": 5,  # (6 + 4) / 2
        "seq-mean-token-mean": 3,  # (2 + 4) / 2
        "seq-mean-token-sum-norm": 1.25,  # 5 / 4
    }


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 2.0), ("seq-mean-token-mean", 3.5)])
def test_L01_the_loss_is_the_same_whatever_the_micro_batch(mode: str, expected: float) -> None:
    scale = torch.ones(2, 4, requires_grad=True)
    loss = scale * torch.tensor([[1.0, 1, 1, 1], [6, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    gradients = []
    for size in (1, 2):
        parts = [
            aggregate(loss[i : i + size], mask[i : i + size], mode, tokens=5, sequences=2, horizon=4)
            for i in range(0, 2, size)
        ]
        total = torch.stack(parts).sum()
        assert float(total.detach()) == pytest.approx(expected)
        gradients.append(torch.autograd.grad(total, scale, retain_graph=True)[0])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize("mode", AGGREGATIONS)
@PROPERTY
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 4), max_size=3), order=st.permutations(range(5)))
def test_any_split_into_micro_batches_in_any_order_gives_one_loss_and_gradient(
    function: Loss, mode: str, seed: int, cuts: list[int], order: list[int]
) -> None:
    batch, mask = random_batch(seed)
    value, gradient, metrics = evaluate(function, batch, mask, mode)
    bounds = [0, *sorted(set(cuts)), 5]
    parts = [torch.tensor(order[a:b]) for a, b in itertools.pairwise(bounds)]
    got_value, got_gradient, got_metrics = evaluate(function, batch, mask, mode, parts)
    torch.testing.assert_close(got_value, value, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(got_gradient, gradient, atol=1e-9, rtol=1e-9)
    assert got_metrics == pytest.approx(metrics)


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_L02_a_batch_without_policy_tokens_gives_zero_loss_and_zero_gradient(function: Loss, mode: str) -> None:
    batch, mask = random_batch(0)
    value, gradient, metrics = evaluate(function, batch, torch.zeros_like(mask), mode)
    assert float(value) == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert not any(metrics.values())


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_L02_an_empty_row_is_in_no_denominator(mode: str) -> None:
    loss = torch.tensor([[float("nan")] * 3, [2.0, 2, 2]])
    mask = torch.tensor([[0, 0, 0], [1, 1, 1]])
    assert float(aggregate(loss, mask, mode, tokens=3, sequences=1, horizon=3)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "mean"}, "expected one of token-mean, token-sum.*'mean'"),
        ({"tokens": -1}, "tokens >= 0"),
        ({"horizon": 0}, "horizon >= 1"),
        ({"mask": torch.ones(1, 3)}, r"\[1, 2\], \[1, 3\]"),
    ],
)
def test_an_aggregation_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    good = {"loss": torch.zeros(1, 2), "mask": torch.ones(1, 2), "mode": "token-mean"}
    counts = {"tokens": 2, "sequences": 1, "horizon": 2}
    with pytest.raises(ValueError, match=message):
        aggregate(**good | counts | change)  # type: ignore[arg-type]


# --- Distances ---------------------------------------------------------------------------------------------


def test_kl_estimators_by_hand() -> None:
    # d = 0.3: k2 = 0.045, k3 = e^-0.3 + 0.3 - 1 = 0.740818 - 0.7.
    tensors = {
        "log_probs": torch.tensor([[-0.7, 5.0]]),
        "ref_log_probs": torch.tensor([[-1.0, float("nan")]]),
    }
    mask = torch.tensor([[1, 0]])
    assert k1(**tensors, mask=mask)[0].tolist() == pytest.approx([0.3, 0])
    assert k2(**tensors, mask=mask)[0].tolist() == pytest.approx([0.045, 0])
    assert k3(**tensors, mask=mask)[0].tolist() == pytest.approx([0.040818, 0], abs=1e-6)


def test_k3_is_cut_where_the_policies_have_nothing_in_common() -> None:
    # e^5 - 5 - 1 = 142.4 and, without the cut of the exponent, e^200 = inf in float32.
    log_probs, reference = torch.tensor([[-5.0, -200.0]]), torch.zeros(1, 2)
    got = k3(log_probs=log_probs, ref_log_probs=reference, mask=torch.ones(1, 2))
    assert got.tolist() == [[10, 10]]


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_a_masked_nan_does_not_reach_the_gradient_of_a_kl(estimator: Callable[..., Tensor]) -> None:
    log_probs = torch.tensor([[-0.7, float("nan")]], requires_grad=True)
    mask = torch.tensor([[1, 0]])
    value = estimator(log_probs=log_probs, ref_log_probs=torch.full((1, 2), -1.0), mask=mask).sum()
    (gradient,) = torch.autograd.grad(value, log_probs)
    assert gradient.isfinite().all()
    assert gradient[0, 0] != 0
    assert gradient[0, 1] == 0


def test_k1_and_k3_are_unbiased_and_k2_has_the_gradient_of_the_kl() -> None:
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    policy = logits.log_softmax(-1)
    kl = (policy.exp() * (policy - reference)).sum()
    tensors = {"log_probs": policy[None], "ref_log_probs": reference[None], "mask": torch.ones(1, 3)}
    weights = policy.exp().detach()  # the exact expectation over tokens drawn from the policy
    torch.testing.assert_close((weights * k1(**tensors)[0]).sum(), kl)
    torch.testing.assert_close((weights * k3(**tensors)[0]).sum(), kl)
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (got,) = torch.autograd.grad((weights * k2(**tensors)[0]).sum(), logits)
    torch.testing.assert_close(got, expected)


def test_mismatch_by_hand() -> None:
    # x = log pi - log pi_rollout = [0.3, -0.1]; e^x - 1 - x = [0.049859, 0.004837].
    got = mismatch(
        torch.tensor([[-0.7, -1.1, float("nan")]]),
        torch.tensor([[-1.0, -1.0, 0.0]]),
        torch.tensor([[1, 1, 0]]),
    )
    assert got == pytest.approx({"mean_abs": 0.2, "max_abs": 0.3, "k3": 0.027348}, abs=1e-6)


def test_no_tokens_no_mismatch() -> None:
    for shape in ((2, 3), (0, 3)):
        empty = torch.zeros(shape)
        assert mismatch(empty, empty, empty) == {"mean_abs": 0, "max_abs": 0, "k3": 0}


def random_batch(seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Five sessions of up to four tokens, one of them without a policy token."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(5, 4, generator=generator, dtype=torch.float64)

    mask = (torch.rand(5, 4, generator=generator) < 0.6).long()
    mask[int(torch.randint(5, (), generator=generator))] = 0
    return {"log_probs": normal() - 2, "old_log_probs": normal() - 2, "advantages": normal()}, mask


def evaluate(
    function: Loss, batch: dict[str, Tensor], mask: Tensor, mode: str, parts: list[Tensor] | None = None
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Value, gradient by log_probs and metrics, summed over micro-batches."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    counts = {"tokens": int(mask.sum()), "sequences": int(mask.any(-1).sum()), "horizon": 4}
    total = torch.zeros((), dtype=torch.float64)
    metrics: dict[str, float] = {}
    for rows in parts or [torch.arange(len(mask))]:
        columns = {name: tensor[rows] for name, tensor in batch.items() if name != "log_probs"}
        token_loss = function(log_probs=log_probs[rows], **columns, mask=mask[rows])
        share = aggregate(token_loss.loss, mask[rows], mode, **counts)
        share.backward()  # type: ignore[no-untyped-call]
        total += share.detach()
        for name, value in token_loss.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
    assert log_probs.grad is not None
    return total, log_probs.grad, metrics
