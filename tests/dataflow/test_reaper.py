"""Ownership of a run's folder, and the removal of what a killed run leaves: real folders and real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dataflow.reaper import MARK, RunFolder, processes_of, reap
from dataflow.weights import WeightsDirectory

# A driver that starts one marked child, prints its folder and the child's process id, and waits to be killed.
DRIVER = """\
import os, subprocess, sys
from pathlib import Path
from dataflow.reaper import RunFolder
from dataflow.weights import WeightsDirectory

folder = RunFolder(sys.argv[1], Path(sys.argv[2]))
weights = WeightsDirectory(sys.argv[1])
weights.create()
weights.file(0).write_bytes(b"weights")
code = sys.argv[3]
child = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **folder.environment}, stdout=subprocess.PIPE)
child.stdout.readline()
print(folder.path, child.pid, flush=True)
sys.stdin.read()
"""
OBEDIENT = "print(flush=True); import time; time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + OBEDIENT
# Ray's agents: no mark in the environment, but a log file in the folder.
UNMARKED = f"""\
import os, sys
folder = os.environ.pop("{MARK}")
log = open(folder + "/agent.log", "w")
os.dup2(log.fileno(), 2)
os.execve(sys.executable, [sys.executable, "-c", {OBEDIENT!r}], dict(os.environ))
"""
SEMAPHORE = """\
import multiprocessing, time
from dataflow.reaper import name_semaphores

name_semaphores()
lock = multiprocessing.get_context("spawn").Lock()
print(flush=True)
time.sleep(600)
"""


class Driver:
    """A process that owns a run's folder, and its child."""

    def __init__(self, run_id: str, parent: Path, child: str) -> None:
        command = [sys.executable, "-c", DRIVER, run_id, str(parent), child]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        folder, pid = self.process.stdout.readline().split()
        self.folder = Path(folder)
        self.child = psutil.Process(int(pid))
        self.weights = WeightsDirectory(run_id)

    def kill(self) -> None:
        """`kill -9` of the driver alone."""
        self.process.kill()
        self.process.wait()

    def clean(self) -> None:
        """End all of it, whatever the test did."""
        self.kill()
        if self.child.is_running():
            self.child.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.weights.remove()


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Start a driver with a child that runs the given code."""
    drivers: list[Driver] = []

    def begin(child: str = OBEDIENT) -> Driver:
        drivers.append(Driver(f"{tmp_path.name}-{len(drivers)}", tmp_path, child))
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.clean()


def lives(process: psutil.Process) -> bool:
    """Whether a process runs; one that only waits for its parent to read its exit code does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("child", [OBEDIENT, STUBBORN, UNMARKED], ids=["obedient", "stubborn", "unmarked"])
def test_what_a_killed_driver_leaves_is_removed_and_said(
    drive: Callable[..., Driver], tmp_path: Path, child: str
) -> None:
    dead = drive(child)
    dead.kill()
    assert lives(dead.child)
    said: list[str] = []
    reap(said.append, tmp_path)
    assert not lives(dead.child)
    assert not dead.folder.exists()
    assert not dead.weights.path.exists()
    assert said == [
        f"removed what the run {tmp_path.name}-0 left (its driver, process {dead.process.pid}, is gone): "
        f"1 processes, 1 shared-memory files, {dead.folder}"
    ]


def test_a_live_run_is_left_alone_while_a_dead_one_is_reaped(drive: Callable[..., Driver], tmp_path: Path) -> None:
    live, dead = drive(), drive()
    dead.kill()
    said: list[str] = []
    reap(said.append, tmp_path)
    assert len(said) == 1
    assert not dead.folder.exists()
    assert lives(live.child)
    assert live.weights.file(0).exists()
    assert live.folder.exists()


def test_a_second_reaper_finds_nothing(drive: Callable[..., Driver], tmp_path: Path) -> None:
    drive().kill()
    reap(lambda text: None, tmp_path)
    said: list[str] = []
    reap(said.append, tmp_path)
    assert said == []


def test_a_process_that_only_reads_in_the_folder_is_not_the_runs(drive: Callable[..., Driver], tmp_path: Path) -> None:
    run = drive()
    code = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(run.folder / "owner.json")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        assert {process.pid for process in processes_of(run.folder)} == {run.process.pid, run.child.pid}
        reader.kill()


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_others_can_enter_is_not_believed(tmp_path: Path, mode: int) -> None:
    fake = tmp_path / f"dataflow-{os.getuid()}-fake"
    fake.mkdir()
    fake.chmod(mode)
    (fake / "owner.json").write_text('{"run_id": "fake", "pid": 1}')
    reap(pytest.fail, tmp_path)
    assert fake.exists()


def test_a_link_to_a_folder_is_not_followed(drive: Callable[..., Driver], tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    dead = drive()
    dead.kill()
    moved = dead.folder.rename(elsewhere / "kept")
    dead.folder.symlink_to(moved)
    reap(pytest.fail, tmp_path)
    assert (moved / "owner.json").exists()


def test_a_run_that_ends_removes_its_folder_and_ends_what_still_runs(tmp_path: Path) -> None:
    folder = RunFolder("ends", tmp_path)
    weights = WeightsDirectory("ends")
    weights.create()
    child = subprocess.Popen([sys.executable, "-c", OBEDIENT], env={**os.environ, **folder.environment})
    folder.remove()
    assert child.wait(timeout=5) != 0
    assert list(tmp_path.iterdir()) == []
    assert not weights.path.exists()


def test_the_folder_is_private_and_its_name_leaves_room_for_sockets(tmp_path: Path) -> None:
    folder = RunFolder("private", tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert Path(folder.environment["TMPDIR"]).is_dir()
    session = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
    assert len(f"/tmp/{folder.path.name}/{session}") <= 107
    folder.remove()


def test_a_semaphore_of_a_killed_process_is_removed_with_its_run(tmp_path: Path) -> None:
    folder = RunFolder("semaphores", tmp_path)
    environment = {**os.environ, **folder.environment}
    with subprocess.Popen([sys.executable, "-c", SEMAPHORE], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for victim in [
            psutil.Process(process.pid),
            *psutil.Process(process.pid).children(),
        ]:  # and Python's own cleaner
            victim.kill()
    assert len(list(Path("/dev/shm").glob(f"sem.{folder.path.name}-*"))) == 1
    folder.remove()
    assert list(Path("/dev/shm").glob(f"sem.{folder.path.name}-*")) == []


def test_a_process_that_ended_long_ago_costs_the_reaper_no_wait(drive: Callable[..., Driver], tmp_path: Path) -> None:
    dead = drive()
    dead.child.kill()
    dead.kill()
    began = time.monotonic()
    said: list[str] = []
    reap(said.append, tmp_path)
    assert "0 processes" in said[0]
    assert time.monotonic() - began < 3
