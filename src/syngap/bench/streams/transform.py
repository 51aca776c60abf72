"""Scaling and augmentation of a batch, on its device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from syngap.bench.streams.tasks import Pixels

__all__ = ["Transform"]


class Transform:
    """Scales values by channel; for training it also shifts and mirrors images, each by its own.

    Args:
        pixels: how values are scaled.
        augments: whether a shifted or mirrored image is still one of the same class.
        pad: the largest shift in pixels; 4 is usual for images of 32 × 32.

    Examples:
        >>> transform = Transform(Pixels(scale=255, mean=(0.5,), std=(0.5,)), augments=True)
        >>> transform(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
        tensor([[[[-1.,  1.]]]])
    """

    def __init__(self, pixels: Pixels, augments: bool, *, pad: int = 4) -> None:
        self.pixels, self.augments, self.pad = pixels, augments, pad
        self._affine: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return a batch as float32, on its device.

        Args:
            x: samples as they are stored: (N, channels, height, width) are images, all else is
                only scaled.
            generator: the source of shifts and mirrors, on the device of `x`; None makes none.
        """
        if generator is not None and self.augments and x.dim() == 4:
            x = shift_and_mirror(x, self.pad, generator)
        gain, offset = self._gain_and_offset(x.device, x.dim())
        return x.to(torch.float32, copy=True).mul_(gain).add_(offset)

    def _gain_and_offset(self, device: torch.device, dims: int) -> tuple[Tensor, Tensor]:
        """Return (x / scale - mean) / std as a product and a sum, kept where they are needed."""
        if (device, dims) not in self._affine:
            by_channel = (-1, *[1] * (dims - 2))
            std = torch.tensor(self.pixels.std, dtype=torch.float64).reshape(by_channel)
            mean = torch.tensor(self.pixels.mean, dtype=torch.float64).reshape(by_channel)
            gain, offset = 1 / (self.pixels.scale * std), -mean / std
            self._affine[device, dims] = (
                gain.to(device, torch.float32),
                offset.to(device, torch.float32),
            )
        return self._affine[device, dims]


def shift_and_mirror(x: Tensor, pad: int, generator: torch.Generator) -> Tensor:
    """Return images moved by up to `pad` pixels each way, black coming in, half of them mirrored.

    Args:
        x: images (N, channels, height, width) as they are stored, where 0 is black.
        pad: the largest shift.
        generator: the source of random numbers, on the device of `x`.
    """
    count, channels, height, width = x.shape
    device = x.device
    shift = torch.randint(2 * pad + 1, (2, count, 1), generator=generator, device=device)
    mirrored = torch.randint(2, (count, 1), generator=generator, device=device).bool()
    row = torch.arange(height, device=device) + shift[0]
    column = torch.arange(width, device=device)
    column = torch.where(mirrored, width - 1 - column, column) + shift[1]
    padded = functional.pad(x, (pad,) * 4)
    # One gather over flat images takes half the time that picking windows does, on a CPU.
    pixel = (row[:, :, None] * padded.shape[3] + column[:, None, :]).flatten(1)
    return padded.flatten(2).gather(2, pixel[:, None].expand(-1, channels, -1)).reshape(x.shape)
