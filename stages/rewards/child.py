"""Grading in a process of its own, so that a reward function that hangs or crashes can be ended.

A thread that is stuck inside a computation cannot be stopped, and if the computation is one long step of C code, such
as matching a regular expression, it stops every other thread of its process too. A process can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from dataflow.errors import WorkerBroken
from stages.rewards.base import Scored, plain

START_LIMIT_S = 120.0
"""Longest time for a grading process to start and to import the reward function, in seconds."""
MEMORY_MIB = 4096
"""Most memory of a grading process unless said otherwise, in MiB."""

Row = tuple[str, object, Mapping[str, object]]
"""Response, ground truth (what JSON can say, or numpy's numbers), and context: `prompt`, `data_source`, `extra`."""

_SERVE = Path(__file__).with_name("serve.py")


class Child:
    """A process that grades with one reward function, one row at a time, and is started when needed.

    It has the working directory, the module search path and the environment of this process, and a session of its
    own, which keeps an interrupt at the terminal from it. It ends, with all that it started, when this process does,
    however that one ends. What it prints goes where this process's errors go, unless that is a terminal.

    Safe to call from any thread and after a fork.

    Args:
        name: A built-in reward, ``package.module:function`` or ``path/to/file.py:function``.
        options: Keyword arguments to bind.
        memory_mib: Most memory that it may take, in MiB; then the function sees a `MemoryError`.
    """

    def __init__(self, name: str, options: Mapping[str, Any] | None = None, *, memory_mib: int = MEMORY_MIB) -> None:
        self._name = name
        self._options = dict(options or {})
        self._memory_mib = memory_mib
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._closed = False

    def start(self) -> None:
        """Start the process now rather than at the first row.

        Raises:
            WorkerBroken: If it does not start, or the reward function cannot be imported there.
        """
        self._disown()
        with self._lock:
            self._started()

    def grade(self, rows: Sequence[Row], *, timeout_s: float) -> list[Scored]:
        """Grade rows in their order, each once, as `stages.rewards.base.score` does.

        A row that takes too long has status ``timeout``, one that ends the process status ``error`` with the signal or
        the exit code. The process is gone then; the rows before keep their scores, and those behind get a new one.

        Args:
            rows: What is graded.
            timeout_s: Time for each row, in seconds. The start of the process does not count.

        Raises:
            WorkerBroken: If the process does not start, or the reward function cannot be imported there.
        """
        self._disown()
        scored: list[Scored] = []
        with self._lock:
            while len(scored) < len(rows):
                scored += self._stretch(rows[len(scored) :], timeout_s)
        return scored

    def _stretch(self, rows: Sequence[Row], timeout_s: float) -> list[Scored]:
        """Grade rows up to the first that costs the process, that one included."""
        running = self._started()
        scored: list[Scored] = []
        overrun = False
        try:
            running.send(json.dumps(rows, default=plain), timeout_s)
            while len(scored) < len(rows) and (reply := running.receive()):
                scored.append(Scored(*json.loads(reply)))
        except TimeoutError:
            overrun = True
        except BaseException:  # an interrupt: what the process says now would be taken for the answer to another row
            self._gone()
            raise
        if len(scored) == len(rows):
            return scored
        code = self._gone()
        # With another code it had ended by itself, and something that it started kept the line open.
        if overrun and code == -signal.SIGKILL:
            error = f"TimeoutError: no answer within {timeout_s:g} s; the process that graded it was ended"
            return [*scored, Scored(None, "timeout", {"error": error})]
        return [*scored, Scored(None, "error", {"error": f"the process that graded it {_ending(code)}"})]

    def close(self) -> None:
        """End the process if there is one, also in the middle of a row, and start no other."""
        self._disown()
        self._closed = True
        running = self._running
        if running is not None:
            running.hang_up()  # whoever waits for a reply gets none, and frees the lock
        with self._lock:
            self._gone()

    def _started(self) -> _Running:
        if self._running is not None and self._running.has_ended():
            self._gone()
        if self._closed:
            raise WorkerBroken(f"reward {self._name!r}: what grades was closed")
        if self._running is None:
            self._running = _start()
            self._finalizer = weakref.finalize(self, _Running.end, self._running)
            self._introduce(self._running)
        return self._running

    def _introduce(self, running: _Running) -> None:
        """Say what grades, and wait until it has been imported."""
        path = [entry for entry in sys.path if isinstance(entry, str)]
        setup = {"name": self._name, "options": self._options, "path": path, "memory_mib": self._memory_mib}
        try:
            running.send(json.dumps(setup, default=plain), START_LIMIT_S)
            reply = running.receive()
            error = json.loads(reply) if reply else None
        except TimeoutError:
            reply, error = "", f"it was not ready after {START_LIMIT_S:g} s"
        except BaseException:
            self._gone()
            raise
        if reply and error is None:
            return
        code = self._gone()
        raise WorkerBroken(
            f"reward {self._name!r}: the process that grades did not start: {error or 'it ' + _ending(code)}. It runs "
            f"{sys.executable} in {os.getcwd()} with the module search path of the process that starts it"
        )

    def _gone(self) -> int:
        """End the process; returns its exit code, the negative signal if one killed it."""
        running, self._running = self._running, None
        if running is None or self._finalizer is None:
            return 0
        self._finalizer.detach()
        return running.end()

    def _disown(self) -> None:
        """After a fork, leave the process and the lock to the parent."""
        if os.getpid() != self._owner:
            self._owner, self._lock, self._running, self._finalizer = os.getpid(), threading.Lock(), None, None


class _Running(NamedTuple):
    """A process that runs, and how to reach it."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    replies: IO[bytes]
    lifeline: int
    owner: int

    def send(self, request: str, timeout_s: float) -> None:
        """Send a line, and give this and each reply so much time."""
        self.connection.settimeout(timeout_s)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ended; `receive` says so
            self.connection.sendall(request.encode() + b"\n")

    def receive(self) -> str:
        """Wait for a line; empty if the process ended.

        Raises:
            TimeoutError: If there was none in time.
        """
        with contextlib.suppress(ConnectionResetError):
            line = self.replies.readline().decode()
            if line.endswith("\n"):
                return line
        return ""

    def has_ended(self) -> bool:
        """Whether it ended while nothing was asked: all that can be read then is the end of the line."""
        self.connection.settimeout(0)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except ConnectionResetError:
            return True
        except BlockingIOError:
            return False

    def hang_up(self) -> None:
        """End the conversation."""
        with contextlib.suppress(OSError):  # it is over already
            self.connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> int:
        """Kill the process and those it started; returns its exit code."""
        if os.getpid() != self.owner:  # a fork's exit: the process is the parent's
            return 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.replies.close()
        self.connection.close()
        os.close(self.lifeline)
        return code


def _start() -> _Running:
    ours, theirs = socket.socketpair()
    end, lifeline = os.pipe()
    output = subprocess.DEVNULL if os.isatty(2) else 2
    try:
        process = subprocess.Popen(
            # -P: the folder of that file is no place to import from.
            [sys.executable, "-P", str(_SERVE), str(theirs.fileno()), str(end)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(), end),
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        os.close(lifeline)
        raise WorkerBroken(f"the process that grades did not start: {type(error).__name__}: {error}") from error
    finally:
        theirs.close()
        os.close(end)
    return _Running(process, ours, ours.makefile("rb"), lifeline, os.getpid())


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    advice = "; the system does that when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.strsignal(-code)}){advice}"
