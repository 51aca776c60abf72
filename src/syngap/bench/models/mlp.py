"""Fully connected layers."""

from __future__ import annotations

import math

from torch import nn

from syngap.bench.errors import UserError
from syngap.bench.options import Count

__all__ = ["mlp"]


def mlp(
    shape: tuple[int, ...],
    classes: int,
    *,
    hidden: list[Count] = [100],  # noqa: B006 (read only; a configuration says lists)
) -> nn.Module:
    """Return a perceptron with hidden layers of the sizes `hidden`; it takes samples of any shape.

    Examples:
        >>> [name for name, _ in mlp((1, 8, 8), 10, hidden=[64, 32]).named_children()]
        ['flatten', 'hidden1', 'relu1', 'hidden2', 'relu2', 'head']
    """
    if not shape or min(shape) < 1:
        raise UserError(f"mlp takes vectors or images, got shape {tuple(shape)}")
    layers = nn.Sequential()
    layers.add_module("flatten", nn.Flatten())
    size = math.prod(shape)
    for number, wider in enumerate(hidden, 1):
        layers.add_module(f"hidden{number}", nn.Linear(size, wider))
        layers.add_module(f"relu{number}", nn.ReLU())
        size = wider
    layers.add_module("head", nn.Linear(size, classes))
    return layers
