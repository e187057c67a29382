"""Stages that look at each response with a model: the critic's values, and the reference's log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from dataflow.batch import Batch
from dataflow.stage import Stage, StageConfig, StageContext
from schemas.catalog import columns
from stages.models import local_model


class ScoringConfig(StageConfig):
    """Options of a stage that looks at responses with a model."""

    model: str
    """Model directory, or a hub id that is on this machine."""
    dtype: str = "float32"
    """Type of the arithmetic, float32 or bfloat16."""
    device: str = "cpu"
    """cpu or cuda."""
    gpu_share: float = 0.5
    """Share of a GPU that the stage takes."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Most tokens in one forward pass, padding included."""
    temperature: float = 1.0
    """Temperature of the sampled rows; logits are divided by the same."""
    threads: int = Field(1, ge=1)
    """CPU threads."""


class ScoringStage(Stage):
    """Base of the stages that look at responses with a model of their own, all in one process on a CPU."""

    Config = ScoringConfig
    reads = ("prompt_ids", "response_ids", "response_mask")
    baselines = False
    placement = "scoring"
    config: ScoringConfig

    def __init__(self, config: ScoringConfig) -> None:
        super().__init__(config)
        if config.device != "cpu":
            self.num_gpus = config.gpu_share

    def rows(self, batch: Batch) -> list[Any]:
        """The batch as rows to score."""
        from stages.scoring import TokenRow

        read = (batch[name] for name in ("prompt_ids", "response_ids", "response_mask"))
        return [TokenRow(*values) for values in zip(*read, strict=True)]


class Values(ScoringStage):
    """Writes `values` by the newest critic that the update has published; before the first, every value is 0."""

    name = "values"
    writes = columns("values")
    loads_weights = True

    def setup(self, context: StageContext) -> None:
        """Load the model that the critic starts from."""
        import torch

        from stages.critic import ValueModel

        config = self.config
        torch.set_num_threads(config.threads)
        self._critic = ValueModel(local_model(config.model), config.dtype, config.device)

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Value the responses of a batch."""
        if batch.weights is not None and batch.weights.version > self.loaded_version:
            self._critic.load(batch.weights.others["critic"])
            self.loaded_version = batch.weights.version
        return {"values": self._critic.score(self.rows(batch), self.config.micro_batch_tokens)}


class RefLogProbs(ScoringStage):
    """Writes `ref_log_probs`, at the sampling temperature, for the KL penalty."""

    name = "ref_log_probs"
    writes = columns("ref_log_probs")

    def setup(self, context: StageContext) -> None:
        """Load the initial policy."""
        self._model = _policy(self.config)

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Score the responses of a batch."""
        import torch

        from stages.scoring import chosen_log_probs, micro_batches, precision, response_logits, unpad

        config, rows, parts = self.config, self.rows(batch), []
        with torch.no_grad(), precision(config.device, config.dtype):
            for micro in micro_batches(rows, config.micro_batch_tokens, config.device):
                parts.append((micro, chosen_log_probs(response_logits(self._model, micro, config.temperature), micro)))
        return {"ref_log_probs": unpad(parts, len(rows))}


class SumPiSquared(ScoringStage):
    """Writes `sum_pi_squared`, at the sampling temperature, by the newest policy that the update has published.

    With staleness that may be a later policy than the one that drew the tokens.
    """

    name = "sum_pi_squared"
    writes = columns("sum_pi_squared")
    loads_weights = True

    def setup(self, context: StageContext) -> None:
        """Load the initial policy."""
        self._model = _policy(self.config)

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Score the responses of a batch."""
        import torch
        from safetensors.torch import load_file

        from stages.scoring import micro_batches, precision, response_logits, unpad

        config, rows, parts = self.config, self.rows(batch), []
        if batch.weights is not None and batch.weights.version > self.loaded_version:
            # Tied parameters are in the file once, so some names are missing by design; none may be unknown.
            unknown = self._model.load_state_dict(load_file(batch.weights.path), strict=False).unexpected_keys
            if unknown:
                raise ValueError(
                    f"{batch.weights.path} has parameters that the model has not: {', '.join(unknown[:5])}"
                )
            self.loaded_version = batch.weights.version
        with torch.no_grad(), precision(config.device, config.dtype):
            for micro in micro_batches(rows, config.micro_batch_tokens, config.device):
                logits = response_logits(self._model, micro, config.temperature)
                parts.append((micro, torch.softmax(logits, -1).square().sum(-1)))
        return {"sum_pi_squared": unpad(parts, len(rows))}


def _policy(config: ScoringConfig) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(config.threads)
    model = AutoModelForCausalLM.from_pretrained(local_model(config.model), dtype=torch.float32)
    return model.to(config.device).eval()
