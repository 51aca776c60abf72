"""L2-SP (Li, Grandvalet and Davoine 2018): a penalty on the distance to the start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Setting
from syngap.bench.options import NonNegative

__all__ = ["L2SP"]


class L2SP(Method):
    """Adds strength / 2 · Σ (θ - θ₀)².

    Args:
        setting: the model and text.
        strength: of the penalty.
        **others: options of `Method`.
    """

    def __init__(self, setting: Setting, *, strength: NonNegative = 0.01, **others: Any) -> None:
        super().__init__(setting, **others)
        self.strength = strength
        self.start = [param.detach().clone() for param in self.model.parameters()]

    def loss(self, windows: Tensor) -> Tensor:
        """Return the loss with the penalty."""
        pairs = zip(self.model.parameters(), self.start, strict=True)
        distance = torch.stack([(param - start).square().sum() for param, start in pairs]).sum()
        return super().loss(windows) + self.strength / 2 * distance
