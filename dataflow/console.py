"""What a person sees of a run: phases, one line per window, alarms, and the ledger at the end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from dataflow.errors import RunError
from dataflow.events import Ledger
from dataflow.journal import append_json
from dataflow.service import Status, WindowRecord, ledger_record
from dataflow.trackers import TensorBoard

# Metrics of a window's line, in order: (metric, label, format).
LINE = (
    ("reward/mean", "reward", ".3f"),
    ("baseline/mean", "baseline", ".3f"),
    ("advantage/abs_mean", "|adv|", ".3f"),
    ("loss/policy", "loss", "+.4f"),
    ("grad_norm", "grad", ".2f"),
    ("policy/nll", "nll", ".3f"),
    ("mismatch/max_abs", "Δlogp", ".1e"),
    ("response/length_mean", "len", ".1f"),
    ("staleness/max", "stale", ".0f"),
)
NOT_COUNTED = ("sampled trained", "baseline used as baseline", "sampled completed")


class Console:
    """Prints to the terminal, and appends to `metrics.jsonl` and TensorBoard.

    Args:
        run_dir: Where the run keeps its files.
        windows: How many windows the run has.
        terminal: Where to print; default standard output.
    """

    def __init__(self, run_dir: Path, windows: int, terminal: TextIO | None = None) -> None:
        self.windows_shown = 0
        self.alarms_shown = 0
        self._run_dir = run_dir
        self._rich = RichConsole(file=terminal, highlight=False, soft_wrap=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("windows"),
            TimeElapsedColumn(),
            console=self._rich,
            transient=True,
            disable=not self._rich.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=windows)
        self._started = time.monotonic()
        self._tracker = TensorBoard(run_dir / "tensorboard")
        self.last: Status | None = None
        self._told_zero = False

    def __enter__(self) -> Console:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
        self._tracker.close()

    def say(self, text: str) -> None:
        """Print one line above the progress bar."""
        self._rich.print(text, markup=False)

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Time a phase of the start, and print its seconds."""
        started = time.monotonic()
        self._progress.update(self._task, description=what)
        yield
        self.phase_done(what, time.monotonic() - started)

    def phase_done(self, what: str, seconds: float) -> None:
        """Print that a phase of the start took so many seconds."""
        self.say(f"  {what:<44}{seconds:6.1f} s")

    def show(self, status: Status) -> None:
        """Show what is new in a status."""
        self.last = status
        for record in status.closed:
            self._window(record)
        for alarm in status.alarms:
            self.say(f"! {alarm}")
        self.windows_shown += len(status.closed)
        self.alarms_shown += len(status.alarms)
        self._progress.update(self._task, completed=self.windows_shown, description=_busiest(status))

    def check(self, status: Status, stall_s: float) -> None:
        """Stop a run that cannot go on or does not move.

        Raises:
            RunError: With the reason; for a stall, with what is waited for, where and since when.
        """
        if status.halted:
            raise RunError(status.halted)
        if status.idle_s > stall_s and not any(deadline > 0 for *_, deadline in status.leases):
            raise RunError(f"nothing moved for {status.idle_s:.0f} s.\n{waiting_screen(status)}")

    def close_ledger(self, irreproducible: str) -> None:
        """Write what became of every unit to `ledger.json`, and print it; also of a run that was cut short.

        Args:
            irreproducible: Why a second run would not give the same bits whatever happened; empty if it would.
        """
        if self.last is None:
            return
        text = json.dumps(ledger_record(self.last.ledger), indent=2) + "\n"
        (self._run_dir / "ledger.json").write_text(text, encoding="utf-8")
        self._ledger(self.last.ledger)
        if self.last.finished:
            cause = irreproducible or _disturbance(self.last)
            self.say(f"reproducible: no ({cause})" if cause else "reproducible: yes")

    def _ledger(self, ledger: Ledger) -> None:
        self.say(f"ledger ({'balanced' if ledger.balanced else 'NOT BALANCED'})")
        for kind, count in sorted(ledger.created.items()):
            self.say(f"  {kind:<10} created {count}")
            for (of, outcome), units in sorted(ledger.settled.items()):
                if of == kind:
                    self.say(f"    {outcome:<36}{units:>8}")
            if ledger.in_flight.get(kind):
                self.say(f"    {'in flight':<36}{ledger.in_flight[kind]:>8}")
        redelivered = ", ".join(f"{stage} {count}" for stage, count in sorted(ledger.redelivered.items()))
        self.say(f"  re-dispatched units: {redelivered or 'none'}; late reports ignored: {ledger.late}")
        if ledger.failures:
            self.say("  exceptions in stages: " + ", ".join(f"{s} {n}" for s, n in sorted(ledger.failures.items())))

    def _window(self, record: WindowRecord) -> None:
        metrics = dict(record.metrics)
        tokens = metrics.get("rollout/tokens_per_row", 0.0) * record.weights.get("rollout/tokens_per_row", 0.0)
        if tokens:
            metrics["throughput/tokens_per_s"] = tokens / max(record.seconds, 1e-9)
        rows = sum(record.counts.values())
        metrics["throughput/rows_per_s"] = rows / max(record.seconds, 1e-9)
        elapsed = time.monotonic() - self._started
        append_json(
            self._run_dir / "metrics.jsonl",
            {
                "window": record.index,
                "name": record.window,
                "elapsed_s": round(elapsed, 3),
                "seconds": round(record.seconds, 3),
            }
            | {"units": dict(record.counts), "metrics": metrics},
        )
        self._tracker.on_window(record.index, metrics)
        self.say(line(record, metrics))
        if metrics.get("reward/mean") == 0 and not self._told_zero:
            self._told_zero = True
            self.say("! every reward of this window is 0: do reward.function and the ground truths agree on the form?")


def line(record: WindowRecord, metrics: Mapping[str, Any]) -> str:
    """One window in one line."""
    parts = [f"window {record.index:>4}"]
    parts += [f"{label} {metrics[name]:{spec}}" for name, label, spec in LINE if name in metrics]
    parts.append(f"{metrics['throughput/rows_per_s']:.0f} rows/s")
    if "throughput/tokens_per_s" in metrics:
        parts.append(f"{metrics['throughput/tokens_per_s']:.0f} tok/s")
    parts.append(f"{record.seconds:.1f} s")
    lost = [f"{name}: {count}" for name, count in sorted(record.counts.items()) if name not in NOT_COUNTED]
    if lost:
        parts.append("[" + "; ".join(lost) + "]")
    return "  ".join(parts)


def waiting_screen(status: Status) -> str:
    """What a run waits for, in one screen: stages with unfinished work, and who holds what."""
    lines = ["waiting for:"]
    for stage, states in status.stages.items():
        unfinished = {
            state: count for state, count in states.items() if state in ("waiting", "ready", "leased") and count
        }
        if unfinished:
            lines.append(f"  stage {stage}: " + ", ".join(f"{count} {state}" for state, count in unfinished.items()))
    for worker, stage, what, deadline in status.leases:
        left = f"{deadline:.0f} s left" if deadline > 0 else f"{-deadline:.0f} s over its deadline"
        lines.append(f"  worker {worker} (stage {stage}) holds {what}, {left}")
    return "\n".join(lines)


def _disturbance(status: Status) -> str:
    """What made the rows of this run depend on more than its configuration; empty if nothing did."""
    for (kind, outcome), count in status.ledger.settled.items():
        if outcome.startswith(("dropped", "failed")):
            return f"{count} {kind} units {outcome}"
    return ""


def _busiest(status: Status) -> str:
    stages = [stage for stage, states in status.stages.items() if states.get("leased")]
    return ", ".join(stages) if stages else "waiting"
