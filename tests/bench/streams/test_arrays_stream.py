from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refused import refused

from syngap.bench.streams.arrays import arrays, npz
from syngap.bench.streams.tasks import InMemory, Pixels

IMAGES = np.arange(12 * 3 * 4 * 4, dtype=np.uint64).astype(np.uint8).reshape(12, 3, 4, 4)
LABELS = np.arange(12) % 6
GIVEN: dict[str, Any] = {
    "x_train": IMAGES,
    "y_train": LABELS,
    "x_test": IMAGES[:6],
    "y_test": LABELS[:6],
}


def test_images_stay_bytes_and_are_scaled() -> None:
    tasks = arrays(**GIVEN, tasks=3)
    assert isinstance(tasks.train.samples, InMemory)
    assert tasks.train.samples.values.dtype == torch.uint8
    assert torch.equal(tasks.train.samples.values, torch.from_numpy(IMAGES))
    assert (tasks.pixels, tasks.augments) == (Pixels(255.0), False)
    assert arrays(**GIVEN, tasks=3, pixels=Pixels(16.0), augments=True).pixels.scale == 16


@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int32, np.uint16, ">f4", bool])
def test_other_values_become_float32(kind: Any) -> None:
    x = (IMAGES.reshape(12, -1) % 2).astype(kind)
    tasks = arrays(x, LABELS, x, LABELS, tasks=3)
    values = tasks.train.samples.take(torch.arange(12))
    assert values.dtype == torch.float32
    assert np.array_equal(values.numpy(), x.astype(np.float32))
    assert tasks.pixels == Pixels()


def test_arrays_and_tensors_give_the_same() -> None:
    tensors: dict[str, Any] = {name: torch.from_numpy(value) for name, value in GIVEN.items()}
    one, other = arrays(**GIVEN, tasks=3, seed=2), arrays(**tensors, tasks=3, seed=2)
    assert torch.equal(one.train.task, other.train.task)
    every = torch.arange(12)
    assert torch.equal(one.train.samples.take(every), other.train.samples.take(every))


def test_arrays_that_torch_cannot_share_are_copied() -> None:
    fixed = IMAGES.copy()
    fixed.flags.writeable = False
    for x in (fixed, IMAGES[::-1], IMAGES[:, ::-1]):
        tasks = arrays(x, LABELS, x, LABELS, tasks=2)
        assert np.array_equal(tasks.train.samples.take(torch.arange(12)).numpy(), x)


def test_the_seed_draws_the_order_of_classes() -> None:
    orders = {tuple(arrays(**GIVEN, tasks=6, seed=seed).train.task.tolist()) for seed in range(8)}
    assert len(orders) > 4
    assert all(sorted(order) == sorted([*range(6), *range(6)]) for order in orders)


def test_groups_say_which_classes_come_when() -> None:
    tasks = arrays(**GIVEN, groups=[[5], [0, 1, 2], [4, 3]])
    assert tasks.test.task.tolist() == [1, 1, 1, 2, 2, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tasks": 4}, ["stream.tasks", "6 classes"]),
        ({"tasks": 0}, ["tasks", "got 0"]),
        ({"tasks": None}, ["either tasks", "or groups"]),
        ({"groups": [[0]]}, ["either tasks", "or groups"]),
        ({"tasks": None, "groups": [[0, 1], [2, 3, 4]]}, ["groups", "0 to 5"]),
        ({"tasks": None, "groups": [[0, 1, 5], [2, 3, 4, 5]]}, ["groups", "0 to 5"]),
        ({"x_train": IMAGES[:5]}, ["5 x_train", "12 y_train"]),
        ({"x_test": IMAGES[:6, :1]}, ["x_test", "(1, 4, 4)"]),
        ({"x_test": IMAGES[:6].astype(float)}, ["uint8", "float32"]),
        ({"x_train": IMAGES[:, 0, 0, 0]}, ["x_train", "(12,)"]),
        ({"x_train": IMAGES[:0], "y_train": LABELS[:0]}, ["x_train", "(0, 3, 4, 4)"]),
        ({"x_train": np.array(["a"] * 12)}, ["x_train", "expected numbers"]),
        ({"x_train": np.full((12, 2), np.nan)}, ["x_train", "finite"]),
        ({"y_train": LABELS.astype(float)}, ["y_train", "float32", "whole number"]),
        ({"y_train": LABELS[:, None]}, ["y_train", "(12, 1)"]),
        ({"y_train": LABELS - 1}, ["label is -1"]),
        ({"y_train": LABELS + 1}, ["class 0", "no training samples"]),
        ({"y_test": LABELS[:6] + 10**12}, ["label is 1000000000005"]),
    ],
    ids=repr,
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: list[str]) -> None:
    with refused(*words):
        arrays(**{**GIVEN, "tasks": 3, **change})


def test_a_file_gives_what_its_arrays_give(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "mine.npz", **GIVEN)
    one, other = npz(1, tmp_path, path="mine.npz", tasks=2), arrays(**GIVEN, tasks=2, seed=1)
    for a, b in ((one.train, other.train), (one.test, other.test)):
        every = torch.arange(len(a.labels))
        assert torch.equal(a.samples.take(every), b.samples.take(every))
        assert torch.equal(a.labels, b.labels)
        assert torch.equal(a.task, b.task)


class Trap:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.mkdir, (Path("trap"),)  # type: ignore[return-value]


def test_files_that_are_not_four_plain_arrays_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.npz"
    with refused("stream.path", "mine.npz"):
        npz(0, tmp_path, path="mine.npz", tasks=2)
    np.savez(path, x=IMAGES, y=LABELS)
    with refused("mine.npz", "holds x, y", "x_train, y_train, x_test, y_test"):
        npz(0, tmp_path, path="mine.npz", tasks=2)
    np.savez(path, **{**GIVEN, "y_test": np.array([Trap()])})
    with refused("mine.npz", "Python objects"):
        npz(0, tmp_path, path="mine.npz", tasks=2)
    assert not Path("trap").exists()
    np.savez(path, **{**GIVEN, "y_test": LABELS})
    with refused("mine.npz", "6 x_test, but 12 y_test"):
        npz(0, tmp_path, path="mine.npz", tasks=2)
    for broken in (path.read_bytes()[:300], b"", b"\x80\x04N."):
        path.write_bytes(broken)
        with refused("mine.npz"):
            npz(0, tmp_path, path="mine.npz", tasks=2)
    (tmp_path / "mine.npy").touch()
    with refused("mine.npy", "not an .npz file"):
        npz(0, tmp_path, path="mine.npy", tasks=2)
