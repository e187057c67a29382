r"""Match of one number, however it is spelt."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal

from stages.rewards.base import Scored
from stages.rewards.extract import (
    NO_ANSWER,
    NOT_A_NUMBER,
    UNSCORABLE,
    Found,
    after_marker,
    explicit,
    gold_texts,
    in_sentence,
    last_number,
    parse_number,
)


def numeric_match(
    response: str,
    ground_truth: object,
    *,
    mode: Literal["strict", "flexible"] = "flexible",
    tolerance: float = 0.0,
) -> Scored | dict[str, Any]:
    r"""Score 1 if the response's number equals a right answer, else 0 with the reason.

    ``strict`` takes the number after the last ``####`` alone. ``flexible`` takes, in this order: the marker,
    the last ``\boxed{}``, the last ``<answer>`` tags, the sentence after "answer is", the last number of the
    text. A marked answer must be one number ("12 or 15" is none); of a sentence the last number counts.

    Args:
        response: The graded text.
        ground_truth: A number or its text, or a list of which any is right. Of a text that marks its answer
            (``####`` in a raw GSM8K answer, a box) the marked part counts.
        mode: Where the answer may stand.
        tolerance: Largest absolute difference that still counts as equal.

    Returns:
        `score`, the number read as `answer`, and a `reason` where there is none: ``no answer``, ``unclosed
        box`` or ``not a number``. Abstains with ``unscorable`` if no right answer is a number.

    Raises:
        ValueError: If the mode is unknown.
    """
    if mode not in ("strict", "flexible"):
        raise ValueError(f"mode: expected strict or flexible, got {mode!r}")
    golds = [gold for text in gold_texts(ground_truth) if (gold := _gold(text)) is not None]
    if not golds:
        return Scored(None, "abstain", {"reason": UNSCORABLE})
    found = after_marker(response) if mode == "strict" else explicit(response)
    if found.text is not None:
        number = parse_number(found.text)
        reason = NOT_A_NUMBER
    else:
        number = _in_prose(response) if mode == "flexible" and found == Found(None, NO_ANSWER) else None
        reason = found.reason
    if number is None:
        return {"score": 0.0, "reason": reason}
    right = any(abs(number - gold) <= Fraction(tolerance) for gold in golds)
    return {"score": float(right), "answer": _spelt(number)}


def _gold(text: str) -> Fraction | None:
    return parse_number(explicit(text).text or text)


def _in_prose(response: str) -> Fraction | None:
    sentence = in_sentence(response).text
    number = last_number(sentence) if sentence else None
    return number if number is not None else last_number(response)


def _spelt(number: Fraction) -> str:
    return str(number) if number.denominator == 1 else format(float(number), ".12g")
