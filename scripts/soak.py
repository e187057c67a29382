"""Run many small windows and print how memory grows: it must not.

    .venv/bin/python scripts/soak.py --windows 10000              one process, in-memory queue
    .venv/bin/python scripts/soak.py --windows 500 --cluster      Ray and TransferQueue

The stages do next to nothing, so that what is measured is the runtime: coordinator, workers, queue, journal. Prints
resident memory in MiB per process at ten points of the run, and the growth over its second half.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from dataflow import Batch, Stage, stage
from dataflow.config import RunConfig
from dataflow.console import Console
from dataflow.pipeline import Pipeline, StageSpec
from schemas.catalog import columns
from schemas.column import Column

PROMPTS, SESSIONS, TOKENS = 4, 4, 16
LENGTH = Column("soak_length", pa.int32(), doc="Tokens of the response.", unit="tokens")


class Source(Stage):
    """Fills a window with the same few prompts."""

    name = "source"
    granularity = "source"
    writes = columns("uid", "__rollout_n__", "__do_sample__", "prompt_ids")

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """One row per prompt."""
        return {
            "uid": [f"{batch.window_index}-{number}" for number in range(PROMPTS)],
            "__rollout_n__": [SESSIONS] * PROMPTS,
            "__do_sample__": [True] * PROMPTS,
            "prompt_ids": [list(range(TOKENS))] * PROMPTS,
        }


class Rollout(Stage):
    """Gives the prompt back as the response."""

    name = "rollout"
    reads = ("prompt_ids",)
    writes = columns("response_ids", "response_mask")
    expands = True

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """One turn per session."""
        return {"response_ids": batch["prompt_ids"], "response_mask": [[1] * TOKENS] * len(batch)}


@stage(reads=["response_ids"], writes=[LENGTH])
def length(batch: Batch) -> Mapping[str, Sequence[Any]]:
    """Count the tokens."""
    return {"soak_length": [len(ids) for ids in batch["response_ids"]]}


class Update(Stage):
    """Takes a whole window, as an update does."""

    name = "update"
    granularity = "window"
    reads = ("soak_length", "response_mask")
    writes = columns("trained_version")
    one_owner = True

    def process(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Number the window."""
        return {"trained_version": [batch.window_index] * len(batch)}


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--cluster", action="store_true", help="on Ray and TransferQueue, in place of one process")
    options = parser.parse_args()
    here = Path(__file__).resolve()
    specs = tuple(StageSpec(f"{here}:{name}") for name in ("Source", "Rollout", "length", "Update"))
    pipeline = Pipeline(specs, windows=options.windows, rows_per_window=PROMPTS * (SESSIONS + 1), max_staleness=1)
    pipeline.check()
    config = RunConfig()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, (Path(folder) / "lines").open("w") as lines:
        run_dir = Path(folder)
        with Console(run_dir, options.windows, config.limits, lines) as console:
            probe = threading.Thread(target=_probe, args=(console, options.windows), daemon=True)
            probe.start()
            started = time.monotonic()
            if options.cluster:
                from dataflow.cluster import run_cluster as run
            else:
                from dataflow.local import run_local as run
            status = run(config, pipeline, run_dir, f"soak-{os.getpid()}", console)
            seconds = time.monotonic() - started
            probe.join(timeout=5)
        ledger = status.ledger
        journal = sum(path.stat().st_size for path in (run_dir / "journal").glob("*"))
    print(f"{options.windows} windows in {seconds:.0f} s, ledger {'balanced' if ledger.balanced else 'NOT BALANCED'}")
    print(f"journal on disk: {journal / 2**20:.1f} MiB")
    return 0 if ledger.balanced else 1


def _probe(console: Console, windows: int) -> None:
    """Print the memory of each process whenever another tenth of the windows is done."""
    next_at, half = windows // 10, {}
    while True:
        if console.windows_shown >= next_at:
            sizes = _sizes()
            print(f"{console.windows_shown:>6} windows  " + "  ".join(f"{n} {s:.0f}" for n, s in sizes.items()))
            if next_at >= windows // 2 and not half:
                half = sizes
            next_at += windows // 10
            if next_at > windows:
                growth = {name: size - half.get(name, size) for name, size in sizes.items()}
                print("growth over the second half, MiB: " + "  ".join(f"{n} {g:+.1f}" for n, g in growth.items()))
                return
        time.sleep(0.05)


def _sizes() -> dict[str, float]:
    """Resident memory of this process and its workers, in MiB, by name."""
    found = {}
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            command = " ".join(process.cmdline())
            name = "driver" if process.pid == me.pid else command.split("::")[-1].split(".")[0].strip()
            if process.pid == me.pid or name.endswith(("Actor", "Controller", "Unit")):
                found[f"{name}#{process.pid}"] = process.memory_info().rss / 2**20
        except psutil.Error:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
