"""The streams and networks that are measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from syngap.bench import models


@dataclass(frozen=True)
class Case:
    """One comparison: a network, and batches that arrive with as many replayed.

    Args:
        name: for the table.
        shape: of a sample.
        classes: of the head.
        batch: samples that arrive at a step, and samples that are replayed with them.
        memory: samples that the memory holds.
        steps: in one turn.
        hidden: of an MLP; empty is a ResNet-18.
        width: of the ResNet-18.
    """

    name: str
    shape: tuple[int, ...]
    classes: int
    batch: int
    memory: int
    steps: int
    hidden: tuple[int, ...] = ()
    width: int = 20

    def network(self) -> nn.Module:
        """Return the network, the same at every call."""
        torch.manual_seed(0)
        if self.hidden:
            return models.mlp(self.shape, self.classes, hidden=list(self.hidden))
        return models.resnet18(self.shape, self.classes, width=self.width)

    def samples(self, count: int) -> tuple[Tensor, Tensor]:
        """Return samples as they are stored, and labels."""
        chance = torch.Generator().manual_seed(0)
        x = torch.randint(256, (count, *self.shape), generator=chance, dtype=torch.uint8)
        return x, torch.arange(count) % self.classes


_IMAGE = (3, 32, 32)
_ON_CPU = (
    Case("MLP 64-100-10, batch 32 + 32", (1, 8, 8), 10, 32, 200, 400, (100,)),
    Case("MLP 3072-256-100, batch 64 + 64", _IMAGE, 100, 64, 2000, 100, (256,)),
    Case("ResNet-18 width 20, batch 64 + 64", _IMAGE, 100, 64, 2000, 3),
)
_ON_GPU = (Case("ResNet-18 width 64, batch 64 + 64", _IMAGE, 100, 64, 2000, 100, width=64),)
CASES = {
    "cpu": {case.name: case for case in _ON_CPU},
    "cuda": {case.name: case for case in _ON_GPU},
}


def resnet18(width: int = 64, classes: int = 100) -> nn.Module:
    return models.resnet18(_IMAGE, classes, width=width)


def mlp(classes: int = 100) -> nn.Module:
    return models.mlp(_IMAGE, classes, hidden=[512, 512])


NETWORKS = {
    "ResNet-18 width 64": partial(resnet18, 64),
    "ResNet-18 width 20": partial(resnet18, 20),
    "MLP 3072-512-512-100": mlp,
}
