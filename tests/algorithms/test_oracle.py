"""Our functions against values that the public package verl 0.9.1 computed on random inputs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dataflow.stage import import_object
from stages.algorithms import advantages, token_advantages
from stages.algorithms.aggregation import aggregate
from stages.algorithms.catalog import LOSSES
from stages.algorithms.critic import value_loss
from stages.algorithms.kl import kl_penalty
from stages.algorithms.losses import TokenLoss
from stages.algorithms.sessions import whiten

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "estimators.json").read_text(encoding="utf-8"))
VALUE, GRADIENT = 1e-5, 1e-4


def cases(kind: str, *names: str) -> list[Any]:
    chosen = [case for case in ORACLE["cases"] if case["kind"] == kind and (not names or case["name"] in names)]
    return [pytest.param(case, id=f"{case['name']}-{number}") for number, case in enumerate(chosen)]


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def inputs(case: dict[str, Any]) -> dict[str, Tensor]:
    _, groups = np.unique(case["uid"], return_inverse=True)
    mask = torch.tensor(case["response_mask"])
    return {
        "token_rewards": torch.tensor(case["token_level_rewards"]),
        "mask": mask,
        "groups": torch.tensor(groups, dtype=torch.int64),
        "valid": torch.ones(len(mask), dtype=torch.bool),
    }


def siblings(batch: dict[str, Tensor], counted: Tensor) -> Tensor:
    """For each row and position, how many rows of the same group are counted there."""
    return (batch["groups"][:, None] == batch["groups"]).to(counted.dtype) @ counted


def test_the_oracle_holds_every_case_of_the_built_functions() -> None:
    assert Counter((case["kind"], case["name"]) for case in ORACLE["cases"]) == {
        ("advantage", "remax"): 9,
        ("advantage", "grpo"): 12,
        ("advantage", "rloo"): 6,
        ("advantage", "opo"): 6,
        ("advantage", "gpg"): 6,
        ("advantage", "grpo_passk"): 4,
        ("advantage", "reinforce_plus_plus"): 9,
        ("advantage", "reinforce_plus_plus_baseline"): 6,
        ("advantage", "gae"): 6,
        ("advantage", "optimal_token_baseline"): 3,
        ("policy_loss", "vanilla"): 16,
        ("policy_loss", "gpg"): 16,
        ("policy_loss", "gspo"): 16,
        ("policy_loss", "sapo"): 16,
        ("policy_loss", "cispo"): 16,
        ("policy_loss", "geo_mean"): 16,
        ("policy_loss", "dro"): 16,
        ("policy_loss", "dppo_tv"): 16,
        ("policy_loss", "dppo_kl"): 16,
        ("policy_loss", "clip_cov"): 8,
        ("policy_loss", "kl_cov"): 8,
        ("value_loss", "clipped"): 2,
        ("agg_loss", "token-mean"): 2,
        ("agg_loss", "seq-mean-token-sum"): 2,
        ("agg_loss", "seq-mean-token-mean"): 2,
        ("agg_loss", "seq-mean-token-sum-norm"): 2,
        ("kl_penalty", "k1"): 2,
        ("kl_penalty", "kl"): 2,
        ("kl_penalty", "abs"): 2,
        ("kl_penalty", "k2"): 2,
        ("kl_penalty", "mse"): 2,
        ("kl_penalty", "k3"): 2,
        ("kl_penalty", "low_var_kl"): 2,
    }


@pytest.mark.parametrize("case", cases("advantage", "remax"))
def test_remax_agrees_on_policy_tokens_and_keeps_zero_where_verl_keeps_the_return(
    case: dict[str, Any],
) -> None:
    batch = inputs(case)
    del batch["groups"]
    got = advantages.remax(**batch, baseline=torch.tensor(case["reward_baselines"]))
    assert_close(got.advantages, torch.tensor(case["advantages"]) * batch["mask"], VALUE)
    assert_close(got.returns, torch.tensor(case["returns"]), VALUE)


@pytest.mark.parametrize("case", cases("advantage", "grpo", "rloo", "opo", "gpg", "grpo_passk"))
def test_group_estimators_agree_except_on_groups_of_one(case: dict[str, Any]) -> None:
    batch = inputs(case)
    scaled = case["params"].get("norm_adv_by_std_in_grpo", True)
    estimator = getattr(advantages, case["name"] if scaled else "dr_grpo")
    got = estimator(**batch)
    expected = torch.tensor(case["advantages"])
    alone = siblings(batch, torch.ones_like(batch["mask"]))[:, 0] == 1
    assert_close(got.advantages[~alone], expected[~alone], VALUE)
    assert_close(got.returns, got.advantages, 0.0)
    # The documented difference: a lone session keeps its reward in verl (under gpg: scaled) and gets 0 here.
    assert torch.equal(got.advantages[alone], torch.zeros_like(expected[alone]))
    score = batch["token_rewards"].sum(-1, keepdim=True)
    scale = len(score) / (score != 0).sum() if case["name"] == "gpg" else 1.0
    assert_close(expected[alone], (scale * score * batch["mask"])[alone], VALUE)


@pytest.mark.parametrize("case", cases("advantage", "reinforce_plus_plus_baseline"))
def test_reinforce_plus_plus_baseline_agrees_except_that_a_lone_session_is_not_whitened(case: dict[str, Any]) -> None:
    batch = inputs(case)
    expected = torch.tensor(case["advantages"])
    alone = siblings(batch, torch.ones_like(batch["mask"]))[:, 0] == 1
    kept = {name: tensor[~alone] for name, tensor in batch.items()}
    got = advantages.reinforce_plus_plus_baseline(**batch).advantages
    assert torch.equal(got[~alone], advantages.reinforce_plus_plus_baseline(**kept).advantages)
    assert not got[alone].any()
    if not alone.any():
        assert_close(got, expected, VALUE)
    # In verl a lone session stands among the whitened with its whole reward, and moves all others.
    score = batch["token_rewards"].double().sum(-1, keepdim=True)
    centred = advantages.dr_grpo(**batch).advantages.double() + (score * batch["mask"]).where(alone[:, None], 0.0)
    assert_close(whiten(centred, batch["mask"] != 0, score.abs(), torch.float32).float(), expected, VALUE)


@pytest.mark.parametrize("case", cases("advantage", "reinforce_plus_plus"))
def test_reinforce_plus_plus_agrees(case: dict[str, Any]) -> None:
    batch = inputs(case)
    del batch["groups"]
    got = token_advantages.reinforce_plus_plus(**batch, **case["params"])
    assert_close(got.advantages, torch.tensor(case["advantages"]), VALUE)
    assert_close(got.returns, torch.tensor(case["returns"]), VALUE)


@pytest.mark.parametrize("case", cases("advantage", "gae"))
def test_gae_agrees_on_policy_tokens_and_keeps_zero_where_verl_keeps_whitened_numbers(case: dict[str, Any]) -> None:
    batch = inputs(case)
    del batch["groups"]
    got = token_advantages.gae(**batch, values=torch.tensor(case["values"]), **case["params"])
    mask, expected = batch["mask"], torch.tensor(case["advantages"])
    assert_close(got.advantages, expected * mask, VALUE)
    assert_close(got.returns, torch.tensor(case["returns"]) * mask, VALUE)
    assert (expected * (1 - mask)).any()


@pytest.mark.parametrize("case", cases("advantage", "optimal_token_baseline"))
def test_the_optimal_token_baseline_agrees_except_where_one_session_alone_reaches(case: dict[str, Any]) -> None:
    batch = inputs(case)
    mask, expected = batch["mask"], torch.tensor(case["advantages"])
    got = token_advantages.optimal_token_baseline(
        **batch,
        log_probs=torch.tensor(case["old_log_probs"]),
        sum_pi_squared=torch.tensor(case["sum_pi_squared"]),
    )
    assert_close(got.returns, torch.tensor(case["returns"]) * mask, VALUE)
    alone = (siblings(batch, mask) == 1) & (mask != 0)
    assert_close(got.advantages[~alone], expected[~alone], VALUE)
    # There verl's baseline is 0 and the token gets the raw return; here it gets 0, as a group of one.
    assert alone.any()
    assert not got.advantages[alone].any()
    assert_close(expected[alone], got.returns[alone], VALUE)


# ---- losses -----------------------------------------------------------------------------------------

OUR_NAMES = {"vanilla": "ppo_clip", "gpg": "policy_gradient", "kl": "k1", "mse": "k2", "low_var_kl": "k3"}
# What the reference calls our options; those of a selection are named by their loss.
THEIR_OPTIONS = {
    "clip_low": "clip_ratio_low",
    "clip_high": "clip_ratio_high",
    "dual_clip": "clip_ratio_c",
    "max_ratio": "clip_ratio_c",
    "tau_positive": "tau_pos",
    "tau_negative": "tau_neg",
    "beta": "dro_beta",
    "coef": "ppo_kl_coef",
    "cov_low": "clip_cov_lb",
    "cov_high": "clip_cov_ub",
}


@pytest.mark.parametrize("case", cases("policy_loss"))
def test_policy_losses_agree_in_value_and_gradient(case: dict[str, Any]) -> None:
    loss, gradient, _ = evaluate(case, selection(case))
    assert_close(loss, torch.tensor(case["loss"]), VALUE)
    assert_close(gradient, torch.tensor(case["grad_log_prob"]), GRADIENT)


@pytest.mark.parametrize("case", cases("policy_loss"))
def test_policy_losses_count_what_the_reference_counts(case: dict[str, Any]) -> None:
    tokens = sum(map(sum, case["response_mask"]))
    _, _, sums = evaluate(case, selection(case))
    got = {name: float(value) / tokens for name, value in sums.items()}
    expected = dict(case["metrics"])
    # Three documented differences: geo_mean counts where its clip changes the loss and not every ratio outside the
    # bounds, clip_cov counts what is selected apart from what is clipped, and old_kl has a sign in kl_cov too.
    if case["name"] == "geo_mean":
        outside = expected.pop("actor/pg_clipfrac") + expected.pop("actor/pg_clipfrac_lower")
        assert got["clipped"] < outside
    if case["name"] == "clip_cov":
        assert got["selected"] == pytest.approx(expected.pop("actor/pg_clipfrac"), abs=VALUE)
    if case["name"] == "kl_cov":
        assert abs(got["old_kl"]) < expected.pop("actor/ppo_kl")
    if case["name"].startswith("dppo"):
        assert expected.pop("actor/pg_clipfrac_lower") == 0
    ours = {"actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "dual_clipped", "actor/ppo_kl": "old_kl"}
    for theirs, value in expected.items():
        assert got.get(ours[theirs], 0.0) == pytest.approx(value, abs=VALUE)


@pytest.mark.parametrize("case", cases("policy_loss", "clip_cov"))
def test_clip_cov_draws_as_many_tokens_from_the_same_candidates_as_the_reference(case: dict[str, Any]) -> None:
    ours, theirs = (int(chosen.sum()) for chosen in (own_selection(case), selection(case)))
    candidates = own_selection(case, share=1.0)
    assert ours == theirs
    assert not (selection(case) & ~candidates).any()
    assert not (own_selection(case) & ~candidates).any()


@pytest.mark.parametrize("case", cases("agg_loss"))
def test_aggregations_agree(case: dict[str, Any]) -> None:
    mask = torch.tensor(case["loss_mask"])
    assert_close(aggregated(torch.tensor(case["loss_mat"]), mask, case["name"]), torch.tensor(case["loss"]), VALUE)


@pytest.mark.parametrize("case", cases("kl_penalty"))
def test_kl_estimators_agree(case: dict[str, Any]) -> None:
    log_probs = torch.tensor(case["log_prob"])
    got = kl_penalty(
        OUR_NAMES.get(case["name"], case["name"]),
        log_probs=log_probs,
        ref_log_probs=torch.tensor(case["ref_log_prob"]),
        mask=torch.ones_like(log_probs),
    )
    assert_close(got, torch.tensor(case["kl"]), VALUE)


@pytest.mark.parametrize("case", cases("value_loss"))
def test_the_value_loss_agrees(case: dict[str, Any]) -> None:
    mask = torch.tensor(case["response_mask"])
    got = value_loss(
        values=torch.tensor(case["vpreds"]),
        old_values=torch.tensor(case["values"]),
        returns=torch.tensor(case["returns"]),
        mask=mask,
        clip=case["cliprange_value"],
    )
    assert_close(aggregated(got.loss, mask, "token-mean"), torch.tensor(case["loss"]), VALUE)
    assert float(got.metrics["clipped"] / mask.sum()) == pytest.approx(case["clipfrac"], abs=VALUE)


def evaluate(case: dict[str, Any], selected: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, gradient by log_probs, and metrics."""
    needs = LOSSES[OUR_NAMES.get(case["name"], case["name"])]
    batch = tensors(case)
    log_probs = batch["log_probs"].requires_grad_()
    weights = case["rollout_is_weights"]
    token_loss: TokenLoss = import_object(needs.function, "loss")(
        **batch,
        weights=None if weights is None else torch.tensor(weights),
        **theirs(case, needs.options),
        **({"selected": selected} if needs.needs_batch else {}),
    )
    # The reference lets gspo be aggregated otherwise too; the other two it aggregates as we demand.
    forced = "" if case["name"] == "gspo" else needs.aggregation
    loss = aggregated(token_loss.loss, batch["mask"], forced or case["loss_agg_mode"])
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.detach(), gradient, token_loss.metrics


def selection(case: dict[str, Any]) -> Tensor:
    """The tokens that the reference treated apart; where it drew at random, those that its gradient leaves out."""
    if case["name"] != "clip_cov":
        return own_selection(case)
    nothing = torch.zeros(torch.tensor(case["log_prob"]).shape, dtype=torch.bool)
    _, gradient, _ = evaluate(case, nothing)
    return (torch.tensor(case["grad_log_prob"]) == 0) & (gradient != 0)


def own_selection(case: dict[str, Any], **changes: float) -> Tensor:
    """The tokens that we treat apart."""
    needs = LOSSES[OUR_NAMES.get(case["name"], case["name"])].needs_batch
    batch = tensors(case)
    if needs is None:
        return torch.zeros(batch["mask"].shape, dtype=torch.bool)
    given: dict[str, Any] = {**batch, "row_ids": torch.arange(len(batch["mask"])), "seed": 0}
    options = theirs(case, needs.options) | {"share": case["params"]["policy_loss"][f"{case['name']}_ratio"]} | changes
    chosen: Tensor = import_object(needs.function, "selection")(
        **{name: given[name] for name in needs.inputs}, **options
    )
    return chosen


def theirs(case: dict[str, Any], options: Iterable[str]) -> dict[str, float]:
    params = case["params"] | case["params"]["policy_loss"]
    return {name: params[THEIR_OPTIONS[name]] for name in options if name in THEIR_OPTIONS}


def tensors(case: dict[str, Any]) -> dict[str, Tensor]:
    return {
        "log_probs": torch.tensor(case["log_prob"]),
        "old_log_probs": torch.tensor(case["old_log_prob"]),
        "advantages": torch.tensor(case["advantages"]),
        "mask": torch.tensor(case["response_mask"]),
    }


def aggregated(loss: Tensor, mask: Tensor, mode: str) -> Tensor:
    return aggregate(
        loss,
        mask,
        mode,
        token_count=int(mask.sum()),
        sequence_count=int(mask.any(-1).sum()),
        horizon=mask.shape[1],
    )
