"""The shell around the coordinator: claims that wait, what the driver is shown, and when partitions are cleared."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dataflow import service as module
from dataflow.batch import Failure
from dataflow.coordinator import Coordinator
from dataflow.draws import Draws
from dataflow.errors import QueueError
from dataflow.events import Acknowledged, Claim, Dropped, Failed, Holding, Prompt, Warned
from dataflow.journal import read_batches
from dataflow.pipeline import StagePlan
from dataflow.queue import MemoryQueue
from dataflow.service import CoordinatorService, Status
from dataflow.waits import Wait
from dataflow.worker import Metrics, Report, Stop
from tests.dataflow.drive import admitted, plans, reward, rollout, source, update

SHORT = plans(source(), rollout(), update("rollout"))
GRADED = plans(source(), rollout(), reward(), update("reward"))
WINDOW = "run/train/000000"


class Office:
    """A service on a clock that stands still unless told, with an in-memory queue, and workers that ask one by one."""

    def __init__(
        self,
        table: dict[str, StagePlan] = SHORT,
        windows: int = 1,
        journal: Path | None = None,
        clear: Callable[[str], Any] | None = None,
        **options: Any,
    ) -> None:
        self.now = 100.0
        self.queue = MemoryQueue()
        coordinator = Coordinator(table, "run", windows, **options)
        self.service = CoordinatorService(coordinator, clear or self.queue.clear, journal, lambda: self.now)
        self.stages = list(table)
        self.requests = 0

    async def open(self, *more: str) -> None:
        for worker in [*(f"{stage}-0" for stage in self.stages), *more]:
            await self.service.joined(worker, worker.split("-")[0], worker)

    def ask(self, worker: str, **holding: Any) -> Coroutine[Any, Any, Claim | None]:
        self.requests += 1
        held = Holding(latest=self.requests, **{"asking": frozenset({self.requests}), **holding})
        return self.service.claim(worker, self.requests, 0, held)

    async def claim(self, worker: str) -> Claim:
        claim = await self.ask(worker)
        assert claim is not None
        return claim

    async def beat(self, worker: str, *claims: int, waits: tuple[Wait, ...] = ()) -> None:
        await self.service.heartbeat(worker, Holding(frozenset(claims), frozenset(), self.requests), waits)

    async def report(self, worker: str, claim: Claim, metrics: Metrics | None = None, *more: Report) -> None:
        """Write and acknowledge all of a claim."""
        reports: list[Report] = [
            Acknowledged(worker, claim.id, unit.unit.id, unit.delivery, 1, 0.0) for unit in claim.units
        ]
        if not claim.units:
            assert claim.draw is not None
            uid = f"{claim.window_index}-{'ab'[claim.draw.number]}"
            reports.append(admitted(worker, claim, Prompt(uid, 2, False)))
        for unit in claim.units:
            self.queue.put(claim.window, [unit.unit.id], {claim.stage: pa.array([unit.delivery])})
        await self.service.report([*reports, *more], metrics or {}, claim.window)

    async def work(self, *workers: str, metrics: Metrics | None = None) -> None:
        for worker in workers:
            await self.report(worker, await self.claim(worker), metrics)

    async def status(self, closed_from: int = 0, alarms_from: int = 0, detail: bool = False) -> Status:
        return await self.service.status(closed_from, alarms_from, detail)

    async def settle(self) -> None:
        """Let what was started in the background end."""
        await self.service.close()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


async def waiting(ask: Coroutine[Any, Any, Claim | None]) -> asyncio.Task[Claim | None]:
    """A request that has reached the service, and waits there."""
    task = asyncio.create_task(ask)
    await asyncio.sleep(0)
    assert not task.done()
    return task


# Claims


def test_a_request_waits_and_is_answered_when_there_is_work() -> None:
    async def story() -> None:
        office = Office()
        await office.open()
        asked = await waiting(office.ask("rollout-0"))
        await office.work("source-0")
        claim = await asked
        assert claim is not None
        assert [unit.unit.session for unit in claim.units] == [0, 1]

    run(story())


def test_a_request_without_an_answer_ends_with_nothing_and_is_given_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CLAIM_WAIT_S", 0.001)

    async def story() -> None:
        office = Office()
        await office.open()
        assert await office.ask("rollout-0") is None
        await office.work("source-0")
        claim = await office.claim("rollout-0")
        assert [unit.delivery for unit in claim.units] == [0, 0]

    run(story())


def test_a_request_whose_caller_went_away_costs_a_delivery_and_no_unit() -> None:
    async def story() -> None:
        office = Office()
        await office.open()
        asked = await waiting(office.ask("rollout-0"))
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await office.work("source-0")
        claim = await office.claim("rollout-0")
        assert [unit.delivery for unit in claim.units] == [1, 1]

    run(story())


def test_waiting_requests_are_told_that_the_run_is_over() -> None:
    async def story() -> None:
        office = Office()
        await office.open()
        asked = await waiting(office.ask("rollout-0"))
        await office.service.stop("enough")
        with pytest.raises(Stop):
            await asked
        with pytest.raises(Stop):
            await office.ask("source-0")
        assert (await office.status()).halted == ""

    run(story())


def test_a_run_that_is_finished_ends_every_request() -> None:
    async def story() -> None:
        office = Office()
        await office.open()
        await office.work("source-0", "rollout-0")
        asked = await waiting(office.ask("source-0"))
        await office.work("update-0")
        with pytest.raises(Stop):
            await asked
        assert office.service.over
        assert (await office.status()).finished
        await office.settle()

    run(story())


def test_a_run_that_cannot_go_on_ends_every_request_and_says_why() -> None:
    async def story() -> None:
        office = Office()
        await office.open()
        asked = await waiting(office.ask("rollout-0"))
        await office.service.fail("the queue is gone")
        with pytest.raises(Stop):
            await asked
        assert office.service.over
        assert (await office.status()).halted == "the queue is gone"

    run(story())


def test_the_death_of_a_process_gives_the_units_of_all_its_workers_to_others() -> None:
    async def story() -> None:
        office = Office(GRADED)
        await office.open("reward-1")
        await office.work("source-0", "rollout-0")
        await office.claim("reward-0")
        await office.service.died(["reward-0", "source-0"], "killed")
        again = await office.claim("reward-1")
        assert [unit.delivery for unit in again.units] == [1, 1]
        assert (await office.status()).stages["reward"] == {"leased": 2}

    run(story())


# What the driver is shown


def test_a_closed_window_is_shown_with_its_averages_its_counts_and_the_time_since_the_one_before() -> None:
    async def story() -> None:
        office = Office(windows=2)
        await office.open()
        await office.work("source-0")
        await office.work("rollout-0", metrics={"length": (30.0, 2.0), "nothing": (0.0, 0.0)})
        office.now += 5
        await office.work("update-0", metrics={"length": (10.0, 2.0), "loss": (0.5, 1.0)})
        (record,) = (await office.status()).closed
        assert (record.index, record.window, record.seconds) == (0, WINDOW, 5.0)
        assert record.metrics == {"length": 10.0, "loss": 0.5}
        assert record.weights == {"length": 4.0, "loss": 1.0}
        assert record.counts == {"sampled trained": 2}
        office.now += 2
        await office.work("source-0", "rollout-0", "update-0")
        (record,) = (await office.status(1)).closed
        assert (record.index, record.seconds, record.metrics) == (1, 2.0, {})
        await office.settle()

    run(story())


def test_a_closed_window_is_shown_with_how_often_it_was_refilled_beside_what_the_stages_measured() -> None:
    async def story() -> None:
        filtering = replace(reward(), filters=True)
        office = Office(plans(source(), rollout(), filtering, update("reward")), draws=Draws(9, 1, max_draws=1))
        await office.open()
        await office.work("source-0", "rollout-0")
        claim = await office.claim("reward-0")
        drops = [Dropped("reward-0", claim.id, unit.unit.id, unit.delivery, "a rule", 0.0) for unit in claim.units]
        await office.service.report(drops, {"score": (2.0, 2.0)}, claim.window)
        await office.work("source-0", "rollout-0", "reward-0", "update-0")
        (record,) = (await office.status()).closed
        assert record.metrics == {"score": 1.0, "filter/dropped_groups": 1, "refill/draws": 1}
        assert record.weights == {"score": 2.0, "filter/dropped_groups": 1.0, "refill/draws": 1.0}
        assert record.counts == {"sampled dropped: a rule": 2, "sampled trained": 2}
        await office.settle()

    run(story())


async def overtaken(office: Office) -> Claim:
    """`reward-0` falls silent with a claim; returns it when `reward-1` has done the work."""
    await office.open("reward-1")
    await office.work("source-0", "rollout-0")
    late = await office.claim("reward-0")
    office.now += 61
    for worker in ("source-0", "rollout-0", "reward-1", "update-0"):
        await office.beat(worker)
    ticks = asyncio.create_task(office.service.tick_forever())
    again = await office.claim("reward-1")
    ticks.cancel()
    await office.report("reward-1", again, {"score": (2.0, 2.0)})
    return late


def test_what_comes_too_late_is_not_measured_whatever_else_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.0)

    async def story() -> None:
        office = Office(GRADED)
        late = await overtaken(office)
        await office.report("reward-0", late, {"score": (20.0, 2.0)})
        await office.report("reward-0", late, {"score": (20.0, 2.0)}, Warned("reward-0", "slow", "it was slow", 0.0))
        await office.work("update-0")
        await office.report("reward-0", late, {"score": (20.0, 2.0)})
        (record,) = (await office.status()).closed
        assert (record.metrics, record.weights) == ({"score": 1.0}, {"score": 2.0})
        assert "it was slow" in (await office.status()).alarms
        await office.settle()

    run(story())


def test_what_counts_in_part_is_measured() -> None:
    async def story() -> None:
        office = Office(GRADED)
        await office.open()
        await office.work("source-0", "rollout-0")
        claim = await office.claim("reward-0")
        first = claim.units[0]
        done = Acknowledged("reward-0", claim.id, first.unit.id, 0, 1, 0.0)
        await office.service.report([done], {"score": (1.0, 1.0)}, WINDOW)
        await office.report("reward-0", claim, {"score": (2.0, 1.0)})  # the first again, and the second
        await office.work("update-0")
        assert (await office.status()).closed[0].weights == {"score": 2.0}
        await office.settle()

    run(story())


def test_what_was_shown_is_forgotten_and_what_was_not_is_shown_again() -> None:
    async def story() -> None:
        office = Office(windows=3)
        await office.open()
        for number in range(3):
            await office.work("source-0", "rollout-0", "update-0")
            await office.service.report([Warned("rollout-0", str(number), f"warning {number}", 0.0)], {}, "")
        assert [record.index for record in (await office.status(0, 0)).closed] == [0, 1, 2]
        status = await office.status(1, 2)
        assert [record.index for record in status.closed] == [1, 2]
        assert status.alarms == ["warning 2"]
        assert [record.index for record in (await office.status(0, 0)).closed] == [1, 2]
        await office.settle()

    run(story())


@pytest.mark.slow
def test_a_long_run_holds_no_more_than_a_short_one() -> None:
    async def story() -> None:
        windows = 10_000
        office = Office(windows=windows)
        await office.open()
        sizes = []
        for number in range(windows):
            await office.work("source-0", "rollout-0", "update-0", metrics={"score": (1.0, 1.0)})
            if number % 100 == 99:
                status = await office.status(number + 1 - 100)
                assert [record.index for record in status.closed] == list(range(number - 99, number + 1))
                await asyncio.sleep(0)
            if number in (1000, windows - 2):
                await office.settle()
                assert office.queue.keys(f"run/train/{number:06d}") == []
                gc.collect()
                sizes.append(len(gc.get_objects()))
        before, after = sizes
        assert after - before < 2000  # 9000 windows: of each of them nothing is left

    run(story())


def test_what_does_not_move_is_told_only_to_those_who_ask_for_it() -> None:
    async def story() -> None:
        office = Office()
        await office.open()
        await office.work("source-0")
        claim = await office.claim("rollout-0")
        wait = Wait("an engine", 3.0, 10.0, "it is started again")
        await office.beat("rollout-0", claim.id, waits=(wait,))
        await office.beat("update-0")
        office.now += 4
        status = await office.status()
        assert (status.detailed, status.blocked, status.waits) == (False, [], {})
        status = await office.status(detail=True)
        assert status.detailed
        assert [(line.stage, line.state, line.seconds) for line in status.blocked] == [
            ("rollout", "leased", 4.0),
            ("update", "waiting", 4.0),
        ]
        assert status.waits == {"rollout-0": (wait,)}
        await office.service.died(["rollout-0"], "killed")
        assert (await office.status(detail=True)).waits == {}

    run(story())


def test_the_status_says_since_when_nothing_was_reported_and_who_works_or_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.0)

    async def story() -> None:
        office = Office(plans(source(), rollout(deadline_s=30), update("rollout")))
        await office.open()
        await office.work("source-0")
        await office.claim("rollout-0")
        office.now += 20
        await office.beat("rollout-0")
        status = await office.status()
        assert (status.idle_s, status.works, status.silent) == (20.0, False, [])  # the heartbeat gave the claim up
        await office.claim("rollout-0")
        assert (await office.status()).works
        office.now += 61
        await tick(office)
        status = await office.status()
        assert (status.idle_s, status.works, status.silent) == (81.0, False, ["source-0", "rollout-0"])

    run(story())


async def tick(office: Office) -> None:
    """Let the service look at the time once."""
    ticks = asyncio.create_task(office.service.tick_forever())
    for _ in range(3):
        await asyncio.sleep(0)
    ticks.cancel()
    await asyncio.gather(ticks, return_exceptions=True)


def test_what_became_of_units_is_in_the_journal(tmp_path: Path) -> None:
    async def story() -> None:
        office = Office(journal=tmp_path)
        await office.open()
        await office.work("source-0")
        claim = await office.claim("rollout-0")
        first, second = claim.units
        failure = Failure("ValueError", "boom", "Traceback")
        reports: Sequence[Report] = [
            Failed("rollout-0", claim.id, first.unit.id, 0, failure, False, 0.0),
            Dropped("rollout-0", claim.id, second.unit.id, 0, "too long", 0.0),
        ]
        await office.service.report(reports, {}, WINDOW)
        await office.settle()

    run(story())
    (path,) = tmp_path.glob("ledger.coordinator.*.arrows")
    records = [record for batch in read_batches(path) for record in batch.to_pylist()]
    assert [(r["unit"][-1], r["outcome"], r["worker"], r["attempt"], r["error"]) for r in records] == [
        ("0", "attempt failed", "rollout-0", 1, "ValueError"),
        ("0", "failed: rollout", "", 1, "ValueError"),
        ("1", "dropped: too long", "", None, None),
    ]


# Partitions


def test_a_closed_window_is_cleared_from_the_queue() -> None:
    async def story() -> None:
        office = Office()
        await office.open()
        await office.work("source-0", "rollout-0")
        assert office.queue.keys(WINDOW) != []
        await office.work("update-0")
        await office.settle()
        assert office.queue.keys(WINDOW) == []

    run(story())


def test_a_closed_window_is_cleared_only_when_nobody_writes_to_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.0)

    async def story() -> None:
        office = Office(GRADED)
        late = await overtaken(office)
        await office.work("update-0")
        await office.beat("reward-0", late.id)
        assert len((await office.status()).closed) == 1
        await office.settle()
        assert office.queue.keys(WINDOW) != []
        await office.report("reward-0", late)
        await office.beat("reward-0")
        await office.settle()
        assert office.queue.keys(WINDOW) == []

    run(story())


def test_a_partition_that_cannot_be_cleared_is_an_alarm_and_the_run_goes_on() -> None:
    def refuse(partition: str) -> int:
        raise QueueError(f"{partition} is stuck")

    async def story() -> None:
        office = Office(windows=2, clear=refuse)
        await office.open()
        await office.work("source-0", "rollout-0", "update-0")
        await office.settle()
        (alarm,) = (await office.status()).alarms
        assert alarm == f"window {WINDOW} was not cleared from the queue: {WINDOW} is stuck"
        await office.work("source-0")

    run(story())


def test_a_queue_on_another_machine_is_cleared_by_a_coroutine() -> None:
    cleared: list[str] = []

    async def clear(partition: str) -> int:
        cleared.append(partition)
        return 1

    async def story() -> None:
        office = Office(clear=clear)
        await office.open()
        await office.work("source-0", "rollout-0", "update-0")
        await office.settle()

    run(story())
    assert cleared == [WINDOW]
