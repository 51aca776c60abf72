"""Gradient descent with momentum on all weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Setting
from syngap.bench.options import Positive, Retention

__all__ = ["SGD"]


class SGD(Method):
    """torch's SGD.

    Args:
        setting: the model and data.
        lr: learning rate.
        momentum: of the mean of gradients.
    """

    def __init__(
        self, setting: Setting, *, lr: Positive = 0.1, momentum: Retention = 0.9, **others: Any
    ) -> None:
        self.momentum = momentum
        super().__init__(setting, lr=lr, **others)

    def make_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(params, self.lr, momentum=self.momentum)
