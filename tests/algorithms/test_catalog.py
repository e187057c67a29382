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

from stages.algorithms.aggregation import aggregate
from stages.algorithms.catalog import AGGREGATIONS, ESTIMATORS, INPUTS, LOSSES, EstimatorNeeds
from stages.algorithms.losses import TokenLoss
from stages.algorithms.sessions import Advantages

BATCH = {"log_probs", "old_log_probs", "advantages", "mask"}


def load(path: str) -> object:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", ["catalog", "join", "returns", "rules"])
def test_what_a_check_and_a_join_import_does_not_import_torch(module: str) -> None:
    code = f"import sys, stages.algorithms.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_what_each_estimator_needs() -> None:
    def beside(needs: EstimatorNeeds) -> set[str]:
        return set(needs.inputs) - {"token_rewards", "mask", "groups", "valid"}

    found = {name: (needs.granularity, needs.min_group, beside(needs)) for name, needs in ESTIMATORS.items()}
    assert found == {
        "remax": ("row", 1, {"baseline"}),
        "grpo": ("group", 2, set()),
        "dr_grpo": ("group", 2, set()),
        "rloo": ("group", 2, set()),
        "reinforce": ("window", 1, set()),
        "remax_clipped": ("row", 1, {"baseline", "log_probs", "ref_log_probs"}),
        "grpo_passk": ("group", 2, set()),
        "gdpo": ("window", 2, {"components", "weights"}),
        "opo": ("group", 2, set()),
        "gpg": ("window", 2, set()),
        "maxrl": ("group", 2, set()),
        "rae": ("row", 1, {"baseline"}),
        "reinforce_plus_plus": ("window", 1, set()),
        "reinforce_plus_plus_baseline": ("window", 2, set()),
        "gae": ("window", 1, {"values"}),
        "optimal_token_baseline": ("group", 2, {"log_probs", "sum_pi_squared"}),
        "tir_optimal_token_baseline": ("group", 2, {"log_probs", "sum_pi_squared"}),
    }
    assert {name for name, needs in ESTIMATORS.items() if needs.greedy_baseline} == {"remax", "remax_clipped"}
    assert {name for name, needs in ESTIMATORS.items() if needs.running_mean} == {"rae"}
    assert {name: dict(needs.options) for name, needs in ESTIMATORS.items() if needs.options} == {
        "remax_clipped": {"kappa": 0.05, "gamma": 0.99, "clip": 5.0},
        "reinforce_plus_plus": {"gamma": 1.0},
        "gae": {"gamma": 1.0, "lam": 1.0},
    }


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_takes_its_inputs_and_gives_advantages(name: str) -> None:
    needs = ESTIMATORS[name]
    function = load(needs.function)
    assert callable(function)
    parameters = inspect.signature(function).parameters
    assert set(parameters) == {*needs.inputs, *needs.options}
    assert {option: parameters[option].default for option in needs.options} == needs.options
    columns = {
        "token_rewards": torch.tensor([[1.0], [0.0]]),
        "mask": torch.ones(2, 1),
        "groups": torch.zeros(2, dtype=torch.int64),
        "valid": torch.ones(2, dtype=torch.bool),
        "baseline": torch.zeros(2),
        "log_probs": torch.full((2, 1), -1.0),
        "ref_log_probs": torch.full((2, 1), -1.0),
        "sum_pi_squared": torch.full((2, 1), 0.5),
        "values": torch.zeros(2, 1),
        "components": torch.tensor([[1.0], [0.0]]),
        "weights": torch.ones(1),
    }
    assert set(columns) == set(INPUTS)
    got = function(**{column: columns[column] for column in needs.inputs})
    assert isinstance(got, Advantages)
    assert got.advantages.dtype == torch.float32
    assert got.advantages[0] > got.advantages[1]


@pytest.mark.parametrize("name", [name for name, needs in ESTIMATORS.items() if needs.options])
def test_every_option_has_a_range_and_the_function_keeps_it(name: str) -> None:
    needs = ESTIMATORS[name]
    assert set(needs.ranges) == set(needs.options)
    for option, (lowest, _) in needs.ranges.items():
        with pytest.raises(ValueError, match=rf"{option}: {name} expects a number in \[0, .*\], got -0\.5"):
            needs.check({option: lowest - 0.5})
        tensors = dict.fromkeys(needs.inputs, torch.zeros(1, 1))
        function = load(needs.function)
        assert callable(function)
        with pytest.raises(ValueError, match=f"{option}: {name} expects"):
            function(**tensors, **{option: lowest - 0.5})


@pytest.mark.parametrize("value", [1.01, float("inf"), float("nan")])
def test_an_option_beyond_its_range_or_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"gamma: gae expects a number in \[0, 1\], got"):
        ESTIMATORS["gae"].check({"gamma": value})


def test_an_unknown_option_is_refused_with_the_nearest_and_all_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"unknown name 'gama'; did you mean 'gamma'.* the options of gae are: gamma, lam"
    ):
        ESTIMATORS["gae"].check({"gama": 0.9})
    with pytest.raises(ValueError, match="the options of grpo are: none"):
        ESTIMATORS["grpo"].check({"gamma": 0.9})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": ("token_reward",)}, "'mine': unknown name 'token_reward'; did you mean 'token_rewards'"),
        ({"granularity": "batch"}, "'mine': unknown name 'batch'; the granularities are: row, group, window"),
        ({"inputs": ("baseline",)}, "'mine': .*one of greedy_baseline and running_mean"),
        ({"greedy_baseline": True}, "'mine': .*one of greedy_baseline and running_mean"),
        ({"ranges": {"gamma": (0, 1)}}, "'mine': ranges: unknown name 'gamma'; the options are: none"),
        ({"options": {"gamma": 2.0}, "ranges": {"gamma": (0, 1)}}, "gamma: mine expects"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(change: dict[str, Any], message: str) -> None:
    declaration = {"name": "mine", "granularity": "row", "inputs": ("mask",), "function": "a:b", "doc": ""}
    EstimatorNeeds(**declaration)
    with pytest.raises(ValueError, match=message):
        EstimatorNeeds(**declaration | change)


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
