"""The contract of a stage: the columns it reads, the columns it writes, and a plain function between."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from dataflow.batch import Batch, Unit
from dataflow.errors import ConfigError, Drop, RowError
from dataflow.waits import Waits
from schemas.column import Column

Granularity = Literal["source", "row", "group", "join", "group_join", "window"]
JOINS = ("join", "group_join")
"""Granularities whose claims carry the greedy rows of their uids."""
WHOLE_GROUPS = ("group", "group_join")
"""Granularities whose claims never split a group."""
Columns = Mapping[str, Sequence[Any]]
Outcome = Columns | RowError | Drop
Processed = Columns | Awaitable[Columns] | AsyncIterator[tuple[Unit, Outcome]]


@dataclass(frozen=True)
class StageContext:
    """What a stage may know of the run it works in.

    Attributes:
        run_id: Names the run; part of every partition's name.
        run_dir: Where the run keeps its files.
        worker: Name of this worker, such as `reward-0`.
        seed: The run's seed. Draw no randomness from anything else.
        waits: Where the stage registers what it waits for, so that a run that does not move can say it.
    """

    run_id: str
    run_dir: Path
    worker: str
    seed: int
    waits: Waits = field(default_factory=Waits, compare=False)


class StageConfig(BaseModel):
    """Base of a stage's own typed options: frozen, and no unknown key."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Stage:
    """A named transformation of columns. Subclass it when a stage has state or options.

    The worker around a stage owns claiming, fetching, validation, writing, acknowledging, retries,
    deadlines and timing. `process` only turns columns into columns.

    Class attributes, each of which an instance may override in `__init__`:
        name: Names the stage in errors, metrics and the ledger.
        reads: Columns it needs; a unit is offered when all of them are there.
        writes: Columns it adds to the same rows.
        granularity: What is offered together. `row`: any units that are ready. `group`: all sampled units of
            a uid, when each is ready or gone. `join`: a sampled unit when its own columns are there and its uid's
            greedy unit has finished or is gone. `group_join`: all sampled units of a uid, when each is ready or gone
            and its greedy unit has finished or is gone. `window`: all sampled units of a window. `source`: a window
            to fill.
        expands: Whether it makes a session's rows (rollout) rather than adding columns to rows.
        batch_rows: Most units in one claim (a group or a window is never split).
        workers: Copies of the stage.
        concurrency: Claims that one worker holds at a time.
        deadline_s: Longest time for one claim, in seconds; then the work is cancelled and counts as failed.
        max_attempts: Failures of one unit before it becomes a tombstone.
        min_group: For whole groups: fewest surviving units that may be used; else the rest of the uid is dropped.
        placement: Stages of equal placement share one process. None: a process of its own.
        num_gpus: GPUs each worker needs.
        device: Stages of equal device take turns: none works while another holds a claim, and `suspend` is called on
            the one that worked before another one works. None: a device of its own.
        baselines: Whether a row stage takes greedy sessions too; whole groups and windows never have them.
        loads_weights: Whether each copy holds published weights, and keeps `loaded_version` up to date: the files of a
            version stay until all have a later one.
        one_owner: No second delivery: if the worker dies or fails, the run stops (update).
        filters: Whether groups that it drops, and those lost before it, are replaced by further prompts: the stages
            that take a whole window, and the one with one owner, come after it. One stage of a pipeline at most.
        loaded_version: Policy version that this copy holds now.
        environment: Variables that the process needs before Python starts.

    The module of a stage imports heavy packages (torch, vllm) inside `setup` and `process`, never at its top:
    `--check` imports every stage and must stay instant.
    """

    Config: ClassVar[type[StageConfig]] = StageConfig
    name: str = ""
    reads: Sequence[str] = ()
    writes: Sequence[Column] = ()
    granularity: Granularity = "row"
    expands: bool = False
    batch_rows: int = 64
    workers: int = 1
    concurrency: int = 1
    deadline_s: float = 300.0
    max_attempts: int = 2
    min_group: int = 1
    placement: str | None = "light"
    num_gpus: float = 0
    device: str | None = None
    baselines: bool = True
    loads_weights: bool = False
    one_owner: bool = False
    filters: bool = False
    loaded_version: int = 0
    environment: Mapping[str, str] = {}

    def __init__(self, config: StageConfig) -> None:
        self.config = config

    def setup(self, context: StageContext) -> Awaitable[None] | None:
        """Load what `process` needs. Runs once, in the worker's process; may be a coroutine."""

    def process(self, batch: Batch) -> Processed:
        """Turn a batch into columns, one value per row, for exactly the declared `writes`.

        A `RowError` or `Drop` in place of a value fails or drops that row's unit alone. May be a coroutine
        function, or an async generator that yields `(unit, columns | RowError | Drop)`, each acknowledged by
        itself. May be called again for the same rows: delivery is at least once.

        Raises:
            Exception: Anything. The worker runs the batch again unit by unit, so that only the culprit fails.
        """
        raise TypeError(f"stage {self.name!r} defines no process()")

    def suspend(self) -> Awaitable[None] | None:
        """Free the device for another stage. Called between claims, only where `device` is shared."""

    def resume(self) -> Awaitable[None] | None:
        """Take the device again; called before the first claim after a `suspend`."""

    def close(self) -> Awaitable[None] | None:
        """Free what `setup` took. Not guaranteed to run: a process may be killed."""


def stage(
    *,
    reads: Sequence[str],
    writes: Sequence[Column],
    granularity: Granularity = "row",
    name: str | None = None,
    batch_rows: int = 64,
    workers: int = 1,
    deadline_s: float = 300.0,
    max_attempts: int = 2,
    placement: str | None = "light",
) -> Callable[[Callable[[Batch], Any]], type[Stage]]:
    """Turn a function of a batch into a stage. The arguments are the attributes of `Stage`."""

    def decorate(function: Callable[[Batch], Any]) -> type[Stage]:
        check_declaration(name or function.__name__, reads, writes)
        attributes = {
            "name": name or function.__name__,
            "reads": tuple(reads),
            "writes": tuple(writes),
            "granularity": granularity,
            "batch_rows": batch_rows,
            "workers": workers,
            "deadline_s": deadline_s,
            "max_attempts": max_attempts,
            "placement": placement,
            "process": staticmethod(function),
            "__doc__": function.__doc__,
            "__module__": function.__module__,
        }
        return type(function.__name__, (Stage,), attributes)

    return decorate


def check_columns(stage_: Stage, columns: Any, rows: int | None = None) -> None:
    """Check what a stage returned against what it declares.

    Args:
        stage_: The stage.
        columns: What its `process` returned.
        rows: How many values each column must have; None is any number.

    Raises:
        TypeError: If it is no mapping.
        ValueError: Names the columns that are missing or not declared, or the column of another length.
    """
    if not isinstance(columns, Mapping):
        raise TypeError(f"stage {stage_.name!r} returned {type(columns).__name__}; expected a dict of columns")
    declared = {column.name for column in stage_.writes}
    if set(columns) != declared:
        extra, lacking = sorted(set(columns) - declared), sorted(declared - set(columns))
        raise ValueError(
            f"stage {stage_.name!r} must return exactly the columns it declares in writes; "
            f"not declared: {extra or 'none'}, not returned: {lacking or 'none'}"
        )
    for name, values in columns.items():
        if rows is not None and len(values) != rows:
            raise ValueError(f"stage {stage_.name!r} returned {len(values)} values of column {name!r} for {rows} rows")


def check_declaration(name: str, reads: Any, writes: Any) -> None:
    """Check what a stage declares.

    Raises:
        ConfigError: If `reads` is no list of names, or `writes` no list of columns.
    """
    if isinstance(reads, str) or not all(isinstance(column, str) for column in reads):
        raise ConfigError(f"stage {name!r}: reads is a list of column names, such as ['reward']; got {reads!r}")
    for column in writes:
        if not isinstance(column, Column):
            raise ConfigError(f"stage {name!r}: writes is a list of dataflow.Column; got {column!r}")


def import_object(path: str, what: str) -> Any:
    """Import `package.module:name` or `folder/file.py:name`.

    Args:
        path: The import path.
        what: Where the path was given, for the error ("stages[0].use").

    Raises:
        ConfigError: Names `what`, the part that was not found, and what the module offers instead.
    """
    place, _, attribute = path.rpartition(":")
    if not place or not attribute:
        raise ConfigError(f"{what}: expected 'package.module:name' or 'folder/file.py:name', got {path!r}")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # importing runs the user's code, which may raise anything
        advice = ""
        if isinstance(error, FileNotFoundError | ModuleNotFoundError):
            advice = (
                ". Python looks in the current folder and in the installed packages; a file can be named directly, as "
                "'folder/file.py:name'"
            )
        raise ConfigError(f"{what}: {place!r} cannot be imported: {type(error).__name__}: {error}{advice}") from error
    if not hasattr(module, attribute):
        offered = ", ".join(name for name in vars(module) if not name.startswith("_"))
        raise ConfigError(f"{what}: {place!r} has no {attribute!r}; it has: {offered}")
    return getattr(module, attribute)


def _load_file(path: Path) -> Any:
    path = path.expanduser().resolve()
    name = f"dataflow_user_file_{path}"  # a name of its own, so that no installed module is hidden
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def is_streaming(stage_: Stage) -> bool:
    """Whether the stage's process is an async generator, acknowledged unit by unit."""
    return inspect.isasyncgenfunction(stage_.process)
