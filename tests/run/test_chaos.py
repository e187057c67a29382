"""One storm of faults over the real thing: Ray, TransferQueue and an engine, with `kill -9` among them.

The engine is `hf`, one sequence at a time, whose values do not depend on what arrives together: it comes up again in a
few seconds, where vLLM takes the better part of a minute.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dataflow.testing.faults import struck_faults

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def test_Q10_a_storm_over_a_real_run_leaves_no_trace_in_rows_and_weights(tmp_path: Path) -> None:
    arguments = ["--seed", "16", "--windows", "6", "--faults", "20", "--engine", "hf", "--dir", str(tmp_path)]
    sizes = ["data.prompts_per_window=8", "rollout.n=4", "rollout.max_sequences=1"]
    command = [sys.executable, "scripts/chaos", *arguments, *sizes]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].endswith("balanced yes"), result.stdout
    struck = struck_faults(tmp_path / "storm-16")
    assert len(struck) == 20
    assert {record["kind"] for record in struck} == {"kill", "hang", "raise", "late", "slow", "drop", "duplicate"}
    assert {record["where"] for record in struck if record["kind"] == "kill"} == {"before", "written", "reported"}
    assert {record["stage"] for record in struck} == {"source", "rollout", "reward", "baseline_join", "advantage"}
