"""Policy losses by hand: values and gradients of single tokens and short sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.algorithms.aggregation import aggregate
from stages.algorithms.covariance_losses import clip_cov, kl_cov
from stages.algorithms.losses import TokenLoss, cispo, dppo_kl, dppo_tv, dro, policy_gradient, ppo_clip, sapo
from stages.algorithms.sequence_losses import geo_mean, gspo

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


def of_sequence(function: Loss, advantage: float, **options: float) -> tuple[list[float], list[float]]:
    """Token losses, and the gradient of their mean, of one sequence with d = 0.1, -0.2, 0.4 (mean 0.1)."""
    old = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
    log_probs = (old + torch.tensor([[0.1, -0.2, 0.4]])).requires_grad_()
    mask = torch.ones(1, 3)
    loss = function(
        log_probs=log_probs, old_log_probs=old, advantages=torch.full_like(old, advantage), mask=mask, **options
    ).loss
    mean = aggregate(loss, mask, "seq-mean-token-mean", token_count=3, sequence_count=1, horizon=3)
    (gradient,) = torch.autograd.grad(mean, log_probs)
    return loss.tolist()[0], gradient.tolist()[0]


# --- Losses of single tokens -------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # s = sigma(tau (r - 1)): the loss is -A 4 s / tau, its derivative by log pi -A 4 s (1 - s) r.
        (1.0, 1.0, -2.0, -1.0),  # s = 1/2: the gate is 2 / tau
        (1.0, -1.0, 2 / 1.05, 1.0),
        (1.2, 1.0, -2.199336, -1.188080),  # s = 0.549834
        (1.2, -1.0, 2.104030, 1.186868),  # tau = 1.05: s = 0.552308
    ],
)
def test_sapo_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert at_ratio(ratio, advantage, sapo) == pytest.approx((loss, gradient), abs=2e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # log 1.5 = 0.405465, so log pi = -0.594535; log 0.5 = -0.693147, so log pi = -1.693147.
        (1.5, 2.0, 2 * 1.2 * 0.594535, -2.4),  # the ratio counts as 1.2, and the gradient stays
        (0.5, -1.0, -0.8 * 1.693147, 0.8),
        (0.5, 1.0, 0.8 * 1.693147, -0.8),
        (1.1, 1.0, 1.1 * 0.904690, -1.1),  # log 1.1 = 0.095310
    ],
)
def test_cispo_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert at_ratio(ratio, advantage, cispo) == pytest.approx((loss, gradient), abs=2e-6)


def test_dro_by_hand() -> None:
    # d = log 1.5 = 0.405465: -2 log pi = 1.189070, and 0.25 d^2 = 0.041100; the gradient is -2 + 0.5 d.
    assert at_ratio(1.5, 2.0, dro, beta=0.5) == pytest.approx((1.230170, -1.797267), abs=2e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # pi_old = 1 / e = 0.367879; the bound of 0.2 is on pi - pi_old.
        (1.5, 2.0, 1.5 * 2 * 0.594535, -3.0),  # moved by 0.184
        (1.6, 2.0, 0.0, 0.0),  # moved by 0.221 in A's direction
        (1.6, -1.0, -1.6 * 0.529996, 1.6),  # moved by 0.221 against it
        (0.5, -1.0, -0.5 * 1.693147, 0.5),  # moved by -0.184
        (0.4, -1.0, 0.0, 0.0),  # moved by -0.221 in A's direction
        (0.4, 1.0, 0.4 * 1.916291, -0.4),
    ],
)
def test_dppo_tv_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    assert at_ratio(ratio, advantage, dppo_tv) == pytest.approx((loss, gradient), abs=2e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "bound", "gradient"),
    [
        # r = 1.5: 0.367879 * -0.405465 + 0.632121 * log(0.632121 / 0.448181) = -0.149162 + 0.217379 = 0.068217.
        (1.5, 1.0, 0.0683, -1.5),
        (1.5, 1.0, 0.0682, 0.0),
        (1.5, -1.0, 0.0, 1.5),  # towards the old policy, whatever the bound
        # r = 0.5: 0.367879 * 0.693147 + 0.632121 * log(0.632121 / 0.816060) = 0.254995 - 0.161453 = 0.093542.
        (0.5, -1.0, 0.0936, 0.5),
        (0.5, -1.0, 0.0935, 0.0),
        (0.5, 1.0, 0.0, -0.5),
    ],
)
def test_dppo_kl_by_hand(ratio: float, advantage: float, bound: float, gradient: float) -> None:
    loss = -advantage * (abs(gradient)) * (-1.0 + math.log(ratio))
    got = at_ratio(ratio, advantage, dppo_kl, clip_low=bound, clip_high=bound)
    assert got == pytest.approx((loss, gradient), abs=1e-6)


@pytest.mark.parametrize("function", [dppo_tv, dppo_kl])
def test_dppo_bounds_the_ratio_of_a_rare_token_without_losing_its_gradient(function: Loss) -> None:
    # A move of probability from e^-9 to e^-5 is far inside; the ratio e^4 = 54.6 counts as 20.
    log_probs = torch.tensor([[-5.0]], requires_grad=True)
    one = torch.ones(1, 1)
    loss = function(log_probs=log_probs, old_log_probs=-9 * one, advantages=one, mask=one).loss
    assert float(loss.detach()) == pytest.approx(100)
    assert float(torch.autograd.grad(loss.sum(), log_probs)[0]) == pytest.approx(-20)


# --- Losses of sequences -----------------------------------------------------------------------------------


def test_gspo_by_hand() -> None:
    # s = e^0.1 = 1.105171 for every token.
    wide = {"clip_low": 0.2, "clip_high": 0.2}
    losses, gradient = of_sequence(gspo, 1.0, **wide)
    assert losses == pytest.approx([-1.105171] * 3, abs=1e-6)
    assert gradient == pytest.approx([-1.105171 / 3] * 3, abs=1e-6)
    # The default clip of 4e-4 holds it where A > 0, and lets it come back where A < 0.
    losses, gradient = of_sequence(gspo, 1.0)
    assert losses == pytest.approx([-1.0004] * 3)
    assert gradient == [0, 0, 0]
    assert of_sequence(gspo, -1.0)[1] == pytest.approx([1.105171 / 3] * 3, abs=1e-6)


def test_gspo_counts_the_tokens_of_clipped_sequences() -> None:
    token_loss = gspo(
        log_probs=torch.tensor([[0.1, -0.2, 0.4], [0.0, 0.0, 9.0]]),
        old_log_probs=torch.zeros(2, 3),
        advantages=torch.ones(2, 3),
        mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
    )
    assert float(token_loss.metrics["clipped"]) == 3


def test_gspo_gives_up_on_a_sequence_that_has_run_away() -> None:
    log_probs = torch.tensor([[-1.0, -1.0]], requires_grad=True)  # mean d = 15; the ratio counts as e^10
    ones = torch.ones(1, 2)
    loss = gspo(log_probs=log_probs, old_log_probs=-16 * ones, advantages=-ones, mask=ones).loss
    assert loss.tolist()[0] == pytest.approx([math.exp(10)] * 2)
    assert torch.autograd.grad(loss.sum(), log_probs)[0].tolist() == [[0, 0]]


def test_geo_mean_by_hand() -> None:
    # A > 0: d = 0.1, -0.2, min(0.4, 0.3), mean 0.066667, e^ = 1.068939; the clipped token has no gradient.
    clip = {"clip_low": 0.15, "clip_high": 0.3}
    losses, gradient = of_sequence(geo_mean, 2.0, **clip)
    assert losses == pytest.approx([-2.137878] * 3, abs=1e-6)
    assert gradient == pytest.approx([-2.137878 / 3, -2.137878 / 3, 0], abs=1e-6)
    # A < 0: d = 0.1, max(-0.2, -0.15), 0.4, mean 0.116667, e^ = 1.123745.
    losses, gradient = of_sequence(geo_mean, -1.0, **clip)
    assert losses == pytest.approx([1.123745] * 3, abs=1e-6)
    assert gradient == pytest.approx([1.123745 / 3, 0, 1.123745 / 3], abs=1e-6)


def test_geo_mean_counts_the_tokens_that_its_clip_changed() -> None:
    # Beyond the bound along A, beyond it against A, inside, without an advantage, masked.
    token_loss = geo_mean(
        log_probs=torch.tensor([[0.5, -0.5, 0.1, 0.5, 0.5]]),
        old_log_probs=torch.zeros(1, 5),
        advantages=torch.tensor([[1.0, 1, 1, 0, 1]]),
        mask=torch.tensor([[1, 1, 1, 1, 0]]),
    )
    assert float(token_loss.metrics["clipped"]) == 1


def test_geo_mean_takes_the_geometric_mean_of_the_weights() -> None:
    weights = torch.tensor([[2.0, 4.0, 1.0]], dtype=torch.float64)  # their product is 8, its third root 2
    plain, _ = of_sequence(geo_mean, 1.0)
    weighted, _ = of_sequence(geo_mean, 1.0, weights=weights)  # type: ignore[arg-type]
    assert weighted == pytest.approx([2 * loss for loss in plain])


@pytest.mark.parametrize("function", [gspo, geo_mean])
def test_the_turns_of_one_session_share_one_ratio(function: Loss) -> None:
    # d = 0.1, -0.2, 0.4 in rows 0 and 2; another session stands between.
    old = torch.tensor([[-1.0, -2.0], [-1.0, -1.0], [-0.5, float("nan")]], dtype=torch.float64)
    d = torch.tensor([[0.1, -0.2], [0.7, -0.9], [0.4, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])
    loss = function(
        log_probs=old + d,
        old_log_probs=old,
        advantages=torch.ones_like(old),
        mask=mask,
        sequences=torch.tensor([5, 2, 5]),
        clip_low=1.0 - 1e-9,
        clip_high=9.0,
    ).loss
    assert loss[0].tolist() == pytest.approx([-1.105171] * 2, abs=1e-6)
    assert loss[1].tolist() == pytest.approx([-math.exp(-0.1)] * 2, abs=1e-6)
    assert loss[2].tolist() == pytest.approx([-1.105171, 0], abs=1e-6)


# --- Losses with selected tokens ---------------------------------------------------------------------------


def test_clip_cov_leaves_out_what_is_selected() -> None:
    ratios = torch.tensor([[1.5, 1.1, 0.5]])
    log_probs = ratios.log().requires_grad_()
    token_loss = clip_cov(
        log_probs=log_probs,
        old_log_probs=torch.zeros(1, 3),
        advantages=torch.ones(1, 3),
        mask=torch.ones(1, 3),
        selected=torch.tensor([[False, True, False]]),
    )
    assert token_loss.loss.tolist()[0] == pytest.approx([-1.2, 0.0, -0.5])
    assert torch.autograd.grad(token_loss.loss.sum(), log_probs)[0].tolist()[0] == pytest.approx([0, 0, -0.5])
    assert (int(token_loss.metrics["clipped"]), int(token_loss.metrics["selected"])) == (1, 1)


def test_kl_cov_holds_back_what_is_selected() -> None:
    # -A r + 0.5 |d| with d = 0.405465 and -0.693147; the gradients are -A r + 0.5 sign(d).
    ratios = torch.tensor([[1.5, 0.5, 0.5, 9.0]])
    log_probs = ratios.log().requires_grad_()
    token_loss = kl_cov(
        log_probs=log_probs,
        old_log_probs=torch.zeros(1, 4),
        advantages=torch.ones(1, 4),
        mask=torch.tensor([[1, 1, 1, 0]]),
        selected=torch.tensor([[True, True, False, True]]),
        coef=0.5,
    )
    assert token_loss.loss.tolist()[0] == pytest.approx([-1.297267, -0.153426, -0.5, 0], abs=1e-6)
    assert torch.autograd.grad(token_loss.loss.sum(), log_probs)[0].tolist()[0] == pytest.approx([-1.0, -1.0, -0.5, 0])
    assert int(token_loss.metrics["selected"]) == 2


# --- What is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (ppo_clip, {"dual_clip": 1.0}, "ppo_clip: expected dual_clip > 1"),
        (ppo_clip, {"clip_low": 1.0}, "ppo_clip: expected 0 <= clip_low < 1"),
        (ppo_clip, {"clip_high": -0.1}, "ppo_clip: expected 0 <= clip_low < 1 and clip_high >= 0"),
        (gspo, {"clip_low": 1.0}, "gspo: expected 0 <= clip_low < 1"),
        (cispo, {"clip_high": -1.0}, "cispo: expected 0 <= clip_low < 1"),
        (geo_mean, {"clip_low": -0.1}, "geo_mean: expected clip_low >= 0"),
        (sapo, {"tau_negative": 0.0}, "sapo: expected temperatures above 0"),
        (dro, {"beta": 0.0}, "dro: expected beta > 0"),
        (dppo_tv, {"clip_low": -0.1}, "dppo_tv: expected clip_low >= 0"),
        (dppo_kl, {"max_ratio": 0.5}, "dppo_kl: .*max_ratio >= 1"),
    ],
)
def test_an_option_out_of_range_is_refused(function: Loss, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        at_ratio(1.0, 1.0, function, **options)


def test_options_of_losses_with_selected_tokens_out_of_range_are_refused() -> None:
    batch: dict[str, Any] = {
        name: torch.zeros(1, 1) for name in ("log_probs", "old_log_probs", "advantages", "mask", "selected")
    }
    with pytest.raises(ValueError, match="clip_cov: expected 0 <= clip_low < 1"):
        clip_cov(**batch, clip_low=1.0)
    with pytest.raises(ValueError, match="kl_cov: expected coef >= 0"):
        kl_cov(**batch, coef=-1.0)


@pytest.mark.parametrize("function", [gspo, geo_mean])
def test_sequence_numbers_of_another_shape_are_refused(function: Loss) -> None:
    batch: dict[str, Tensor] = {
        name: torch.zeros(2, 3) for name in ("log_probs", "old_log_probs", "advantages", "mask")
    }
    with pytest.raises(ValueError, match=r"sequences of shape \[2\], one number per row, got \[3\]"):
        function(**batch, sequences=torch.zeros(3))
