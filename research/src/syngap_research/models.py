"""A small network with norms, as ResNets have them."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from syngap.bench.options import Count

__all__ = ["small_cnn"]


def small_cnn(shape: tuple[int, ...], classes: int, *, width: Count = 16) -> nn.Module:
    """Return four 3 × 3 convolutions with BatchNorm, two of which halve the image, and a head."""
    widths = [shape[0], width, 2 * width, 2 * width, 4 * width]
    layers = [
        nn.Sequential(
            nn.Conv2d(a, b, 3, stride, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()
        )
        for a, b, stride in zip(widths[:-1], widths[1:], (1, 2, 1, 2), strict=True)
    ]
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = nn.Linear(widths[-1], classes)
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*layers), pool=pooled, head=head))
