"""The mean importance of each tensor and of the network, kept without a pass over importance.

The mean of an exponential average is the exponential average of the means, so it costs a few
numbers a step. They live in one vector, of which every parameter's state holds its element: one
operation advances all, and `state_dict` needs to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Means"]


class Means:
    """The means of some parameters' importance, in the order of these parameters.

    Args:
        params: the parameters that count.
        states: their optimizer states, whose "mean" becomes an element of the vector.
    """

    def __init__(self, params: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> None:
        numel = max(1, sum(param.numel() for param in params))
        kept = [state["mean"] for state in states] or [torch.zeros(())]
        dtype = max((mean.dtype for mean in kept), key=lambda dtype: dtype.itemsize)
        self.vector = torch.stack([mean.to(kept[0].device, dtype) for mean in kept])
        self._shares = self.vector.new_tensor([param.numel() / numel for param in params] or [0.0])
        self._elements = self.vector.unbind()[: len(states)]
        for state, element in zip(states, self._elements, strict=True):
            state["mean"] = element

    def fits(self, states: Sequence[dict[str, Any]]) -> bool:
        """Whether these states, no more and no fewer, hold the elements of this vector."""
        return len(states) == len(self._elements) and all(
            state.get("mean") is element
            for state, element in zip(states, self._elements, strict=True)
        )

    def advance(self, first: int, observed: Sequence[Tensor | None], keep: float) -> None:
        """Let means from the `first` on follow what was observed of their parameters."""
        like = self.vector
        seen = [like.new_zeros(()) if mean is None else mean for mean in observed]
        if any(mean.dtype != like.dtype or mean.device != like.device for mean in seen):
            seen = [mean.to(like) for mean in seen]
        part = self.vector[first : first + len(seen)]
        part.mul_(keep).add_(torch.stack(seen), alpha=1.0 - keep)

    def network(self) -> Tensor:
        """Return the mean over all elements of all parameters."""
        if len(self.vector) == 1:
            return self.vector[0].clone()
        return self.vector.dot(self._shares)
