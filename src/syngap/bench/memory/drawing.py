"""Some of many at random, without a list of the many, and lists as indices."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

__all__ = ["indices", "subset"]


def indices(numbers: list[int]) -> Tensor:
    """Return whole numbers as an int64 tensor, in a quarter of the time of `torch.tensor`."""
    if not numbers:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def subset(count: int, total: int, generator: torch.Generator) -> list[int]:
    """Return `count` different numbers below `total`, every set of them as likely as any other.

    The work is O(count) (Bentley and Floyd 1987). The order is not random: larger numbers tend to
    come later.

    Examples:
        >>> sorted(subset(3, 3, torch.Generator()))
        [0, 1, 2]
    """
    uniform = torch.rand(count, dtype=torch.float64, generator=generator).tolist()
    chosen: dict[int, None] = {}  # ordered, so that the same numbers come in the same order
    for top, u in enumerate(uniform, total - count):
        number = int(u * (top + 1))
        chosen[top if number in chosen else number] = None
    return list(chosen)
