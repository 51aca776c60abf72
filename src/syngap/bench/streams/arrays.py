"""Streams from arrays in memory or in an .npz file."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from syngap.bench.errors import UserError
from syngap.bench.options import Count
from syngap.bench.streams import places
from syngap.bench.streams.tasks import InMemory, Pixels, Split, Tasks, by_class, permuted_groups
from syngap.messages import count_of

__all__ = ["arrays", "npz"]

TRUSTED_BYTES = 1 << 28  # arrays up to this size are read whatever the file's size
MAX_RATIO = 100  # of array bytes to file bytes: real data do not compress that well
KEYS = ("x_train", "y_train", "x_test", "y_test")

Values: TypeAlias = Tensor | NDArray[Any]


def arrays(
    x_train: Values,
    y_train: Values,
    x_test: Values,
    y_test: Values,
    *,
    tasks: int | None = None,
    seed: int = 0,
    groups: Sequence[Sequence[int]] | None = None,
    pixels: Pixels | None = None,
    augments: bool = False,
) -> Tasks:
    """Return NumPy arrays or tensors in tasks.

    Args:
        x_train: samples to learn from, the first dimension counts them. Images are uint8
            (N, channels, height, width); anything else becomes float32.
        y_train: their labels, whole numbers from 0.
        x_test: samples to test on.
        y_test: their labels.
        tasks: how many, of equal numbers of classes in an order drawn from `seed`.
        seed: of that order.
        groups: the classes of each task, in place of `tasks`.
        pixels: how values are scaled; None divides uint8 by 255 and leaves the rest.
        augments: whether shifted and mirrored images are still images of the same thing.

    Examples:
        >>> x, y = torch.rand(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
        >>> split = arrays(x, y, x, y, groups=[[2], [0, 1]])
        >>> split.classes, split.train.task
        (3, tensor([1, 1, 0, 1, 1, 0]))
    """
    x = {"x_train": _samples(x_train, "x_train"), "x_test": _samples(x_test, "x_test")}
    y = {"y_train": _labels(y_train, "y_train"), "y_test": _labels(y_test, "y_test")}
    _check_shapes(x, y)
    classes = _classes(y["y_train"], y["y_test"])
    if (tasks is None) == (groups is None):
        raise UserError("arrays: give either tasks, a number, or groups, the classes of each")
    if groups is None:
        groups = permuted_groups(classes, _check_count(tasks), seed)
    elif sorted(c for group in groups for c in group) != list(range(classes)):
        raise UserError(f"groups: got {groups}, expected each class 0 to {classes - 1} once")
    if pixels is None:
        pixels = Pixels(255.0) if x["x_train"].dtype == torch.uint8 else Pixels()
    train, test = (
        Split(InMemory(x[f"x_{s}"]), y[f"y_{s}"], by_class(y[f"y_{s}"], groups))
        for s in ("train", "test")
    )
    return Tasks(train, test, classes, pixels, augments)


def npz(seed: int, data: Path | None, *, path: str, tasks: Count) -> Tasks:
    """Return the arrays of a file that `numpy.savez` wrote, in tasks.

    Args:
        seed: of the order of classes.
        data: the folder that a relative `path` starts from.
        path: the file; its arrays are x_train, y_train, x_test and y_test.
        tasks: how many, of equal numbers of classes.
    """
    place = places.find_path(data, path)
    if not place.is_file():
        raise UserError(f"stream.path: {place} is not a plain file")
    if not zipfile.is_zipfile(place):
        raise UserError(f"stream.path: {place} is not an .npz file, as numpy.savez writes them")
    try:
        # Opened here: numpy leaves a file open that it cannot make sense of.
        with place.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            if set(file.files) != set(KEYS):
                raise UserError(
                    f"{place} holds {', '.join(sorted(file.files)) or 'nothing'}; "
                    f"expected {', '.join(KEYS)}"
                )
            _check_sizes(file.zip, place)
            found = {key: file[key] for key in KEYS}
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({error.strerror or error})") from error
    except MemoryError as error:  # the sizes are those of the file: `_check_sizes`
        raise UserError(f"{place}: not read, its arrays need more memory than there is") from error
    except Exception as error:  # a damaged header can raise anything
        reason = "it holds Python objects" if "pickle" in str(error) else "the file is damaged"
        raise UserError(f"{place}: not read, {reason}; expected plain arrays") from error
    try:
        return arrays(**found, tasks=tasks, seed=seed)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def _check_sizes(file: zipfile.ZipFile, place: Path) -> None:
    """Refuse arrays that say they are larger than what is there for them, or than is likely."""
    whole = 0
    for info in file.infolist():
        with file.open(info) as stream:
            version = np.lib.format.read_magic(stream)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, _, kind = read(stream)
            claimed = math.prod(shape) * kind.itemsize
            if not kind.hasobject and claimed != info.file_size - stream.tell():
                raise ValueError("an array of another size than its header says")
            whole += claimed
    packed = place.stat().st_size
    if whole > TRUSTED_BYTES + MAX_RATIO * packed:
        raise UserError(f"{place}: refused, {count_of(packed, 'byte')} that would become {whole}")


def _check_count(tasks: int | None) -> int:
    if type(tasks) is not int or tasks < 1:
        raise UserError(f"tasks: got {tasks!r}, expected a whole number ≥ 1")
    return tasks


def _tensor(values: Values, name: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach()
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise UserError(f"{name}: got an array of {array.dtype}, expected numbers")
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    elif array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch can do little with wider unsigned numbers
    # The caller's own memory where torch can use it: writable, native and without negative strides.
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))


def _samples(array: Values, name: str) -> Tensor:
    values = _tensor(array, name)
    if values.ndim < 2 or not values.numel():
        raise UserError(f"{name}: got the shape {tuple(values.shape)}, expected samples × values")
    if values.ndim == 4 and values.shape[-1] in (1, 3, 4) and values.shape[1] not in (1, 3, 4):
        raise UserError(
            f"{name}: got the shape {tuple(values.shape)}; channels come before height and width"
        )
    if values.dtype != torch.uint8:
        values = values.to(torch.float32)
        if not values.isfinite().all():
            raise UserError(f"{name}: some values are not finite; fill in or leave out what misses")
    return values


def _labels(array: Values, name: str) -> Tensor:
    values = _tensor(array, name).cpu()
    if values.ndim != 1 or values.is_floating_point() or values.dtype == torch.bool:
        raise UserError(
            f"{name}: got {tuple(values.shape)} of {str(values.dtype).removeprefix('torch.')}, "
            "expected one whole number a sample"
        )
    return values.to(torch.int64)


def _check_shapes(x: dict[str, Tensor], y: dict[str, Tensor]) -> None:
    for samples, labels in (("x_train", "y_train"), ("x_test", "y_test")):
        if len(x[samples]) != len(y[labels]):
            raise UserError(f"{len(x[samples])} {samples}, but {len(y[labels])} {labels}")
    train, test = x["x_train"], x["x_test"]
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise UserError(
            f"x_train holds {tuple(train.shape[1:])} of {train.dtype}, but x_test "
            f"{tuple(test.shape[1:])} of {test.dtype}"
        )


def _classes(train: Tensor, test: Tensor) -> int:
    low, high = int(min(train.min(), test.min())), int(max(train.max(), test.max()))
    if low < 0:
        raise UserError(f"a label is {low}, expected whole numbers from 0")
    if high >= len(train):
        samples = count_of(len(train), "training sample")
        raise UserError(f"a label is {high}, and the data have {samples}")
    absent = (torch.bincount(train, minlength=high + 1) == 0).nonzero().flatten().tolist()
    if absent:
        raise UserError(f"class {absent[0]} of 0 to {high} has no training samples")
    return high + 1
