"""A run's private folder, and the removal of what a run leaves behind when its driver was killed.

The driver holds a lock on the record in its folder. The system drops the lock when the driver ends, however it ends, so
a record that can be locked is of a dead run. A process id would not tell: it may be another process's by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

import psutil

from dataflow.weights import WeightsDirectory

# In the environment of every process of a run: the path of the run's folder.
MARK = "DATAFLOW_RUN_FOLDER"
RECORD = "owner.json"
SHARED_MEMORY = Path("/dev/shm")
# How long a process may take to end after SIGTERM, and after SIGKILL.
END_S = 3.0
END_POLL_S = 0.05


class RunFolder:
    """The folder of a live run, mode 0700: Ray's files, and the temporary files of the run's processes.

    Args:
        run_id: Names the run's weight files, which go with the folder.
        parent: Where to make it; default the machine's folder for temporary files. The folder's own name is short:
            sockets lie in it, and the path of a socket has at most 107 characters.
    """

    def __init__(self, run_id: str, parent: Path | None = None) -> None:
        self.run_id = run_id
        self.path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=parent))
        (self.path / "tmp").mkdir(mode=0o700)
        self._record = self._hold()

    @property
    def environment(self) -> dict[str, str]:
        """Variables for every process of the run: they mark it, and send its temporary files here."""
        return {MARK: str(self.path), "TMPDIR": str(self.path / "tmp")}

    def remove(self) -> None:
        """End what still runs of the run, this process apart, and remove its files."""
        _clear(self.path, self.run_id)
        self._record.close()

    def _hold(self) -> TextIO:
        draft = self.path / f"{RECORD}.draft"
        file = draft.open("x", encoding="utf-8")
        json.dump({"run_id": self.run_id, "pid": os.getpid()}, file)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        # Under its name only once it is locked: no other run may take this one for dead.
        draft.rename(self.path / RECORD)
        return file


def reap(say: Callable[[str], None], parent: Path | None = None) -> None:
    """End and remove what this user's dead runs left: processes, folders, shared-memory files.

    Live runs, other users' runs and runs that use another folder for temporary files are left alone.

    Args:
        say: Called with one line for each dead run.
        parent: Where the runs' folders are; default the machine's folder for temporary files.
    """
    for folder in sorted((parent or Path(tempfile.gettempdir())).glob(f"{_prefix()}*")):
        record = _take(folder)
        if record is not None:
            with record:
                owner: dict[str, Any] = json.load(record)
                processes, files = _clear(folder, owner["run_id"])
            say(
                f"removed what the run {owner['run_id']} left (its driver, process {owner['pid']}, is gone): "
                f"{processes} processes, {files} shared-memory files, {folder}"
            )


def name_semaphores() -> None:
    """Let the semaphores of this process, and of those that it spawns, carry the name of the run's folder.

    An engine's process leaves one behind when it is killed, and a random name would not tell whose it was.
    """
    # CPython has no public name for it; what it holds is inherited by all processes that multiprocessing starts.
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"/{Path(os.environ[MARK]).name}"


def processes_of(folder: Path) -> list[psutil.Process]:
    """This user's processes that belong to the run of a folder, the driver among them."""
    return [process for process in psutil.process_iter() if _belongs(process, folder)]


def _belongs(process: psutil.Process, folder: Path) -> bool:
    try:
        if process.uids().real != os.getuid():
            return False
        if process.environ().get(MARK) == str(folder):
            return True
        # Ray's agents overwrite their environment with their title, but they write logs in the folder.
        return any(file.mode != "r" and Path(file.path).is_relative_to(folder) for file in process.open_files())
    except psutil.Error:  # it ended meanwhile
        return False


def _prefix() -> str:
    return f"dataflow-{os.getuid()}-"


def _take(folder: Path) -> TextIO | None:
    """The record of a dead run, locked; None if the run lives, another reaper has it, or the folder is not ours."""
    try:
        entry = folder.lstat()
        if not stat.S_ISDIR(entry.st_mode) or entry.st_uid != os.getuid() or entry.st_mode & 0o077:
            return None
        record = (folder / RECORD).open(encoding="utf-8")
    except OSError:
        return None
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        record.close()
        return None
    if not (folder / RECORD).exists():  # the driver, or another reaper, has just removed it
        record.close()
        return None
    return record


def _clear(folder: Path, run_id: str) -> tuple[int, int]:
    """End the processes of a run and remove its files; returns the numbers of processes and shared-memory files."""
    # Neither this process nor what started it, in case one run was started from within another.
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    processes = [process for process in processes_of(folder) if process.pid not in spared]
    _end(processes)
    weights = WeightsDirectory(run_id)
    semaphores = list(SHARED_MEMORY.glob(f"sem.{folder.name}-*"))
    files = len(list(weights.path.glob("*"))) + len(semaphores)
    weights.remove()
    for semaphore in semaphores:
        semaphore.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return len(processes), files


def _end(processes: Iterable[psutil.Process]) -> None:
    # psutil compares start times before it sends: a process id that was given away meanwhile is not hit.
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                send(process)
        deadline = time.monotonic() + END_S
        while (processes := [one for one in processes if _lives(one)]) and time.monotonic() < deadline:
            time.sleep(END_POLL_S)


def _lives(process: psutil.Process) -> bool:
    try:
        lives: bool = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    return lives
