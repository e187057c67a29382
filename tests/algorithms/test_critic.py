"""The value loss."""

from __future__ import annotations

import pytest
import torch

from stages.algorithms.critic import value_loss


@pytest.mark.parametrize(
    ("value", "loss", "gradient", "clipped"),
    [
        # V_old = 1, clip 0.2, G = 2.
        (1.1, 0.405, -0.9, 0),  # inside: (1.1 - 2)^2 / 2
        (1.5, 0.32, 0.0, 1),  # beyond, towards G: (1.2 - 2)^2 / 2, nothing left to gain
        (0.5, 1.125, -1.5, 0),  # beyond, away from G: (0.5 - 2)^2 / 2 is the larger
        (3.5, 1.125, 1.5, 0),  # beyond G: (1.5)^2 / 2 is larger than (1.2 - 2)^2 / 2
    ],
)
def test_the_value_loss_by_hand(value: float, loss: float, gradient: float, clipped: int) -> None:
    values = torch.tensor([[value]], requires_grad=True)
    got = value_loss(
        values=values,
        old_values=torch.ones(1, 1),
        returns=torch.full((1, 1), 2.0),
        mask=torch.ones(1, 1),
        clip=0.2,
    )
    assert float(got.loss.detach()) == pytest.approx(loss)
    assert float(torch.autograd.grad(got.loss.sum(), values)[0]) == pytest.approx(gradient)
    assert int(got.metrics["clipped"]) == clipped


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_what_a_masked_token_holds_reaches_neither_the_value_loss_nor_its_gradient(junk: float) -> None:
    values = torch.tensor([[1.0, junk]], requires_grad=True)
    masked = torch.tensor([[0.0, junk]])
    got = value_loss(values=values, old_values=masked, returns=masked, mask=torch.tensor([[1, 0]]))
    assert got.loss.tolist() == [[0.5, 0.0]]
    (gradient,) = torch.autograd.grad(got.loss.sum(), values)
    assert gradient.isfinite().all()
    assert gradient[0, 1] == 0


def test_a_clip_that_lets_nothing_move_is_refused() -> None:
    one = torch.ones(1, 1)
    for clip in (0.0, float("nan")):
        with pytest.raises(ValueError, match="value_loss: expected clip > 0"):
            value_loss(values=one, old_values=one, returns=one, mask=one, clip=clip)
    with pytest.raises(ValueError, match=r"\[1, 1\], \[1, 2\], \[1, 1\], \[1, 1\]"):
        value_loss(values=one, old_values=torch.ones(1, 2), returns=one, mask=one)
