"""Warnings given once, that point at the caller's own line."""

from __future__ import annotations

import sys
import warnings

__all__ = ["Notices"]

_INSIDE = {"syngap", "torch", "contextlib"}


class Notices:
    """Remembers which warnings were given."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def __contains__(self, topic: str) -> bool:
        return topic in self._given

    def warn(self, topic: str, message: str) -> None:
        """Warn of a topic, the first time that it comes up."""
        if topic not in self._given:
            self._given.add(topic)
            _warn_caller(message)


def _warn_caller(message: str) -> None:
    """Warn at the nearest frame outside this package and torch, whose decorators lie between."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and _package(frame.f_globals) in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
