"""The whole run in one process: the same coordinator, workers and stages over the in-memory queue."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from dataflow.config import RunConfig
from dataflow.console import Console
from dataflow.errors import RunError, WorkerBroken
from dataflow.journal import JournalWriter
from dataflow.pipeline import Pipeline
from dataflow.queue import MemoryQueue, Queue
from dataflow.service import CoordinatorService, Status, coordinator_for
from dataflow.stage import StageContext
from dataflow.testing.faults import Faults
from dataflow.weights import WeightsDirectory
from dataflow.worker import Worker

POLL_S = 0.2
STOP_S = 8.0


def run_local(config: RunConfig, pipeline: Pipeline, run_dir: Path, run_id: str, console: Console) -> Status:
    """Run a pipeline to its end in this process.

    Raises:
        RunError: If a worker fails or the run stalls.
        KeyboardInterrupt: After everything was closed.
    """
    for stage in pipeline.stages.values():
        for name, value in stage.environment.items():
            os.environ.setdefault(name, value)
    return asyncio.run(run_over(config, pipeline, run_dir, run_id, console, MemoryQueue()))


async def run_over(
    config: RunConfig, pipeline: Pipeline, run_dir: Path, run_id: str, console: Console, queue: Queue
) -> Status:
    """As `run_local`, in the event loop that runs already, over a queue that may be looked at meanwhile."""
    coordinator = coordinator_for(pipeline, run_id, config.limits)
    service = CoordinatorService(coordinator, queue.clear, run_dir / "journal")
    crew = _Crew(config, pipeline, run_dir, run_id, service, queue)
    await crew.start(console)
    ticks = asyncio.create_task(service.tick_forever())
    try:
        return await _watch(config, service, console, crew)
    finally:
        await service.stop("the run ended")
        await crew.stop()
        ticks.cancel()
        await asyncio.gather(ticks, return_exceptions=True)
        await service.close()
        WeightsDirectory(run_id).remove()


class _Crew:
    """The workers of a local run, and what is done when one breaks."""

    def __init__(
        self,
        config: RunConfig,
        pipeline: Pipeline,
        run_dir: Path,
        run_id: str,
        service: CoordinatorService,
        queue: Queue,
    ) -> None:
        self._config = config
        self._pipeline = pipeline
        self._run_dir = run_dir
        self._run_id = run_id
        self._service = service
        self._queue = queue
        self._faults = Faults(config.faults, config.run.seed, run_dir, kill=_break)
        self._restarts: dict[str, int] = {}
        self.running: dict[asyncio.Task[None], tuple[str, str]] = {}

    async def start(self, console: Console) -> None:
        """Set every worker up, and let them run."""
        hired = []
        for process in self._pipeline.processes().values():
            for name, stage in process:
                worker = self._hire(name, stage)
                with console.phase(f"{stage} sets up"):
                    await worker.setup()
                hired.append(worker)
        for worker in hired:
            self._run(worker)

    async def check(self, console: Console) -> None:
        """Replace the workers that broke.

        Raises:
            RunError: If one failed otherwise, has one owner, or breaks again and again.
        """
        for task in [task for task in self.running if task.done() and task.exception() is not None]:
            name, stage = self.running.pop(task)
            error = task.exception()
            self._restarts[name] = self._restarts.get(name, 0) + 1
            many = self._restarts[name] > self._config.cluster.max_restarts
            if not isinstance(error, WorkerBroken) or many or self._pipeline.stages[stage].one_owner:
                raise RunError(f"worker {name} failed: {type(error).__name__}: {error}") from error
            console.say(f"! worker {name} broke ({error}); its units are re-dispatched and it is started again")
            await self._service.died([name], str(error))
            worker = self._hire(name, stage)
            await worker.setup()
            self._run(worker)

    def window_closed(self) -> None:
        """Only breaks in a row, with no window closed between, count against the limit."""
        self._restarts.clear()

    async def finish(self) -> None:
        """When all work is done, let every worker close what it has, such as the model that it saves.

        Raises:
            RunError: If one fails at it. A worker that breaks at work that others have done meanwhile does not count.
        """
        await asyncio.gather(*self.running, return_exceptions=True)
        for task, (name, stage) in self.running.items():
            error = task.exception()
            broke = isinstance(error, WorkerBroken) and not self._pipeline.stages[stage].one_owner
            if error is not None and not broke:
                raise RunError(f"worker {name} failed: {type(error).__name__}: {error}") from error
        # Nobody writes any more: now the windows can be cleared that were kept for a late write.
        gone = [name for name, stage in self.running.values() if not self._pipeline.stages[stage].one_owner]
        await self._service.died(gone, "the run ended")

    async def stop(self) -> None:
        """Let the workers finish what they hold, for a few seconds; then cancel them."""
        if not self.running:
            return
        _, late = await asyncio.wait(self.running, timeout=STOP_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    def _hire(self, name: str, stage: str) -> Worker:
        journal = JournalWriter(self._run_dir / "journal", stage, name)
        context = StageContext(self._run_id, self._run_dir, name, self._config.run.seed)
        beat = self._config.limits.heartbeat_s
        built = self._pipeline.build(stage)
        control, queue = self._faults.around(built, self._service, self._queue)
        return Worker(name, built, self._pipeline, control, queue, journal, context, heartbeat_s=beat)

    def _run(self, worker: Worker) -> None:
        self.running[asyncio.create_task(worker.run(), name=worker.name)] = (worker.name, worker.stage.name)


def _break() -> None:
    """What `kill` means in a run of one process: the worker ends without a word."""
    raise WorkerBroken("a fault of kind 'kill' struck")


async def _watch(config: RunConfig, service: CoordinatorService, console: Console, crew: _Crew) -> Status:
    while True:
        await asyncio.wait(crew.running, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        status = await service.status(*console.wants)
        console.show(status)
        if status.closed:
            crew.window_closed()
        await crew.check(console)
        console.check(status)
        if status.finished:
            await crew.finish()
            return status
