"""The one exception that means: what was asked for cannot be done, and here is why."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["UserError", "nearest"]


class UserError(ValueError):
    """A wrong option, missing data, a folder that is not ours: one line, no traceback.

    The command line prints it and ends with exit code 2.
    """


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
