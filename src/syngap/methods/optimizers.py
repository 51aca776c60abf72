"""The optimizers that a method can be configured with."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from syngap import optim
from syngap.errors import UserError

__all__ = ["OptimizerName", "make_optimizer"]

OptimizerName: TypeAlias = Literal["sgd", "adam", "ballistic"]


def make_optimizer(
    parameters: list[nn.Parameter],
    name: OptimizerName,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> Optimizer:
    """Return the optimizer `name`; momentum is for SGD alone."""
    if momentum and name != "sgd":
        raise UserError(f"momentum: got {momentum} with {name}, which has none to set; leave it 0")
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay)
    if name == "ballistic":
        return optim.Ballistic(parameters, lr=lr, weight_decay=weight_decay)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
