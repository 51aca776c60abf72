"""ResNet-18 for small images (He et al. 2016): 3 × 3 stem, no pooling before the blocks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, TypeAlias

from torch import Tensor, nn

from syngap.bench.models.layers import group_norm, image_shape
from syngap.bench.options import Count

__all__ = ["resnet18"]

Norm: TypeAlias = Literal["batch", "group"]


def resnet18(
    shape: tuple[int, ...], classes: int, *, width: Count = 64, norm: Norm = "batch"
) -> nn.Module:
    """Return a ResNet-18 whose four stages have 1, 2, 4 and 8 times `width` channels.

    Args:
        shape: (channels, height, width) of one image.
        classes: how many outputs the head has.
        width: channels of the first stage; 64 has 11.2 M parameters, 20 has 1.1 M.
        norm: "group" makes a sample's output independent of the others in its batch.

    Examples:
        >>> model = resnet18((3, 32, 32), 100)
        >>> [name for name, _ in model.named_children()]
        ['stem', 'stages', 'pool', 'flatten', 'head']
        >>> sum(param.numel() for param in model.parameters())
        11220132
    """
    channels, _, _ = image_shape(shape, "resnet18")
    stem = OrderedDict(conv=_conv(channels, width, 3, 1), norm=_norm(norm, width), relu=nn.ReLU())
    stages = nn.Sequential()
    channels = width
    for stage in range(4):
        wider = width << stage
        first = _Block(channels, wider, stride=2 if stage else 1, norm=norm)
        stages.append(nn.Sequential(first, _Block(wider, wider, stride=1, norm=norm)))
        channels = wider
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(stem),
            stages=stages,
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(channels, classes),
        )
    )


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _conv(channels_in, channels, 3, stride)
        self.norm1 = _norm(norm, channels)
        self.conv2 = _conv(channels, channels, 3, 1)
        self.norm2 = _norm(norm, channels)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            conv = _conv(channels_in, channels, 1, stride)
            self.shortcut = nn.Sequential(OrderedDict(conv=conv, norm=_norm(norm, channels)))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.norm1(self.conv1(x)))
        added: Tensor = self.relu2(self.norm2(self.conv2(out)) + self.shortcut(x))
        return added


def _conv(channels_in: int, channels: int, kernel: int, stride: int) -> nn.Module:
    return nn.Conv2d(channels_in, channels, kernel, stride, padding=kernel // 2, bias=False)


def _norm(norm: Norm, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return group_norm(channels)
