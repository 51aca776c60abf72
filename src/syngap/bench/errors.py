"""The exceptions that mean: what was asked for cannot be done, and here is why."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["DamagedError", "UserError", "printable"]


class UserError(ValueError):
    """A wrong option, missing data, a folder that is not ours: one line, no traceback.

    The command line prints it and ends with exit code 2. Names in it may be those of other people's
    files, so what a terminal would act upon is spelled out, and a word of thousands of letters is
    cut.

    Examples:
        >>> str(UserError("unknown method " + 1000 * "a"))[-8:]
        'aaaaa...'
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(_LONG.sub(r"\1...", printable(str(message))))


class DamagedError(UserError):
    """A file that is not as syngap wrote it."""


def printable(text: str) -> str:
    r"""Return `text` in one line that does nothing but stand there, wherever it is printed.

    Examples:
        >>> printable("a\x1b[2J\nb")
        'a\\u001b[2J b'
    """
    line = re.sub(r"[\t\n\v\f\r]+", " ", text)
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in _ACTS else c for c in line)


_LONG = re.compile(r"(\S{200})\S{200,}")  # words, of which the beginning says enough
_ACTS = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format, half a character, ends of lines
