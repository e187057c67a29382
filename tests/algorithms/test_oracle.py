"""Our functions against values that the public package verl 0.9.1 computed on random inputs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stages.algorithms import advantages, losses, token_advantages
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
        ("agg_loss", "token-mean"): 2,
        ("agg_loss", "seq-mean-token-sum"): 2,
        ("agg_loss", "seq-mean-token-mean"): 2,
        ("agg_loss", "seq-mean-token-sum-norm"): 2,
        ("kl_penalty", "k1"): 2,
        ("kl_penalty", "k2"): 2,
        ("kl_penalty", "k3"): 2,
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


@pytest.mark.parametrize("case", cases("policy_loss"))
def test_policy_losses_agree_in_value_gradient_and_metrics(case: dict[str, Any]) -> None:
    log_probs = torch.tensor(case["log_prob"], requires_grad=True)
    mask = torch.tensor(case["response_mask"])
    batch = {
        "old_log_probs": torch.tensor(case["old_log_prob"]),
        "advantages": torch.tensor(case["advantages"]),
        "mask": mask,
    }
    if case["name"] == "vanilla":
        params = case["params"]
        token_loss = losses.ppo_clip(
            log_probs=log_probs,
            **batch,
            clip_low=params["clip_ratio_low"],
            clip_high=params["clip_ratio_high"],
            dual_clip=params["clip_ratio_c"],
        )
    else:
        token_loss = losses.policy_gradient(log_probs=log_probs, **batch)
    tokens = int(mask.sum())
    weights = 1.0 if case["rollout_is_weights"] is None else torch.tensor(case["rollout_is_weights"])
    loss = losses.aggregate(
        token_loss.loss * weights,
        mask,
        case["loss_agg_mode"],
        tokens=tokens,
        sequences=int(mask.any(-1).sum()),
        horizon=mask.shape[1],
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert_close(loss.detach(), torch.tensor(case["loss"]), VALUE)
    assert_close(gradient, torch.tensor(case["grad_log_prob"]), GRADIENT)
    ours = {
        "actor/pg_clipfrac": "clipped",
        "actor/pg_clipfrac_lower": "dual_clipped",
        "actor/ppo_kl": "old_kl",
    }
    for theirs, expected in case["metrics"].items():
        assert float(token_loss.metrics[ours[theirs]]) / tokens == pytest.approx(expected, abs=VALUE)


@pytest.mark.parametrize("case", cases("agg_loss"))
def test_aggregations_agree(case: dict[str, Any]) -> None:
    mask = torch.tensor(case["loss_mask"])
    got = losses.aggregate(
        torch.tensor(case["loss_mat"]),
        mask,
        case["name"],
        tokens=int(mask.sum()),
        sequences=int(mask.any(-1).sum()),
        horizon=mask.shape[1],
    )
    assert_close(got, torch.tensor(case["loss"]), VALUE)


@pytest.mark.parametrize("case", cases("kl_penalty"))
def test_kl_estimators_agree(case: dict[str, Any]) -> None:
    log_probs = torch.tensor(case["log_prob"])
    estimator = getattr(losses, case["name"])
    got = estimator(
        log_probs=log_probs, ref_log_probs=torch.tensor(case["ref_log_prob"]), mask=torch.ones_like(log_probs)
    )
    assert_close(got, torch.tensor(case["kl"]), VALUE)
