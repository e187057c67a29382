"""The tables that a pipeline check reads before anything heavy is loaded."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest
import torch

from stages.algorithms.advantages import Advantages
from stages.algorithms.catalog import AGGREGATIONS, ESTIMATORS, LOSSES
from stages.algorithms.losses import TokenLoss, aggregate

BATCH = {"log_probs", "old_log_probs", "advantages", "mask"}


def load(path: str) -> object:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", ["catalog", "join", "returns"])
def test_what_a_check_and_a_join_import_does_not_import_torch(module: str) -> None:
    code = f"import sys, stages.algorithms.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_what_each_estimator_needs() -> None:
    assert {name: (n.granularity, n.greedy_baseline, n.min_group) for name, n in ESTIMATORS.items()} == {
        "remax": ("row", True, 1),
        "grpo": ("group", False, 2),
        "dr_grpo": ("group", False, 2),
        "rloo": ("group", False, 2),
        "reinforce": ("window", False, 1),
    }


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_takes_its_inputs_and_gives_advantages(name: str) -> None:
    needs = ESTIMATORS[name]
    function = load(needs.function)
    assert callable(function)
    assert list(inspect.signature(function).parameters) == list(needs.inputs)
    columns = {
        "token_rewards": torch.tensor([[1.0], [0.0]]),
        "mask": torch.ones(2, 1),
        "groups": torch.zeros(2, dtype=torch.int64),
        "valid": torch.ones(2, dtype=torch.bool),
        "baseline": torch.zeros(2),
    }
    got = function(**{column: columns[column] for column in needs.inputs})
    assert isinstance(got, Advantages)
    assert got.advantages.dtype == torch.float32


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_takes_the_batch_and_its_options_and_gives_a_token_loss(name: str) -> None:
    function = load(LOSSES[name].function)
    assert callable(function)
    assert set(inspect.signature(function).parameters) == BATCH | set(LOSSES[name].options)
    assert isinstance(function(**{column: torch.zeros(1, 2) for column in BATCH}), TokenLoss)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_divides_by_what_it_declares(name: str) -> None:
    ones = {"tokens": 1, "sequences": 1, "horizon": 1}
    base = aggregate(torch.tensor([[3.0]]), torch.ones(1, 1), name, **ones)
    for divisor in ("tokens", "sequences", "horizon"):
        got = aggregate(torch.tensor([[3.0]]), torch.ones(1, 1), name, **ones | {divisor: 2})
        assert float(got) == float(base) / (2 if divisor in AGGREGATIONS[name].divisors else 1)
