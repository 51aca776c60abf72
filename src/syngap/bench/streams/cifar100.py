"""CIFAR-100 (Krizhevsky 2009), as its owner publishes it: binary or Python, packed or not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from syngap.bench.errors import UserError
from syngap.bench.options import Count
from syngap.bench.seeds import generator
from syngap.bench.streams import archives, places
from syngap.bench.streams.pickles import read_pickle
from syngap.bench.streams.tasks import InMemory, Pixels, Split, Tasks, by_class, permuted_groups
from syngap.messages import count_of

__all__ = ["cifar100"]

BINARY, PYTHON = "cifar-100-binary", "cifar-100-python"
NAMES = (BINARY, PYTHON, f"{BINARY}.tar.gz", f"{PYTHON}.tar.gz")
PIXELS = Pixels(255.0, mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))
FINE, COARSE = 100, 20
RECORD = 2 + 3 * 32 * 32
LARGEST = 1 << 28  # bytes of one file; the largest official one has 155 million

Bytes: TypeAlias = NDArray[np.uint8]


def cifar100(
    seed: int,
    data: Path | None,
    *,
    tasks: Count | None = None,
    labels: Literal["classes", "superclasses"] = "classes",
) -> Tasks:
    """Return CIFAR-100 in tasks.

    Args:
        seed: of the order of classes.
        data: the folder with cifar-100-binary, cifar-100-python or one of their archives.
        tasks: how many; 10 for classes. Superclasses come in 5, since each has five classes.
        labels: "classes": 100 labels, every task brings new ones (class-incremental).
            "superclasses": 20 labels, every task brings one new class of each
            (domain-incremental).
    """
    if labels == "superclasses" and tasks not in (None, FINE // COARSE):
        raise UserError(
            f"stream.tasks: got {tasks}, but superclasses come in {FINE // COARSE} tasks, "
            "one new class of each at a time; leave it out"
        )
    place = places.find(data, NAMES, "syngap data cifar100")
    train, test = _read(place)
    if labels == "superclasses":
        groups = _one_of_each(_members(train, test, place), seed)
    else:
        groups = permuted_groups(FINE, tasks or 10, seed)

    def split(images: _Images) -> Split:
        fine, coarse = (torch.from_numpy(y.astype(np.int64)) for y in (images.fine, images.coarse))
        samples = InMemory(torch.from_numpy(images.pixels))
        return Split(samples, fine if labels == "classes" else coarse, by_class(fine, groups))

    classes = FINE if labels == "classes" else COARSE
    return Tasks(split(train), split(test), classes, PIXELS, augments=True)


class _Images(NamedTuple):
    pixels: Bytes
    fine: Bytes
    coarse: Bytes


def _read(place: Path) -> tuple[_Images, _Images]:
    binary = place.name.startswith(BINARY)
    names = [f"{split}.bin" if binary else split for split in ("train", "test")]
    if not place.is_dir():
        places.check_plain(place)
    contents = _in_folder(place, names) if place.is_dir() else _in_archive(place, names)
    parse = _records if binary else _dictionary
    train, test = (_check_images(parse(contents[n], f"{place / n}"), f"{place / n}") for n in names)
    return train, test


def _in_folder(place: Path, names: list[str]) -> dict[str, Bytes]:
    for path in (place / name for name in names):
        if not path.is_file():
            raise UserError(f"{place} has no {path.name}; fetch it again with syngap data cifar100")
        if not 0 < path.stat().st_size <= LARGEST:
            size = count_of(path.stat().st_size, "byte")
            raise UserError(f"{path} has {size}; it is not CIFAR-100's")
    return {name: np.memmap(place / name, np.uint8, "r") for name in names}


def _in_archive(place: Path, names: list[str]) -> dict[str, Bytes]:
    folder = place.name.removesuffix(".tar.gz")
    wanted = re.compile(f"{re.escape(folder)}/({'|'.join(map(re.escape, names))})")
    found = archives.read(place, wanted, 2 * LARGEST)
    if missing := [name for name in names if not found.get(name)]:
        raise UserError(f"{place} has no {' and no '.join(missing)}")
    return {name: np.frombuffer(contents, np.uint8) for name, contents in found.items()}


def _records(contents: Bytes, where: str) -> _Images:
    if len(contents) % RECORD:
        raise UserError(
            f"{where}: {count_of(len(contents), 'byte')}, no whole number of images of {RECORD}; "
            "the file is cut short or another one"
        )
    records = contents.reshape(-1, RECORD)
    pixels = np.array(records[:, 2:]).reshape(-1, 3, 32, 32)
    return _Images(pixels, fine=np.array(records[:, 1]), coarse=np.array(records[:, 0]))


def _dictionary(contents: Bytes, where: str) -> _Images:
    found = read_pickle(contents.data, where)

    def get(name: str) -> Any:
        return found.get(name.encode(), found.get(name))

    pixels = get("data")
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != RECORD - 2:
        raise UserError(f'{where}: "data" is no array of rows of {RECORD - 2} pixels')
    fine, coarse = (_labels(get(f"{name}_labels"), name, where) for name in ("fine", "coarse"))
    if not len(pixels) == len(fine) == len(coarse):
        raise UserError(
            f"{where}: {count_of(len(pixels), 'image')}, {len(fine)} fine and "
            f"{count_of(len(coarse), 'coarse label')}"
        )
    return _Images(np.array(pixels, order="C").reshape(-1, 3, 32, 32), fine, coarse)


def _labels(labels: object, name: str, where: str) -> Bytes:
    if not isinstance(labels, list) or not all(type(y) is int and 0 <= y < 256 for y in labels):
        raise UserError(f'{where}: "{name}_labels" is no list of labels')
    return np.array(labels, np.uint8)


def _check_images(images: _Images, where: str) -> _Images:
    for labels, name, count in ((images.fine, "fine", FINE), (images.coarse, "coarse", COARSE)):
        if len(labels) and labels.max() >= count:
            raise UserError(
                f"{where}: a {name} label is {labels.max()}, expected 0 to {count - 1}; "
                "the file is damaged or another one"
            )
    present = len(np.unique(images.fine))
    if present < FINE:
        raise UserError(f"{where}: images of {count_of(present, 'class')}, expected all {FINE}")
    return images


def _members(train: _Images, test: _Images, place: Path) -> list[list[int]]:
    """Return the fine classes of each superclass, by what the files say."""
    pairs = {
        (int(coarse), int(fine))
        for images in (train, test)
        for coarse, fine in np.unique(np.stack([images.coarse, images.fine]), axis=1).T
    }
    members = [sorted(fine for of, fine in pairs if of == coarse) for coarse in range(COARSE)]
    if len(pairs) != FINE or any(len(group) != FINE // COARSE for group in members):
        raise UserError(f"{place}: its coarse labels are not {COARSE} superclasses of five classes")
    return members


def _one_of_each(members: list[list[int]], seed: int) -> list[list[int]]:
    chance = generator(seed, "classes")
    orders = [torch.randperm(len(group), generator=chance).tolist() for group in members]
    return [
        [group[order[task]] for group, order in zip(members, orders, strict=True)]
        for task in range(FINE // COARSE)
    ]
