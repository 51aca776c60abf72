"""Some of many at random, without a list of the many."""

from __future__ import annotations

import torch

__all__ = ["subset"]


def subset(count: int, total: int, generator: torch.Generator) -> list[int]:
    """Return `count` different numbers below `total`, every set of them as likely as any other.

    The work is O(count) (Bentley and Floyd 1987). The order is not random: larger numbers tend to
    come later.

    Examples:
        >>> sorted(subset(3, 3, torch.Generator()))
        [0, 1, 2]
    """
    highest = range(total - count, total)
    uniform = torch.rand(count, dtype=torch.float64, generator=generator)
    drawn = (uniform * torch.arange(highest.start + 1, highest.stop + 1)).long().tolist()
    chosen: dict[int, None] = {}  # ordered, so that the same numbers come in the same order
    for number, top in zip(drawn, highest, strict=True):
        chosen[top if number in chosen else number] = None
    return list(chosen)
