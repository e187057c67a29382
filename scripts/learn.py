"""Train the tiny configuration under several estimators and degrees of staleness, and print what reward each reaches.

    .venv/bin/python scripts/learn.py                            six estimators at max_staleness 0, 1 and 4
    .venv/bin/python scripts/learn.py --estimators remax,gae --staleness 0
    .venv/bin/python scripts/learn.py --engine vllm              on Ray, TransferQueue and vLLM: about an hour
    .venv/bin/python scripts/learn.py windows=48                 settings, as for dataflow.run

By default each run is one process with the transformers engine (`--local`), some twenty seconds. From staleness 2 on,
the ratio is to recomputed log-probabilities, and tokens are weighed by how much likelier the policy has become to draw
them.

Prints a Markdown table of the mean sampled reward over the first window and the last five. Exit code 1 says that one
stayed below the goal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.9
LAST = 5
ESTIMATORS = "remax,grpo,rloo,reinforce_plus_plus,opo,gae"
SETTINGS = {"gae": ["critic.lr=1e-3", "critic.epochs=2"]}
CORRECTED = ["update.old_log_probs=recomputed", "update.correction={weights: {level: token}}"]


def main() -> int:
    """Run all, print the table; returns the exit code."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--estimators", default=ESTIMATORS, help=f"default {ESTIMATORS}")
    parser.add_argument("--staleness", default="0,1,4", help="default 0,1,4")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf", help="hf is run in one process")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every run")
    options = parser.parse_intermixed_args()
    staleness = [int(value) for value in options.staleness.split(",")]
    print("| estimator | first window |" + "".join(f" max_staleness {value} |" for value in staleness), flush=True)
    print("|---|---|" + "---|" * len(staleness), flush=True)
    below = False
    for estimator in options.estimators.split(","):
        found = [_train(estimator, value, options.engine, options.overrides) for value in staleness]
        below |= any(last < GOAL for _, last in found)
        cells = " | ".join(f"{last:.3f}" for _, last in found)
        print(f"| {estimator} | {found[0][0]:.3f} | {cells} |", flush=True)
    return int(below)


def _train(estimator: str, staleness: int, engine: str, overrides: list[str]) -> tuple[float, float]:
    """Mean sampled reward of the first window, and of the last five."""
    changes = [f"estimator={estimator}", f"max_staleness={staleness}", f"engine={engine}", *SETTINGS.get(estimator, [])]
    changes += CORRECTED if staleness > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dataflow.run", str(ROOT / "configs" / "tiny_cpu.yaml"), *changes]
        command += [f"run.dir={folder}", "run.save_model=false", *overrides, *(["--local"] if engine == "hf" else [])]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"{estimator} at staleness {staleness} failed:\n{result.stdout[-1000:]}\n{result.stderr}")
        lines = (Path(folder) / "tiny" / "metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["metrics"]["reward/mean"] for line in lines]
    return rewards[0], sum(rewards[-LAST:]) / LAST


if __name__ == "__main__":
    sys.exit(main())
