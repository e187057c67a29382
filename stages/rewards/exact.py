"""Exact match of the whole response."""

from __future__ import annotations

from typing import Any

from stages.rewards.base import Scored
from stages.rewards.extract import UNSCORABLE, gold_texts


def exact_match(
    response: str, ground_truth: object, *, strip: bool = True, ignore_case: bool = False
) -> Scored | dict[str, Any]:
    """Score 1 if the response is the right answer and nothing else, else 0.

    Args:
        response: The graded text.
        ground_truth: The right answer, or a list of which any is right; a number is compared as JSON writes
            it, so 42 is "42" and 42.0 is "42.0".
        strip: Whether white space around either text does not count.
        ignore_case: Whether upper and lower case are the same.

    Returns:
        The score; abstains with reason ``unscorable`` if there is no right answer.
    """
    golds = gold_texts(ground_truth)
    if not golds:
        return Scored(None, "abstain", {"reason": UNSCORABLE})

    def form(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    return {"score": float(form(response) in map(form, golds))}
