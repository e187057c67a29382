"""Runs of the whole product, in one process and on a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

COUNT_STAGE = """\
import pyarrow as pa
from dataflow import Column, stage

WORDS = Column("response_words", pa.int32(), doc="Words in the response.", unit="words")

@stage(reads=["response_text"], writes=[WORDS])
def count_words(batch):
    return {"response_words": [len(text.split()) for text in batch["response_text"]]}
"""


@dataclass
class Run:
    """A run of the command line in a process of its own."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        """Its run directory, once it has printed one."""
        line = next(line for line in self.lines if line.startswith("run directory: "))
        return Path(line.removeprefix("run directory: "))

    def read(self) -> Iterator[str]:
        """Yield what it prints, line by line, until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            yield self.lines[-1]

    def finish(self) -> int:
        """Read to the end; returns the exit code."""
        for _ in self.read():
            pass
        return self.process.wait()

    def kill(self, process: str) -> None:
        """`kill -9` one of its worker processes by name."""
        pids = json.loads((self.directory / "processes.json").read_text())
        os.kill(pids[process], signal.SIGKILL)

    def ledger(self) -> dict[str, object]:
        """The final ledger."""
        found: dict[str, object] = json.loads((self.directory / "ledger.json").read_text())
        return found

    def metrics(self) -> list[dict[str, float]]:
        """The metrics of each window."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["metrics"] for line in lines]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start `python -m dataflow.run` in a folder of its own; what is left of it is ended after the test."""
    runs: list[Run] = []

    def begin(*arguments: str) -> Run:
        command = [sys.executable, "-m", "dataflow.run", *arguments]
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        runs.append(Run(process))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGINT)
            try:
                run.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(run.process.pid, signal.SIGKILL)
        assert run.process.stdout is not None
        run.process.stdout.close()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A user's own prompt file of twelve sums."""
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": f"{a}+{b}=", "ground_truth": a + b, "topic": "sums"}
        for a, b in zip(range(11, 23), range(21, 33), strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def count_stage(tmp_path: Path) -> Path:
    """The README's custom stage, in a file outside the project."""
    path = tmp_path / "count.py"
    path.write_text(COUNT_STAGE, encoding="utf-8")
    return path


def run_main(arguments: Sequence[str]) -> int:
    """Run the command line in this process."""
    from dataflow.run import main

    return main(list(arguments))
