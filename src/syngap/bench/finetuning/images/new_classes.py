"""Classes to learn: those of CIFAR-100, or any folder of class folders such as COIL-100."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

import torch

from syngap.bench.errors import UserError
from syngap.bench.finetuning.images import Images, Labelled
from syngap.bench.finetuning.images.class_files import read_class_files, split_known
from syngap.bench.options import Count, Natural, Proportion
from syngap.bench.streams.cifar100 import cifar100
from syngap.bench.streams.folder import folder
from syngap.bench.streams.tasks import Split, Tasks

__all__ = ["cifar100_images", "folder_images"]

ANIMALS = 398  # the first so many of ImageNet's 1,000 classes


@lru_cache(maxsize=1)  # runs of one process read them once
def cifar100_images(
    data: Path | None, *, old: str = "imagenet", animals: Natural = ANIMALS, size: Count = 224
) -> Images:
    """Return CIFAR-100 to learn, and old images to keep.

    Args:
        data: where CIFAR-100 and the folder of old images are.
        old: that folder; its files are CLASS_ANYTHING.jpg, classes in the order of their names.
        animals: classes below this number are a kind of which there are no anchors; 0 is none.
        size: width and height of old images.
    """
    return _with_old(cifar100(0, data, tasks=1), data, old, animals, size)


@lru_cache(maxsize=1)
def folder_images(
    data: Path | None,
    *,
    path: str,
    holdout: Proportion = 0.25,
    old: str = "imagenet",
    animals: Natural = ANIMALS,
    size: Count = 224,
) -> Images:
    """Return a folder of class folders to learn, and old images to keep.

    Args:
        data: where the folders are.
        path: the folder of class folders.
        holdout: the share of every class that is tested on, in one piece.
        old: the folder of old images; its files are CLASS_ANYTHING.jpg.
        animals: classes below this number are a kind of which there are no anchors; 0 is none.
        size: width and height of old images.
    """
    return _with_old(folder(0, data, path=path, tasks=1, holdout=holdout), data, old, animals, size)


def _with_old(new: Tasks, data: Path | None, old: str, animals: int, size: int) -> Images:
    if data is None:
        raise UserError("old: --data has to say where the folder of old images is")
    known, kinds = split_known(_old_images(data / old, size), animals)
    return Images(_labelled(new.train), _labelled(new.test), new.classes, known, kinds)


_old_images = cache(read_class_files)  # runs of one process read them once


def _labelled(split: Split) -> Labelled:
    return Labelled(split.samples.take(torch.arange(len(split.samples))), split.labels)
