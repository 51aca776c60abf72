"""What a network says about samples that it cannot take."""

from __future__ import annotations

from syngap.bench.errors import UserError

__all__ = ["image_shape"]


def image_shape(shape: tuple[int, ...], model: str) -> tuple[int, int, int]:
    """Return `shape` as that of an image; UserError in the name of `model` where it is none.

    Examples:
        >>> image_shape((64,), "cnn")
        Traceback (most recent call last):
        syngap.bench.errors.UserError: cnn takes images (channels, height, width), got shape (64,)
    """
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(f"{model} takes images (channels, height, width), got shape {tuple(shape)}")
    channels, height, width = shape
    return channels, height, width
