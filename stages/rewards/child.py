"""Calling a function in a process of its own, so that it can be stopped.

A thread that is stuck inside a computation cannot be stopped, and if the computation is one long step of
C code it stops every other thread of its process too. A child process can be: it sets a kernel timer on
itself before each call, whose default action ends it, so it dies on time even if its parent is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from typing import Any

_START_LIMIT_S = 120.0
_MEMORY_BYTES = 4 << 30


class ChildError(RuntimeError):
    """Raised when the call failed in the child, or the child died for another reason than time."""


class Child:
    """A child process that answers calls of one function, one at a time, and is started when needed.

    Safe to call from any thread and after a fork. The child ends with its parent.

    Args:
        target: ``module:function``; the function takes and returns what JSON can say.
        logger: Name of a logger that the child silences below ERROR; empty for none.
    """

    def __init__(self, target: str, logger: str = "") -> None:
        self._command = [sys.executable, "-m", __spec__.name, target, logger]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()
        self._finalizer: weakref.finalize[..., Any] | None = None

    def call(self, *arguments: object, timeout_s: float) -> Any:
        """Call the function.

        Args:
            *arguments: What JSON can say.
            timeout_s: Time for the call itself, in seconds; the start of the child does not count.

        Raises:
            TimeoutError: If the function took longer; the child is gone, the next call starts a new one.
            ChildError: If the function raised, or the child died.
        """
        if os.getpid() != self._owner:  # forked: the lock and the pipes belong to the parent
            self.__init__(*self._command[3:])  # type: ignore[misc]
        with self._lock:
            process = self._started()
            try:
                process.stdin.write(json.dumps([timeout_s, arguments]) + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
                reply = process.stdout.readline()  # type: ignore[union-attr]
            except BrokenPipeError:
                reply = ""
            if not reply:
                code = self._gone()
                if code == -signal.SIGALRM:
                    raise TimeoutError(f"no answer within {timeout_s:g} s")
                raise ChildError(f"the grading process died with code {code}")
        error, result = json.loads(reply)
        if error:
            raise ChildError(error)
        return result

    def close(self) -> None:
        """End the child if there is one; a later call starts a new one."""
        with self._lock:
            self._gone()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._gone()
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
        return self._process

    def _gone(self) -> int | None:
        process, self._process = self._process, None
        if process is None or self._finalizer is None:
            return None
        self._finalizer.detach()
        return _end(process)


def _end(process: subprocess.Popen[str]) -> int:
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # type: ignore[union-attr]
    # It reads the end of its input and leaves; if it is in a call, its timer ends it.
    code = process.wait()
    process.stdout.close()  # type: ignore[union-attr]
    return code


def _serve(target: str, logger: str) -> None:
    """Answer calls from standard input until it ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.setitimer(signal.ITIMER_REAL, _START_LIMIT_S)
    with contextlib.suppress(ValueError, OSError):  # not every system limits memory
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not look like a reply
    if logger:
        logging = importlib.import_module("logging")
        logging.getLogger(logger).setLevel(logging.ERROR)
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for line in sys.stdin:
        timeout_s, arguments = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            reply = [None, function(*arguments)]
        except Exception as error:
            reply = [f"{type(error).__name__}: {error}", None]
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
