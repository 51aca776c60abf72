"""CrispEdit (2026): gradients are projected out of the top Kronecker eigen-directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syngap.bench.finetuning.methods.kronecker_ewc import known_of
from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Setting
from syngap.bench.options import Count, Share

__all__ = ["CrispEdit", "free_directions"]


class CrispEdit(Method):
    """AdamW on G ← L (M ⊙ Lᵀ G R) Rᵀ, where M is 0 along important directions and else 1.

    As in the paper, the gradient is projected and not Adam's update, and matrices alone learn, and
    a new head. Directions are ordered by importance in the eigenbasis, in place of products of
    eigenvalues.

    Args:
        setting: the model, data and anchors.
        energy: share of all importance of a weight that lies along the directions that are masked.
        batch: anchors at a time, to take importance.
        **others: options of `Method`.
    """

    def __init__(
        self, setting: Setting, *, energy: Share = 0.9, batch: Count = 8, **others: Any
    ) -> None:
        super().__init__(setting, **others)
        known = known_of(setting, self.model, batch)
        self.directions = {
            param: (found.basis, free_directions(found.importance, energy))
            for param, found in known.items()
            if found.basis is not None
        }

    def change_gradients(self) -> None:
        """Project the gradients of matrices, and drop those of all else but a new head."""
        for name, param in self.model.named_parameters():
            if name in self.setting.new_parameters:
                continue
            if param not in self.directions:
                param.grad = None
            elif param.grad is not None:
                basis, free = self.directions[param]
                along = basis.into(param.grad, keep_dtype=False)
                param.grad = basis.back(along * free, param.grad)


def free_directions(importance: Tensor, energy: float) -> Tensor:
    """Return 0 for the fewest directions that have this share of all importance, else 1.

    Examples:
        >>> free_directions(torch.tensor([1.0, 6.0, 3.0]), 0.9)
        tensor([1., 0., 0.])
    """
    largest, order = importance.flatten().double().sort(descending=True)
    before = largest.cumsum(0) - largest
    free = torch.empty_like(importance).flatten()
    free[order] = (before >= energy * largest.sum() * (1 - 1e-12)).to(free.dtype)
    return free.view_as(importance)
