"""In which coordinates a parameter's values are, so that no optimizer mixes two of them.

`rotate` and `unrotate` give a parameter other values that mean the same. What an optimizer knows of
it, importance and momentum, is then of something else, entry by entry, and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Coordinates", "note_plain", "note_turned"]

_NAME = "_syngap_coordinates"  # of a parameter: which change made them, none where it is plain
_PLAIN = 0
_changes = 0  # of all parameters of this process


def note_turned(param: Tensor) -> None:
    """Note that a parameter's values are in coordinates of their own from now on."""
    global _changes
    _changes += 1
    setattr(param, _NAME, _changes)


def note_plain(param: Tensor) -> None:
    """Note that they are plain again.

    A copy of a parameter has no note, and optimizers of it take its values to be plain. What they
    know is of other coordinates from now on, so that plain gets a number of its own there.
    """
    global _changes
    _changes += 1
    setattr(param, _NAME, _PLAIN if hasattr(param, _NAME) else _changes)


class Coordinates:
    """Those in which an optimizer knows its parameters."""

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._looked = -1

    def are_current(self) -> bool:
        """Return whether nothing was turned since the last `learn`; it costs one comparison."""
        return self._looked == _changes

    def changed(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose coordinates are others than `learn` saw."""
        return [param for param in params if self._known.get(param, _now(param)) != _now(param)]

    def learn(self, params: Iterable[Tensor]) -> None:
        """Take the coordinates of now to be those of all that is known."""
        self._known.clear()
        for param in params:
            self._known[param] = _now(param)
        self._looked = _changes

    def look_again(self) -> None:
        """Learn at the next opportunity: there are other parameters."""
        self._looked = -1


def _now(param: Tensor) -> int:
    number: int = getattr(param, _NAME, _PLAIN)
    return number
