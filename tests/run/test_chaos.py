"""One storm of faults over the real thing: Ray, TransferQueue and vLLM, with `kill -9` among them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dataflow.testing.faults import struck_faults

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]


def test_a_storm_over_a_real_run_leaves_no_trace_in_rows_and_weights(tmp_path: Path) -> None:
    arguments = ["--seed", "16", "--windows", "6", "--faults", "20", "--dir", str(tmp_path)]
    command = [sys.executable, "scripts/chaos", *arguments, "data.prompts_per_window=8", "rollout.n=4"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert result.returncode == 0, result.stdout + result.stderr
    struck = struck_faults(tmp_path / "storm-16")
    assert len(struck) == 20
    assert {record["kind"] for record in struck} == {"kill", "hang", "raise", "late", "slow", "drop", "duplicate"}
    assert {record["where"] for record in struck if record["kind"] == "kill"} == {"before", "written", "reported"}
    assert {record["stage"] for record in struck} == {"source", "rollout", "reward", "baseline_join", "advantage"}
