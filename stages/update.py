"""Update: one training event per window, and the publication of the weights that come of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataflow.batch import Batch
from dataflow.stage import Stage, StageConfig, StageContext
from dataflow.weights import WeightsDirectory
from schemas.catalog import columns
from stages.models import local_model
from stages.training import ENGINE_AND_LEARNER, LearnerConfig


class UpdateConfig(StageConfig):
    """Options of the update."""

    learner: LearnerConfig
    """What is trained, and how."""
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
    reads = (
        "prompt_ids",
        "response_ids",
        "response_mask",
        "rollout_log_probs",
        "advantages",
        "policy_version_min",
        "policy_version_max",
    )
    writes = columns("trained_version")
    one_owner = True
    deadline_s = 3600.0
    placement = None
    config: UpdateConfig

    def __init__(self, config: UpdateConfig) -> None:
        super().__init__(config)
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
        self._learner = Learner(self.config.learner.model_copy(update={"model": model}), self._weights)

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Train on the window's rows, publish the new version, and drop files that no engine needs."""
        from stages.learner import TrainRow

        version = self._learner.version
        rows = [
            TrainRow(
                group=unit.uid,
                prompt_ids=batch["prompt_ids"][row],
                response_ids=batch["response_ids"][row],
                mask=batch["response_mask"][row],
                rollout_log_probs=batch["rollout_log_probs"][row],
                advantages=batch["advantages"][row],
                current=batch["policy_version_min"][row] == batch["policy_version_max"][row] == version,
            )
            for row, unit in enumerate(batch.units)
        ]
        metrics = self._learner.update(rows)
        staleness = [version - oldest for oldest in batch["policy_version_min"]]
        metrics |= {"staleness/max": float(max(staleness)), "staleness/mean": float(np.mean(staleness))}
        metrics["policy_version"] = float(self._learner.version)
        batch.report(metrics)
        batch.publish(self._learner.publish())
        self._weights.discard_before(min(batch.oldest_loaded, version))
        return {"trained_version": [self._learner.version] * len(batch)}

    def suspend(self) -> None:
        """Move the learner to the host's memory, so that the engines can have the device."""
        self._learner.offload()

    def resume(self) -> None:
        """Move the learner back to the device."""
        self._learner.reload()

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
