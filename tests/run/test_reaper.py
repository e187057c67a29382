"""What a killed driver leaves on the machine, and the next run that removes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dataflow.reaper import MARK, processes_of
from dataflow.weights import WeightsDirectory
from tests.run.conftest import Run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
SMALL = ["engine=hf", "data.prompts_per_window=8", "rollout.n=4"]


def test_after_kill_9_of_the_driver_the_next_run_leaves_nothing_of_it(start: Callable[..., Run]) -> None:
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

    following = start(*SMALL, "windows=1", "run.name=following")
    assert following.finish() == 0, "\n".join(following.lines)
    assert any(line.startswith("removed what the run") and line.endswith(str(folder)) for line in following.lines)
    assert processes_of(folder) == []
    assert [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    assert not folder.exists()
    assert not weights.exists()
    assert list(Path("/dev/shm").glob(f"sem.{folder.name}-*")) == []
    assert any("every socket of this run listens on loopback only" in line for line in following.lines)
    own = WeightsDirectory(f"{following.directory.name}-{following.process.pid}").path
    assert not own.exists()
