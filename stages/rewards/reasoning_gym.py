"""Scoring with reasoning-gym's own scorers."""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

from stages.rewards.extract import NO_ANSWER, Found, explicit, in_sentence, in_tags

_NUMBER = re.compile(r"(?<![\w.])(?:(?<![\w)\]}])-)?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")


def reasoning_gym_score(
    response: str,
    ground_truth: object = None,
    *,
    extra: Mapping[str, Any] | str,
    mode: Literal["strict", "flexible"] = "flexible",
) -> dict[str, Any]:
    r"""Score a response with the scorer of the data set that made the question.

    ``strict`` takes the content of the last ``<answer>`` tags alone, as reasoning-gym does. ``flexible``
    takes ``####``, the last ``\boxed{}``, or the tags. Where none is there and the entry's own answer is a
    number, it takes the last number of the sentence after "answer is", else the last number of the text;
    where the entry's answer is text, the sentence after "answer is", else the whole response.

    Some scorers give part of the point for a long answer that contains the right one; that is theirs.

    Args:
        response: The graded text.
        ground_truth: Not used: the entry holds the answer.
        extra: The row's remaining columns, as a mapping or JSON text: `dataset`, the registered name, and
            `entry`, the generated entry (`question`, `answer`, `metadata`) as a mapping or JSON text.
            Without `dataset` the entry's ``metadata.source_dataset`` counts.
        mode: Where the answer may stand.

    Returns:
        `score` (0 to 1), the scored text as `answer`, and the reason ``no answer`` or ``unclosed box`` where
        nothing was found.

    Raises:
        KeyError: If `extra` lacks the entry or the data set's name.
        ValueError: If the mode or the data set is unknown.
        ModuleNotFoundError: If reasoning-gym is not installed.
    """
    if mode not in ("strict", "flexible"):
        raise ValueError(f"mode: expected strict or flexible, got {mode!r}")
    fields = _mapping(extra)
    entry = _mapping(_field(fields, "entry"))
    dataset = fields.get("dataset") or _field(_field(entry, "metadata"), "source_dataset")
    found = in_tags(response) if mode == "strict" else _flexible(response, str(_field(entry, "answer")))
    if found.text is None:
        return {"score": 0.0, "reason": found.reason}
    return {"score": _scorer(str(dataset))(found.text, dict(entry)), "answer": found.text}


@functools.cache
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # its dependency cellpylib has some
            import reasoning_gym
    except ModuleNotFoundError as cause:
        raise ModuleNotFoundError("the reward reasoning_gym needs the package reasoning-gym: install it") from cause
    scorer: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(dataset)
    return scorer


def _flexible(response: str, answer: str) -> Found:
    found = explicit(response)
    if found != Found(None, NO_ANSWER):
        return found
    sentence = in_sentence(response)
    if not _NUMBER.fullmatch(answer.strip()):
        whole = response.strip()
        return sentence if sentence.text or not whole else Found(whole)
    for text in (sentence.text or "", response):
        if numbers := _NUMBER.findall(text):
            return Found(numbers[-1])
    return Found(None, NO_ANSWER)


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise KeyError(f"extra: expected {name!r}, found {', '.join(map(repr, fields)) or 'nothing'}")
    return fields[name]


def _mapping(value: Mapping[str, Any] | str) -> Mapping[str, Any]:
    mapping: Mapping[str, Any] = json.loads(value) if isinstance(value, str) else value
    return mapping
