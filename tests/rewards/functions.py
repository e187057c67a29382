"""Reward functions for the tests: a process that grades loads this file by its path."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from stages.rewards.base import Scored

calls: list[str] = []

VALUES: dict[str, Any] = {
    "int": 1,
    "float": 0.25,
    "bool": True,
    "numpy bool": np.bool_(True),
    "numpy float": np.float32(0.5),
    "numpy int": np.int64(-2),
    "dict": {"score": np.float64(1.5), "picked": np.array([1, 2])},
    "scored": Scored(0.5, "ok", {"why": "half"}),
    "none": None,
    "none in a dict": {"score": None, "reason": "no gold"},
    "nan": float("nan"),
    "infinity": float("inf"),
    "beyond float32": 1e39,
    "text": "1.0",
    "list": [1.0],
    "dict without a score": {"acc": 1},
    "contradiction": Scored(1.0, "error"),
    "huge int beside": {"score": 1, "count": 10**5000},
    "half a character beside": {"score": 1, "said": "\ud83d"},
    "fields acc pred": {"score": 0, "acc": 0, "pred": "7"},
    "fields acc": {"score": 1, "acc": 1},
    "field is none": {"score": 1, "pred": None},
}


def value(response: str, ground_truth: object) -> Any:
    """What the response names."""
    return VALUES[response]


def length(response: str, ground_truth: object, *, scale: float = 1.0) -> float:
    """The characters of the response."""
    return len(response) * scale


def picky(response: str, ground_truth: object) -> float:
    """Equality, unless the response is `bad`."""
    if response == "bad":
        raise ValueError("cannot grade this")
    return float(response == ground_truth)


def counted(response: str, ground_truth: object) -> float:
    """How often this process has graded, in tenths."""
    calls.append(response)
    return len(calls) / 10


def logged(response: str, ground_truth: object, *, log: str) -> float:
    """Write the response to a file that all processes share."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{response} {os.getpid()}\n")
    return 1.0


def everything(response: str, ground_truth: object, *, prompt: object, data_source: object, extra: object) -> Any:
    """What it was called with."""
    return {"score": 1.0, "seen": [response, ground_truth, prompt, data_source, extra]}


def types(response: str, ground_truth: object) -> Any:
    """The type of the ground truth."""
    return {"score": 0.0, "type": type(ground_truth).__name__}


def surroundings(response: str, ground_truth: object) -> Any:
    """Where it runs."""
    return {"score": os.getpid(), "folder": os.getcwd(), "path": sys.path, "input": sys.stdin.read()}


def after_the_next(response: str, ground_truth: object, *, folder: str) -> float:
    """Finish an even row only when the next row has finished, and give the row in tenths."""
    row = int(response)
    pipe = Path(folder) / str(row // 2)
    if row % 2:
        pipe.write_text("done")
    else:
        pipe.read_text()
    return row / 10


def trouble(response: str, ground_truth: object) -> float:
    """Whatever the response asks for."""
    if response == "never returns":
        re.match(r"(a+)+$", "a" * 64 + "b")  # one step of C code that no other thread interrupts
    elif response == "blocks":
        time.sleep(600)
    elif response == "raises":
        raise ValueError("no digits")
    elif response == "times out itself":
        raise TimeoutError("the judge did not answer")
    elif response == "exits at once":
        os._exit(4)
    elif response == "crashes":
        ctypes.string_at(0)
    elif response == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif response == "takes all memory":
        bytearray(8 << 30)
    return 1.0


def pid(response: str, ground_truth: object) -> int:
    """The process that grades."""
    return os.getpid()


def dies_when_idle(response: str, ground_truth: object) -> int:
    """Grade, and be gone a moment later."""
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    return os.getpid()


def noisy(response: str, ground_truth: object) -> float:
    """Print, as a debugging author does."""
    for stream, text in ((sys.stdout, "noise\n"), (sys.stderr, "more noise\n")):
        stream.write(text)
        stream.flush()
    return 1.0


def tells_then_hangs(response: str, ground_truth: object) -> None:
    """Write the ids of this process and of one that it starts into the pipe named by the response, and never return."""
    noisy(response, ground_truth)
    started = subprocess.Popen(["sleep", "600"])
    Path(response).write_text(f"{os.getpid()} {started.pid}")
    trouble("never returns", None)


def breaks_its_own_file(response: str, ground_truth: object) -> float:
    """Die, so that no other process can load this file."""
    Path(__file__).unlink()
    os._exit(1)
