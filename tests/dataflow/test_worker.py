"""Workers around small stages, over the in-memory queue and the real coordinator, in one event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dataflow.batch import Batch, Unit
from dataflow.config import LimitsSection
from dataflow.errors import Drop, RowError, WorkerBroken
from dataflow.events import ATTEMPT_FAILED, Claim, Holding
from dataflow.journal import JournalWriter, read_batches
from dataflow.pipeline import Pipeline, StageSpec
from dataflow.queue import MemoryQueue
from dataflow.service import CoordinatorService, WindowRecord, coordinator_for
from dataflow.stage import Granularity, Outcome, Stage, StageConfig, StageContext, stage
from dataflow.waits import Wait
from dataflow.worker import Control, Metrics, Report, Worker
from schemas.catalog import columns
from schemas.column import Column

QUESTION = Column("question", pa.string())
ANSWER = Column("answer", pa.string())
GRADE = Column("grade", pa.float32())
NOTE = Column("note", pa.string())
SEEN = Column("seen", pa.bool_())

Process = Callable[[Batch], Any]


class Prompts(Stage):
    """A source of given uids."""

    name = "source"
    granularity = "source"
    writes = (*columns("uid", "__rollout_n__", "__do_sample__"), QUESTION)

    def __init__(self, *uids: str, sessions: int = 1, greedy: bool = False) -> None:
        super().__init__(StageConfig())
        self.uids, self.sessions, self.greedy = uids, sessions, greedy

    def process(self, batch: Batch) -> dict[str, list[Any]]:
        rows = [(uid, sample) for uid in self.uids for sample in ((True, False) if self.greedy else (True,))]
        return {
            "uid": [uid for uid, _ in rows],
            "__rollout_n__": [self.sessions if sample else 1 for _, sample in rows],
            "__do_sample__": [sample for _, sample in rows],
            "question": [f"What is {uid}?" for uid, _ in rows],
        }


class Answers(Stage):
    """A rollout that answers with the unit's own identity."""

    name = "answers"
    reads = ("question",)
    writes = (ANSWER,)
    expands = True
    batch_rows = 200

    def __init__(self) -> None:
        super().__init__(StageConfig())

    def process(self, batch: Batch) -> dict[str, list[Any]]:
        return {"answer": [f"{unit.uid}:{unit.session}" for unit in batch.units]}


class Turns(Answers):
    """A rollout of several turns per session."""

    def __init__(self, turns: Callable[[Unit], int]) -> None:
        super().__init__()
        self.turns = turns

    async def process(self, batch: Batch) -> AsyncIterator[tuple[Unit, Outcome]]:  # type: ignore[override]
        for unit in batch.units:
            yield unit, {"answer": [f"{unit.session}.{turn}" for turn in range(self.turns(unit))]}


class Sink(Stage):
    """The last stage: remembers what it was given."""

    name = "sink"
    writes = (SEEN,)

    def __init__(self, *reads: str) -> None:
        super().__init__(StageConfig())
        self.reads = reads
        self.rows: dict[str, list[Any]] = {}
        self.columns: set[str] = set()

    def process(self, batch: Batch) -> dict[str, list[Any]]:
        self.columns |= set(batch.columns)
        for unit, rows in batch.sessions():
            assert unit.id not in self.rows
            self.rows[unit.id] = [
                tuple(batch[name][row] for name in self.reads) for row in range(rows.start, rows.stop)
            ]
        return {"seen": [True] * len(batch)}


def made(
    process: Process, *, reads: Sequence[str] = ("answer",), writes: Sequence[Column] = (GRADE,), **options: Any
) -> Stage:
    """A stage named `grade` around a function."""
    cls = stage(reads=reads, writes=writes, name="grade", **options)(process)
    return cls(cls.Config())


@dataclass(frozen=True)
class Given(StageSpec):
    """The specification of a stage that is there already."""

    stage: Stage = field(default_factory=Answers)

    def build(self) -> Stage:
        return self.stage


class Line:
    """A production line: stages, a queue, a coordinator, and workers that are started by name."""

    def __init__(self, folder: Path, *stages: Stage, windows: int = 1, lease_s: float = 60.0) -> None:
        specs = tuple(Given(use="a test", stage=one) for one in stages)
        self.pipeline = Pipeline(specs, windows=windows, rows_per_window=1000)
        self.pipeline.check()
        self.queue = MemoryQueue()
        self.folder = folder
        self.written: dict[str, list[str]] = {}
        coordinator = coordinator_for(self.pipeline, "run", LimitsSection(lease_s=lease_s, max_failures=None))
        self.service = CoordinatorService(coordinator, self._clear, folder)

    def _clear(self, window: str) -> int:
        self.written[window] = self.queue.keys(window)
        return self.queue.clear(window)

    @property
    def ledger(self) -> Any:
        return self.service.coordinator.ledger

    def worker(self, name: str, control: Control | None = None) -> Worker:
        which = self.pipeline.stages[name.rpartition("-")[0]]
        context = StageContext("run", self.folder, name, seed=0)
        journal = JournalWriter(None, which.name, name)
        return Worker(name, which, self.pipeline, control or self.service, self.queue, journal, context)

    def run(self, *names: str) -> None:
        """Run to the end with the named workers; by default one of each stage."""
        asyncio.run(self.finish(*(names or [f"{name}-0" for name in self.pipeline.stages])))

    async def finish(self, *names: str) -> None:
        workers = [self.worker(name) for name in names]
        for worker in workers:
            await worker.setup()
        async with asyncio.timeout(20):
            await asyncio.gather(*(worker.run() for worker in workers))
        await self.service.close()

    def outcomes(self) -> dict[str, tuple[str, str]]:
        """Unit -> its final outcome and reason, as the ledger's journal has them."""
        (path,) = self.folder.glob("ledger.*.arrows")
        records = [record for batch in read_batches(path) for record in batch.to_pylist()]
        return {r["unit"]: (r["outcome"], r["reason"]) for r in records if r["outcome"] not in ("done", ATTEMPT_FAILED)}

    def failures(self) -> dict[str, str]:
        """Failed unit -> why."""
        return {unit: reason for unit, (outcome, reason) in self.outcomes().items() if "failed" in outcome}

    def window(self) -> WindowRecord:
        """The record of the first window."""
        return asyncio.run(self.service.status(0, 0)).closed[0]


def unit_id(uid: str, session: int = 0) -> str:
    return f"run/train/000000/{uid}/{session}"


# What a stage is given


def test_O01_two_prompts_of_three_sessions_with_greedy_rows_are_eight_units(tmp_path: Path) -> None:
    sink = Sink("answer")
    Line(tmp_path, Prompts("a", "b", sessions=3, greedy=True), Answers(), sink).run()
    expected = [unit_id(uid, session) for uid in "ab" for session in range(3)]
    assert sorted(sink.rows) == sorted([*expected, unit_id("a#greedy"), unit_id("b#greedy")])


def test_A09_every_session_of_a_prompt_has_its_uid(tmp_path: Path) -> None:
    uids: dict[str, str] = {}

    def grade(batch: Batch) -> dict[str, Any]:
        uids.update({unit.id: unit.uid for unit in batch.units})
        return {"grade": [0.0] * len(batch)}

    Line(tmp_path, Prompts("0-p", sessions=4), Answers(), made(grade)).run()
    assert uids == {unit_id("0-p", session): "0-p" for session in range(4)}


def test_a_stage_sees_the_columns_it_reads_and_no_other(tmp_path: Path) -> None:
    sink = Sink("question", "answer")
    Line(tmp_path, Prompts("a"), Answers(), sink).run()
    assert sink.columns == {"question", "answer"}
    assert sink.rows == {unit_id("a"): [("What is a?", "a:0")]}


def test_a_stage_that_reads_prompt_columns_alone_sees_the_rows_of_every_session(tmp_path: Path) -> None:
    sink = Sink("question")
    Line(tmp_path, Prompts("a", sessions=2), Answers(), sink).run()
    assert sink.rows == {unit_id("a", session): [("What is a?",)] for session in range(2)}


def test_the_rows_of_a_session_of_several_turns_are_adjacent_and_in_order(tmp_path: Path) -> None:
    sink = Sink("answer", "question")
    Line(tmp_path, Prompts("a", sessions=3), Turns(lambda unit: unit.session + 1), sink).run()
    question = "What is a?"
    assert sink.rows == {
        unit_id("a", 0): [("0.0", question)],
        unit_id("a", 1): [("1.0", question), ("1.1", question)],
        unit_id("a", 2): [("2.0", question), ("2.1", question), ("2.2", question)],
    }


def test_Q08_a_tail_smaller_than_a_batch_is_worked_on(tmp_path: Path) -> None:
    sizes: list[int] = []

    def grade(batch: Batch) -> dict[str, Any]:
        sizes.append(len(batch))
        return {"grade": [0.0] * len(batch)}

    Line(tmp_path, Prompts("a", sessions=10), Answers(), made(grade, batch_rows=4)).run()
    assert sum(sizes) == 10
    assert max(sizes) <= 4


def test_windows_follow_each_other_and_leave_no_row_behind(tmp_path: Path) -> None:
    line = Line(tmp_path, Prompts("a", "b"), Answers(), Sink("answer"), windows=3)
    line.run()
    assert sorted(line.written) == [f"run/train/{index:06d}" for index in range(3)]
    assert all(line.queue.keys(window) == [] for window in line.written)
    assert line.ledger.settled == {("sampled", "completed"): 6}


# Failures of single rows


def boom_on(session: int, error: Exception) -> Process:
    def grade(batch: Batch) -> dict[str, Any]:
        if any(unit.session == session for unit in batch.units):
            raise error
        return {"grade": [1.0] * len(batch)}

    return grade


def test_O04_one_row_that_raises_fails_alone_and_its_error_is_kept(tmp_path: Path) -> None:
    sink = Sink("grade")
    line = Line(tmp_path, Prompts("a", sessions=8), Answers(), made(boom_on(5, RuntimeError("boom"))), sink)
    line.run()
    assert sorted(sink.rows) == [unit_id("a", session) for session in range(8) if session != 5]
    (failed,) = line.failures().items()
    assert failed[0] == unit_id("a", 5)
    assert "RuntimeError: boom" in failed[1]
    assert line.ledger.settled == {("sampled", "completed"): 7, ("sampled", "failed: grade"): 1}


def test_O04_a_rollout_that_raises_for_one_session_fails_that_session_alone(tmp_path: Path) -> None:
    class Fragile(Answers):
        def process(self, batch: Batch) -> dict[str, list[Any]]:
            if any(unit.session == 5 for unit in batch.units):
                raise RuntimeError("boom")
            return super().process(batch)

    sink = Sink("answer")
    line = Line(tmp_path, Prompts("a", sessions=8), Fragile(), sink)
    line.run()
    assert len(sink.rows) == 7
    assert "boom" in line.failures()[unit_id("a", 5)]


def test_a_row_is_tried_max_attempts_times_before_it_fails_for_good(tmp_path: Path) -> None:
    calls: Counter[int] = Counter()

    def grade(batch: Batch) -> dict[str, Any]:
        calls.update(unit.session for unit in batch.units)
        raise ValueError("no")

    line = Line(tmp_path, Prompts("a"), Answers(), made(grade, max_attempts=3))
    line.run()
    assert calls == {0: 3}
    assert line.ledger.failures == {"grade": 3}


def test_a_row_that_fails_once_succeeds_at_its_second_delivery(tmp_path: Path) -> None:
    seen: list[int] = []

    def grade(batch: Batch) -> dict[str, Any]:
        seen.append(len(batch))
        if len(seen) == 1:
            raise ConnectionError("try again")
        return {"grade": [1.0] * len(batch)}

    sink = Sink("grade")
    line = Line(tmp_path, Prompts("a"), Answers(), made(grade), sink)
    line.run()
    assert sink.rows == {unit_id("a"): [(1.0,)]}
    assert line.ledger.redelivered == {"grade": 1}


def test_drop_and_row_error_as_values_take_out_their_own_unit(tmp_path: Path) -> None:
    def grade(batch: Batch) -> dict[str, Any]:
        special = {1: Drop("too easy"), 2: RowError("unreadable", retry=False)}
        return {"grade": [special.get(unit.session, 1.0) for unit in batch.units]}

    line = Line(tmp_path, Prompts("a", sessions=4), Answers(), made(grade, max_attempts=9))
    line.run()
    assert line.outcomes()[unit_id("a", 1)] == ("dropped: too easy", "too easy")
    assert line.outcomes()[unit_id("a", 2)] == ("failed: grade", "RowError: unreadable")
    assert line.ledger.settled[("sampled", "completed")] == 2


def test_a_mark_on_one_turn_takes_out_the_whole_session(tmp_path: Path) -> None:
    def grade(batch: Batch) -> dict[str, Any]:
        return {"grade": [Drop("bad turn") if answer == "1.1" else 1.0 for answer in batch["answer"]]}

    sink = Sink("grade")
    line = Line(tmp_path, Prompts("a", sessions=2), Turns(lambda _: 3), made(grade), sink)
    line.run()
    assert list(sink.rows) == [unit_id("a", 0)]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"grade": [1.0], "garde": [1.0]}, r"'grade' must return exactly .* not declared: \['garde'\]"),
        ({}, r"not returned: \['grade'\]"),
        ({"grade": [1.0, 2.0]}, r"'grade' returned 2 values of column 'grade' for 1 rows"),
        ({"grade": ["high"]}, r"column 'grade', row 'run/train/000000/a/0/0': expected float, got str 'high'"),
        ({"grade": [None]}, r"column 'grade', row 'run/train/000000/a/0/0': .*not nullable"),
        ([1.0], r"'grade' returned list; expected a dict of columns"),
    ],
)
def test_a_wrong_result_is_a_failure_that_names_stage_column_and_row(tmp_path: Path, result: Any, message: str) -> None:
    import re

    line = Line(tmp_path, Prompts("a"), Answers(), made(lambda batch: result, max_attempts=1))
    line.run()
    assert re.search(message, line.failures()[unit_id("a")])


def test_a_value_of_the_wrong_type_fails_its_own_row_alone(tmp_path: Path) -> None:
    def grade(batch: Batch) -> dict[str, Any]:
        return {"grade": ["bad" if unit.session == 1 else 1.0 for unit in batch.units]}

    line = Line(tmp_path, Prompts("a", sessions=3), Answers(), made(grade, max_attempts=1))
    line.run()
    assert list(line.failures()) == [unit_id("a", 1)]


def test_a_stage_that_raises_stop_iteration_fails_at_once(tmp_path: Path) -> None:
    def grade(batch: Batch) -> dict[str, Any]:
        return {"grade": [next(iter(()))]}

    line = Line(tmp_path, Prompts("a"), Answers(), made(grade, max_attempts=1))
    line.run()
    assert "StopIteration" in line.failures()[unit_id("a")]


def test_what_a_failed_attempt_reported_does_not_count_and_what_its_parts_report_does(tmp_path: Path) -> None:
    def grade(batch: Batch) -> dict[str, Any]:
        batch.report({"grade/mean": 0.5})
        if any(unit.session == 2 for unit in batch.units):
            raise ValueError("no")
        return {"grade": [1.0] * len(batch)}

    line = Line(tmp_path, Prompts("a", sessions=4), Answers(), made(grade, max_attempts=1))
    line.run()
    record = line.window()
    assert (record.metrics["grade/mean"], record.weights["grade/mean"]) == (0.5, 3.0)


# Groups


def group_stage(grade: Process, **options: Any) -> Stage:
    return made(grade, granularity="group", **options)


def test_a_batch_of_groups_that_raises_is_run_again_group_by_group(tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def grade(batch: Batch) -> dict[str, Any]:
        calls.append([f"{unit.uid}{unit.session}" for unit in batch.units])
        if any(unit.uid == "b" for unit in batch.units):
            raise ValueError("b is bad")
        return {"grade": [1.0] * len(batch)}

    sink = Sink("grade")
    line = Line(tmp_path, Prompts("a", "b", "c", sessions=2), Answers(), group_stage(grade, max_attempts=1), sink)
    line.run()
    assert sorted(line.failures()) == [unit_id("b", 0), unit_id("b", 1)]
    assert sorted(sink.rows) == [unit_id(uid, session) for uid in "ac" for session in range(2)]
    # Whatever lots they came in, no call saw a group in part.
    assert all(Counter(name[0] for name in call) == dict.fromkeys({n[0] for n in call}, 2) for call in calls)


@pytest.mark.parametrize("granularity", ["group", "window"])
def test_units_taken_together_of_which_one_value_is_wrong_are_tried_again_whole(
    tmp_path: Path, granularity: Granularity
) -> None:
    calls: list[int] = []

    def grade(batch: Batch) -> dict[str, Any]:
        calls.append(len(batch))
        return {"grade": [1.0, "bad" if len(calls) == 1 else 2.0, 3.0]}

    sink = Sink("grade")
    line = Line(tmp_path, Prompts("a", sessions=3), Answers(), made(grade, granularity=granularity), sink)
    line.run()
    assert calls == [3, 3]
    assert [rows for _, rows in sorted(sink.rows.items())] == [[(1.0,)], [(2.0,)], [(3.0,)]]


# Asynchronous stages, streams, deadlines


def test_a_coroutine_function_is_a_stage(tmp_path: Path) -> None:
    async def grade(batch: Batch) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"grade": [2.0] * len(batch)}

    sink = Sink("grade")
    Line(tmp_path, Prompts("a"), Answers(), made(grade), sink).run()
    assert sink.rows == {unit_id("a"): [(2.0,)]}


def test_a_stream_is_acknowledged_unit_by_unit_while_it_goes_on(tmp_path: Path) -> None:
    arrived = asyncio.Event()

    class Streaming(Answers):
        async def process(self, batch: Batch) -> AsyncIterator[tuple[Unit, Outcome]]:  # type: ignore[override]
            yield batch.units[1], {"answer": ["short"]}
            # The long session ends only after the short one has come through the next stage.
            await arrived.wait()
            yield batch.units[0], {"answer": ["long"]}

    async def grade(batch: Batch) -> dict[str, Any]:
        if "short" in batch["answer"]:
            arrived.set()
        return {"grade": [0.0] * len(batch)}

    sink = Sink("answer", "grade")
    Line(tmp_path, Prompts("a", sessions=2), Streaming(), made(grade), sink).run()
    assert sink.rows == {unit_id("a", 0): [("long", 0.0)], unit_id("a", 1): [("short", 0.0)]}


def test_a_stream_keeps_what_was_yielded_and_fails_the_rest_when_it_raises(tmp_path: Path) -> None:
    class Streaming(Answers):
        max_attempts = 1

        async def process(self, batch: Batch) -> AsyncIterator[tuple[Unit, Outcome]]:  # type: ignore[override]
            yield batch.units[0], {"answer": ["fine"]}
            yield batch.units[1], RowError("too long", retry=False)
            yield batch.units[2], Drop("by rule")
            raise OSError("disk full")

    sink = Sink("answer")
    line = Line(tmp_path, Prompts("a", sessions=5), Streaming(), sink)
    line.run()
    assert sink.rows == {unit_id("a", 0): [("fine",)]}
    assert line.outcomes()[unit_id("a", 2)] == ("dropped: by rule", "by rule")
    reasons = line.failures()
    assert reasons[unit_id("a", 1)] == "RowError: too long"
    assert "disk full" in reasons[unit_id("a", 3)]
    assert "disk full" in reasons[unit_id("a", 4)]


def test_a_unit_that_a_stream_forgets_fails_by_name(tmp_path: Path) -> None:
    class Forgetful(Answers):
        max_attempts = 1

        async def process(self, batch: Batch) -> AsyncIterator[tuple[Unit, Outcome]]:  # type: ignore[override]
            yield batch.units[0], {"answer": ["fine"]}

    line = Line(tmp_path, Prompts("a", sessions=2), Forgetful(), Sink("answer"))
    line.run()
    assert line.failures() == {unit_id("a", 1): "RowError: the stage ended without a result for this unit"}


def test_a_session_without_a_turn_is_a_failure(tmp_path: Path) -> None:
    rollout = Turns(lambda unit: unit.session)
    rollout.max_attempts = 1
    sink = Sink("answer")
    line = Line(tmp_path, Prompts("a", sessions=2), rollout, sink)
    line.run()
    assert list(sink.rows) == [unit_id("a", 1)]
    assert "no rows" in line.failures()[unit_id("a", 0)]


def test_work_beyond_its_deadline_is_cancelled_and_fails_under_its_name(tmp_path: Path) -> None:
    async def grade(batch: Batch) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    line = Line(tmp_path, Prompts("a"), Answers(), made(grade, deadline_s=0.05, max_attempts=1))
    line.run()
    assert "stage 'grade' took longer than its deadline of 0.05 s" in line.failures()[unit_id("a")]


def test_a_stream_beyond_its_deadline_keeps_what_was_yielded(tmp_path: Path) -> None:
    class Slow(Answers):
        deadline_s = 0.2
        max_attempts = 1

        async def process(self, batch: Batch) -> AsyncIterator[tuple[Unit, Outcome]]:  # type: ignore[override]
            yield batch.units[0], {"answer": ["fine"]}
            await asyncio.Event().wait()

    sink = Sink("answer")
    line = Line(tmp_path, Prompts("a", sessions=2), Slow(), sink)
    line.run()
    assert sink.rows == {unit_id("a", 0): [("fine",)]}
    assert "longer than its deadline of 0.2 s" in line.failures()[unit_id("a", 1)]


def test_a_timeout_that_the_stage_itself_raises_keeps_its_own_words(tmp_path: Path) -> None:
    def grade(batch: Batch) -> dict[str, Any]:
        raise TimeoutError("the judge did not answer")

    line = Line(tmp_path, Prompts("a"), Answers(), made(grade, max_attempts=1))
    line.run()
    assert "the judge did not answer" in line.failures()[unit_id("a")]


# Several workers, and workers that end


def test_Q11_R19_four_workers_of_a_stage_grade_each_row_once(tmp_path: Path) -> None:
    for attempt in range(3):
        calls: Counter[str] = Counter()
        lock = threading.Lock()

        def grade(batch: Batch, calls: Counter[str] = calls, lock: threading.Lock = lock) -> dict[str, Any]:
            with lock:
                calls.update(unit.id for unit in batch.units)
            return {"grade": [0.0] * len(batch)}

        line = Line(tmp_path / str(attempt), Prompts("a", sessions=100), Answers(), made(grade, batch_rows=7))
        line.run("source-0", "answers-0", *(f"grade-{number}" for number in range(4)))
        assert calls == {unit_id("a", session): 1 for session in range(100)}
        assert line.ledger.settled == {("sampled", "completed"): 100}


def test_Q04_more_workers_than_rows_leave_no_row_undone_and_none_done_twice(tmp_path: Path) -> None:
    sink = Sink("answer")
    line = Line(tmp_path, Prompts("a", sessions=3), Answers(), sink)
    line.run("source-0", *(f"{name}-{number}" for name in ("answers", "sink") for number in range(5)))
    assert len(sink.rows) == 3


class Breaking(Stage):
    """A grader whose process is broken in its first life."""

    name = "grade"
    reads = ("answer",)
    writes = (NOTE,)

    def __init__(self, only_alone: bool = False) -> None:
        super().__init__(StageConfig())
        self.broken = True
        self.only_alone = only_alone

    def process(self, batch: Batch) -> dict[str, list[Any]]:
        if self.broken and self.only_alone and len(batch) > 1:
            raise ValueError("which of them?")
        if self.broken:
            raise WorkerBroken("the engine died")
        return {"note": ["second life"] * len(batch)}


@pytest.mark.parametrize("only_alone", [False, True])
def test_a_broken_worker_ends_and_its_units_go_to_another_without_counting_an_attempt(
    tmp_path: Path, only_alone: bool
) -> None:
    breaking, sink = Breaking(only_alone), Sink("note")
    line = Line(tmp_path, Prompts("a", sessions=3), Answers(), breaking, sink)

    async def live() -> None:
        async with asyncio.timeout(20):
            rest = asyncio.create_task(line.finish("source-0", "answers-0", "sink-0"))
            while line.service.coordinator.waits()["grade"].get("ready", 0) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)  # until all three can be claimed together
            with pytest.raises(WorkerBroken, match="the engine died"):
                await line.worker("grade-0").run()
            await line.service.died(["grade-0"], "the engine died")
            breaking.broken = False
            await asyncio.gather(rest, line.worker("grade-0").run())

    asyncio.run(live())
    assert {row for rows in sink.rows.values() for row in rows} == {("second life",)}
    assert line.ledger.failures == {}
    assert line.ledger.settled == {("sampled", "completed"): 3}


def test_the_other_claims_of_a_broken_worker_are_not_reported_as_failures(tmp_path: Path) -> None:
    class TwoAtATime(Answers):
        concurrency = 2
        batch_rows = 1
        both = 0

        async def process(self, batch: Batch) -> dict[str, list[Any]]:  # type: ignore[override]
            self.both += 1
            if self.both == 1:
                await self.closed.wait()
                raise OSError("the engine is closed")
            raise WorkerBroken("the engine died")

        def setup(self, context: StageContext) -> None:
            self.closed = asyncio.Event()

        async def close(self) -> None:
            self.closed.set()
            for _ in range(20):
                await asyncio.sleep(0)

    line = Line(tmp_path, Prompts("a", sessions=2), TwoAtATime(), Sink("answer"))

    async def live() -> None:
        worker = line.worker("answers-0")
        await worker.setup()
        source = asyncio.create_task(line.worker("source-0").run())
        async with asyncio.timeout(20):
            with pytest.raises(WorkerBroken):
                await worker.run()
        await line.service.stop("enough")
        await source

    asyncio.run(live())
    assert line.ledger.failures == {}


class Cut:
    """The coordinator as a worker sees it whose reports are lost: it writes, and dies before it is heard."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.reported = asyncio.Event()
        self.last: tuple[Sequence[Report], Metrics, str] = ((), {}, "")

    async def joined(self, worker: str, stage: str, process: str) -> None:
        await self._control.joined(worker, stage, process)

    async def claim(self, worker: str, request: int, loaded_version: int, holding: Holding) -> Claim | None:
        return await self._control.claim(worker, request, loaded_version, holding)

    async def report(self, reports: Sequence[Report], metrics: Metrics, window: str) -> None:
        self.last = (reports, metrics, window)
        self.reported.set()
        await asyncio.Event().wait()

    async def heartbeat(self, worker: str, holding: Holding, waits: tuple[Wait, ...]) -> None:
        await self._control.heartbeat(worker, holding, waits)


@pytest.mark.parametrize("late", [False, True])
def test_Q10_what_a_worker_wrote_before_it_died_unheard_is_written_again_elsewhere_and_never_read(
    tmp_path: Path, late: bool
) -> None:
    lives: list[str] = []

    def note(batch: Batch) -> dict[str, Any]:
        lives.append(f"life {len(lives)}")
        return {"note": [lives[-1]] * len(batch)}

    sink = Sink("note")
    line = Line(tmp_path, Prompts("a", sessions=1), Answers(), made(note, writes=[NOTE]), sink)

    async def live() -> None:
        async with asyncio.timeout(20):
            rest = asyncio.create_task(line.finish("source-0", "answers-0", "sink-0"))
            cut = Cut(line.service)
            victim = asyncio.create_task(line.worker("grade-0", cut).run())
            await cut.reported.wait()
            victim.cancel()
            await asyncio.wait([victim])
            await line.service.died(["grade-0"], "killed")
            if late:
                await line.service.report(*cut.last)
            await asyncio.gather(rest, line.worker("grade-1").run())

    asyncio.run(live())
    assert lives == ["life 0", "life 1"]
    assert sink.rows == {unit_id("a"): [("life 1",)]}
    assert f"{unit_id('a')}/0~1" in line.written["run/train/000000"]
    assert line.ledger.redelivered == {"grade": 1}
    assert line.ledger.failures == {}


def test_Q10_a_killed_worker_costs_its_units_a_delivery_and_nothing_else(tmp_path: Path) -> None:
    held = asyncio.Event()

    async def hang(batch: Batch) -> Mapping[str, Any]:
        if not held.is_set():
            held.set()
            await asyncio.Event().wait()
        return {"grade": [1.0] * len(batch)}

    sink = Sink("grade")
    line = Line(tmp_path, Prompts("a", sessions=4), Answers(), made(hang, batch_rows=2), sink)

    async def live() -> None:
        async with asyncio.timeout(20):
            rest = asyncio.create_task(line.finish("source-0", "answers-0", "sink-0"))
            victim = asyncio.create_task(line.worker("grade-0").run())
            await held.wait()
            victim.cancel()
            await asyncio.wait([victim])
            await line.service.died(["grade-0"], "killed")
            await asyncio.gather(rest, line.worker("grade-1").run())

    asyncio.run(live())
    assert len(sink.rows) == 4
    assert line.ledger.settled == {("sampled", "completed"): 4}
