"""Options of the training: what is filled in, and which contradictions are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from stages.algorithms.catalog import LOSSES
from stages.algorithms.rules import Rejection, WeightRule
from stages.training import LearnerConfig, TrainingConfig

REQUIRED: dict[str, dict[str, float]] = {"dro": {"beta": 0.1}}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_can_be_configured_and_its_defaults_are_shown(loss: str) -> None:
    config = TrainingConfig(loss=loss, loss_options=REQUIRED.get(loss, {}))
    assert config.loss_options == {**LOSSES[loss].all_options, **REQUIRED.get(loss, {})}
    assert config.aggregation == (LOSSES[loss].aggregation or "token-mean")


def test_a_set_option_stays_beside_the_defaults() -> None:
    assert TrainingConfig(loss_options={"clip_high": 0.28}).loss_options == {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 3.0,
    }


def test_a_resolved_configuration_reads_as_it_was_written() -> None:
    written = TrainingConfig(
        loss="gspo",
        kl_loss={"coef": 0.01, "kind": "k3+"},
        entropy_coef=0.001,
        old_log_probs="recomputed",
        correction={"weights": {"mode": "mask", "low": 0.5}, "reject": [{"kind": "k1", "level": "token", "high": 3.0}]},
    )
    read = LearnerConfig(model="m", **written.model_dump())
    assert {name: getattr(read, name) for name in TrainingConfig.model_fields} == dict(written)
    assert read.correction is not None
    assert read.correction.weights is not None
    assert read.correction.weights.rule() == WeightRule("sequence", "mask", 2.0, 0.5, False)
    assert [rule.rule() for rule in read.correction.reject] == [Rejection("k1", "token", 3.0)]


@pytest.mark.parametrize("options", [{"loss": "policy_gradient"}, {"old_log_probs": "recomputed"}])
def test_importance_weights_go_with_a_ratio_that_does_not_hold_them_already(options: dict[str, str]) -> None:
    assert TrainingConfig(**options, correction={"weights": {}}).correction is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "vanilla"}, "loss: unknown name 'vanilla'.*the losses are: ppo_clip, policy_gradient, gspo"),
        ({"loss_options": {"clip": 0.1}}, "unknown name 'clip'; .*options of ppo_clip are: clip_low, clip_high"),
        ({"loss": "gspo", "loss_options": {"dual_clip": 3.0}}, "unknown name 'dual_clip'.*options of gspo"),
        ({"loss": "dro"}, "loss_options: dro has no default for 'beta'; set it"),
        ({"loss_options": 3}, "loss_options\n.*valid dictionary"),
        ({"loss": "gspo", "aggregation": "token-mean"}, "gspo is defined with 'seq-mean-token-mean', got 'token-mean'"),
        ({"kl_loss": {"kind": "kl"}}, "kind: unknown name 'kl'.*the kinds of KL are: k1, abs, k2, k3"),
        ({"kl_loss": {"coef": 0.0}}, "kl_loss.coef\n.*greater than 0"),
        ({"entropy_coef": -0.1}, "entropy_coef\n.*greater than or equal to 0"),
        ({"old_log_probs": "rollout"}, "old_log_probs\n.*'engine' or 'recomputed'"),
        ({"correction": {}}, "correction\n.*neither weights nor reject"),
        ({"correction": {"weights": {}}}, "ppo_clip weighs each token.*twice; set old_log_probs: recomputed"),
        ({"correction": {"weights": {"low": 0.5}}}, "correction.weights\n.*'truncate' has no lower bound"),
        ({"correction": {"weights": {"hgih": 2}}}, "correction.weights.hgih\n.*[Ee]xtra"),
        (
            {"correction": {"reject": [{"kind": "k1", "level": "seq_max", "high": 2.0}]}},
            "correction.reject.0\n.*use k2 or k3 with seq_max",
        ),
    ],
)
def test_a_contradiction_is_refused_with_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainingConfig(**options)
