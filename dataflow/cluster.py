"""The run on Ray: one coordinator actor, one actor per process of workers, and their supervision.

The only importer of ray. The driver itself imports neither torch nor the queue.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow import exposure
from dataflow.config import RunConfig
from dataflow.console import Console
from dataflow.errors import ConfigError, QueueError, RunError
from dataflow.events import Claim, Holding
from dataflow.journal import JournalWriter
from dataflow.pipeline import Pipeline
from dataflow.reaper import MARK, RunFolder, processes_of, reap
from dataflow.service import CoordinatorService, Status, coordinator_for
from dataflow.stage import StageContext
from dataflow.testing.faults import Faults
from dataflow.waits import Wait
from dataflow.worker import Metrics, Report, Stop, Worker

log = logging.getLogger(__name__)

POLL_S = 0.25
STOP_S = 6.0
ANSWER_S = 25.0
QUEUE_CHECK_S = 2.0


@dataclass(frozen=True)
class Boot:
    """What an actor needs to come up."""

    config: RunConfig
    pipeline: Pipeline
    run_dir: Path
    run_id: str
    folder: str


class _CoordinatorActor:
    """The coordinator and the owner of the queue, in one process: neither is of use without the other."""

    def __init__(self, boot: Boot) -> None:
        _settle_in(boot, "coordinator")
        self._boot = boot
        self._service: CoordinatorService | None = None
        self._ready = asyncio.Event()
        self._queue: Any = None

    async def start(self) -> int:
        """Start the queue and the state machine; returns the process id."""
        from dataflow import tq

        boot = self._boot
        await asyncio.to_thread(tq.start, boot.config.queue.storage_units)
        self._queue = await asyncio.to_thread(
            tq.TransferQueue, boot.pipeline.columns, boot.pipeline.producers, boot.config.queue.timeout_s
        )
        coordinator = coordinator_for(boot.pipeline, boot.run_id, boot.config.limits)
        self._service = CoordinatorService(coordinator, self._queue.clear, boot.run_dir / "journal")
        self._watching = [
            asyncio.create_task(self._service.tick_forever()),
            asyncio.create_task(self._watch_queue(self._service)),
        ]
        self._ready.set()
        return os.getpid()

    async def ready(self) -> None:
        """Wait until `start` has finished."""
        await self._ready.wait()

    async def _watch_queue(self, service: CoordinatorService) -> None:
        """End the run soon after one of the queue's processes died: its calls alone would find out much later."""
        from dataflow import tq

        actors = tq.actors(self._boot.config.queue.storage_units)
        while not (gone := await asyncio.to_thread(_missing_actors, actors)):  # noqa: ASYNC110  Ray offers no event
            await asyncio.sleep(QUEUE_CHECK_S)
        await service.fail(f"the queue's process {gone[0]} is gone, and with it the rows it held; the run cannot go on")

    async def joined(self, worker: str, stage: str, process: str) -> None:
        await self._it.joined(worker, stage, process)

    async def claim(self, worker: str, request: int, loaded_version: int, holding: Holding) -> Claim | bool | None:
        """As `Control.claim`; False in place of raising Stop."""
        try:
            return await self._it.claim(worker, request, loaded_version, holding)
        except Stop:
            return False

    async def report(self, reports: Sequence[Report], metrics: Metrics, window: str) -> None:
        await self._it.report(reports, metrics, window)

    async def heartbeat(self, worker: str, holding: Holding, waits: tuple[Wait, ...]) -> None:
        await self._it.heartbeat(worker, holding, waits)

    async def died(self, workers: Sequence[str], reason: str) -> None:
        await self._it.died(workers, reason)

    async def status(self, closed_from: int, alarms_from: int, detail: bool) -> Status:
        return await self._it.status(closed_from, alarms_from, detail)

    async def stop(self, reason: str) -> None:
        if self._service is not None:
            await self._service.stop(reason)

    async def close(self) -> None:
        """End the queue's actors and close the journal."""
        from dataflow import tq

        if self._service is not None:
            for task in self._watching:
                task.cancel()
            await self._service.close()
        await asyncio.to_thread(tq.shut_down)

    @property
    def _it(self) -> CoordinatorService:
        if self._service is None:
            raise RunError("the coordinator has not started")
        return self._service


class _RemoteControl:
    """`worker.Control` over a Ray actor handle."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    async def joined(self, worker: str, stage: str, process: str) -> None:
        await self._coordinator.joined.remote(worker, stage, process)

    async def claim(self, worker: str, request: int, loaded_version: int, holding: Holding) -> Claim | None:
        answer: Claim | bool | None = await self._coordinator.claim.remote(worker, request, loaded_version, holding)
        if isinstance(answer, bool):
            raise Stop
        return answer

    async def report(self, reports: Sequence[Report], metrics: Metrics, window: str) -> None:
        await self._coordinator.report.remote(reports, metrics, window)

    async def heartbeat(self, worker: str, holding: Holding, waits: tuple[Wait, ...]) -> None:
        await self._coordinator.heartbeat.remote(worker, holding, waits)


class _ProcessActor:
    """One process of workers."""

    def __init__(self, boot: Boot, name: str, workers: Sequence[tuple[str, str]], coordinator: Any) -> None:
        _settle_in(boot, name)
        self._boot = boot
        self._name = name
        self._members = workers
        self._coordinator = coordinator
        self._workers: list[Worker] = []

    async def start(self) -> int:
        """Set the stages up, wait for the queue and attach to it; returns the process id."""
        boot, journal = self._boot, self._boot.run_dir / "journal"
        control = _RemoteControl(self._coordinator)
        beat = boot.config.limits.heartbeat_s
        queue = _LateQueue()
        faults = Faults(boot.config.faults, boot.config.run.seed, boot.run_dir)
        for name, stage_name in self._members:
            stage = boot.pipeline.build(stage_name)
            context = StageContext(boot.run_id, boot.run_dir, name, boot.config.run.seed)
            writer = JournalWriter(journal, stage_name, name)
            seen, reached = faults.around(stage, control, queue)
            self._workers.append(Worker(name, stage, boot.pipeline, seen, reached, writer, context, self._name, beat))
        for worker in self._workers:
            await worker.setup()
        await self._coordinator.ready.remote()
        await asyncio.to_thread(queue.attach, boot)
        return os.getpid()

    async def run(self) -> None:
        """Work until the run is over."""
        await asyncio.gather(*(worker.run() for worker in self._workers))


def _missing_actors(names: Sequence[tuple[str, str | None]]) -> list[str]:
    """Those of the named actors, each (name, namespace), that are not alive.

    `ray.get_actor` would not tell: a process that has found a name once keeps what it found.
    """
    import ray

    own = ray.get_runtime_context().namespace
    alive = {(found["name"], found["namespace"]) for found in ray.util.list_named_actors(all_namespaces=True)}
    return [name for name, namespace in names if (name, namespace or own) not in alive]


def _actor(cls: type, variables: Mapping[str, str], num_gpus: float = 0) -> Any:
    """An actor class with our options. It is never restarted by Ray: what a death means is decided here."""
    import ray

    return ray.remote(cls).options(
        num_cpus=0,
        num_gpus=num_gpus,
        max_concurrency=1000,
        max_restarts=0,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", **variables}},
    )


class _LateQueue:
    """A TransferQueue client that is made only when the queue is known to be there.

    Attaching earlier would start a second queue with default settings.
    """

    def __init__(self) -> None:
        self._queue: Any = None

    def attach(self, boot: Boot) -> None:
        """Attach to the queue.

        Raises:
            QueueError: If it is gone.
        """
        import ray

        from dataflow import tq

        try:
            ray.get_actor(tq.CONTROLLER, namespace=tq.NAMESPACE)
        except ValueError as error:
            raise QueueError(f"the queue is gone: there is no actor {tq.CONTROLLER!r} any more") from error
        self._queue = tq.TransferQueue(boot.pipeline.columns, boot.pipeline.producers, boot.config.queue.timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def _settle_in(boot: Boot, name: str) -> None:
    """Work in the driver's folder, and send everything the process prints, libraries included, to its log file."""
    os.chdir(boot.folder)
    folder = boot.run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        force=True,
    )


class _Cluster:
    """The actors of one run, and what is done when one dies."""

    def __init__(self, boot: Boot, console: Console) -> None:
        self.boot = boot
        self.console = console
        self.coordinator: Any = None
        self.processes: dict[str, Any] = {}
        self.running: dict[Any, str] = {}
        self.restarts: dict[str, int] = {}
        self.restarting: dict[str, float] = {}
        self.pids: dict[str, int] = {}
        self.members = boot.pipeline.processes()

    def start(self) -> None:
        """Start everything at once, and report each process as it comes up."""
        import ray

        began = time.monotonic()
        self.coordinator = _actor(_CoordinatorActor, {}).remote(self.boot)
        waiting = {self.coordinator.start.remote(): "coordinator and queue"}
        for name in self.members:
            waiting[self._spawn(name)] = name
        for name, workers in self.members.items():
            self.console.say(f"  starting process {name}: {', '.join(worker for worker, _ in workers)}")
        self.console.say("  (each imports torch, and vLLM loads the model: expect a minute on two cores)")
        deadline = began + self.boot.config.cluster.start_timeout_s
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=1.0)
            for ref in done:
                name = waiting.pop(ref)
                try:
                    pid = ray.get(ref)
                except ray.exceptions.RayError as error:
                    if isinstance(cause := getattr(error, "cause", None), ConfigError):
                        raise cause from None
                    raise RunError(f"{name} did not come up: {_cause(error)}") from error
                self._note_pid(name, pid)
                self.console.phase_done(f"{name} is up", time.monotonic() - began)
            if waiting and time.monotonic() > deadline:
                raise RunError(
                    f"still not up after {self.boot.config.cluster.start_timeout_s:g} s: {', '.join(waiting.values())} "
                    f"(cluster.start_timeout_s sets the limit; logs are in {self.boot.run_dir / 'logs'})"
                )
        for name in self.members:
            self.running[self.processes[name].run.remote()] = name

    def _spawn(self, name: str) -> Any:
        """Start one process; returns the reference of its start."""
        stages = [self.boot.pipeline.stages[stage] for _, stage in self.members[name]]
        variables = {key: value for stage in stages for key, value in stage.environment.items()}
        actor = _actor(_ProcessActor, variables, sum(stage.num_gpus for stage in stages))
        self.processes[name] = actor.remote(self.boot, name, self.members[name], self.coordinator)
        return self.processes[name].start.remote()

    def _note_pid(self, name: str, pid: int) -> None:
        """Write a process id to the run directory: for a debugger, and for tests that kill one."""
        self.pids[name] = pid
        (self.boot.run_dir / "processes.json").write_text(json.dumps(self.pids, indent=2) + "\n")

    def watch(self) -> Status:
        """Show progress, and restart what dies, until the run is over.

        Raises:
            RunError: If the run cannot go on.
        """
        import ray

        while True:
            done, _ = ray.wait(list(self.running), timeout=POLL_S) if self.running else ([], [])
            for ref in done:
                self._ended(ref)
            status: Status = self._ask(self.coordinator.status.remote(*self.console.wants))
            self.console.show(status)
            self.console.check(status)
            if status.closed:
                self.restarts.clear()
            self._end_silent(status.silent)
            self._check_restarts()
            if status.finished:
                self._wait_for_ends()
                return status

    def _end_silent(self, workers: Sequence[str]) -> None:
        """A process without heartbeats may hang in code that nothing inside of it can stop."""
        for ref, name in list(self.running.items()):
            if name not in self.restarting and any(worker in workers for worker, _ in self.members[name]):
                del self.running[ref]
                self._restart(name, f"it sent no heartbeat for {self.boot.config.limits.lease_s:g} s")

    def _check_restarts(self) -> None:
        limit = self.boot.config.cluster.start_timeout_s
        for name, since in self.restarting.items():
            if time.monotonic() - since > limit:
                raise RunError(f"process {name}, started again, is not up after {limit:g} s (cluster.start_timeout_s)")

    def _wait_for_ends(self) -> None:
        """Let every worker close what it has, such as the model that it saves, and see that none failed at it."""
        import ray

        began, limit = time.monotonic(), self.boot.config.cluster.start_timeout_s
        self.console.say("  closing: the model is saved, the engine stops")
        # A process that was being started again has nothing to close.
        self.running = {ref: name for ref, name in self.running.items() if name not in self.restarting}
        while self.running:
            done, _ = ray.wait(list(self.running), timeout=1.0)
            for ref in done:
                name = self.running.pop(ref)
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as error:
                    raise RunError(f"process {name} failed at the end of the run: {_cause(error)}") from error
            if self.running and time.monotonic() - began > limit:
                raise RunError(f"still not closed after {limit:g} s: {', '.join(self.running.values())}")

    @staticmethod
    def _ask(answer: Any) -> Any:
        """Wait for the coordinator's answer.

        Raises:
            RunError: If it is gone or does not answer.
        """
        import ray

        try:
            return ray.get(answer, timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            raise RunError(f"the coordinator is gone: {_cause(error)}; the run cannot go on without it") from error

    def _ended(self, ref: Any) -> None:
        """A process's `run` or, after a restart, `start` came to an end."""
        import ray

        name = self.running.pop(ref)
        try:
            pid = ray.get(ref)
        except ray.exceptions.RayError as error:
            if isinstance(getattr(error, "cause", None), QueueError):
                raise RunError(f"process {name} lost the queue: {_cause(error)}; what was in it is gone") from error
            self._restart(name, _cause(error))
            return
        if name in self.restarting:
            del self.restarting[name]
            self._note_pid(name, pid)
            self.running[self.processes[name].run.remote()] = name
            self.console.say(f"! process {name} is back")

    def _restart(self, name: str, cause: str) -> None:
        import ray

        workers = [worker for worker, _ in self.members[name]]
        self.restarts[name] = self.restarts.get(name, 0) + 1
        ray.kill(self.processes[name])
        self._ask(self.coordinator.died.remote(workers, cause))
        owners = [stage for _, stage in self.members[name] if self.boot.pipeline.stages[stage].one_owner]
        if owners:
            raise RunError(f"process {name} died ({cause}); stage {owners[0]!r} has one owner and is not started again")
        if self.restarts[name] > self.boot.config.cluster.max_restarts:
            raise RunError(
                f"process {name} died {self.restarts[name]} times and no window was closed between, the last time of: "
                f"{cause} (cluster.max_restarts sets the limit)"
            )
        self.console.say(f"! process {name} died ({cause}); its units are re-dispatched and it is started again")
        self.restarting[name] = time.monotonic()
        self.running[self._spawn(name)] = name

    def stop(self) -> None:
        """Let the workers finish what they hold, for a few seconds; then end everything."""
        import ray

        if self.coordinator is None:
            return
        try:
            ray.get(self.coordinator.stop.remote("the run ended"), timeout=2)
            ray.wait(list(self.running), num_returns=len(self.running), timeout=STOP_S) if self.running else None
            ray.get(self.coordinator.close.remote(), timeout=5)
        except ray.exceptions.RayError as error:
            log.warning("the run did not stop in order: %s", error)


def run_cluster(config: RunConfig, pipeline: Pipeline, run_dir: Path, run_id: str, console: Console) -> Status:
    """Run a pipeline to its end on Ray.

    Raises:
        RunError: If the run cannot go on; the message says why.
        KeyboardInterrupt: After everything was stopped.
    """
    reap(console.say)
    folder = RunFolder(run_id)
    _prepare_environment(config, folder)
    import ray

    cluster = _Cluster(Boot(config, pipeline, run_dir, run_id, os.getcwd()), console)
    try:
        with console.phase("Ray starts" if config.cluster.address is None else "Ray is joined"):
            _join_ray(config, folder)
        _refuse_foreign_queue()
        cluster.start()
        for line in exposure.describe(exposure.open_sockets(processes_of(folder.path))):
            console.say(line)
        return cluster.watch()
    except RunError:
        if (logs := folder.path / "ray" / "session_latest" / "logs").is_dir():
            shutil.copytree(logs, run_dir / "logs" / "ray", symlinks=True)
        raise
    finally:
        cluster.stop()
        ray.shutdown()
        folder.remove()


def _prepare_environment(config: RunConfig, folder: RunFolder) -> None:
    """Set what this process, and with it a cluster of our own, must have before it imports ray."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.update(exposure.SILENCE)
    os.environ[MARK] = str(folder.path)
    if config.cluster.address is None:
        os.environ.update(exposure.LOOPBACK)
        os.environ["RAY_AUTH_MODE"] = "token"
        # In the environment, which only this user can read. Kept by this process if there is one: Ray reads it once.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _join_ray(config: RunConfig, folder: RunFolder) -> None:
    import ray

    from dataflow import tq

    variables = {
        **exposure.SILENCE,
        **folder.environment,
        **tq.environment(config.queue.timeout_s),
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),
    }
    common: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": variables},
    }
    if config.cluster.address is not None:
        _init_ray(address=config.cluster.address, **common)
        nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        if len(nodes) > 1:
            raise RunError(
                f"the cluster at {config.cluster.address} has {len(nodes)} machines; a run's files and weights are "
                "shared through one machine's disk and memory, so it needs a cluster of one"
            )
        return
    # The queue's own actors ask for one CPU each and wait for ever if they do not get it.
    cpus = max(os.cpu_count() or 1, config.queue.storage_units + 2)
    _init_ray(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=128 << 20,
        _temp_dir=str(folder.path / "ray"),
        **common,
    )


def _init_ray(**options: Any) -> None:
    """`ray.init`, whose failures come as errors of several kinds, some of them plain Exceptions.

    Raises:
        RunError: If Ray does not start, or there is no cluster at the address.
    """
    import ray

    try:
        ray.init(**options)
    except Exception as error:
        ray.shutdown()
        raise RunError(
            f"Ray ({options['address']}) did not start: {error} (a machine that is very busy may need a second try)"
        ) from error


def _refuse_foreign_queue() -> None:
    import ray

    from dataflow import tq

    try:
        ray.get_actor(tq.CONTROLLER, namespace=tq.NAMESPACE)
    except ValueError:
        return
    raise RunError(
        f"this Ray cluster already runs a TransferQueue (actor {tq.CONTROLLER!r} in namespace {tq.NAMESPACE!r}), and "
        "there can be only one; stop the other run first, or leave cluster.address unset to get a cluster of its own"
    )


def _cause(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0] if text else ''}"
