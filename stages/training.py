"""How the policy is trained: options alone, so that a configuration is checked without torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from dataflow.stage import StageConfig
from stages.algorithms.catalog import AGGREGATIONS, LOSSES
from stages.names import known

# What engine and learner call the device that they take turns on.
ENGINE_AND_LEARNER = "engine and learner"


class TrainingConfig(StageConfig):
    """What a user sets of the training."""

    loss: str = "ppo_clip"
    """Policy loss: `ppo_clip` or `policy_gradient`."""
    loss_options: dict[str, float] = {}
    """Options of the loss: clip_low, clip_high, dual_clip."""
    aggregation: str = "token-mean"
    """How token losses become one number: token-mean, token-sum, seq-mean-token-sum, -mean, -sum-norm."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Momentum terms of AdamW."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of AdamW."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest norm of the gradient."""
    mini_batches: int = Field(1, ge=1)
    """Optimiser steps per pass over a window; groups are kept whole."""
    epochs: int = Field(1, ge=1)
    """Passes over a window."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Most tokens in one forward pass, padding included; decides memory, not results."""
    threads: int = Field(1, ge=1)
    """CPU threads; with one, results are the same bit for bit."""

    @model_validator(mode="after")
    def _known_names(self) -> Any:
        known(self.loss, LOSSES, "losses", "loss: ")
        known(self.aggregation, AGGREGATIONS, "aggregations", "aggregation: ")
        for option in self.loss_options:
            known(option, LOSSES[self.loss].options, f"options of {self.loss}", "loss_options: ")
        return self


class LearnerConfig(TrainingConfig):
    """What a learner needs beside: the model, and what the rollout was told."""

    model: str
    """Directory of the initial model."""
    dtype: str = "float32"
    """Type of the published weights and of the arithmetic, float32 or bfloat16; the trained ones are float32."""
    device: str = "cpu"
    """cpu or cuda."""
    horizon: int = 64
    """Longest possible response in tokens; the divisor of seq-mean-token-sum-norm."""
    temperature: float = 1.0
    """Temperature of the sampled rows; the learner divides its logits by the same."""
