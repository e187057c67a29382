"""Comparing expressions with math-verify. Imports sympy: for a process that grades alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify


def compare(golds: Sequence[str], answer: str) -> tuple[bool, bool]:
    """Parse the right answers and compare an answer with them, without a time limit.

    Args:
        golds: Bare expressions, LaTeX or plain.
        answer: A bare expression; empty text equals nothing.

    Returns:
        Whether no right answer could be parsed, and whether the answer equals one of them.
    """
    parsed = [gold for text in golds if (gold := _parsed(text))]
    target = _parsed(answer) if answer and parsed else []
    # The gold comes first: verify is not symmetric. None switches the library's alarm signal off.
    equal = bool(target) and any(verify(gold, target, timeout_seconds=None) for gold in parsed)
    return not parsed, equal


def _parsed(text: str) -> list[Any]:
    return list(parse(f"${text}$", fallback_mode="no_fallback", parsing_timeout=None))
