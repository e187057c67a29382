"""Which part of a response is graded."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence


def graded_ids(response_ids: Sequence[int], end_ids: Collection[int], drop_ids: Collection[int] = ()) -> list[int]:
    """Cut a response at its end token and remove what the scorer should not see.

    Everything from the first end token on goes, for the policy ended there. Decode the result with special
    tokens kept: tags that are registered as special, such as ``<think>``, belong to the text unless they are
    named in `drop_ids`.

    Args:
        response_ids: ``[T]`` token ids, padded or not.
        end_ids: Ids that end a response.
        drop_ids: Ids to remove wherever they stand, such as the pad token.

    Returns:
        The ids to decode.
    """
    graded = []
    for token in response_ids:
        if token in end_ids:
            break
        if token not in drop_ids:
            graded.append(int(token))
    return graded


def format_match(
    response: str, ground_truth: object = None, *, pattern: str = r".*<answer>(?:(?!<answer>).)*</answer>"
) -> float:
    """Score 1 if the whole response has the wanted form, else 0; white space at the end does not count.

    Args:
        response: The graded text.
        ground_truth: Not used; a form has no right answer.
        pattern: Regular expression that must match from the first character to the last; ``.`` matches line
            ends too. The default asks for an answer block at the end.
    """
    return float(re.fullmatch(pattern, response.rstrip(), re.DOTALL) is not None)
