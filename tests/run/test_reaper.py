"""What a killed driver leaves on the machine, the next run that removes it, and an interrupt that leaves nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import dataflow
from dataflow.reaper import MARK, processes_of
from dataflow.weights import WeightsDirectory
from tests.run.conftest import Run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
# One process for all stages: each that imports torch takes its time to start.
ONE_PROCESS = ["settings.rollout.placement=light", "settings.update.placement=light"]
SMALL = ["engine=hf", "data.prompts_per_window=8", "rollout.n=4", *ONE_PROCESS]


def test_after_kill_9_of_the_driver_the_next_run_leaves_nothing_of_it_nor_of_itself(start: Callable[..., Run]) -> None:
    killed = start(*SMALL, "windows=500")
    for line in killed.read():
        if line.startswith("window    0"):
            break
    family = psutil.Process(killed.process.pid).children(recursive=True)
    folder = Path(family[0].environ()[MARK])
    weights = WeightsDirectory(f"{killed.directory.name}-{killed.process.pid}").path
    assert folder.is_dir()
    assert any(weights.iterdir())
    killed.process.kill()
    killed.process.wait()
    # Some of Ray's processes live on: without them the test would show less than it says.
    assert processes_of(folder)

    following = start(*SMALL, "windows=500", "run.name=following")
    for line in following.read():
        if line.startswith("window    0"):
            children = psutil.Process(following.process.pid).children(recursive=True)
            os.killpg(following.process.pid, signal.SIGINT)
            break
    assert following.finish() == 130, "\n".join(following.lines)
    assert any(line.startswith("removed what the run") and line.endswith(str(folder)) for line in following.lines)
    assert processes_of(folder) == []
    assert [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    assert not folder.exists()
    assert not weights.exists()
    assert list(Path("/dev/shm").glob(f"sem.{folder.name}-*")) == []
    assert any("every socket of this run listens on loopback only" in line for line in following.lines)
    # An interrupted run cleans up after itself, and what it has done can be looked at.
    assert psutil.wait_procs(children, timeout=20)[1] == []
    assert not WeightsDirectory(f"{following.directory.name}-{following.process.pid}").path.exists()
    assert dataflow.connect(following.directory).table("train/000000").num_rows == 40
