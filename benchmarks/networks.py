"""The networks that are measured."""

from __future__ import annotations

from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu1(self.norm1(self.conv1(x)))
        return self.relu2(self.norm2(self.conv2(out)) + self.shortcut(x))


def resnet18(width: int = 64, classes: int = 100) -> nn.Module:
    """ResNet-18 for 32 × 32 images: 3 × 3 stem, no pooling before the blocks."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    channels = width
    for stage in range(4):
        for block in range(2):
            stride = 2 if stage and not block else 1
            layers.append(_Block(channels, width << stage, stride))
            channels = width << stage
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


def mlp(classes: int = 100) -> nn.Module:
    """Two hidden layers on flattened 32 × 32 images."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3072, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, classes),
    )


NETWORKS = {
    "ResNet-18 width 64": lambda: resnet18(64),
    "ResNet-18 width 20": lambda: resnet18(20),
    "MLP 3072-512-512-100": mlp,
}
