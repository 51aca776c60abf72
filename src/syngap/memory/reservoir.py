"""Reservoir sampling (Vitter 1985, algorithm R): a uniform sample of a stream of any length."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from syngap.memory.base import Memory

__all__ = ["Reservoir"]


class Reservoir(Memory):
    """Keeps each sample seen so far with the same chance.

    The n-th sample (from 0) goes to slot n while n < size, else to slot j ~ U{0..n} if j < size.

    Examples:
        >>> memory = Reservoir(2, generator=torch.Generator())
        >>> memory.add(x=torch.rand(3, 4), y=torch.tensor([0, 1, 0]))
        >>> memory.seen, len(memory), {name: len(v) for name, v in memory.draw(5).items()}
        (3, 2, {'x': 2, 'y': 2})
    """

    def _slots(self, uniform: Tensor, fields: Mapping[str, Tensor]) -> list[int]:
        number = torch.arange(self.seen, self.seen + len(uniform))
        drawn = (uniform * (number + 1)).long()
        slots: list[int] = torch.where(number < self.size, number, drawn).tolist()
        return slots
