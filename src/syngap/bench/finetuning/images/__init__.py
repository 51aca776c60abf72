"""Images of classes to learn and of classes to keep. One file, one source.

A source is a function of the folder that data are in, and of keyword-only options; it returns
`Images`. Another package adds one by an entry point of the group "syngap.images".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from syngap.bench.registry import Registry

__all__ = ["Images", "Labelled", "registry"]

registry = Registry(
    "images",
    "syngap.images",
    {
        "cifar100": "syngap.bench.finetuning.images.new_classes:cifar100_images",
        "folder": "syngap.bench.finetuning.images.new_classes:folder_images",
    },
)


@dataclass(frozen=True)
class Labelled:
    """Images and the numbers of their classes.

    Args:
        images: (N, 3, height, width), as uint8.
        labels: (N,).
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, places: slice | Tensor) -> Labelled:
        """Return some of them."""
        return Labelled(self.images[places], self.labels[places])


@dataclass(frozen=True)
class Images:
    """What a classifier learns and what it is to keep.

    Args:
        train: of the classes that are learned, which are counted from 0.
        test: of the same classes.
        classes: how many these are.
        known: old images for anchors and replay, which are not tested on.
        old: old images to test on, by kind; the kind of `known` first.
    """

    train: Labelled
    test: Labelled
    classes: int
    known: Labelled
    old: Mapping[str, Labelled]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all images and labels."""
        digest = hashlib.sha256(repr((self.classes, list(self.old))).encode())
        for each in (self.train, self.test, self.known, *self.old.values()):
            for tensor in (each.images, each.labels):
                digest.update(repr((tensor.dtype, tensor.shape)).encode())
                digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()[:12]
