"""What networks share: a norm, and what is said about samples that are no images."""

from __future__ import annotations

from torch import nn

from syngap.bench.errors import UserError

__all__ = ["group_norm", "image_shape"]


def group_norm(channels: int) -> nn.GroupNorm:
    """Return the norm with the most groups of equal size, up to 32, that leave each four channels.

    Group normalisation (Wu and He 2018) makes a sample's output independent of its batch. Smaller
    groups could hold a single value where the image has shrunk to one pixel, and their own mean
    would take all of it away.

    Examples:
        >>> group_norm(64).num_groups, group_norm(20).num_groups
        (16, 5)
    """
    groups = max(g for g in range(1, 33) if g == 1 or (channels % g == 0 and channels // g >= 4))
    return nn.GroupNorm(groups, channels)


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
