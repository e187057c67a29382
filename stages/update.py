"""Update: one training event per window, and the publication of the weights that come of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dataflow.batch import Batch
from dataflow.stage import Stage, StageConfig, StageContext
from dataflow.weights import WeightsDirectory
from schemas.catalog import columns
from stages.models import local_model
from stages.training import ENGINE_AND_LEARNER, CriticConfig, LearnerConfig

if TYPE_CHECKING:
    from stages.scoring import TokenRow


class UpdateConfig(StageConfig):
    """Options of the update."""

    learner: LearnerConfig
    """What is trained, and how."""
    critic: CriticConfig | None = None
    """How the critic is trained beside it; none where the estimator needs no values."""
    save_model: bool = True
    """Write the trained model to RUN/model at the end."""
    gpu_share: float = 0.5
    """Share of a GPU that the learner takes."""
    colocate: bool = False
    """Whether the learner shares its device with the engines, and takes turns."""


class Update(Stage):
    """Trains on a whole window in canonical order, whatever the order in which it was filled. Has one owner."""

    Config = UpdateConfig
    name = "update"
    granularity = "window"
    writes = columns("trained_version")
    one_owner = True
    deadline_s = 3600.0
    placement = None
    config: UpdateConfig

    def __init__(self, config: UpdateConfig) -> None:
        super().__init__(config)
        self._per_token = (
            "rollout_log_probs",
            "advantages",
            *(("ref_log_probs",) if config.learner.reads_ref_log_probs else ()),
            *(("values", "returns") if config.critic is not None else ()),
        )
        versions = ("policy_version_min", "policy_version_max")
        self.reads = ("prompt_ids", "response_ids", "response_mask", *versions, *self._per_token)
        if config.colocate:
            self.device = ENGINE_AND_LEARNER
        if config.learner.device != "cpu":
            self.num_gpus = config.gpu_share

    def setup(self, context: StageContext) -> None:
        """Load the model and make the weight files' directory."""
        from stages.learner import Learner

        self._run_dir = Path(context.run_dir)
        self._weights = WeightsDirectory(context.run_id)
        self._weights.create()
        model = local_model(self.config.learner.model)
        learner = self.config.learner.model_copy(update={"model": model})
        self._learner = Learner(learner, self._weights)
        self._critic = None
        if self.config.critic is not None:
            from stages.critic import Critic

            self._critic = Critic(self.config.critic, model, learner.dtype, learner.device, learner.micro_batch_tokens)

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Train on the window's rows, publish the new version, and drop files that no engine needs."""
        version = self._learner.version
        rows = self._rows(batch)
        metrics = self._learner.update(rows)
        others = {}
        if self._critic is not None:
            metrics |= self._critic.update(rows)
            others["critic"] = self._critic.values.save
        staleness = [version - oldest for oldest in batch["policy_version_min"]]
        metrics |= {"staleness/max": float(max(staleness)), "staleness/mean": float(np.mean(staleness))}
        metrics["policy_version"] = float(self._learner.version)
        batch.report(metrics)
        batch.publish(self._learner.publish(others))
        self._weights.discard_before(min(batch.oldest_loaded, version))
        return {"trained_version": [self._learner.version] * len(batch)}

    def _rows(self, batch: Batch) -> list[TokenRow]:
        from stages.scoring import TokenRow

        version = self._learner.version
        return [
            TokenRow(
                prompt_ids=batch["prompt_ids"][row],
                response_ids=batch["response_ids"][row],
                mask=batch["response_mask"][row],
                values={name: batch[name][row] for name in self._per_token},
                group=unit.uid,
                session=unit.id,
                current=batch["policy_version_min"][row] == batch["policy_version_max"][row] == version,
            )
            for row, unit in enumerate(batch.units)
        ]

    def suspend(self) -> None:
        """Move the learner to the host's memory, so that the engines can have the device."""
        self._move("cpu")

    def resume(self) -> None:
        """Move the learner back to the device."""
        self._move(self.config.learner.device)

    def _move(self, device: str) -> None:
        import torch

        self._learner.move(device)
        if self._critic is not None:
            self._critic.trained.move(device)
        torch.cuda.empty_cache()  # what the allocator keeps, no other process can have

    def close(self) -> None:
        """Save the trained model, and remove the weight files."""
        if self.config.save_model and self._learner.version:
            # Under another name first: what is called `model` is whole.
            partial = self._run_dir / "model.partial"
            self._learner.save(partial)
            note = json.dumps({"policy_version": self._learner.version})
            (partial / "policy_version.json").write_text(note + "\n", encoding="utf-8")
            partial.rename(self._run_dir / "model")
        self._weights.remove()
