"""Return mean: notes what each window's sampled sessions returned, to compare sessions of later windows with."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.batch import Batch
from dataflow.stage import Stage, StageContext
from stages.algorithms.fallback import advance
from stages.algorithms.returns import session_return

Returns = Mapping[str, tuple[float, int]]
"""Data source -> sum and count of the total returns of a window."""


class ReturnMean(Stage):
    """Writes one small file per window, `RUN/state/returns/{window:06d}.json`; no column.

    The state is in files, not in a process: a worker's death loses nothing, and a window that is done twice writes the
    same file twice. The update waits for this stage as for every other, so the files of all windows that were trained
    on are there, whole and final. A window without a survivor has none. Where workers run on several machines, they
    must share the run's directory, or this stage and the join one process (as they do by default).
    """

    name = "return_mean"
    granularity = "window"
    reads = (
        "reward",
        "reward_semantics",
        "token_rewards",
        "reward_status",
        "response_mask",
        "data_source",
        # Not looked at: what is dropped up to there must be gone before the window is summed, whatever the timing.
        "advantages",
    )
    writes = ()

    def setup(self, context: StageContext) -> None:
        """Note the run's directory."""
        self._run_dir = context.run_dir

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Sum the returns of a window in canonical order; sessions whose reward is not ok do not count."""
        sums: dict[str, tuple[float, int]] = {}
        for _, rows in batch.sessions():
            if any(status != "ok" for status in batch["reward_status"][rows]):
                continue
            value = session_return(
                batch["reward"][rows],
                batch["reward_semantics"][rows.start],
                batch["response_mask"][rows],
                batch["token_rewards"][rows],
            )
            total, count = sums.get(batch["data_source"][rows.start], (0.0, 0))
            sums[batch["data_source"][rows.start]] = (total + value, count + 1)
        _write(returns_file(self._run_dir, batch.window_index), sums)
        return {}


class RunningMeans:
    """The running mean of the sampled returns per data source, as it was at any window; reads each file once.

    Args:
        run_dir: Where the run keeps its files.
        decay: See `advance`.
    """

    def __init__(self, run_dir: Path, decay: float) -> None:
        self._run_dir = run_dir
        self._decay = decay
        self._means: list[dict[str, float]] = [{}]

    def after(self, windows: int) -> Mapping[str, float]:
        """Data source -> running mean over windows 0 .. `windows` - 1, all of which must be trained on or empty."""
        while len(self._means) <= windows:
            returns = _read(returns_file(self._run_dir, len(self._means) - 1))
            self._means.append(advance(self._means[-1], returns, self._decay) if returns else self._means[-1])
        return self._means[max(windows, 0)]


def returns_file(run_dir: Path, window: int) -> Path:
    """Where the returns of a window are noted."""
    return run_dir / "state" / "returns" / f"{window:06d}.json"


def _write(path: Path, returns: Returns) -> None:
    """Write a file that is there whole or not at all, readable by its owner alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)  # mode 0600
    with open(handle, "w", encoding="utf-8") as file:
        json.dump(returns, file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())  # before the rename: a whole name must not outlive half a file
    os.replace(temporary, path)


def _read(path: Path) -> Returns:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {source: (float(total), int(count)) for source, (total, count) in found.items()}
