"""The ReMax baseline changes the variance of the policy gradient, not its expectation.

Small policies whose every session can be enumerated: expectations are exact sums, free of sampling noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from stages.algorithms.advantages import remax
from stages.algorithms.aggregation import aggregate
from stages.algorithms.losses import policy_gradient
from stages.algorithms.returns import place_rewards, session_return

TOKENS = 3


@dataclass(frozen=True)
class Outcome:
    """One possible session: the policy's choices (state, token), one per turn, and the turns' rewards."""

    choices: tuple[tuple[int, int], ...]
    rewards: tuple[float, ...]


def two_token_bandit(reward: Sequence[Sequence[float]]) -> list[Outcome]:
    """Two tokens, the second drawn in a state that the first decides; the reward comes at the end."""
    return [
        Outcome(((0, first), (1 + first, second)), (0.0, reward[first][second]))
        for first in range(TOKENS)
        for second in range(TOKENS)
    ]


def stop_or_go(stop: float, go: float, then: Sequence[float]) -> list[Outcome]:
    """Token 0 stops after one turn; tokens 1 and 2 pay `go` and lead to a second turn."""
    stopped = [Outcome(((0, 0),), (stop,))]
    return stopped + [
        Outcome(((0, first), (first, second)), (go, then[second])) for first in (1, 2) for second in range(TOKENS)
    ]


def greedy(logits: Tensor, outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of taking the most likely token at every step."""
    best = logits.argmax(-1).tolist()
    (outcome,) = [o for o in outcomes if all(token == best[state] for state, token in o.choices)]
    return outcome


def total(outcome: Outcome) -> float:
    return session_return(outcome.rewards, "step", [np.ones(1)] * len(outcome.rewards))


def gradients(logits: Tensor, outcomes: Sequence[Outcome], baseline: float) -> tuple[Tensor, Tensor]:
    """Probability of each outcome, and the policy gradient that a session of it would give."""
    probabilities, rows = [], []
    for outcome in outcomes:
        weights = logits.clone().requires_grad_()
        states, tokens = zip(*outcome.choices, strict=True)
        log_probs = weights.log_softmax(-1)[list(states), list(tokens)][None]
        mask = torch.ones(log_probs.shape)
        placed = place_rewards(outcome.rewards, "step", [np.ones(1)] * len(tokens))
        advantages = remax(
            token_rewards=torch.tensor(placed, dtype=torch.float64)[None],
            mask=mask,
            valid=torch.tensor([True]),
            baseline=torch.tensor([baseline], dtype=torch.float64),
        ).advantages
        token_loss = policy_gradient(
            log_probs=log_probs, old_log_probs=log_probs.detach(), advantages=advantages, mask=mask
        )
        loss = aggregate(
            token_loss.loss, mask, "seq-mean-token-sum", token_count=len(tokens), sequence_count=1, horizon=2
        )
        (gradient,) = torch.autograd.grad(-loss, weights)
        probabilities.append(log_probs.detach().sum().exp())
        rows.append(gradient.flatten())
    return torch.stack(probabilities), torch.stack(rows)


def moments(probabilities: Tensor, rows: Tensor) -> tuple[Tensor, float]:
    """Mean, and the sum of the variances of all components."""
    mean = probabilities @ rows
    return mean, float(probabilities @ (rows - mean).square().sum(-1))


def true_gradient(logits: Tensor, outcomes: Sequence[Outcome]) -> Tensor:
    """Gradient of the expected return, by differentiating the sum over all outcomes."""
    weights = logits.clone().requires_grad_()
    table = weights.log_softmax(-1)
    expected = torch.zeros((), dtype=torch.float64)
    for outcome in outcomes:
        states, tokens = zip(*outcome.choices, strict=True)
        expected = expected + table[list(states), list(tokens)].sum().exp() * sum(outcome.rewards)
    (gradient,) = torch.autograd.grad(expected, weights)
    return gradient.flatten()


REWARD = [[1.0, 0.8, 0.9], [0.6, 1.2, 0.7], [1.1, 0.5, 0.9]]
PROBLEMS = {
    "bandit": two_token_bandit(REWARD),
    "variable stopping": stop_or_go(stop=1.0, go=0.4, then=[0.9, 0.2, 0.6]),
}


def policy(seed: int, states: int = 4) -> Tensor:
    return torch.randn(states, TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("seed", range(5))
def test_the_greedy_baseline_leaves_the_expected_gradient_exact(problem: str, seed: int) -> None:
    outcomes, logits = PROBLEMS[problem], policy(seed)
    baseline = total(greedy(logits, outcomes))
    with_baseline, _ = moments(*gradients(logits, outcomes, baseline))
    without, _ = moments(*gradients(logits, outcomes, 0.0))
    expected = true_gradient(logits, outcomes)
    assert baseline > 0
    assert expected.abs().max() > 1e-3
    # Rewards pass through float32 when they are placed.
    torch.testing.assert_close(with_baseline, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(without, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("seed", range(5))
def test_the_greedy_baseline_lowers_the_variance_where_rewards_share_a_level(problem: str, seed: int) -> None:
    outcomes, logits = PROBLEMS[problem], policy(seed)
    _, with_baseline = moments(*gradients(logits, outcomes, total(greedy(logits, outcomes))))
    _, without = moments(*gradients(logits, outcomes, 0.0))
    assert with_baseline < 0.7 * without


def test_a_baseline_per_turn_is_biased_where_the_policy_controls_stopping() -> None:
    # Subtracting each turn's own greedy reward charges a session for the turns it takes, so going on looks
    # worse than it is, by b_2 P(go). A baseline that is one number for all sessions has no such term.
    outcomes, logits = PROBLEMS["variable stopping"], policy(3)
    logits[0] = torch.tensor([-0.5, 0.6, 0.1])
    logits[1] = torch.tensor([1.0, 0.2, -0.3])
    per_turn = greedy(logits, outcomes).rewards
    assert per_turn == (0.4, 0.9)
    charged = [Outcome(o.choices, tuple(r - b for r, b in zip(o.rewards, per_turn, strict=False))) for o in outcomes]
    expected = true_gradient(logits, outcomes)
    biased, _ = moments(*gradients(logits, charged, 0.0))
    first = logits[0].softmax(-1)
    bias = torch.zeros_like(logits)
    bias[0] = 0.9 * first[0] * (torch.tensor([1.0, 0, 0]) - first)  # -b_2 dP(go) = b_2 dP(stop)
    assert bias.abs().max() > 0.1
    torch.testing.assert_close(biased - expected, bias.flatten(), atol=1e-6, rtol=0)
    unbiased, _ = moments(*gradients(logits, outcomes, sum(per_turn)))
    torch.testing.assert_close(unbiased, expected, atol=1e-6, rtol=0)
