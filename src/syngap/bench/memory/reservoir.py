"""Reservoir sampling (Vitter 1985, algorithm R): a uniform sample of a stream of any length."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from syngap.bench.memory.base import Memory

__all__ = ["Reservoir"]


class Reservoir(Memory):
    """Keeps each sample seen so far with the same chance.

    The n-th sample (from 0) goes to slot n while n < size, else to slot j ~ U{0..n} if j < size.

    Examples:
        >>> import torch
        >>> memory = Reservoir(2)
        >>> memory.add(x=torch.rand(3, 4), y=torch.tensor([0, 1, 0]))
        >>> memory.samples_seen, len(memory), {name: len(v) for name, v in memory.draw(5).items()}
        (3, 2, {'x': 2, 'y': 2})
    """

    def _slots(self, uniform: list[float], fields: Mapping[str, Tensor]) -> list[int]:
        numbered = enumerate(
            uniform, self.samples_seen
        )  # for a batch, quicker than tensors of its size
        return [n if n < self.size else int(u * (n + 1)) for n, u in numbered]
