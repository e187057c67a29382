"""Run a pipeline: ``python -m dataflow.run [CONFIG] [key=value ...]``.

Exit codes: 0 the run finished; 1 it could not go on; 2 the configuration or the data cannot run as written;
130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from dataflow.config import Recipe, RunConfig, known_keys, load_config
from dataflow.errors import ConfigError, DataflowError, RunError
from dataflow.pipeline import Pipeline
from dataflow.testing.faults import check_faults

EXIT_S = 2.0
EXAMPLES = """\
examples:
  python -m dataflow.run                                  the tiny model, ReMax, a few minutes on a CPU
  python -m dataflow.run configs/tiny_cpu.yaml estimator=grpo rollout.n=8
  python -m dataflow.run my.yaml data.train=my.parquet    your own prompts (.parquet or .jsonl)
  python -m dataflow.run my.yaml --check                  validate everything in seconds, start nothing
  python -m dataflow.run my.yaml --local engine=hf        one process, no Ray, no TransferQueue
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        _check_one_installation()
        if options.keys:
            return _print_keys(options.config)
        path, overrides = _split(options.config, options.overrides)
        config, recipe = load_config(path, overrides, _default_config())
        pipeline = recipe.build(config)
        pipeline.check()
        check_faults(config.faults, pipeline)
        if options.check:
            _print_check(config, pipeline)
            return 0
        recipe.prepare(config, lambda text: print(text, flush=True))
        return _run(config, recipe, pipeline, local=options.local)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DataflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dataflow.run",
        description="Run a pipeline of stages over a columnar queue, from a prompt file to a better model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", help="a YAML file; without one, the built-in tiny configuration")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that replace the file's, as in rollout.n=8",
    )
    parser.add_argument("--check", action="store_true", help="validate config, data and graph, print both, and stop")
    parser.add_argument("--local", action="store_true", help="run in this process, with an in-memory queue")
    parser.add_argument("--keys", action="store_true", help="list every configuration key with its meaning, and stop")
    return parser


def _split(first: str | None, rest: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Tell the configuration file from an override; both are positional."""
    if first is not None and "=" in first:
        return None, [first, *rest]
    return (Path(first) if first else None), list(rest)


def _default_config() -> Path:
    # Found without importing the package: this layer knows no word of what the stages do.
    spec = importlib.util.find_spec("stages")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "configs" / "tiny_cpu.yaml"


def _check_one_installation() -> None:
    """The package names are common words: refuse to run on somebody else's `stages` or `schemas`."""
    places = {}
    for name in ("dataflow", "stages", "schemas"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ConfigError(f"the package {name!r} is not installed; install this project with pip, not by copying")
        places[name] = Path(spec.origin).resolve().parent.parent
    if len(set(places.values())) > 1:
        found = ", ".join(f"{name} in {place}" for name, place in places.items())
        raise ConfigError(
            f"dataflow, stages and schemas come from different places: {found}; another package shadows one"
        )


def _print_keys(config: str | None) -> int:
    _, recipe = load_config(Path(config) if config else None, [], _default_config())
    for key, meaning in known_keys(recipe.config).items():
        print(f"{key:<34}{meaning}")
    return 0


def _print_check(config: RunConfig, pipeline: Pipeline) -> None:
    from omegaconf import OmegaConf

    print(OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json"))).rstrip())
    print("\npipeline")
    print(pipeline.render())
    staleness = f"max_staleness {pipeline.max_staleness}"
    most = "at most " * bool(pipeline.epochs and pipeline.further_draws)  # refilled windows use the epochs up sooner
    print(f"\n{most}{pipeline.windows} windows of at most {pipeline.most_rows} rows, {staleness}")
    print("ok: nothing was started")


def _run(config: RunConfig, recipe: Recipe, pipeline: Pipeline, *, local: bool) -> int:
    from dataflow.console import Console

    run_dir = _make_run_dir(config, pipeline)
    run_id = f"{run_dir.name}-{os.getpid()}"
    started = time.monotonic()
    with (
        _own_terminal(run_dir / "logs" / "driver.log") as terminal,
        Console(run_dir, pipeline.windows, config.limits, terminal) as console,
    ):
        console.say(f"run directory: {run_dir}")
        try:
            if local:
                from dataflow.local import run_local

                status = run_local(config, pipeline, run_dir, run_id, console)
            else:
                from dataflow.cluster import run_cluster

                status = run_cluster(config, pipeline, run_dir, run_id, console)
        except RunError as error:
            raise RunError(f"{error}\nlogs: {run_dir / 'logs'}") from error
        finally:
            console.close_ledger(pipeline.irreproducible, recipe.summarise, pipeline.drops_by_rule)
        console.say(f"finished in {time.monotonic() - started:.1f} s; results in {run_dir}")
    trained = status.ledger.units("trained") + status.ledger.units("completed")
    if not trained:
        raise RunError("the run finished without a single unit trained; the ledger above says what became of them")
    return 0


@contextlib.contextmanager
def _own_terminal(log: Path) -> Iterator[TextIO]:
    """Keep the terminal for the run's own lines: what libraries print goes to a log file meanwhile."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    terminal, errors = os.dup(1), os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        with os.fdopen(terminal, "w", closefd=False) as stream:
            yield stream
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(terminal, 1)
        os.dup2(errors, 2)
        os.close(terminal)
        os.close(errors)


def _make_run_dir(config: RunConfig, pipeline: Pipeline) -> Path:
    """Make RUNS/NAME, or RUNS/NAME-2 and so on if it is taken: no run overwrites another."""
    from omegaconf import OmegaConf

    from dataflow.inspect import write_columns

    parent = Path(config.run.dir).expanduser().resolve()
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = parent / (config.run.name if number == 1 else f"{config.run.name}-{number}")
        try:
            path.mkdir()
            break
        except FileExistsError:
            number += 1
    resolved = OmegaConf.create(config.model_dump(mode="json"))
    (path / "config.yaml").write_text(OmegaConf.to_yaml(resolved), encoding="utf-8")
    (path / "pipeline.txt").write_text(pipeline.render() + "\n", encoding="utf-8")
    write_columns(path, pipeline.columns.values())
    return path


def _entry() -> NoReturn:
    # Also where a shell in the background has made us ignore it: an interrupt is the way to end a run in order.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    code = main()
    # A stage that hangs in a thread must not keep the process: Python would wait for it for ever.
    deadline = time.monotonic() + EXIT_S
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                print(f"left hanging: thread {thread.name}", file=sys.stderr, flush=True)
                os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _entry()
