"""What a person sees of a run: phases, one line per window, alarms, and the ledger at the end."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
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

from dataflow.config import LimitsSection
from dataflow.errors import RunError
from dataflow.events import Blocked, Ledger
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
SOON_S = 2.0  # how long before a warning the details are asked for
NOT_COUNTED = ("sampled trained", "baseline used as baseline", "sampled completed")


class Console:
    """Prints to the terminal, and appends to `metrics.jsonl` and TensorBoard. Use it in the main thread.

    While it is open, SIGUSR1 makes it print what the run waits for.

    Args:
        run_dir: Where the run keeps its files.
        windows: How many windows the run has.
        limits: When to show what does not move, and when to stop.
        terminal: Where to print; default standard output.
    """

    def __init__(self, run_dir: Path, windows: int, limits: LimitsSection, terminal: TextIO | None = None) -> None:
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
        self._totals: dict[str, tuple[float, float]] = {}
        self._limits = limits
        self._asked = False
        self._warn_at_s = limits.warn_s
        self._former: Any = None

    def __enter__(self) -> Console:
        self._former = signal.signal(signal.SIGUSR1, self._ask)
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGUSR1, self._former)
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

    @property
    def wants(self) -> tuple[int, int, bool]:
        """What to ask the next status for: the first window record and alarm, and whether in detail."""
        idle_s = self.last.idle_s if self.last else 0.0
        soon = idle_s + SOON_S > min(self._warn_at_s, self._limits.stall_s)
        return self.windows_shown, self.alarms_shown, self._asked or soon

    def check(self, status: Status) -> None:
        """Watch over a run that does not move: show what it waits for, and stop it when it cannot go on.

        Raises:
            RunError: With the reason; for a stall, with what is waited for, where and since when.
        """
        if status.halted:
            raise RunError(status.halted)
        if status.idle_s < self._limits.warn_s:
            self._warn_at_s = self._limits.warn_s
        if not status.detailed:
            return
        if status.idle_s > self._limits.stall_s and not status.works:
            raise RunError(waiting_screen(status))
        if self._asked or status.idle_s > self._warn_at_s:
            self.say(waiting_screen(status, self._limits.stall_s))
            self._warn_at_s = max(self._warn_at_s, 2 * status.idle_s)
            self._asked = False

    def _ask(self, *_: object) -> None:
        self._asked = True

    def close_ledger(
        self,
        irreproducible: str,
        summarise: Callable[[Mapping[str, tuple[float, float]]], list[str]],
        drops_by_rule: Collection[str],
    ) -> None:
        """Write what became of every unit to `ledger.json`, and print it; also of a run that was cut short.

        Args:
            irreproducible: Why a second run would not give the same bits whatever happened; empty if it would.
            summarise: Makes the last lines from metric -> (weighted sum, weight) over all windows.
            drops_by_rule: Reasons of drops that a second run has too.
        """
        if self.last is None:
            return
        text = json.dumps(ledger_record(self.last.ledger), indent=2) + "\n"
        (self._run_dir / "ledger.json").write_text(text, encoding="utf-8")
        self._ledger(self.last.ledger)
        for text in summarise(self._totals):
            self.say(text)
        if self.last.finished:
            cause = irreproducible or _disturbance(self.last, drops_by_rule)
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
        for name, weight in record.weights.items():
            total, before = self._totals.get(name, (0.0, 0.0))
            self._totals[name] = (total + metrics[name] * weight, before + weight)
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


def waiting_screen(status: Status, stall_s: float | None = None) -> str:
    """What a run waits for, in one screen: which units, where, since when, who has them, and what happens then."""
    lines = [f"nothing moved for {status.idle_s:.0f} s; the run waits for:"]
    lines += [f"  {_blocked_line(item)}" for item in status.blocked] or ["  no unit: every open window is done"]
    lines += [f"  inside {worker}: {wait}" for worker, waits in status.waits.items() for wait in waits]
    lines += [f"  {worker} sends no heartbeat" for worker in status.silent]
    if stall_s is not None:
        lines.append(
            f"  if nothing moves for {stall_s:g} s and no claim is within its deadline, the run stops (limits.stall_s)"
        )
    return "\n".join(lines)


def _blocked_line(item: Blocked) -> str:
    held = f"held by {item.worker}" if item.worker else item.state
    more = ", ..." if item.units > len(item.uids) else ""
    then = item.action if item.until_s is None else f"in {item.until_s:.0f} s: {item.action}"
    return (
        f"{item.stage}: {item.units} units {held} for {item.seconds:.0f} s (uids {', '.join(item.uids)}{more}); {then}"
    )


def _disturbance(status: Status, drops_by_rule: Collection[str]) -> str:
    """What made the rows of this run depend on more than its configuration; empty if nothing did."""
    expected = {f"dropped: {reason}" for reason in drops_by_rule}
    for (kind, outcome), count in status.ledger.settled.items():
        if outcome.startswith(("dropped", "failed")) and outcome not in expected:
            return f"{count} {kind} units {outcome}"
    return ""


def _busiest(status: Status) -> str:
    stages = [stage for stage, states in status.stages.items() if states.get("leased")]
    return ", ".join(stages) if stages else "waiting"
