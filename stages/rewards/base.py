"""The contract of a reward function, and the one place where what it returns becomes a reward.

A reward function is any callable ``(response, ground_truth, **context)``. `response` is the graded text,
`ground_truth` the data set's answer as a Python value (a list means that any entry is right), and the
context is whichever of `prompt`, `data_source` and `extra` its signature names. It returns a number or a
bool, None to abstain, a dict with a `score` and whatever else is worth keeping, or a `Scored`.

A row whose reward could not be determined has no reward. It is never a silent 0: a 0 says that the answer
is wrong, and trains the policy away from it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

RewardFunction = Callable[..., Any]
Status = Literal["ok", "timeout", "error", "abstain"]

_FLOAT32_MAX = 3.4028234663852886e38  # rewards are stored as float32
_LONGEST_INT = 10_000  # bits; Python refuses to write longer ones in decimal


@dataclass(frozen=True)
class Scored:
    """One row's reward.

    Attributes:
        reward: A finite number if `status` is ``ok``, else None.
        status: ``ok``; ``timeout`` or ``error`` if grading failed; ``abstain`` if the row cannot be graded.
        info: What else the scorer said. JSON can say all of it. `error` holds why grading failed, `reason`
            a short phrase such as ``no answer`` or ``unscorable``.
    """

    reward: float | None
    status: Status = "ok"
    info: dict[str, Any] = field(default_factory=dict)


def normalise(raw: object) -> Scored:
    """Turn what a reward function returned into a `Scored`.

    None abstains. NaN, infinities, numbers beyond float32, text, lists and dicts without a `score` are
    errors whose text stands in ``info["error"]``.
    """
    if isinstance(raw, Scored):
        return _checked(raw)
    if isinstance(raw, Mapping):
        info = plain({key: value for key, value in raw.items() if key != "score"})
        if "score" not in raw:
            found = ", ".join(map(repr, raw)) or "no keys"
            return _error(f"expected a dict with 'score', got {found}", info)
        return _number(raw["score"], info)
    return _number(raw, {})


def score(function: RewardFunction, response: str, ground_truth: object, /, **context: object) -> Scored:
    """Grade one response. Whatever the function does, the result is a `Scored`.

    The function gets those context arguments that its signature names. Names that begin with ``__`` never
    reach it. A `TimeoutError` becomes status ``timeout``, any other exception and `SystemExit` status ``error`` with
    ``Type: message`` in ``info["error"]``.

    Args:
        function: The reward function.
        response: The graded text.
        ground_truth: The right answer as a Python value, None if the data set has none.
        **context: `prompt`, `data_source`, `extra` and the user's own columns.
    """
    try:
        return normalise(function(response, ground_truth, **_accepted(function, context)))
    except TimeoutError as error:
        return Scored(None, "timeout", {"error": plain(f"{type(error).__name__}: {error}")})
    except (Exception, SystemExit) as error:
        return _error(f"{type(error).__name__}: {error}")


def plain(value: Any) -> Any:
    """Turn a value into what JSON can say; what it cannot say becomes text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()  # half a surrogate pair is no text
    if isinstance(value, int):
        return value if value.bit_length() <= _LONGEST_INT else hex(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(entry) for key, entry in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes | bytearray):
        return [plain(entry) for entry in value]
    return None if value is None else repr(value)


def _accepted(function: RewardFunction, context: Mapping[str, object]) -> dict[str, object]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return {}
    taken = {parameter.name for parameter in parameters[:2]}  # by response and ground_truth
    usable = {name: value for name, value in context.items() if name not in taken and name[:2] != "__"}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return usable
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = {parameter.name for parameter in parameters if parameter.kind in keyword}
    return {name: value for name, value in usable.items() if name in names}


def _number(raw: object, info: dict[str, Any]) -> Scored:
    if inspect.iscoroutine(raw):
        raw.close()
        return _error("expected a number, got a coroutine: a reward function must not be async", info)
    value = raw.item() if getattr(raw, "ndim", None) == 0 and hasattr(raw, "item") else raw
    if value is None:
        return Scored(None, "abstain", info)
    if not isinstance(value, bool | int | float):
        return _error(f"expected a number, a bool, None or a dict, got {_show(raw)}", info)
    if not abs(value) <= _FLOAT32_MAX:  # also true for NaN
        return _error(f"expected a finite float32, got {_show(value)}", info)
    return Scored(float(value), "ok", info)


def _checked(scored: Scored) -> Scored:
    info = plain(dict(scored.info))
    if scored.status == "ok":
        return _number(scored.reward, info)
    if scored.status not in get_args(Status):
        return _error(f"expected a status out of {', '.join(get_args(Status))}, got {scored.status!r}", info)
    if scored.reward is not None:
        return _error(f"expected no reward beside status {scored.status!r}, got {_show(scored.reward)}", info)
    return Scored(None, scored.status, info)


def _error(text: str, info: Mapping[str, Any] | None = None) -> Scored:
    return Scored(None, "error", {**(info or {}), "error": plain(text)})


def _show(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else text[:77] + "..."
