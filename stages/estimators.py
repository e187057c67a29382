"""How a name in a configuration becomes an advantage estimator's declaration. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from dataflow.errors import ConfigError
from dataflow.stage import import_object
from stages.algorithms.catalog import ESTIMATORS, EstimatorNeeds
from stages.names import known

RewardKeys = list[str] | dict[str, float]
"""Names in `reward_info`, or names with their weights; a name alone has the weight 1."""


def resolve(name: str) -> EstimatorNeeds:
    """Turn a name from a config into a declaration.

    Args:
        name: A built-in name, or the import path of an `EstimatorNeeds`: ``package.module:name`` or ``file.py:name``.

    Raises:
        ValueError: If there is no such built-in estimator.
        ConfigError: If nothing can be imported from the path, or it is no declaration.
    """
    if ":" not in name:
        return ESTIMATORS[known(name, ESTIMATORS, "estimators")]
    found = import_object(name, "estimator")
    if not isinstance(found, EstimatorNeeds):
        raise ConfigError(
            f"estimator: {name!r} is a {type(found).__name__}; expected a stages.algorithms.catalog.EstimatorNeeds, "
            f"which says what the function needs. The built-in estimators are: {', '.join(ESTIMATORS)}"
        )
    return found


def weights_of(reward_keys: RewardKeys) -> Mapping[str, float]:
    """Name of a reward -> its weight."""
    return reward_keys if isinstance(reward_keys, dict) else dict.fromkeys(reward_keys, 1.0)


def check_reward_keys(needs: EstimatorNeeds, reward_keys: RewardKeys) -> None:
    """Refuse named rewards that are not asked for, are lacking, or are named twice.

    Raises:
        ValueError: Says which, and what to do.
    """
    if "components" not in needs.inputs and reward_keys:
        raise ValueError(f"estimator {needs.name!r} takes no named rewards; remove reward_keys, or use gdpo")
    if "components" in needs.inputs and not reward_keys:
        raise ValueError(
            f"estimator {needs.name!r} compares named rewards; name them, such as reward_keys=[correct, format]: the "
            "numbers that the reward function returns beside its score"
        )
    if len(weights_of(reward_keys)) < len(reward_keys):
        raise ValueError(f"expected each name once, got {', '.join(reward_keys)}")
