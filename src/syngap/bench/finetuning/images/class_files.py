"""Old images: a folder of files whose names begin with their class, such as a few of ImageNet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from syngap.bench.errors import UserError
from syngap.bench.finetuning.images import Labelled
from syngap.bench.streams.files import SUFFIXES, ImageFiles, size_of
from syngap.messages import count_of

__all__ = ["read_class_files", "split_known"]

MARGIN = 0.125  # of the shorter side, which is cut off around the middle


def read_class_files(folder: Path, size: int) -> Labelled:
    """Return the images of a folder, each the square in its middle.

    Their names are CLASS_ANYTHING.jpg; classes are numbered in the order of their names, as those
    of ImageNet are. A square of 87.5 % of the shorter side is scaled to `size`, which is how
    ImageNet's images are shown to networks that are tested on them.

    Args:
        folder: that holds them.
        size: width and height to return.
    """
    if not folder.is_dir():
        raise UserError(f"old: there is no folder {folder}; --data says where images are")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    names = [path.name.partition("_")[0] for path in paths]
    classes = {name: number for number, name in enumerate(sorted(set(names)))}
    if len(classes) < 2:
        raise UserError(f"old: {folder} has no images called CLASS_NAME.jpg of two classes or more")
    images = torch.stack([_square(path, size) for path in paths])
    return Labelled(images, torch.tensor([classes[name] for name in names]))


def _square(path: Path, size: int) -> torch.Tensor:
    pixels = ImageFiles([path], (3, *size_of(path)[::-1])).take(torch.tensor([0]))[0]
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    side = min(image.size) * (1 - MARGIN)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    square = image.resize((size, size), Image.Resampling.BICUBIC, box)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()


def split_known(found: Labelled, animals: int) -> tuple[Labelled, dict[str, Labelled]]:
    """Return known images for anchors, and those to test on by kind.

    Every second image of the known kind is for anchors. Of the other kind there are none.

    Args:
        found: all images.
        animals: classes below this number are "animals", of which there are no anchors; the others
            are "objects". With 0 all images are of one kind.
    """
    is_animal = found.labels < animals
    objects, others = found.rows(~is_animal), found.rows(is_animal)
    if len(objects) < 6:
        left = count_of(len(objects), "image")
        raise UserError(f"animals: got {animals}, which leaves {left} of objects")
    kinds = {"objects" if animals else "images": objects.rows(slice(1, None, 2))}
    if len(others):
        kinds["animals"] = others
    return objects.rows(slice(0, None, 2)), kinds
