"""CIFAR-100 at 16 × 16 pixels: a proxy that a CPU learns in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch.nn.functional import avg_pool2d

from syngap.bench.options import Count
from syngap.bench.streams.cifar100 import cifar100
from syngap.bench.streams.tasks import InMemory, Split, Tasks

__all__ = ["small_cifar100"]


def small_cifar100(
    seed: int,
    data: Path | None,
    *,
    tasks: Count | None = None,
    labels: Literal["classes", "superclasses"] = "classes",
) -> Tasks:
    """Return CIFAR-100 in tasks, every 2 × 2 pixels made one.

    Args:
        seed: of the order of classes.
        data: as of `cifar100`.
        tasks: as of `cifar100`.
        labels: as of `cifar100`.
    """
    whole = cifar100(seed, data, tasks=tasks, labels=labels)
    return replace(whole, train=_halved(whole.train), test=_halved(whole.test))


def _halved(split: Split) -> Split:
    assert isinstance(split.samples, InMemory)
    pixels = avg_pool2d(split.samples.values.float(), 2).round().byte()
    return replace(split, samples=InMemory(pixels))
