"""Engine and learner on one device: what the two stages do when they give it away and take it again."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.stage import StageContext
from dataflow.testing import make_batch
from dataflow.waits import Waits
from dataflow.weights import WeightsDirectory
from stages.learner import Learner
from stages.rollout import Rollout, RolloutConfig
from stages.scoring import TokenRow
from stages.training import LearnerConfig
from stages.update import Update, UpdateConfig


def test_colocated_stages_name_one_device_and_others_none(tiny_model: Path) -> None:
    learner = {"model": str(tiny_model)}
    stages = [
        (Rollout(RolloutConfig(model=str(tiny_model), colocate=on)), Update(UpdateConfig(learner=learner, colocate=on)))
        for on in (True, False)
    ]

    (rollout, update), apart = stages
    assert rollout.device == update.device is not None
    assert [stage.device for stage in apart] == [None, None]


def test_sessions_of_a_suspended_rollout_wait_by_name_and_are_answered_when_it_resumes(tiny_model: Path) -> None:
    config = RolloutConfig(engine="hf", model=str(tiny_model), max_tokens=6, max_model_len=24, colocate=True)
    batch = make_batch([{"uid": uid, "prompt_ids": [3, 4, 5]} for uid in ("0-a", "0-b")])
    waits = Waits()

    async def roll(stage: Rollout) -> dict[str, Any]:
        return {unit.id: outcome async for unit, outcome in stage.process(batch)}

    async def run() -> tuple[dict[str, Any], list[str], dict[str, Any]]:
        stage = Rollout(config)
        await stage.setup(StageContext("run", Path("."), "rollout-0", seed=7, waits=waits))
        try:
            before = await roll(stage)
            await stage.suspend()
            rolling = asyncio.create_task(roll(stage))
            for _ in range(9):  # both sessions are asked for by then
                await asyncio.sleep(0)
            subjects = [wait.subject for wait in waits.open()]
            await stage.resume()
            return before, subjects, await rolling
        finally:
            await stage.close()

    before, subjects, after = asyncio.run(run())

    assert subjects == [f"request {unit.id}: engine rollout-0 is asleep" for unit in batch.units]
    assert after == before


@pytest.fixture
def weights() -> Iterator[WeightsDirectory]:
    directory = WeightsDirectory(f"test-{uuid.uuid4().hex}")
    directory.create()
    yield directory
    directory.remove()


def test_a_learner_that_was_away_from_its_device_goes_on_where_it_was(
    tiny_model: Path, weights: WeightsDirectory
) -> None:
    ids, ones = np.array([3, 4, 5], np.int32), np.ones(3, np.float32)
    rows = [TokenRow(ids, ids, ones, {"rollout_log_probs": -ones, "advantages": ones})]
    stayed, moved = (Learner(LearnerConfig(model=str(tiny_model), lr=1e-3), weights) for _ in range(2))

    for learner in (stayed, moved):
        learner.update(rows)
    moved.move("cpu")
    assert all(parameter.grad is None for parameter in moved.model.parameters())
    moved.move("cpu")
    metrics = [learner.update(rows) for learner in (stayed, moved)]

    assert metrics[0] == metrics[1]
    for name, tensor in stayed.model.state_dict().items():
        assert torch.equal(tensor, moved.model.state_dict()[name]), name
