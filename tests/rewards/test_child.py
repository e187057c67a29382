"""Grading in a process of its own, with real processes: nothing that a reward function does reaches beyond it."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow.errors import WorkerBroken
from stages.rewards.base import Scored
from stages.rewards.child import Child, Row

FUNCTIONS = Path(__file__).with_name("functions.py")
PLENTY_S = 60.0

Make = Callable[..., Child]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make a child that grades with a function of the tests, or with a named one; closed after the test."""
    children: list[Child] = []

    def made(function: str, options: dict[str, Any] | None = None, **settings: Any) -> Child:
        name = function if ":" in function else f"{FUNCTIONS}:{function}"
        children.append(Child(name, options, **settings))
        return children[-1]

    yield made
    for child in children:
        child.close()


def rows(*responses: str) -> list[Row]:
    return [(response, None, {}) for response in responses]


def only(scored: Sequence[Scored]) -> Scored:
    (one,) = scored
    return one


def wait_for_end(pid: int) -> Callable[[], None]:
    """Take hold of a process now, to wait later until it is gone."""
    handle = os.pidfd_open(pid)

    def wait() -> None:
        ended = select.select([handle], [], [], PLENTY_S)[0]
        os.close(handle)
        assert ended, f"process {pid} is still there"

    return wait


# What becomes of a row


def test_rows_are_graded_in_their_order_by_one_process(make: Make) -> None:
    child = make("length")
    assert [one.reward for one in child.grade(rows("xxx", "", "x"), timeout_s=PLENTY_S)] == [3.0, 0.0, 1.0]
    assert child.grade([], timeout_s=PLENTY_S) == []


def test_a_row_that_never_returns_is_a_timeout_and_its_siblings_keep_their_scores(make: Make) -> None:
    scored = make("trouble").grade(rows("fine", "never returns", "fine", "blocks", "fine"), timeout_s=2)
    assert [one.status for one in scored] == ["ok", "timeout", "ok", "timeout", "ok"]
    assert [one.reward for one in scored] == [1.0, None, 1.0, None, 1.0]
    assert "no answer within 2 s" in scored[1].info["error"]


def test_a_function_may_say_itself_that_it_took_too_long(make: Make) -> None:
    scored = make("trouble").grade(rows("times out itself"), timeout_s=PLENTY_S)
    assert scored == [Scored(None, "timeout", {"error": "TimeoutError: the judge did not answer"})]


def test_a_row_that_ends_the_process_is_an_error_that_says_how(make: Make) -> None:
    troubles = ("exits at once", "crashes", "is killed")
    scored = make("trouble").grade(rows("fine", *troubles, "fine"), timeout_s=PLENTY_S)
    assert [one.status for one in scored] == ["ok", "error", "error", "error", "ok"]
    reasons = ["exit code 4", "signal 11 (Segmentation fault)", "signal 9 (Killed); the system"]
    for one, reason in zip(scored[1:-1], reasons, strict=True):
        assert one.reward is None
        assert reason in one.info["error"]


def test_a_row_that_takes_more_memory_than_allowed_is_an_error(make: Make) -> None:
    scored = make("trouble", memory_mib=1024).grade(rows("takes all memory", "fine"), timeout_s=PLENTY_S)
    assert [one.status for one in scored] == ["error", "ok"]
    assert "MemoryError" in scored[0].info["error"]


def test_a_process_that_ends_between_rows_is_no_rows_fault(make: Make) -> None:
    child = make("dies_when_idle")
    first = only(child.grade(rows("a"), timeout_s=PLENTY_S))
    assert first.reward is not None
    with contextlib.suppress(ProcessLookupError):  # it is gone already
        wait_for_end(int(first.reward))()
    second = only(child.grade(rows("b"), timeout_s=PLENTY_S))
    assert second.status == "ok"
    assert second.reward != first.reward


def test_a_ground_truth_of_numpy_and_text_of_any_kind_reach_the_function(make: Make) -> None:
    texts = ["line\nbreak\u2028", '"quoted" \\', "\ud83d", "日本"]
    row: Row = (
        "r",
        {"n": np.int64(42), "x": np.array([0.5])},
        {"prompt": "p", "extra": {"t": texts}, "data_source": ""},
    )
    seen = only(make("everything").grade([row], timeout_s=PLENTY_S)).info["seen"]
    assert seen == ["r", {"n": 42, "x": [0.5]}, "p", "", {"t": [*texts[:2], "\\ud83d", "日本"]}]


# Where it runs


def test_it_has_the_folder_and_the_module_search_path_of_its_parent_and_no_input(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_reward.py").write_text(FUNCTIONS.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    one = only(make("my_reward:surroundings").grade(rows(""), timeout_s=PLENTY_S))
    assert one.info == {"folder": str(tmp_path), "path": sys.path, "input": ""}
    assert one.reward != os.getpid()


def test_a_file_is_found_from_the_folder_of_the_parent(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS.read_text())
    monkeypatch.chdir(tmp_path)
    assert only(make("mine.py:length", {"scale": 0.5}).grade(rows("xx"), timeout_s=PLENTY_S)).reward == 1.0


def test_what_it_prints_goes_where_errors_go_and_never_into_a_reply(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    assert make("noisy").grade(rows("a", "b"), timeout_s=PLENTY_S) == [Scored(1.0)] * 2
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "noise\nmore noise\n" * 2)


def test_many_threads_may_grade_at_once(make: Make) -> None:
    child = make("length")
    with ThreadPoolExecutor(4) as pool:
        scored = pool.map(lambda n: only(child.grade(rows("x" * n), timeout_s=PLENTY_S)).reward, range(12))
        assert list(scored) == [float(n) for n in range(12)]


def test_a_forked_process_gets_a_process_of_its_own_and_leaves_its_parents_alone() -> None:
    code = f"""
        import os, sys
        from stages.rewards.child import Child
        child = Child({f"{FUNCTIONS}:pid"!r})
        ask = lambda: child.grade([("", None, {{}})], timeout_s=60)[0].reward
        mine = ask()
        if (forked := os.fork()) == 0:
            sys.exit(ask() == mine)
        assert os.waitpid(forked, 0)[1] == 0
        assert ask() == mine
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PLENTY_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Its end


def started_by(make: Make, tmp_path: Path) -> tuple[Child, ThreadPoolExecutor, Any, list[int]]:
    """A child that hangs in a row, the row's future, and the ids of its process and of one that it started."""
    child, pool, pipe = make("tells_then_hangs"), ThreadPoolExecutor(1), tmp_path / "pipe"
    os.mkfifo(pipe)
    future = pool.submit(child.grade, rows(str(pipe), "next"), timeout_s=600)
    return child, pool, future, [int(pid) for pid in pipe.read_text().split()]


def test_close_ends_it_in_the_middle_of_a_row_with_all_that_it_started(make: Make, tmp_path: Path) -> None:
    child, pool, future, pids = started_by(make, tmp_path)
    ends = [wait_for_end(pid) for pid in pids]
    child.close()
    for end in ends:
        end()
    with pool, pytest.raises(WorkerBroken, match="was closed"):
        future.result(PLENTY_S)
    child.close()


PARENT = """
    import sys
    from stages.rewards.child import Child
    try:
        Child(sys.argv[1]).grade([(sys.argv[2], None, {})], timeout_s=600)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Start]:
    """Start a process whose child tells the pipe `tmp_path / "pipe"` who it is, and hangs; killed after the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(**settings: Any) -> subprocess.Popen[bytes]:
        os.mkfifo(tmp_path / "pipe")
        command = [
            sys.executable,
            "-c",
            textwrap.dedent(PARENT),
            f"{FUNCTIONS}:tells_then_hangs",
            str(tmp_path / "pipe"),
        ]
        processes.append(subprocess.Popen(command, **settings))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_it_does_not_outlive_a_parent_that_is_killed(parent: Start, tmp_path: Path) -> None:
    process = parent(stderr=subprocess.DEVNULL)
    ends = [wait_for_end(int(pid)) for pid in (tmp_path / "pipe").read_text().split()]
    process.kill()
    process.wait(PLENTY_S)
    for end in ends:
        end()


def test_an_interrupt_at_the_terminal_ends_it_and_the_terminal_shows_the_parents_words_alone(
    parent: Start, tmp_path: Path
) -> None:
    terminal, theirs = pty.openpty()

    def log_in() -> None:
        os.login_tty(theirs)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background shell has it ignored, and that is inherited

    process = parent(stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=log_in)
    os.close(theirs)
    ends = [wait_for_end(int(pid)) for pid in (tmp_path / "pipe").read_text().split()]
    os.write(terminal, b"\x03")
    assert process.wait(PLENTY_S) == 0
    for end in ends:
        end()
    shown = b""
    while not shown.endswith(b"interrupted\r\n"):
        shown += os.read(terminal, 1000)
    os.close(terminal)
    assert shown in (b"interrupted\r\n", b"^Cinterrupted\r\n")


def test_a_child_that_nobody_holds_any_more_is_ended(tmp_path: Path) -> None:
    child = Child(f"{FUNCTIONS}:pid")
    pid = only(child.grade(rows(""), timeout_s=PLENTY_S)).reward
    assert pid is not None
    end = wait_for_end(int(pid))
    del child
    end()


# Its start


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import os\nos._exit(7)\n", "it ended with exit code 7"),
        ("def other(response, ground_truth): ...\n", "has no 'reward'; it has: other"),
    ],
)
def test_a_function_that_cannot_be_imported_there_is_an_error_of_the_system(
    make: Make, tmp_path: Path, source: str, reason: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    name = f"{tmp_path / 'mine.py'}:reward"
    with pytest.raises(WorkerBroken) as caught:
        make(name).start()
    assert f"reward {name!r}: the process that grades did not start: " in str(caught.value)
    assert reason in str(caught.value)


def test_a_process_that_cannot_be_started_again_is_no_error_of_the_next_row(make: Make, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS.read_text())
    child = make(f"{tmp_path / 'mine.py'}:breaks_its_own_file")
    with pytest.raises(WorkerBroken, match="FileNotFoundError"):
        child.grade(rows("a", "b"), timeout_s=PLENTY_S)


def test_starting_does_not_count_as_time_of_a_row(make: Make, tmp_path: Path) -> None:
    slow = "import time\ntime.sleep(1.5)\ndef reward(response, ground_truth):\n    return 1\n"
    (tmp_path / "slow.py").write_text(slow)
    scored = make(f"{tmp_path / 'slow.py'}:reward").grade(rows("a"), timeout_s=1)
    assert scored == [Scored(1.0)]
