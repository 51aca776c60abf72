"""What goes wrong while training, and not at the door."""

from __future__ import annotations

__all__ = ["NotFiniteError"]


class NotFiniteError(FloatingPointError, ValueError):
    """A prediction or a gradient with NaN or infinite numbers, which would spoil all that follows.

    It is raised before anything has changed.
    """
