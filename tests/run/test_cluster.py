"""Whole runs on a real local cluster: Ray, TransferQueue, and vLLM or transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import dataflow
from tests.run.conftest import Run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
SMALL = ["data.prompts_per_window=8", "rollout.n=4"]


@pytest.mark.vllm
def test_remax_trains_through_vllm_on_a_live_queue(start: Callable[..., Run], prompts: Path, count_stage: Path) -> None:
    run = start(
        *SMALL, "windows=4", f"data.train={prompts}", "data.prompts_per_window=6",
        f'stages=[{{use: "{count_stage.name}:count_words"}}]',
    )  # fmt: skip
    assert run.finish() == 0, "\n".join(run.lines)
    ledger = run.ledger()
    assert ledger["balanced"]
    assert ledger["settled"] == {"sampled trained": 96, "baseline used as baseline": 24}
    assert all(metrics["mismatch/max_abs"] < 1e-4 for metrics in run.metrics())
    assert [metrics["staleness/max"] for metrics in run.metrics()] == [0.0] * 4
    table = dataflow.connect(run.directory).table("train/000003")
    greedy = table.filter(table["is_baseline"])
    assert all(json.loads(text)["temperature"] == 0.0 for text in greedy["sampling"].to_pylist())
    assert set(table["policy_version_min"].to_pylist()) == {3}
    assert table["response_words"].null_count == 0
    assert (run.directory / "model" / "model.safetensors").is_file()
    assert not [process for process in psutil.process_iter(["cmdline"]) if "EngineCore" in str(process.info["cmdline"])]
