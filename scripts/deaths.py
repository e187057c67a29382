"""Kill each process that a run cannot do without, and print how long the run takes to say so and end.

    .venv/bin/python scripts/deaths.py                    learner, coordinator, storage unit, queue controller
    .venv/bin/python scripts/deaths.py update-0           one of them

Each is a run of its own (transformers engine, small windows), killed with `kill -9` after its first window. Exit code 1
says that one ended without an error, or took longer than 30 s.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ACTORS = {"storage unit": "ray::SimpleStorageUnit", "queue controller": "ray::TransferQueueController"}
VICTIMS = ("update-0", "coordinator and queue", *ACTORS)
LIMIT_S = 30.0
RUN = ("engine=hf", "data.prompts_per_window=8", "rollout.n=4", "windows=500")


def main() -> int:
    """Kill the named processes, or all; returns the exit code."""
    slow = False
    for victim in sys.argv[1:] or VICTIMS:
        with tempfile.TemporaryDirectory() as folder:
            code, seconds, error = _kill(victim, folder)
        slow |= code != 1 or seconds > LIMIT_S
        print(f"{victim:24} exit code {code} after {seconds:5.1f} s: {error}", flush=True)
    return int(slow)


def _kill(victim: str, folder: str) -> tuple[int, float, str]:
    """Exit code, seconds from the kill to the end, and the last error."""
    command = [sys.executable, "-m", "dataflow.run", *RUN]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as run:
        assert run.stdout is not None
        lines, began = [], 0.0
        for line in run.stdout:
            lines.append(line.rstrip())
            if line.startswith("window    0"):
                os.kill(_pid(victim, run.pid, lines), signal.SIGKILL)
                began = time.monotonic()
        code = run.wait()
    errors = [line for line in lines if line.startswith("error:")]
    return code, time.monotonic() - began, errors[-1] if errors else "no error was printed"


def _pid(victim: str, driver: int, lines: list[str]) -> int:
    if victim in ACTORS:
        children = psutil.Process(driver).children(recursive=True)
        return next(child.pid for child in children if child.cmdline()[:1] == [ACTORS[victim]])
    directory = next(line for line in lines if line.startswith("run directory: ")).removeprefix("run directory: ")
    pids: dict[str, int] = json.loads((Path(directory) / "processes.json").read_text())
    return pids[victim]


if __name__ == "__main__":
    sys.exit(main())
