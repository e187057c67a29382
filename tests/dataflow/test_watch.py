"""Runs that do not move, and workers that break: what is said, and what is done."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dataflow.batch import Batch
from dataflow.config import ClusterSection, LimitsSection, RunConfig
from dataflow.console import Console
from dataflow.errors import RunError, WorkerBroken
from dataflow.events import Blocked
from dataflow.inspect import RunView
from dataflow.local import run_local
from dataflow.pipeline import Pipeline, StageSpec
from dataflow.service import Status
from dataflow.stage import Stage, StageConfig
from dataflow.waits import Wait
from schemas.catalog import columns
from schemas.column import Column

GRADE = Column("grade", pa.float32())
UIDS = ("0-a", "0-b")


class Source(Stage):
    """Two prompts of two sessions in each window."""

    name = "source"
    granularity = "source"
    writes = columns("uid", "__rollout_n__", "__do_sample__", "prompt")

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        return {
            "uid": list(UIDS),
            "__rollout_n__": [2, 2],
            "__do_sample__": [True, True],
            "prompt": ["one", "two"],
        }


class Rollout(Stage):
    """Repeats the prompt."""

    name = "rollout"
    reads = ("prompt",)
    writes = columns("response_text")
    expands = True

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        return {"response_text": batch["prompt"]}


class Grade(Stage):
    """Grades every response with 1, unless a test says otherwise."""

    name = "grade"
    reads = ("response_text",)
    writes = (GRADE,)

    def process(self, batch: Batch) -> Any:
        return {"grade": [1.0] * len(batch)}


class Update(Stage):
    name = "update"
    granularity = "window"
    reads = ("grade",)
    writes = columns("trained_version")
    one_owner = True

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        return {"trained_version": [batch.window_index] * len(batch)}


class Spec(StageSpec):
    """Makes a fresh stage of a class, as the specifications of a run do."""

    def __init__(self, cls: type[Stage], **settings: Any) -> None:
        super().__init__(use=cls.__name__, settings=settings)
        object.__setattr__(self, "_cls", cls)

    def build(self) -> Stage:
        stage: Stage = self._cls(StageConfig())  # type: ignore[attr-defined]
        for name, value in self.settings.items():
            setattr(stage, name, value)
        return stage


def go(
    folder: Path,
    grade: type[Stage],
    terminal: io.StringIO | None = None,
    restarts: int = 3,
    pipeline: Pipeline | None = None,
    **limits: Any,
) -> Status:
    """Run three windows in this process with the given grading stage."""
    specs = tuple(Spec(cls) for cls in (Source, Rollout, grade, Update))
    pipeline = pipeline or Pipeline(specs, windows=3, rows_per_window=6)
    pipeline.check()
    config = RunConfig(limits=LimitsSection(max_failures=None, **limits), cluster=ClusterSection(max_restarts=restarts))
    with Console(folder, pipeline.windows, config.limits, terminal or io.StringIO()) as console:
        return run_local(config, pipeline, folder, "run", console)


def test_I04_a_run_that_stalls_says_which_units_where_since_when_and_what_will_be_done(tmp_path: Path) -> None:
    class Stuck(Grade):
        deadline_s = 1.5
        max_attempts = 1

        async def process(self, batch: Batch) -> Any:
            if batch.window_index == 1:
                await asyncio.Event().wait()
            return {"grade": [1.0] * len(batch)}

    terminal = io.StringIO()
    go(tmp_path, Stuck, terminal, warn_s=0.5, lease_s=2)  # the waits inside come with the heartbeats
    said = terminal.getvalue()
    assert "nothing moved for" in said
    assert "grade: 4 units held by grade-0 for" in said
    assert "(uids 0-a, 0-b, ...)" in said
    assert "update: 4 units waiting for" in said
    assert "they wait for grade" in said
    assert "inside grade-0: process() on 4 rows of run/train/000001 (uids 0-a, 0-b)" in said
    assert "they are cancelled and count as failed once" in said


def stalled(**changes: Any) -> Status:
    """Nothing has moved for ten minutes."""
    item = Blocked(
        "grade", "ready", "", 4, UIDS, 700.0, None, "no worker of the stage is up; its process is being started"
    )
    waits = {"rollout-0": (Wait("weights of version 3", 690.0, 300.0, "the engine is replaced"),)}
    return replace(Status(idle_s=700.0, detailed=True, blocked=[item], waits=waits, silent=["grade-0"]), **changes)


def test_a_run_in_which_no_claim_is_within_its_deadline_stops_and_names_what_it_waited_for(tmp_path: Path) -> None:
    with Console(tmp_path, 3, LimitsSection(stall_s=600), io.StringIO()) as console:
        console.check(stalled(works=True))  # somebody still works, and has time
        console.check(stalled(idle_s=599.0))
        with pytest.raises(RunError) as stop:
            console.check(stalled())
    assert str(stop.value).splitlines() == [
        "nothing moved for 700 s; the run waits for:",
        "  grade: 4 units ready for 700 s (uids 0-a, 0-b, ...); "
        "no worker of the stage is up; its process is being started",
        "  inside rollout-0: weights of version 3: 690 s of 300 s, then: the engine is replaced",
        "  grade-0 sends no heartbeat",
    ]


def test_the_warning_comes_when_it_is_due_and_then_each_time_the_wait_has_doubled(tmp_path: Path) -> None:
    terminal = io.StringIO()
    with Console(tmp_path, 3, LimitsSection(warn_s=60), terminal) as console:
        for idle_s in (59.0, 61.0, 80.0, 119.0, 123.0, 200.0, 247.0, 3.0, 61.0):
            console.check(stalled(idle_s=idle_s, works=True))
    warned = [line for line in terminal.getvalue().splitlines() if line.startswith("nothing moved")]
    assert [line.split()[3] for line in warned] == ["61", "123", "247", "61"]


def test_a_signal_shows_what_a_live_run_waits_for(tmp_path: Path) -> None:
    asked = threading.Event()

    class Asking(Grade):
        async def process(self, batch: Batch) -> Any:
            if not asked.is_set():
                asked.set()
                os.kill(os.getpid(), signal.SIGUSR1)
                await asyncio.sleep(1.0)  # longer than the console takes to look
            return {"grade": [1.0] * len(batch)}

    terminal = io.StringIO()
    assert go(tmp_path, Asking, terminal).ledger.balanced
    assert "grade: 4 units held by grade-0 for" in terminal.getvalue()
    assert terminal.getvalue().count("the run waits for") == 1


def test_a_worker_that_breaks_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    worked: list[Stage] = []

    class Fragile(Grade):
        def process(self, batch: Batch) -> Any:
            worked.append(self)
            if len(worked) == 2:
                raise WorkerBroken("the grader is gone")
            return {"grade": [1.0] * len(batch)}

    terminal = io.StringIO()
    ledger = go(tmp_path, Fragile, terminal).ledger
    assert ledger.settled == {("sampled", "trained"): 12}
    assert "worker grade-0 broke (the grader is gone)" in terminal.getvalue()
    first, broken, *others = worked
    assert first is broken
    assert {id(one) for one in others} == {id(others[0])} != {id(broken)}


def test_a_worker_that_breaks_again_and_again_ends_the_run(tmp_path: Path) -> None:
    class Broken(Grade):
        def process(self, batch: Batch) -> Any:
            raise WorkerBroken("the grader is gone")

    with pytest.raises(RunError, match="worker grade-0 failed: WorkerBroken: the grader is gone"):
        go(tmp_path, Broken, restarts=1)


def test_a_stage_that_hangs_in_a_thread_costs_its_worker_and_one_attempt(tmp_path: Path) -> None:
    free = threading.Event()
    hung: list[str] = []

    class Hangs(Grade):
        deadline_s = 0.3

        def process(self, batch: Batch) -> Any:
            if batch.window_index == 1 and not hung:
                hung.append(batch.window)
                free.wait(60)
            return {"grade": [1.0] * len(batch)}

    terminal = io.StringIO()
    try:
        ledger = go(tmp_path, Hangs, terminal).ledger
    finally:
        free.set()
    assert ledger.settled == {("sampled", "trained"): 12}
    assert "took longer than its deadline of 0.3 s; a thread cannot be stopped" in terminal.getvalue()


def test_the_dead_letters_have_the_exception_its_traceback_and_the_attempts(tmp_path: Path) -> None:
    class Picky(Grade):
        max_attempts = 2

        def process(self, batch: Batch) -> Any:
            if any(unit.uid == "0-b" and unit.session == 1 for unit in batch.units):
                raise ValueError("cannot grade this")
            return {"grade": [1.0] * len(batch)}

    ledger = go(tmp_path, Picky).ledger
    (tmp_path / "config.yaml").write_text("")
    view = RunView(tmp_path)
    letters = view.dead_letters().to_pylist()
    assert ledger.settled == {("sampled", "trained"): 9, ("sampled", "failed: grade"): 3}
    assert [
        (one["uid"], one["session"], one["stage"], one["error"], one["message"], one["attempt"]) for one in letters
    ] == [("0-b", 1, "grade", "ValueError", "cannot grade this", 2)] * 3
    assert all('raise ValueError("cannot grade this")' in one["traceback"] for one in letters)
    attempts = view.failures().to_pylist()
    assert [(one["attempt"], one["worker"]) for one in attempts] == [(1, "grade-0"), (2, "grade-0")] * 3


def test_a_slow_last_stage_bounds_what_the_first_one_fills(tmp_path: Path) -> None:
    filled: list[int] = []
    ahead: list[int] = []

    class Counted(Source):
        def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
            filled.append(batch.window_index)
            return super().process(batch)

    class Slow(Update):
        async def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:  # type: ignore[override]
            await asyncio.sleep(0.05)  # the stages before could fill every window in this time
            ahead.append(len(filled) - batch.window_index)
            return super().process(batch)

    specs = tuple(Spec(cls) for cls in (Counted, Rollout, Grade, Slow))
    # Six rows are one window, at worst: 18 are three.
    pipeline = Pipeline(specs, windows=12, rows_per_window=6, max_staleness=100, max_rows=18)
    assert go(tmp_path, Grade, pipeline=pipeline).ledger.balanced
    assert max(ahead) == 3
