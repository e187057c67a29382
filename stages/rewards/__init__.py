"""Verifiable rewards, and how a name in a config becomes a function. Importing this imports no grader."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dataflow.errors import ConfigError
from dataflow.stage import import_object

BUILTIN: dict[str, str] = {
    "exact_match": "stages.rewards.exact:exact_match",
    "format_match": "stages.rewards.text:format_match",
    "math_match": "stages.rewards.maths:math_score",
    "numeric_match": "stages.rewards.numeric:numeric_match",
    "reasoning_gym": "stages.rewards.reasoning_gym:reasoning_gym_score",
}
PACKAGES = {"math_match": "math_verify", "reasoning_gym": "reasoning_gym"}
"""What a built-in imports at its first call; it takes seconds, so a process that grades imports it at its start."""

CONTEXT = ("prompt", "data_source", "extra")
"""What a reward function may ask for beside the response and the ground truth, by naming it."""


def resolve(name: str, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Turn a name from a config into a reward function.

    Args:
        name: A built-in name, ``package.module:function``, or ``path/to/file.py:function``.
        options: Keyword arguments to bind, such as ``{"mode": "strict"}``.

    Returns:
        The function, with the options bound.

    Raises:
        ConfigError: If there is no such function, it has no such option, or its package is not installed.
    """
    package = PACKAGES.get(name, "")
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"reward {name!r}: the package {package!r} is not installed; install {package.replace('_', '-')}"
        )
    function = _imported(BUILTIN.get(name, name), name)
    _check_signature(name, function, options or {})
    if not options:
        return function
    parameters = inspect.signature(function).parameters
    keywords = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [option for option in options if option not in parameters]
    if unknown and not open_ended:
        raise ConfigError(
            f"reward {name!r}: expected options out of {', '.join(keywords) or 'none'}, got "
            f"{', '.join(unknown)}. Correct the option's name."
        )
    return functools.partial(function, **options)


def _imported(target: str, name: str) -> Callable[..., Any]:
    try:
        function = import_object(target, f"reward {name!r}")
    except ConfigError as error:
        raise ConfigError(f"{error}. The built-in rewards are: {', '.join(BUILTIN)}") from error.__cause__
    if not callable(function) or inspect.iscoroutinefunction(function):
        kind = "async" if callable(function) else f"a {type(function).__name__}"
        raise ConfigError(
            f"reward {name!r}: it is {kind}; a reward is a plain function of a response. "
            f"The built-in rewards are: {', '.join(BUILTIN)}"
        )
    found: Callable[..., Any] = function
    return found


def _check_signature(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse a function that could never be called: it must take a response and a ground truth, and need no more."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    needed = [
        p.name for p in parameters[2:] if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    unknown = [argument for argument in needed if argument not in {*CONTEXT, *options}]
    if unknown or (len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in positional)):
        raise ConfigError(
            f"reward {name!r}: a reward is called as function(response, ground_truth) and may name "
            f"{', '.join(CONTEXT)} and its options besides; its signature is {inspect.signature(function)}"
        )
