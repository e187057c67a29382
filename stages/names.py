"""Names in a configuration that must be one of a table's."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def known(value: str, names: Iterable[str], what: str, where: str = "") -> str:
    """Return `value` if it is among `names`.

    Args:
        value: What the configuration says.
        names: What is known.
        what: What the names are, in the plural, for the error.
        where: What the error begins with.

    Raises:
        ValueError: With the nearest known name and all of them.
    """
    names = list(names)
    if value not in names:
        near = difflib.get_close_matches(value, names, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{where}unknown name {value!r}; {hint}the {what} are: {', '.join(names) or 'none'}")
    return value
