"""What runs in a grading process. Started by `stages.rewards.child`; imports nothing heavy before it must.

Requests and replies are lines of JSON on a socket. The first request says what grades; its reply is null, or why it
cannot. Each later one is a list of rows, `[response, ground_truth, context]`; it is read whole and then answered by one
reply for each row as it is graded, `[reward, status, info]`.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any


def serve(requests: int, lifeline: int) -> None:
    """Answer requests until there are no more.

    Args:
        requests: File descriptor of the socket.
        lifeline: File descriptor of a pipe on which nothing is ever written. It ends when the parent does.
    """
    _end_with(lifeline)
    with socket.socket(fileno=requests) as connection, connection.makefile("rw", encoding="utf-8") as lines:
        os.set_inheritable(requests, False)
        try:
            function = _prepared(**json.loads(lines.readline()))
        except (Exception, SystemExit) as error:
            _reply(lines, f"{type(error).__name__}: {error}")
            return
        _reply(lines, None)
        from stages.rewards.base import score

        for line in lines:
            for response, ground_truth, context in json.loads(line):
                scored = score(function, response, ground_truth, **context)
                _reply(lines, [scored.reward, scored.status, scored.info])


def _end_with(lifeline: int) -> None:
    """Have the kernel kill this process and those it started as soon as the lifeline ends.

    A thread that waits for the end could not run while a computation in C holds the interpreter.
    """
    os.set_inheritable(lifeline, False)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it ended before the kernel was asked
        os.killpg(0, signal.SIGKILL)


def _prepared(name: str, options: Mapping[str, Any], path: list[str], memory_mib: int) -> Callable[..., Any]:
    """Import the reward function, and what it is slow to import at its first call."""
    sys.path[:] = path
    with contextlib.suppress(ValueError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mib << 20, memory_mib << 20))
    from stages.rewards import PACKAGES, resolve

    function = resolve(name, options)
    if name in PACKAGES:
        importlib.import_module(PACKAGES[name])
    return function


def _reply(lines: Any, value: object) -> None:
    lines.write(json.dumps(value) + "\n")
    lines.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
