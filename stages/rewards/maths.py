r"""Match of mathematical expressions, graded by math-verify.

math-verify stops a long comparison by an alarm signal, which only a main thread may set, and without it a
response such as ``\boxed{9^{9^{9^9}}}`` never ends. So the alarm of the library is switched off, and grading runs in
a process that is killed when it takes too long: the reward stage's, or one of `math_match`'s own.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Literal, get_args

from stages.rewards.base import Scored
from stages.rewards.child import Child
from stages.rewards.extract import (
    NO_ANSWER,
    UNSCORABLE,
    Found,
    explicit,
    gold_texts,
    in_sentence,
    last_box,
    parse_number,
)

NOT_AN_EXPRESSION = "not an expression"
TOO_LONG = "answer too long"
Mode = Literal["strict", "flexible"]

_LONGEST_ANSWER = 1000  # characters
_TEX_WORD = re.compile(r"\\[a-zA-Z]+(?:\s*\{[a-zA-Z ]*\})?")
_PROSE = re.compile(r"[^\W\d_]{4,}")
_FUNCTIONS = frozenset(
    ("sqrt", "sinh", "cosh", "tanh", "asin", "acos", "atan", "arcsin", "arccos", "arctan", "infinity")
)


def math_match(response: str, ground_truth: object, *, mode: Mode = "strict", timeout_s: float = 5.0) -> Scored:
    """Grade as `math_score` does, in a process of its own: it ends in time, called from any thread.

    Args:
        response: The graded text.
        ground_truth: See `math_score`.
        mode: Where the answer may stand.
        timeout_s: Time for grading, in seconds; the start of the process does not count.

    Raises:
        ValueError: If the mode is unknown.
        WorkerBroken: If the process does not start.
    """
    _check(mode)
    (scored,) = _child(mode).grade([(response, ground_truth, {})], timeout_s=timeout_s)
    return scored


@functools.cache
def _child(mode: Mode) -> Child:
    return Child("math_match", {"mode": mode})


def math_score(response: str, ground_truth: object, *, mode: Mode = "strict") -> Scored | dict[str, Any]:
    r"""Score 1 if the response's expression equals a right answer, else 0, with a reason if there is none.

    ``strict`` takes the last ``\boxed{}`` or ``\fbox{}`` alone. ``flexible`` takes, in this order: ``####``,
    the last box, the last ``<answer>`` tags, the sentence after "answer is". The whole text is never graded:
    a number mentioned in passing is no answer. The right answer goes into the comparison first: 1<x<2 as the
    right answer accepts the interval (1,2), the reverse does not hold.

    A right answer of several values ("3 and 8", "3, 8", "\{3, 8\}") is a set: all of them, and no others.

    Nothing limits its time: this is what a process grades with that somebody else watches.

    Args:
        response: The graded text.
        ground_truth: LaTeX or plain text, a number, or a list of which any is right. Of a text that marks
            its answer (``####``, a box) the marked part counts.
        mode: Where the answer may stand.

    Returns:
        `score`, the compared text as `answer`, and a `reason` where nothing was compared: ``no answer``,
        ``unclosed box``, ``not an expression`` or ``answer too long``. Abstains with ``unscorable`` if no
        right answer can be parsed.

    Raises:
        ValueError: If the mode is unknown.
    """
    _check(mode)
    from stages.rewards.expressions import compare  # imports sympy

    golds = [gold for text in gold_texts(ground_truth) if (gold := _gold(text))]
    found = last_box(response) if mode == "strict" else _flexible(response)
    reason, answer = _judge(found)
    unscorable, equal = compare(golds, answer) if golds else (True, False)
    if unscorable:
        return Scored(None, "abstain", {"reason": UNSCORABLE})
    if reason:
        return {"score": 0.0, "reason": reason}
    return {"score": float(equal), "answer": answer}


def _check(mode: str) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode: expected strict or flexible, got {mode!r}")


def _judge(found: Found) -> tuple[str, str]:
    """Why there is nothing to compare, or else what."""
    if found.text is None:
        return found.reason, ""
    if len(found.text) > _LONGEST_ANSWER:
        return TOO_LONG, ""
    answer = _expression(found.text)
    return ("", answer) if answer else (NOT_AN_EXPRESSION, "")


def _flexible(response: str) -> Found:
    found = explicit(response)
    return in_sentence(response) if found == Found(None, NO_ANSWER) else found


def _gold(text: str) -> str:
    return _expression(explicit(text).text or text)


def _expression(text: str) -> str:
    r"""Take an expression out of ``$``, ``\(``, ``\[`` and a full stop, and a number out of its unit.

    Empty for prose, which would otherwise be read as a product of letters.
    """
    bare = re.sub(r"(?<!\\)(?:\$|\\[()\[\]])", "", text).strip().removeprefix("**").removesuffix("**")
    bare = bare.removesuffix(".").removesuffix("**").strip()
    words = {word.lower() for word in _PROSE.findall(_TEX_WORD.sub(" ", bare))}
    if words <= _FUNCTIONS:
        return bare
    number = parse_number(bare)
    return "" if number is None else str(number)
