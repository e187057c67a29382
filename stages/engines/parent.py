"""A child process that does not outlive its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def exit_with_parent() -> None:
    """End this process as soon as the process that started it is gone, however that one ended.

    Does nothing in a process that `multiprocessing` did not start. Waits on the pipe that `multiprocessing`
    holds open between parent and child. `PR_SET_PDEATHSIG` is no substitute: it fires when the *thread*
    that started the child ends, which for an engine started from a thread pool is too early.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        # Not sys.exit: nothing that this process could still say has a reader.
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()
