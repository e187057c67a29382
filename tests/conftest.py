"""What all tests share: hypothesis profiles, and one real Ray cluster with one real TransferQueue."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# `ci` finds the same examples every time; `dev` looks for new ones (HYPOTHESIS_PROFILE=dev).
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=60, database=None)
settings.register_profile("dev", deadline=None, max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray cluster with a TransferQueue of its own, for all tests marked `ray`."""
    import logging

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from dataflow import tq

        variables = {**tq.environment(timeout_s=30), "OMP_NUM_THREADS": "1"}
        for name, value in variables.items():
            patch.setenv(name, value)  # the queue's client in this process reads them at import
        import ray

        root = str(Path(__file__).parents[1])
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # The queue's two actors ask for one CPU each, and wait for ever if they do not get it.
        ray.init(
            address="local",
            num_cpus=max(4, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=128 << 20,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {**variables, "PYTHONPATH": paths}},
        )
        try:
            tq.start(storage_units=1)
            yield
            tq.shut_down()
        finally:
            ray.shutdown()
