"""A small convolutional network: minutes, not hours, on a CPU."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from syngap.models.shapes import image_shape
from syngap.options import Count

__all__ = ["cnn"]

_LAST = 4  # where an image this small has nothing left to gain from being halved


def cnn(shape: tuple[int, ...], classes: int, *, width: Count = 32) -> nn.Module:
    """Return 3 × 3 convolutions that halve the image until a side has 4 pixels, and a linear head.

    The first has `width` channels, all others twice as many. There is no normalisation, so a
    sample's output is its own; strides take the place of pooling, whose gradient differs from run
    to run on an accelerator.

    Examples:
        >>> [name for name, _ in cnn((1, 8, 8), 10).named_children()]
        ['stem', 'stages', 'flatten', 'head']
    """
    channels, height, across = image_shape(shape, "cnn")
    stem = _layer(channels, width, stride=1)
    stages = nn.Sequential()
    channels = width
    while min(height, across) > _LAST:
        stages.append(_layer(channels, 2 * width, stride=2))
        channels, height, across = 2 * width, (height + 1) // 2, (across + 1) // 2
    head = nn.Linear(channels * height * across, classes)
    return nn.Sequential(
        OrderedDict(stem=stem, stages=stages, flatten=nn.Flatten(), head=head),
    )


def _layer(channels_in: int, channels: int, stride: int) -> nn.Module:
    conv = nn.Conv2d(channels_in, channels, 3, stride, padding=1)
    # From torch's own initial values a signal fades layer by layer, with no norm to restore it.
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return nn.Sequential(OrderedDict(conv=conv, relu=nn.ReLU()))
