"""Words of messages: counts with their nouns, and hints for mistyped names. It needs no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

__all__ = ["count_of", "nearest"]


def count_of(number: int, noun: str) -> str:
    """Return a count and its noun, in the singular for one.

    Examples:
        >>> count_of(1, "row"), count_of(0, "row"), count_of(2, "more class")
        ('1 row', '0 rows', '2 more classes')
        >>> count_of(2, "accuracy"), count_of(2, "day")
        ('2 accuracies', '2 days')
    """
    if number == 1:
        return f"1 {noun}"
    if re.search(r"[^aeiou]y$", noun):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if re.search(r'(s|x|z|ch|sh)$', noun) else 's'}"


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return a hint for a mistyped `name`, beginning with a separator, or nothing.

    Examples:
        >>> nearest("syngpa", ["er", "syngap"])
        '; did you mean "syngap"?'
        >>> nearest("q", ["er"])
        ''
    """
    close = difflib.get_close_matches(name, list(allowed), n=1)
    return f'; did you mean "{close[0]}"?' if close else ""
