"""The errors a caller can act on. Everything else propagates as it is.

A failure of one row inside a stage is data: the worker catches it at one place and the coordinator
records it as a tombstone. A failure of the system is one of these, and stops the run.
"""

from __future__ import annotations


class DataflowError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(DataflowError):
    """Raised when a configuration, a prompt file or a pipeline cannot run as written.

    The message names the place (file, key, column), what was expected, what came, and the remedy.
    The command line turns it into exit code 2.
    """


class QueueError(DataflowError):
    """Raised when the queue did not store or return what was asked for, or did not answer in time."""


class RunError(DataflowError):
    """Raised when a run cannot go on: the coordinator, the queue or the learner is gone.

    A stage may raise it too, to stop the run on purpose: nothing is tried again.
    """


class WorkerBroken(DataflowError):
    """Raised by a stage when its process is of no more use, such as an engine that died.

    The worker ends, its units are given to others without counting an attempt, and a new worker is started.
    """


class RowError(Exception):
    """One row's failure, as a value: a stage yields it in place of columns.

    Args:
        message: What went wrong.
        retry: Whether another attempt may succeed. A prompt that is too long never will.
    """

    def __init__(self, message: str, *, retry: bool = True) -> None:
        super().__init__(message)
        self.retry = retry


class Drop(Exception):
    """One row's exclusion by a rule, as a value: a stage yields it in place of columns.

    The ledger counts the unit under `reason`; no later stage sees it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
