"""Measure TransferQueue as the gateway uses it: small columns packed per stage, and one queue column each.

    .venv/bin/python scripts/bench_queue.py

Prints milliseconds per call, the median of ten, for rows with the columns that rollout writes (three token columns and
six small ones). Quote ratios: absolute times depend on the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa

from dataflow import tq
from schemas.catalog import columns
from schemas.column import Column

ROLLOUT = columns(
    "response_ids",
    "response_mask",
    "rollout_log_probs",
    "response_text",
    "finish_reason",
    "sampling",
    "engine",
    "policy_version_min",
    "policy_version_max",
)


class PlainQueue(tq.TransferQueue):
    """The gateway without packing: every small column is a queue column of its own."""

    def __init__(self, declared: list[Column]) -> None:
        by_name = {column.name: column for column in declared}
        super().__init__(by_name, {column.name: column.name for column in declared})


def rows(count: int) -> dict[str, pa.Array]:
    """Values of `count` rows of about 32 tokens."""
    random = np.random.default_rng(0)
    lengths = random.integers(8, 56, count)
    values = {
        "response_ids": [random.integers(0, 1000, length) for length in lengths],
        "response_mask": [np.ones(length, np.int8) for length in lengths],
        "rollout_log_probs": [random.random(length, dtype=np.float32) for length in lengths],
        "response_text": ["the answer is forty-two"] * count,
        "finish_reason": ["stop"] * count,
        "sampling": ['{"greedy": false, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 7}'] * count,
        "engine": ["rollout-0"] * count,
        "policy_version_min": [3] * count,
        "policy_version_max": [3] * count,
    }
    return {column.name: column.cast(values[column.name]) for column in ROLLOUT}


def milliseconds(call: Callable[[], object], repeats: int = 10) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def main() -> None:
    """Start a queue of its own, measure, stop it."""
    import os

    import ray

    os.environ.update(tq.environment(30))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20)
    try:
        tq.start(1)
        names = [column.name for column in ROLLOUT]
        small = ["policy_version_min", "finish_reason"]
        packed = tq.TransferQueue({c.name: c for c in ROLLOUT}, dict.fromkeys(names, "rollout"))
        plain = PlainQueue(ROLLOUT)
        print(f"{'rows':>5} {'queue':<7} {'put':>8} {'get all':>8} {'get 2 small':>12}   ms per call")
        for count in (1, 16, 128, 512):
            values = rows(count)
            for label, queue in (("packed", packed), ("plain", plain)):
                partition, keys = f"{label}-{count}", [f"k{i}" for i in range(count)]
                put = milliseconds(partial(queue.put, partition, keys, values))
                everything = milliseconds(partial(queue.get, partition, keys, names))
                few = milliseconds(partial(queue.get, partition, keys, small))
                print(f"{count:>5} {label:<7} {put:>8.1f} {everything:>8.1f} {few:>12.1f}")
        packed.close()
        plain.close()
        tq.shut_down()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
