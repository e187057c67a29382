"""The tables that a pipeline check reads before anything heavy is loaded."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from stages.algorithms.advantages import Advantages
from stages.algorithms.aggregation import aggregate
from stages.algorithms.catalog import AGGREGATIONS, ESTIMATORS, LOSSES
from stages.algorithms.losses import TokenLoss

BATCH = {"log_probs", "old_log_probs", "advantages", "mask"}


def load(path: str) -> object:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", ["catalog", "join", "returns", "rules"])
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
    needs = LOSSES[name]
    function = load(needs.function)
    assert callable(function)
    parameters = inspect.signature(function).parameters
    asked = ({"sequences"} if needs.sequences else set()) | ({"selected"} if needs.needs_batch else set())
    assert set(parameters) == BATCH | {"weights"} | asked | set(needs.options)
    assert defaults(function, needs.options) == needs.options
    tensors = {column: torch.zeros(1, 2) for column in BATCH | asked - {"sequences"}}
    required = {option: 1.0 for option, default in needs.options.items() if default is None}
    assert isinstance(function(**tensors, **required), TokenLoss)


@pytest.mark.parametrize("name", [name for name, needs in LOSSES.items() if needs.needs_batch])
def test_a_selection_takes_its_inputs_and_options_and_gives_a_mask(name: str) -> None:
    needs = LOSSES[name].needs_batch
    assert needs is not None
    function = load(needs.function)
    assert callable(function)
    assert list(inspect.signature(function).parameters) == [*needs.inputs, *needs.options]
    assert defaults(function, needs.options) == needs.options
    columns = {**{column: torch.zeros(1, 2) for column in BATCH}, "row_ids": torch.tensor([0]), "seed": 0}
    selected = function(**{column: columns[column] for column in needs.inputs})
    assert (selected.shape, selected.dtype) == ((1, 2), torch.bool)


@pytest.mark.parametrize("name", LOSSES)
def test_an_option_of_a_loss_and_of_its_selection_has_one_default(name: str) -> None:
    needs = LOSSES[name]
    both = dict(needs.needs_batch.options) if needs.needs_batch else {}
    assert all(both.get(option, default) == default for option, default in needs.options.items())
    assert needs.all_options == {**needs.options, **both}


def test_what_each_loss_needs() -> None:
    assert {name for name, needs in LOSSES.items() if not needs.ratio} == {"policy_gradient", "dro"}
    assert {name for name, needs in LOSSES.items() if needs.sequences} == {"gspo", "geo_mean"}
    assert {name for name, needs in LOSSES.items() if needs.needs_batch} == {"clip_cov", "kl_cov"}
    assert {name: needs.aggregation for name, needs in LOSSES.items() if needs.aggregation} == dict.fromkeys(
        ("gspo", "sapo", "geo_mean"), "seq-mean-token-mean"
    )


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_divides_by_what_it_declares(name: str) -> None:
    ones: dict[str, Any] = {"token_count": 1, "sequence_count": 1, "horizon": 1}
    base = aggregate(torch.tensor([[3.0]]), torch.ones(1, 1), name, **ones)
    for divisor in ("token_count", "sequence_count", "horizon"):
        got = aggregate(torch.tensor([[3.0]]), torch.ones(1, 1), name, **ones | {divisor: 2})
        assert float(got) == float(base) / (2 if divisor in AGGREGATIONS[name].divisors else 1)


def defaults(function: Callable[..., object], options: Iterable[str]) -> dict[str, float | None]:
    """What the signature says; None where there is no default."""
    parameters = inspect.signature(function).parameters
    return {name: None if (value := parameters[name].default) is inspect.Parameter.empty else value for name in options}
