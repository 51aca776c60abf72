"""Words of messages: counts with their nouns, and hints for mistyped names. It needs no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from types import MappingProxyType
from typing import ParamSpec, TypeVar

__all__ = ["count_of", "duration", "names_arguments", "nearest"]

P = ParamSpec("P")
R = TypeVar("R")


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


def names_arguments(
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function answer a keyword that it does not take with the one that was meant.

    Args:
        aliases: other names of its arguments, such as symbols of a paper.

    Examples:
        >>> @names_arguments({"eta": "rate"})
        ... def train(*, rate): ...
        >>> train(rat=1)
        Traceback (most recent call last):
        TypeError: train() has no argument "rat"; did you mean "rate"?
        >>> train(eta=1)
        Traceback (most recent call last):
        TypeError: train() has no argument "eta"; did you mean "rate"?
        >>> train(x=1)
        Traceback (most recent call last):
        TypeError: train() has no argument "x"; there are rate
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        called = function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")
        known = [name for name in signature(function).parameters if name not in ("self", "cls")]

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    hint = nearest(aliases.get(name.lower(), name), known)
                    hint = hint or f"; there are {', '.join(known)}"
                    raise TypeError(f'{called}() has no argument "{name}"{hint}')
            return function(*args, **kwargs)

        return checked

    return decorate


def duration(seconds: float) -> str:
    """Return a time in a unit that is easy to read.

    Examples:
        >>> duration(42), duration(600), duration(9000)
        ('42 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
