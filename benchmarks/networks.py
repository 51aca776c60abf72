"""The networks that are measured."""

from __future__ import annotations

from functools import partial

from torch import nn

from syngap.bench import models

SHAPE = (3, 32, 32)


def resnet18(width: int = 64, classes: int = 100) -> nn.Module:
    return models.resnet18(SHAPE, classes, width=width)


def mlp(classes: int = 100) -> nn.Module:
    return models.mlp(SHAPE, classes, hidden=[512, 512])


NETWORKS = {
    "ResNet-18 width 64": partial(resnet18, 64),
    "ResNet-18 width 20": partial(resnet18, 20),
    "MLP 3072-512-512-100": mlp,
}
