"""L2-SP (Li, Grandvalet and Davoine 2018): a penalty on the distance to the start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Batch, Setting
from syngap.bench.options import NonNegative

__all__ = ["L2SP"]


class L2SP(Method):
    """Adds strength / 2 · Σ (θ - θ₀)², over all weights but those of a new head.

    Args:
        setting: the model and data.
        strength: of the penalty.
        **others: options of `Method`.
    """

    def __init__(self, setting: Setting, *, strength: NonNegative = 0.01, **others: Any) -> None:
        super().__init__(setting, **others)
        self.strength = strength
        self.start = {
            name: param.detach().clone()
            for name, param in self.model.named_parameters()
            if name not in setting.new_parameters
        }

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss with the penalty."""
        now = dict(self.model.named_parameters())
        moved = [(now[name] - start).square().sum() for name, start in self.start.items()]
        return super().loss(batch) + self.strength / 2 * torch.stack(moved).sum()
