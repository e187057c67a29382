"""What one value of a prompt file may be, and its one form from there on."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Mapping
from typing import Any

_EXACT_FLOAT = 2**53  # above it a float no longer tells neighbouring integers apart


class PromptValueError(ValueError):
    """Raised when a value does not fit. The message says what was expected, what came and the remedy."""

    def __init__(self, expected: str, got: object, remedy: str) -> None:
        super().__init__(f"expected {expected}, got {got if isinstance(got, _Words) else show(got)}. {remedy}")


class _Words(str):
    """Says in words what came, in place of a value to print."""


def prompt_value(value: object) -> str | list[dict[str, Any]]:
    """Check one prompt and give it its two forms: text, or a list of messages.

    Arrow gives every message the keys of all messages and fills them with None; such keys are removed
    again, at any depth.

    Args:
        value: Text, or a list or numpy array of ``{role, content}`` dicts.

    Raises:
        PromptValueError: If it is empty, null, or neither of the two, or a message lacks role or content.
    """
    value = _listed(value)
    wanted = "text or a list of {role, content} messages"
    if isinstance(value, str):
        if not value.strip():
            raise PromptValueError(wanted, _Words("empty text"), "Fill it in, or drop the row.")
        return str(plain(value))
    if isinstance(value, Mapping):
        raise PromptValueError(wanted, value, "Put the message into a list.")
    if not isinstance(value, list | tuple):
        raise PromptValueError(wanted, value, "Correct the row, or map another column.")
    if not value:
        raise PromptValueError(wanted, _Words("an empty list"), "Fill it in, or drop the row.")
    messages = [_message(turn, message) for turn, message in enumerate(value)]
    if not any(message["content"].strip() for message in messages):
        raise PromptValueError(wanted, _Words("messages whose content is empty"), "Fill it in, or drop the row.")
    return messages


def _message(turn: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptValueError(f"a dict with role and content as message {turn}", message, "Correct the row.")
    for key in ("role", "content"):
        text = message.get(key)
        if not isinstance(text, str) or (key == "role" and not text):
            raise PromptValueError(f"text as {key} of message {turn}", text, f"Write the {key}, or drop the message.")
    checked: dict[str, Any] = plain(message)
    return checked


def ground_truth_text(value: object) -> str | None:
    """Write one right answer as JSON text that keeps its type: 42, 42.0, "42" and ["42"] stay apart.

    Args:
        value: Text, a number, a bool, a dict, a non-empty list of them, their numpy forms, or None.

    Returns:
        The JSON text, or None for None and NaN.

    Raises:
        PromptValueError: If the value has no JSON form, or is a list that is empty or holds a null.
    """
    answer = plain(value)
    if isinstance(answer, list) and (not answer or any(entry is None for entry in answer)):
        raise PromptValueError(
            "a list of answers of which any is right", value, "Remove nulls, and name at least one answer."
        )
    return None if answer is None else json_text(answer)


def id_text(value: object) -> str | None:
    """Turn an id into text once: 7 and 7.0 become '7'.

    Returns:
        The text, or None for None and NaN: the row needs a generated id.

    Raises:
        PromptValueError: If it is neither text nor an integer.
    """
    value = _listed(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_FLOAT:
        value = int(value)  # an integer column that met a null in pandas
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise PromptValueError("text or an integer", value, "Correct the id, or leave it null to have one generated.")
    return str(plain(str(value)))


def source_text(value: object) -> str | None:
    """Check the name of a data set; None or empty text asks for the default.

    Raises:
        PromptValueError: If it is not text.
    """
    if value is not None and not isinstance(value, str):
        raise PromptValueError("text", value, "Write the name of the data set, or map another column.")
    return plain(value) or None


def _listed(value: object) -> object:
    return value.tolist() if hasattr(value, "tolist") else value


def plain(value: Any) -> Any:
    """Turn a value into what JSON can say.

    NaN becomes None, dict entries that are None go away, dates and decimals become text.

    Raises:
        PromptValueError: If JSON cannot say it: an infinite number, bytes, a lone surrogate.
    """
    value = _listed(value)
    if isinstance(value, float):
        if math.isinf(value):
            raise PromptValueError("a finite number", value, "Replace it, or leave it null.")
        return None if math.isnan(value) else value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as cause:
            raise PromptValueError("text that UTF-8 can say", value, "Remove the lone surrogate.") from cause
        return value
    if isinstance(value, Mapping):
        entries = {plain(str(key)): plain(entry) for key, entry in value.items()}
        return {key: entry for key, entry in entries.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise PromptValueError("text, numbers, lists or dicts", value, "Convert the column, or drop it from the file.")


def json_text(value: object) -> str:
    """Write a plain value as JSON text, non-ASCII letters as they are."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def show(value: object) -> str:
    """Type and value of what came, cut to 80 characters."""
    text = "null" if value is None else f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else text[:77] + "..."
