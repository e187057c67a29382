"""The whole run in one process: the same coordinator, workers and stages over the in-memory queue."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from dataflow.config import RunConfig
from dataflow.console import Console
from dataflow.errors import RunError
from dataflow.journal import JournalWriter
from dataflow.pipeline import Pipeline
from dataflow.queue import MemoryQueue, Queue
from dataflow.service import CoordinatorService, Status, coordinator_for
from dataflow.stage import StageContext
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
    return asyncio.run(_run(config, pipeline, run_dir, run_id, console, MemoryQueue()))


async def _run(
    config: RunConfig, pipeline: Pipeline, run_dir: Path, run_id: str, console: Console, queue: Queue
) -> Status:
    journal = run_dir / "journal"
    coordinator = coordinator_for(pipeline, run_id, config.limits.lease_s, config.limits.max_empty_windows)
    service = CoordinatorService(coordinator, queue.clear, journal)
    workers = []
    beat = config.limits.heartbeat_s
    for process in pipeline.processes().values():
        for name, stage in process:
            context = StageContext(run_id, run_dir, name, config.run.seed)
            writer = JournalWriter(journal, stage, name)
            workers.append(
                Worker(name, pipeline.stages[stage], pipeline, service, queue, writer, context, heartbeat_s=beat)
            )
    for worker in workers:
        with console.phase(f"{worker.stage.name} sets up"):
            await worker.setup()
    ticks = asyncio.create_task(service.tick_forever())
    running = {asyncio.create_task(worker.run(), name=worker.name) for worker in workers}
    try:
        return await _watch(config, service, console, running)
    finally:
        await service.stop("the run ended")
        _, late = await asyncio.wait(running, timeout=STOP_S)
        for task in [*late, ticks]:
            task.cancel()
        await asyncio.gather(*late, ticks, return_exceptions=True)
        await service.close()
        WeightsDirectory(run_id).remove()


async def _watch(
    config: RunConfig, service: CoordinatorService, console: Console, running: set[asyncio.Task[None]]
) -> Status:
    while True:
        done, _ = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        status = await service.status(console.windows_shown, console.alarms_shown)
        console.show(status)
        for task in done:
            if (error := task.exception()) is not None:
                raise RunError(f"worker {task.get_name()} failed: {type(error).__name__}: {error}") from error
        console.check(status, config.limits.stall_s)
        if status.finished:
            await asyncio.gather(*running)  # what a worker closes with, such as a saved model, may fail too
            return status
