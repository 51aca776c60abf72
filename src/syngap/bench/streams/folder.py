"""Any tree of class folders with frames in them, such as a turntable's or a camera's."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
from annotated_types import Ge, Le

from syngap.bench.errors import UserError
from syngap.bench.options import Count, Proportion, Says, Seed
from syngap.bench.seeds import generator
from syngap.bench.streams import places
from syngap.bench.streams.files import LARGEST, SUFFIXES, ImageFiles, size_of
from syngap.bench.streams.tasks import (
    InMemory,
    Pixels,
    Samples,
    Split,
    Tasks,
    by_class,
    permuted_groups,
)
from syngap.messages import count_of

__all__ = ["folder", "natural_key"]

MEMORY_BYTES = 1 << 30  # bytes that are read at once and kept; more stays in files
LONGEST_SIDE = math.isqrt(LARGEST)
Side: TypeAlias = Annotated[
    int, Ge(1), Le(LONGEST_SIDE), Says(f"a whole number from 1 to {LONGEST_SIDE}")
]
PIXELS = Pixels(255.0, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def folder(
    seed: int,
    data: Path | None,
    *,
    path: str,
    tasks: Count,
    holdout: Proportion = 0.25,
    holdout_seed: Seed | None = None,
    size: Side | None = None,
) -> Tasks:
    """Return the images beneath `path` in tasks: each folder in it is a class.

    Neighbouring frames look alike, so what is held out for testing is one piece of every class, not
    single frames whose neighbours were learned.

    Args:
        seed: of the order of classes, and of which piece is held out.
        data: the folder that a relative `path` starts from.
        path: the folder of class folders. Frames come in the order of their names, 2 before 10.
        tasks: how many, of equal numbers of classes.
        holdout: the share of every class that is only tested on.
        holdout_seed: of which piece is held out, in place of `seed`: the same for all seeds.
        size: width and height that images are brought to; None expects one size throughout.
    """
    root = places.find_path(data, path)
    frames = _frames(root)
    groups = permuted_groups(len(frames), tasks, seed)
    chance = generator(seed if holdout_seed is None else holdout_seed, "holdout")
    train: list[tuple[Path, int]] = []
    test: list[tuple[Path, int]] = []
    for label, paths in enumerate(frames):
        count = _holdout_size(len(paths), holdout)
        start = int(torch.randint(len(paths) - count + 1, (), generator=chance))
        for number, frame in enumerate(paths):
            (test if start <= number < start + count else train).append((frame, label))
    width, height = (size, size) if size else size_of(train[0][0])
    fits = (len(train) + len(test)) * 3 * width * height <= MEMORY_BYTES

    def part(rows: list[tuple[Path, int]]) -> Split:
        files = ImageFiles([path for path, _ in rows], (3, height, width), resize=size is not None)
        labels = torch.tensor([label for _, label in rows])
        samples: Samples = files
        if fits:
            samples = InMemory(files.take(torch.arange(len(files))))
        elif size is None:
            _check_sizes(files.paths, (width, height))
        return Split(samples, labels, by_class(labels, groups))

    return Tasks(part(train), part(test), len(frames), PIXELS, augments=True)


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts the numbers in names by value.

    Examples:
        >>> sorted(["frame10", "frame2", "Frame1"], key=natural_key)
        ['Frame1', 'frame2', 'frame10']
    """
    parts = re.findall(r"[0-9]+|[^0-9]+", name.casefold())
    return [(int(part), "") if part[0] in "0123456789" else (-1, part) for part in parts]


def _frames(root: Path) -> list[list[Path]]:
    """Return the frames of every class in their natural order."""
    if not root.is_dir():
        raise UserError(f"stream.path: {root} is not a folder")
    folders = [p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")]
    folders.sort(key=lambda path: (natural_key(path.name), path.name))
    if len(folders) < 2:
        raise UserError(
            f"stream.path: {root} has {count_of(len(folders), 'class folder')}, expected 2 or "
            "more; every class needs a folder of its own"
        )
    frames = []
    for each in folders:
        found = [
            Path(where, name)
            for where, _, names in os.walk(each)
            for name in names
            if Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
        ]
        if len(found) < 2:
            raise UserError(
                f"{each} holds {len(found)} of the 2 or more images that a class needs, to learn "
                f"from and to test on ({', '.join(sorted(SUFFIXES))})"
            )
        frames.append(
            sorted(found, key=lambda path: (natural_key(f"{path.relative_to(root)}"), path))
        )
    return frames


def _holdout_size(count: int, holdout: float) -> int:
    return min(max(math.floor(count * holdout + 0.5), 1), count - 1)


def _check_sizes(paths: list[Path], size: tuple[int, int]) -> None:
    for path in paths:
        if (found := size_of(path)) != size:
            raise UserError(
                f"{path}: an image of {found[0]}×{found[1]}, expected {size[0]}×{size[1]} like the "
                "others; stream.size brings all to one"
            )
