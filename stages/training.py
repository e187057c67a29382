"""How the policy is trained: options alone, so that a configuration is checked without torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from dataflow.stage import StageConfig
from stages.algorithms.catalog import AGGREGATIONS, KL_KINDS, LOSSES
from stages.algorithms.rules import Rejection, WeightRule
from stages.names import known

# What engine and learner call the device that they take turns on.
ENGINE_AND_LEARNER = "engine and learner"


class KlLossConfig(StageConfig):
    """A penalty on the distance to the reference policy, as a term of the loss."""

    coef: float = Field(0.001, gt=0)
    """Coefficient of the penalty."""
    kind: str = "k3"
    """Estimate of the KL: k1, abs, k2, k3; k1+, abs+, k3+ with the gradient of k2."""

    @model_validator(mode="after")
    def _known_kind(self) -> Any:
        known(self.kind, KL_KINDS, "kinds of KL", "kind: ")
        return self


class WeightsConfig(StageConfig):
    """Importance weights of tokens that another policy drew."""

    level: str = WeightRule.level
    """token: one weight for each token; sequence: one for all tokens of a session."""
    mode: str = WeightRule.mode
    """truncate: at most `high`; mask: 0 outside [low, high]."""
    high: float = WeightRule.high
    """Upper bound, at least 1."""
    low: float = WeightRule.low
    """Lower bound of `mask`, at most 1."""
    normalise: bool = WeightRule.normalise
    """Divide by the mean of the weights, over tokens or sessions."""

    @model_validator(mode="after")
    def _possible(self) -> Any:
        self.rule()
        return self

    def rule(self) -> WeightRule:
        """What `stages.algorithms.correction.importance_weights` takes."""
        return WeightRule(**self.model_dump())


class RejectionConfig(StageConfig):
    """Tokens or whole sessions that leave the loss, because another policy drew them."""

    kind: str
    """Estimate of the distance: k1 (bounded on both sides), k2, k3."""
    level: str
    """token; or seq_sum, seq_mean, seq_max, by which whole sessions stay or leave."""
    high: float
    """k1: largest ratio of the rollout policy to the trained one; k2, k3: largest distance, nats."""
    low: float | None = None
    """k1: smallest ratio; default 1 / high."""

    @model_validator(mode="after")
    def _possible(self) -> Any:
        self.rule()
        return self

    def rule(self) -> Rejection:
        """What `stages.algorithms.correction.rejection_mask` takes."""
        return Rejection(**self.model_dump())


class CorrectionConfig(StageConfig):
    """What is done about tokens that another policy than the trained one drew."""

    weights: WeightsConfig | None = None
    """Importance weights."""
    reject: list[RejectionConfig] = []
    """Rules that a token has to pass, all of them, to be trained on."""

    @model_validator(mode="after")
    def _does_something(self) -> Any:
        if self.weights is None and not self.reject:
            raise ValueError("it has neither weights nor reject, so it corrects nothing; set one, or leave it out")
        return self


class CriticConfig(StageConfig):
    """The critic, for estimators that need values."""

    lr: float = Field(1e-5, gt=0)
    """Learning rate of AdamW; a critic usually takes larger steps than the policy."""
    epochs: int = Field(1, ge=1)
    """Optimiser steps per update."""
    clip: float = Field(0.5, gt=0)
    """How far a value may move from the one that the advantages were computed with, before it earns no more."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest norm of the gradient."""


class LoraConfig(StageConfig):
    """Low-rank adapters in place of training all weights."""

    rank: int = Field(16, ge=1)
    """Rank of each adapter."""
    alpha: int = Field(32, ge=1)
    """Scale: the adapter's product is multiplied by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """Names of the modules that get one, or `all-linear`."""


class TrainingConfig(StageConfig):
    """What a user sets of the training."""

    loss: str = "ppo_clip"
    """Policy loss: ppo_clip, policy_gradient, gspo, sapo, cispo, geo_mean, dro, dppo_tv, dppo_kl, clip_cov, kl_cov."""
    loss_options: dict[str, float] = {}
    """Options of the loss; what is not set has the default of docs/algorithms.md."""
    entropy_coef: float = Field(0.0, ge=0)
    """Coefficient of the mean entropy, which the loss rewards."""
    kl_loss: KlLossConfig | None = None
    """Penalty on the distance to the reference policy: {coef, kind}."""
    old_log_probs: Literal["engine", "recomputed"] = "engine"
    """Whose policy the ratio is to: that of the engine's tokens, or the learner's before the update, recomputed."""
    correction: CorrectionConfig | None = None
    """Off-policy correction: {weights: {level, mode, high, low, normalise}, reject: [{kind, level, high, low}]}."""
    aggregation: str = "token-mean"
    """How token losses become one number: token-mean, token-sum, seq-mean-token-sum, -mean, -sum-norm.

    The default is token-mean, or the one that the loss is defined with.
    """
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
    lora: LoraConfig | None = None
    """Train low-rank adapters alone, {rank, alpha, target_modules}; engines get the merged weights. Needs peft."""

    @model_validator(mode="before")
    @classmethod
    def _as_the_loss_has_it(cls, values: Any) -> Any:
        """Fill in the loss's options and aggregation, so that a resolved configuration shows all that applies."""
        needs = LOSSES.get(values.get("loss", "ppo_clip")) if isinstance(values, dict) else None
        if needs is None:
            return values
        options = values.get("loss_options", {})
        if isinstance(options, dict):
            options = {name: value for name, value in needs.all_options.items() if value is not None} | options
        filled = {"aggregation": needs.aggregation} if needs.aggregation else {}
        return filled | values | {"loss_options": options}

    @model_validator(mode="after")
    def _consistent(self) -> Any:
        known(self.loss, LOSSES, "losses", "loss: ")
        known(self.aggregation, AGGREGATIONS, "aggregations", "aggregation: ")
        needs = LOSSES[self.loss]
        for option in self.loss_options:
            known(option, needs.all_options, f"options of {self.loss}", "loss_options: ")
        missing = [option for option in needs.all_options if option not in self.loss_options]
        if missing:
            raise ValueError(f"loss_options: {self.loss} has no default for {missing[0]!r}; set it")
        if needs.aggregation not in ("", self.aggregation):
            raise ValueError(
                f"aggregation: {self.loss} is defined with {needs.aggregation!r}, got {self.aggregation!r}; set it to "
                f"{needs.aggregation!r} or leave it out, or choose another loss"
            )
        weights = self.correction is not None and self.correction.weights is not None
        if weights and needs.ratio and self.old_log_probs == "engine":
            raise ValueError(
                f"correction.weights: {self.loss} weighs each token by its ratio to the engine's policy already, and "
                "weights would count that ratio twice; set old_log_probs: recomputed, or leave the weights out"
            )
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
    seed: int = 0
    """The run's seed, for losses that choose tokens at random."""

    @property
    def reads_ref_log_probs(self) -> bool:
        """Whether its rows have to bring the reference's log-probabilities; without its adapter, the model has them."""
        return self.kl_loss is not None and self.lora is None

    @property
    def looks_first(self) -> bool:
        """Whether the rows have to be scored before the first step."""
        several = self.epochs * self.mini_batches > 1
        adapter_off = self.lora is not None and self.kl_loss is not None
        return several or adapter_off or self.correction is not None or self.old_log_probs == "recomputed"
