"""A small convolutional network: minutes, not hours, on a CPU."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Literal, TypeAlias

from torch import nn

from syngap.bench.models.layers import group_norm, image_shape
from syngap.bench.options import Count

__all__ = ["cnn"]

Norm: TypeAlias = Literal["group", "none"]

_LAST = 4  # where an image this small has nothing left to gain from being halved


def cnn(
    shape: tuple[int, ...], classes: int, *, width: Count = 32, norm: Norm = "group"
) -> nn.Module:
    """Return 3 × 3 convolutions that halve the image until a side has 4 pixels, and a linear head.

    A sample's output is independent of the others in its batch. Strides take the place of pooling,
    whose gradient differs from run to run on an accelerator.

    Args:
        shape: (channels, height, width) of one image.
        classes: how many outputs the head has.
        width: channels of the first convolution; all others have twice as many.
        norm: "group" puts a GroupNorm after each convolution, so that photographs are learned
            at rates from 0.05 to 0.3, at which a network with "none" may diverge.

    Examples:
        >>> [name for name, _ in cnn((1, 8, 8), 10).named_children()]
        ['stem', 'stages', 'flatten', 'head']
    """
    channels, height, across = image_shape(shape, "cnn")
    stem = _layer(channels, width, 1, norm)
    stages = nn.Sequential()
    channels = width
    while min(height, across) > _LAST:
        stages.append(_layer(channels, 2 * width, 2, norm))
        channels, height, across = 2 * width, (height + 1) // 2, (across + 1) // 2
    if norm == "group":
        # The head reads each pixel that is left. Their number would set the rate above which it
        # overshoots, so all of them together begin as long as one.
        last = (stages[-1] if len(stages) else stem).get_submodule("norm")
        nn.init.constant_(last.get_parameter("weight"), 1 / math.sqrt(height * across))
    head = nn.Linear(channels * height * across, classes)
    return nn.Sequential(
        OrderedDict(stem=stem, stages=stages, flatten=nn.Flatten(), head=head),
    )


def _layer(channels_in: int, channels: int, stride: int, norm: Norm) -> nn.Module:
    conv = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=norm == "none")
    # From torch's own initial values a signal fades layer by layer where no norm restores it.
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    layers = OrderedDict[str, nn.Module](conv=conv)
    if norm == "group":
        layers["norm"] = group_norm(channels)
    layers["relu"] = nn.ReLU()
    return nn.Sequential(layers)
