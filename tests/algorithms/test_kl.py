"""KL estimates, the coefficient of a penalty, entropy, and the mismatch of engine and learner."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from stages.algorithms.catalog import KL_KINDS
from stages.algorithms.kl import adapt, entropy, kl_penalty, mismatch

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        # d = 0.3: k2 = 0.045, k3 = e^-0.3 + 0.3 - 1 = 0.740818 - 0.7, and d k3 / d d = 1 - e^-0.3 = 0.259182.
        ("k1", 0.3, 1.0),
        ("abs", 0.3, 1.0),
        ("k2", 0.045, 0.3),
        ("k3", 0.040818, 0.259182),
        ("k1+", 0.3, 0.3),
        ("abs+", 0.3, 0.3),
        ("k3+", 0.040818, 0.3),
    ],
)
def test_kl_estimates_by_hand(kind: str, value: float, gradient: float) -> None:
    log_probs = torch.tensor([[-0.7, 5.0]], requires_grad=True)
    got = kl_penalty(
        kind,
        log_probs=log_probs,
        ref_log_probs=torch.tensor([[-1.0, float("nan")]]),
        mask=torch.tensor([[1, 0]]),
    )
    assert got.tolist()[0] == pytest.approx([value, 0], abs=1e-6)
    assert torch.autograd.grad(got.sum(), log_probs)[0].tolist()[0] == pytest.approx([gradient, 0], abs=1e-6)


def test_every_kind_is_tested_by_hand() -> None:
    (mark,) = test_kl_estimates_by_hand.pytestmark  # type: ignore[attr-defined]
    assert [case[0] for case in mark.args[1]] == list(KL_KINDS)


def test_k3_is_cut_where_the_policies_have_nothing_in_common() -> None:
    # e^5 - 5 - 1 = 142.4 and, without the cut of the exponent, e^200 = inf in float32.
    log_probs, reference = torch.tensor([[-5.0, -200.0]]), torch.zeros(1, 2)
    got = kl_penalty("k3", log_probs=log_probs, ref_log_probs=reference, mask=torch.ones(1, 2))
    assert got.tolist() == [[10, 10]]


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf")])
def test_what_a_masked_token_holds_does_not_reach_the_gradient_of_a_kl(kind: str, junk: float) -> None:
    log_probs = torch.tensor([[-0.7, junk]], requires_grad=True)
    reference = torch.tensor([[-1.0, junk]])
    value = kl_penalty(kind, log_probs=log_probs, ref_log_probs=reference, mask=torch.tensor([[1, 0]])).sum()
    (gradient,) = torch.autograd.grad(value, log_probs)
    assert value.isfinite()
    assert gradient[0, 0] != 0
    assert gradient[0, 1] == 0


def test_k1_and_k3_are_unbiased_and_k2_and_the_plus_kinds_have_the_gradient_of_the_kl() -> None:
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    policy = logits.log_softmax(-1)
    kl = (policy.exp() * (policy - reference)).sum()
    reverse = (reference.exp() * (reference - policy)).sum()
    weights = policy.exp().detach()  # the exact expectation over tokens drawn from the policy
    expected = {
        kind: (
            weights * kl_penalty(kind, log_probs=policy[None], ref_log_probs=reference[None], mask=torch.ones(1, 3))
        ).sum()
        for kind in KL_KINDS
    }
    for kind in ("k1", "k3", "k1+", "k3+"):
        torch.testing.assert_close(expected[kind], kl)
    gradients = {
        kind: torch.autograd.grad(value, logits, retain_graph=True)[0]
        for kind, value in (expected | {"kl": kl, "reverse": reverse}).items()
    }
    for kind in ("k2", "k1+", "abs+", "k3+"):
        torch.testing.assert_close(gradients[kind], gradients["kl"])
    torch.testing.assert_close(gradients["k1"], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(gradients["k3"], gradients["reverse"])


def test_an_unknown_kind_is_refused() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"expected one of k1, abs, k2.*got 'k2\+'"):
        kl_penalty("k2+", log_probs=one, ref_log_probs=one, mask=one)
    with pytest.raises(ValueError, match=r"\[1, 1\], \[1, 2\], \[1, 1\]"):
        kl_penalty("k1", log_probs=one, ref_log_probs=torch.ones(1, 2), mask=one)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.1, 0.001),  # on target
        (0.105, 0.001 * (1 + 0.05 * 0.05)),  # 5 % above, 500 of 10000 rows
        (0.5, 0.001 * (1 + 0.2 * 0.05)),  # far above: at most a fifth
        (-0.3, 0.001 * (1 - 0.2 * 0.05)),
    ],
)
def test_the_coefficient_follows_the_kl(kl: float, expected: float) -> None:
    assert adapt(0.001, kl, target=0.1, horizon=10_000, rows=500) == pytest.approx(expected, rel=1e-12)


def test_the_coefficient_settles_where_the_kl_is_on_target() -> None:
    coef = 0.001
    for _ in range(4000):  # a policy that moves less the more it costs
        coef = adapt(coef, 0.002 / coef, target=0.1, horizon=1000, rows=100)
    assert coef == pytest.approx(0.02, rel=1e-3)


@pytest.mark.parametrize(
    "change", [{"coef": -1.0}, {"target": 0.0}, {"rows": 0}, {"rows": 11}, {"kl": float("nan")}, {"kl": float("inf")}]
)
def test_a_coefficient_that_cannot_be_adapted_is_refused(change: dict[str, float]) -> None:
    good = {"coef": 0.1, "kl": 0.1, "target": 0.1, "horizon": 10, "rows": 10}
    with pytest.raises(ValueError, match="adapt: expected coef >= 0, a finite kl"):
        adapt(**good | change)  # type: ignore[arg-type]


def test_entropy_by_hand() -> None:
    # p = 1/2, 1/4, 1/4: ln 2 / 2 + 2 ln 4 / 4 = 1.5 ln 2; even: ln 3; certain: 0.
    logits = torch.tensor([[0.5, 0.25, 0.25], [1, 1, 1], [1, 0, 0]]).log()
    assert entropy(logits).tolist() == pytest.approx([1.5 * math.log(2), math.log(3), 0])


def test_an_impossible_token_has_no_part_in_entropy_or_gradient() -> None:
    logits = torch.tensor([0.3, -0.4, -math.inf], requires_grad=True)
    (gradient,) = torch.autograd.grad(entropy(logits), logits)
    without = torch.tensor([0.3, -0.4], requires_grad=True)
    torch.testing.assert_close(entropy(logits), entropy(without))
    (expected,) = torch.autograd.grad(entropy(without), without)
    assert gradient.tolist() == pytest.approx([*expected.tolist(), 0])


@PROPERTY
@given(seed=st.integers(0, 10_000), shift=st.floats(-50, 50))
def test_entropy_is_bounded_ignores_a_shift_and_has_the_right_gradient(seed: int, shift: float) -> None:
    logits = 3 * torch.randn(5, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    got = entropy(logits)
    assert ((got >= 0) & (got <= math.log(7) + 1e-12)).all()
    torch.testing.assert_close(entropy(logits + shift), got)
    assert torch.autograd.gradcheck(entropy, logits.requires_grad_())


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
