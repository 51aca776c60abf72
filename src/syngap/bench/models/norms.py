"""Group normalisation (Wu and He 2018): a sample's output is independent of its batch."""

from __future__ import annotations

from torch import nn

__all__ = ["group_norm"]


def group_norm(channels: int) -> nn.GroupNorm:
    """Return the norm with the most groups of equal size, up to 32, that leave each four channels.

    Smaller groups could hold a single value where the image has shrunk to one pixel, and their own
    mean would take all of it away.

    Examples:
        >>> group_norm(64).num_groups, group_norm(20).num_groups
        (16, 5)
    """
    groups = max(g for g in range(1, 33) if g == 1 or (channels % g == 0 and channels // g >= 4))
    return nn.GroupNorm(groups, channels)
