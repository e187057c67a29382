"""Importance weights and rejection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from stages.algorithms.catalog import CORRECTION_LEVELS, REJECTION_KINDS, REJECTION_LEVELS
from stages.algorithms.correction import effective_sample_size, importance_weights, rejection_mask
from stages.algorithms.rules import Rejection, WeightRule

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)
SEEDS = st.integers(0, 10_000)
RULES = [
    WeightRule(level, mode, high, low, normalise)
    for level in CORRECTION_LEVELS
    for mode, high, low in (("truncate", 1.5, 0.0), ("mask", 1.5, 0.5))
    for normalise in (False, True)
]
REJECTIONS = [
    (kind, level) for kind in REJECTION_KINDS for level in REJECTION_LEVELS if (kind, level) != ("k1", "seq_max")
]


def log_probs_of(x: list[list[float]], mask: list[list[int]]) -> dict[str, Tensor]:
    """The inputs whose log ratio is x."""
    rollout = torch.full((len(x), len(x[0])), -1.0, dtype=torch.float64)
    return {
        "log_probs": rollout + torch.tensor(x, dtype=torch.float64),
        "rollout_log_probs": rollout,
        "mask": torch.tensor(mask),
    }


def random_inputs(seed: int, scale: float = 0.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(6, 5, generator=generator, dtype=torch.float64)
    mask = (torch.rand(6, 5, generator=generator) < 0.7).long()
    mask[0, 0] = 1
    mask[int(torch.randint(1, 6, (), generator=generator))] = 0
    rollout = -torch.rand(6, 5, generator=generator, dtype=torch.float64)
    return {
        "log_probs": rollout + x,
        "rollout_log_probs": rollout,
        "mask": mask,
        "sequences": torch.tensor([4, 4, 1, 2, 2, 7]),
    }


def keep(kind: str, level: str, inputs: Mapping[str, Tensor], high: float, low: float | None = None) -> Tensor:
    return rejection_mask([Rejection(kind, level, high, low)], **inputs)


# --- Weights -----------------------------------------------------------------------------------------------

# e^x = 1.5, 0.5, 4 in the first row and 3 in the second: products 3 and 3.
X = [[math.log(1.5), math.log(0.5), math.log(4)], [math.log(3), 0.0, 0.0]]
MASK = [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (WeightRule("token", "truncate", 2.0), [[1.5, 0.5, 2], [2, 0, 0]]),
        (WeightRule("token", "mask", 2.0, 0.6), [[1.5, 0, 0], [0, 0, 0]]),
        (WeightRule("token", "mask", 3.5, 0.4), [[1.5, 0.5, 0], [3, 0, 0]]),
        (WeightRule("sequence", "truncate", 2.0), [[2, 2, 2], [2, 0, 0]]),
        (WeightRule("sequence", "mask", 2.0, 0.5), [[0, 0, 0], [0, 0, 0]]),
        # The token mean of 1.5, 0.5, 2, 2 is 1.5.
        (WeightRule("token", "truncate", 2.0, normalise=True), [[1, 1 / 3, 4 / 3], [4 / 3, 0, 0]]),
        (WeightRule("sequence", "truncate", 2.0, normalise=True), [[1, 1, 1], [1, 0, 0]]),
    ],
)
def test_weights_by_hand(rule: WeightRule, expected: list[list[float]]) -> None:
    got = importance_weights(rule, **log_probs_of(X, MASK)).weights
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_figures_of_the_weights_by_hand() -> None:
    # Token weights 1.5, 0.5, 2, 2 after truncation: sum 6, squares 10.5, so 36 / (4 * 10.5).
    got = importance_weights(WeightRule("token", "truncate", 2.0), **log_probs_of(X, MASK)).metrics
    assert got == pytest.approx({"mean": 1.5, "max": 2, "below": 0, "above": 0.5, "effective_sample_size": 36 / 42})
    masked = importance_weights(WeightRule("token", "mask", 2.0, 0.6), **log_probs_of(X, MASK)).metrics
    assert masked == pytest.approx(
        {"mean": 0.375, "max": 1.5, "below": 0.25, "above": 0.5, "effective_sample_size": 0.25}
    )


def test_log_ratios_of_tokens_and_of_sequences_are_cut_to_20() -> None:
    inputs = log_probs_of([[-15.0, -15.0], [-50.0, 4.0]], [[1, 1], [1, 1]])
    of_sequences = importance_weights(WeightRule("sequence"), **inputs).weights
    torch.testing.assert_close(of_sequences[:, 0].log(), torch.tensor([-20.0, -16.0], dtype=torch.float64))
    of_tokens = importance_weights(WeightRule("token", high=1e9), **inputs).weights
    torch.testing.assert_close(of_tokens.log(), torch.tensor([[-15.0, -15], [-20, 4]], dtype=torch.float64))


def test_the_turns_of_a_session_have_one_weight() -> None:
    # x = 0.3 in row 0 and -0.1 in row 2: e^0.2. Row 1 is another session: e^0.5.
    inputs = log_probs_of([[0.3], [0.5], [-0.1]], [[1], [1], [1]])
    rule = WeightRule("sequence", "truncate", 2.0)
    got = importance_weights(rule, **inputs, sequences=torch.tensor([3, 9, 3]))
    expected = [math.exp(0.2), math.exp(0.5), math.exp(0.2)]
    assert got.weights[:, 0].tolist() == pytest.approx(expected)
    assert got.metrics["mean"] == pytest.approx((expected[0] + expected[1]) / 2)  # over two sessions, not three rows


@pytest.mark.parametrize("rule", RULES)
def test_without_mismatch_every_weight_is_1_and_every_token_is_kept(rule: WeightRule) -> None:
    inputs = random_inputs(0, scale=0.0)
    weights, metrics = importance_weights(rule, **inputs)
    assert torch.equal(weights, inputs["mask"].double())
    assert metrics == {"mean": 1, "max": 1, "below": 0, "above": 0, "effective_sample_size": 1}
    rules = [Rejection(kind, level, 1.0 + 1e-9 if kind == "k1" else 1e-9) for kind, level in REJECTIONS]
    assert torch.equal(rejection_mask(rules, **inputs), inputs["mask"] != 0)


@pytest.mark.parametrize("rule", RULES)
@PROPERTY
@given(seed=SEEDS, scale=st.floats(0.1, 40))
def test_weights_are_bounded_not_negative_and_without_gradient(rule: WeightRule, seed: int, scale: float) -> None:
    inputs = random_inputs(seed, scale)
    inputs["log_probs"].requires_grad_()
    weights, metrics = importance_weights(rule, **inputs)
    policy = inputs["mask"] != 0
    assert not weights.requires_grad
    assert not weights[~policy].any()
    assert metrics["max"] == pytest.approx(float(weights.max()))
    if rule.normalise:
        assert metrics["mean"] == pytest.approx(1) or metrics["mean"] == 0
    elif rule.mode == "truncate":
        assert ((weights[policy] > 0) & (weights[policy] <= rule.high)).all()
    else:
        assert ((weights == 0) | ((weights >= rule.low) & (weights <= rule.high))).all()
    assert 0 < metrics["effective_sample_size"] <= 1 + 1e-12 or not weights.any()
    if rule.level == "sequence":
        for number in torch.unique(inputs["sequences"]):
            of_one = weights[inputs["sequences"] == number][policy[inputs["sequences"] == number]]
            assert torch.equal(of_one, of_one[:1].expand_as(of_one))


@pytest.mark.parametrize("rule", RULES)
@PROPERTY
@given(seed=SEEDS, order=st.permutations(range(6)), junk=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_order_padding_and_masked_values_change_neither_weights_nor_rejection(
    rule: WeightRule, seed: int, order: list[int], junk: float
) -> None:
    inputs = random_inputs(seed)
    moved: dict[str, Tensor] = {"sequences": inputs["sequences"][order]}
    moved["mask"] = torch.cat([inputs["mask"][order], torch.zeros(6, 2, dtype=torch.int64)], 1)
    for name in ("log_probs", "rollout_log_probs"):
        padded = torch.cat([inputs[name][order], torch.zeros(6, 2, dtype=torch.float64)], 1)
        moved[name] = padded.masked_fill(moved["mask"] == 0, junk)
    weights, metrics = importance_weights(rule, **inputs)
    got, got_metrics = importance_weights(rule, **moved)
    torch.testing.assert_close(got[:, :5], weights[order])
    assert got_metrics == pytest.approx(metrics)
    for kind, level in REJECTIONS:
        kept = keep(kind, level, inputs, 1.3)
        assert torch.equal(keep(kind, level, moved, 1.3)[:, :5], kept[order])


def test_unbounded_weights_make_the_rollout_policys_tokens_count_as_the_policys() -> None:
    # The exact expectation over one token from the rollout policy: sum q (p / q) f = sum p f.
    policy = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    rollout = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    value = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    for level in CORRECTION_LEVELS:
        weights = importance_weights(
            WeightRule(level, "truncate", 100.0),
            log_probs=policy.log()[:, None],
            rollout_log_probs=rollout.log()[:, None],
            mask=torch.ones(3, 1),
        ).weights[:, 0]
        torch.testing.assert_close((rollout * weights * value).sum(), (policy * value).sum())


def test_without_policy_tokens_there_are_no_weights() -> None:
    inputs = random_inputs(0)
    inputs["mask"] = torch.zeros(6, 5)
    for rule in RULES:
        weights, metrics = importance_weights(rule, **inputs)
        assert not weights.any()
        assert not any(metrics.values())
    assert not rejection_mask([Rejection("k3", "seq_mean", 1.0)], **inputs).any()


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1.0, 1, 1, 1], 1), ([4.0, 0, 0, 0], 0.25), ([1.0, 3], 0.8), ([0.0, 0], 0), ([], 0)],
)
def test_the_effective_sample_size_by_hand(weights: list[float], expected: float) -> None:
    assert effective_sample_size(torch.tensor(weights)) == pytest.approx(expected)


@PROPERTY
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), scale=st.floats(1e-3, 1e3))
def test_the_effective_sample_size_is_a_share_and_has_no_unit(weights: list[float], scale: float) -> None:
    size = effective_sample_size(torch.tensor(weights, dtype=torch.float64))
    assert 1 / len(weights) - 1e-9 <= size <= 1 + 1e-9
    assert effective_sample_size(scale * torch.tensor(weights, dtype=torch.float64)) == pytest.approx(size)


# --- Rejection ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "level", "high", "low", "expected"),
    [
        # x = [0.4, -0.2, -0.6] and [0.1]. k1 = -x; k2 = [0.08, 0.02, 0.18], [0.005];
        # k3 = e^x - 1 - x = [0.091825, 0.018731, 0.148812], [0.005171].
        ("k1", "token", 1.5, None, [[1, 1, 0], [1, 0, 0]]),  # |x| <= log 1.5 = 0.405
        ("k1", "token", 2.0, 0.9, [[0, 1, 1], [1, 0, 0]]),  # -x in [-0.105, 0.693]; -0.1 is inside
        ("k1", "seq_sum", 1.45, None, [[0, 0, 0], [1, 0, 0]]),  # 0.4 > log 1.45 = 0.372
        ("k1", "seq_sum", 1.5, None, [[1, 1, 1], [1, 0, 0]]),
        ("k1", "seq_mean", 1.15, None, [[1, 1, 1], [1, 0, 0]]),  # 0.4 / 3 = 0.133 <= log 1.15 = 0.140
        ("k1", "seq_mean", 1.14, None, [[0, 0, 0], [1, 0, 0]]),  # log 1.14 = 0.131
        ("k2", "token", 0.1, None, [[1, 1, 0], [1, 0, 0]]),
        ("k2", "seq_sum", 0.27, None, [[0, 0, 0], [1, 0, 0]]),  # 0.28
        ("k2", "seq_mean", 0.1, None, [[1, 1, 1], [1, 0, 0]]),  # 0.0933
        ("k2", "seq_mean", 0.004, None, [[0, 0, 0], [0, 0, 0]]),
        ("k2", "seq_max", 0.17, None, [[0, 0, 0], [1, 0, 0]]),
        ("k3", "token", 0.1, None, [[1, 1, 0], [1, 0, 0]]),
        ("k3", "seq_sum", 0.26, None, [[1, 1, 1], [1, 0, 0]]),  # 0.259368
        ("k3", "seq_mean", 0.086, None, [[0, 0, 0], [1, 0, 0]]),  # 0.086456
        ("k3", "seq_max", 0.149, None, [[1, 1, 1], [1, 0, 0]]),
        ("k3", "seq_max", 0.005, None, [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_rejection_by_hand(kind: str, level: str, high: float, low: float | None, expected: list[list[int]]) -> None:
    inputs = log_probs_of([[0.4, -0.2, -0.6], [0.1, 9.0, -9.0]], [[1, 1, 1], [1, 0, 0]])
    assert keep(kind, level, inputs, high, low).long().tolist() == expected


def test_the_turns_of_a_session_stay_or_leave_together() -> None:
    inputs = log_probs_of([[0.1], [0.1], [0.9]], [[1], [1], [1]])
    for level in ("seq_sum", "seq_mean", "seq_max"):
        kept = rejection_mask([Rejection("k2", level, 0.1)], **inputs, sequences=torch.tensor([1, 0, 1]))
        assert kept[:, 0].tolist() == [False, True, False]


def test_all_rules_have_to_be_met_and_each_sees_the_whole_mask() -> None:
    inputs = log_probs_of([[0.6, 0.1], [0.1, 0.1]], [[1, 1], [1, 1]])
    token, sequence = Rejection("k2", "token", 0.1), Rejection("k2", "seq_sum", 0.15)
    # k2 = 0.18, 0.005 and 0.005, 0.005: the sequence rule rejects row 0 whether or not the token rule did before.
    for rules in ([token, sequence], [sequence, token]):
        assert rejection_mask(rules, **inputs).tolist() == [[False, False], [True, True]]
    assert rejection_mask([token], **inputs).tolist() == [[False, True], [True, True]]
    # The mean of row 0 is 0.0925 over its two tokens, whichever the token rule rejects.
    both = rejection_mask([token, Rejection("k2", "seq_mean", 0.1)], **inputs)
    assert both.tolist() == [[False, True], [True, True]]
    assert rejection_mask([], **inputs).all()


@pytest.mark.parametrize(("kind", "level"), REJECTIONS)
@PROPERTY
@given(seed=SEEDS, bounds=st.tuples(st.floats(0.01, 3), st.floats(0.01, 3)))
def test_a_wider_bound_keeps_what_a_narrower_one_kept(
    kind: str, level: str, seed: int, bounds: tuple[float, float]
) -> None:
    inputs = random_inputs(seed)
    least = 1.0 if kind == "k1" else 0.0
    narrow, wide = (keep(kind, level, inputs, least + bound) for bound in sorted(bounds))
    assert not (narrow & ~wide).any()
    assert not (wide & (inputs["mask"] == 0)).any()


# --- What is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"level": "row"}, "level: expected one of token, sequence, got 'row'"),
        ({"mode": "clip"}, "mode: expected one of truncate, mask, got 'clip'"),
        ({"high": 0.9}, "0 <= low <= 1 <= high.*got low 0.0 and high 0.9"),
        ({"mode": "mask", "low": 1.1}, "0 <= low <= 1 <= high"),
        ({"mode": "mask", "low": -0.1}, "0 <= low <= 1 <= high"),
        ({"low": 0.5}, "'truncate' has no lower bound, but low is 0.5"),
        ({"high": float("nan")}, "0 <= low <= 1 <= high"),
    ],
)
def test_a_rule_of_weights_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightRule(**change)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("k4", "token", 1.0), "kind: expected one of k1, k2, k3, got 'k4'"),
        (("k3", "row", 1.0), "level: expected one of token, seq_sum, seq_mean, seq_max, got 'row'"),
        (("k1", "seq_max", 2.0), "use k2 or k3 with seq_max"),
        (("k3", "token", 1.0, 0.5), "has no lower bound, but low is 0.5"),
        (("k1", "token", 1.0), "by k1: expected high > 1, 0 < low < 1, got high 1.0"),
        (("k1", "token", 2.0, 1.5), "0 < low < 1, got high 2.0 and low 1.5"),
        (("k2", "token", 0.0), "by k2: expected high > 0, got high 0.0"),
    ],
)
def test_a_rejection_that_cannot_be_is_refused(rule: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rejection(*rule)


def test_unequal_shapes_are_refused() -> None:
    inputs = random_inputs(0) | {"mask": torch.ones(6, 4)}
    with pytest.raises(ValueError, match=r"importance_weights: expected equal shapes.*\[6, 4\]"):
        importance_weights(WeightRule(), **inputs)
    with pytest.raises(ValueError, match=r"rejection_mask: expected equal shapes.*\[6, 4\]"):
        rejection_mask([], **inputs)
