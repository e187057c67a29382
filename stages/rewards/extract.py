r"""Finding the answer in a response, and reading numbers and right answers.

Where an answer may stand, most explicit first: after the marker ``####``, in the last ``\boxed{}`` (or
``\fbox{}``), in the last ``<answer>`` tags, after "answer is" or "answer:", and, for numbers alone, the last
number of the text. What is found must be the whole answer: a list of guesses is none.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

NO_ANSWER = "no answer"
UNCLOSED_BOX = "unclosed box"
NOT_A_NUMBER = "not a number"
UNSCORABLE = "unscorable"

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = rf"(?:{_DIGITS})(?:[eE][+-]?\d{{1,3}})?(?:\s*/\s*\d+(?!\d|\.\d))?"
_CURRENCY = r"[$€£¥]?\s?"
# One number alone: an optional sign, currency, percent sign, full stop, and a unit in words.
_ALONE = re.compile(
    rf"(?P<sign>[+-]?)\s?{_CURRENCY}(?P<inner>[+-]?)(?P<number>{_NUMBER})\s?%?\.?(?:\s+(?!(?:and|or|to|not|plus|minus)\b)[^\W\d]+){{0,3}}\.?"
)
# A number inside text: its sign is a minus only where it cannot be a difference or a range.
_INSIDE = re.compile(rf"(?:(?<![\w.)\]}}$%])(?P<sign>[+-]))?(?:[$€£¥](?P<inner>-?))?(?<![\w.])(?P<number>{_NUMBER})")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARKER = re.compile(r"####([^\n]*)")
_SENTENCE = re.compile(
    r"\banswer(?:\s+(?:is|would\s+be|equals)\b\s*:?|\s*[:=])((?:(?!\banswer\b|[.!?](?:\s|$)|\n).)+)",
    re.IGNORECASE,
)
_TEX_UNIT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_TEX_FRACTION = re.compile(r"\\[dtc]?frac\s*\{\s*([^{}]+?)\s*\}\s*\{\s*([^{}]+?)\s*\}")
_TEX_NOISE = re.compile(r"\\[,!;: ]|\\left|\\right|~|\^\s*\{?\\circ\}?|(?<!\\)\$(?!\s*[\d.-])")
_LEFT_SIDE = re.compile(r"(?:(?!\b(?:and|or)\b|\\[lgn]e)[^,;<>!≠≤≥])*=")
_LONGEST = 400  # characters of a number with its unit; longer ones are no answers and cost quadratic time


@dataclass(frozen=True)
class Found:
    """What a search for the answer found: `text`, or None and the `reason` why not."""

    text: str | None
    reason: str = ""


def last_box(response: str) -> Found:
    r"""Find the content of the last ``\boxed{}`` or ``\fbox{}``, braces balanced.

    A box that is never closed was cut off: the reason says so, and no earlier box is taken for it.
    """
    starts = [match.end() for match in _BOX.finditer(response)]
    if not starts:
        return Found(None, NO_ANSWER)
    depth, i = 1, starts[-1]
    while i < len(response):
        letter = response[i]
        if letter == "\\":  # an escaped brace does not count
            i += 1
        elif letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
            if depth == 0:
                return _found(response[starts[-1] : i])
        i += 1
    return Found(None, UNCLOSED_BOX)


def after_marker(response: str) -> Found:
    """Find the rest of the line after the last ``####``."""
    lines = _MARKER.findall(response)
    return _found(lines[-1]) if lines else Found(None, NO_ANSWER)


def in_tags(response: str) -> Found:
    """Find the content of the last ``<answer>`` tags."""
    stop = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(stop, 0))
    return _found(response[start + len("<answer>") : stop]) if start >= 0 else Found(None, NO_ANSWER)


def in_sentence(response: str) -> Found:
    """Find what follows the last "answer is", "answer:" or "answer =", up to the end of the sentence."""
    answers = _SENTENCE.findall(response)
    return _found(answers[-1]) if answers else Found(None, NO_ANSWER)


def explicit(response: str) -> Found:
    """Find an answer that is marked as one: by the marker, a box or tags, in this order."""
    for search in (after_marker, last_box, in_tags):
        found = search(response)
        if found.text is not None or found.reason == UNCLOSED_BOX:
            return found
    return Found(None, NO_ANSWER)


def parse_number(text: str) -> Fraction | None:
    r"""Read a text that is one number, exactly; None if it is anything else.

    Thousands separators, a currency sign, a percent sign (18% is 18), a full stop, a unit in words, simple
    fractions and ``\frac`` are read; of an equation the right side counts. "12 or 15" is no number.
    """
    if len(text) > _LONGEST:
        return None
    text = _TEX_FRACTION.sub(r"\1/\2", _TEX_UNIT.sub(r" \1", text)).replace("\\$", "$").replace("\\%", "%")
    text = _LEFT_SIDE.sub("", _TEX_NOISE.sub("", text.replace("{,}", ",")), count=1)
    match = _ALONE.fullmatch(_ascii(text).strip().strip("*").strip())
    return _value(match) if match else None


def last_number(text: str) -> Fraction | None:
    """Read the last number that stands in a text; None if there is none."""
    last = None
    for match in _INSIDE.finditer(_ascii(text)):
        last = match
    return _value(last) if last else None


def parse_score(text: str, label: str = "Reward") -> float | None:
    """Read the score that a judge wrote as ``Reward: 0.5``.

    The last label counts. What follows it must be one finite number, in any spelling that `float` takes:
    10 is 10.0 and 1e-1 is 0.1; of ``nan``, ``7/10`` or a missing number nothing is read.

    Args:
        text: What the judge wrote.
        label: The word before the colon or equals sign; case does not matter.

    Returns:
        The score, or None if there is no valid one.
    """
    scores = re.findall(rf"\b{re.escape(label)}\s*[:=]\s*(\S*)", text, re.IGNORECASE)
    word = scores[-1].lstrip("*`\"'([").rstrip("*`\"')],;.") if scores else ""
    if not re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?", _ascii(word)):
        return None
    return float(_ascii(word))


def gold_texts(ground_truth: object) -> list[str]:
    """List the texts of which any is a right answer; empty if the row has none.

    Numbers are written as JSON writes them (42, 42.0, true), numpy values like Python's.

    Raises:
        TypeError: If an answer is neither text, a number, nor a list of them.
    """
    value: Any = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [text for entry in value for text in gold_texts(entry)]
    if isinstance(value, str):
        return [value]
    if isinstance(value, bool | int | float):
        return [json.dumps(value)]
    raise TypeError(f"expected a ground truth of text, numbers or a list of them, got {type(value).__name__}")


def _found(text: str) -> Found:
    return Found(text.strip()) if text.strip() else Found(None, NO_ANSWER)


def _ascii(text: str) -> str:
    return text.replace("−", "-").replace("–", "-").replace("\u00a0", " ")


def _value(match: re.Match[str]) -> Fraction | None:
    text = match["number"].replace(",", "")
    if len(text) > _LONGEST:
        return None
    numerator, _, denominator = text.partition("/")
    below = Fraction(denominator.strip()) if denominator else Fraction(1)
    if not below:
        return None
    negative = (match["sign"] == "-") != (match["inner"] == "-")
    return (-1 if negative else 1) * Fraction(numerator.strip()) / below
