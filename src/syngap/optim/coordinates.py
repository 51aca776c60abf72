"""In which coordinates a parameter's values are, so that no optimizer mixes two of them.

`rotate` and `unrotate` give a parameter other values that mean the same. What an optimizer knows of
it, importance and momentum, is then of something else, entry by entry, and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__ = ["Coordinates", "note_change"]

_COUNT = "_syngap_coordinates"  # an attribute of a parameter: how often they have changed
_changes = 0  # of all parameters of this process


def note_change(param: Tensor) -> None:
    """Note that a parameter's values are in other coordinates from now on."""
    global _changes
    _changes += 1
    setattr(param, _COUNT, _count(param) + 1)


class Coordinates:
    """Those in which an optimizer knows its parameters."""

    def __init__(self) -> None:
        self._known: dict[Tensor, int] = {}
        self._looked = -1

    def are_current(self) -> bool:
        """Return whether nothing was turned since the last `learn`; it costs one comparison."""
        return self._looked == _changes

    def differ(self, params: Iterable[Tensor]) -> bool:
        """Return whether those of any parameter are others than `learn` saw."""
        return any(self._known.get(param, _count(param)) != _count(param) for param in params)

    def learn(self, params: Iterable[Tensor]) -> None:
        """Take the coordinates of now to be those of all that is known."""
        self._known = {param: _count(param) for param in params}
        self._looked = _changes

    def look_again(self) -> None:
        """Learn at the next opportunity: there are other parameters."""
        self._looked = -1


def _count(param: Tensor) -> int:
    count: int = getattr(param, _COUNT, 0)
    return count
