"""Words of messages: counts with their nouns, and hints for mistyped names. It needs no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any

__all__ = ["count_of", "duration", "nearest", "unknown_argument"]


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


def unknown_argument(
    function: Callable[..., Any], name: str, aliases: Mapping[str, str] = MappingProxyType({})
) -> TypeError:
    """Return the error for a keyword that a function does not take, with the one that was meant.

    Args:
        function: that was called.
        name: of the keyword.
        aliases: other names of its arguments, such as symbols of a paper.

    Examples:
        >>> def train(*, rate): ...
        >>> unknown_argument(train, "rat")
        TypeError('train() has no argument "rat"; did you mean "rate"?')
        >>> unknown_argument(train, "eta", {"eta": "rate"})
        TypeError('train() has no argument "eta"; did you mean "rate"?')
        >>> unknown_argument(train, "x")
        TypeError('train() has no argument "x"; there are rate')
    """
    parameters = signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    hint = nearest(aliases.get(name.lower(), name), known) or f"; there are {', '.join(known)}"
    return TypeError(f'{function.__name__}() has no argument "{name}"{hint}')


def duration(seconds: float) -> str:
    """Return a time in a unit that is easy to read.

    Examples:
        >>> duration(42), duration(600), duration(9000)
        ('42 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
