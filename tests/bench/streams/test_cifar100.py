import gzip
import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from realdata import unpacked
from refused import refused

from syngap.bench.streams.cifar100 import cifar100
from syngap.bench.streams.tasks import InMemory, Split, Tasks

Records = NDArray[np.uint8]
Layout = Literal["binary", "python", "binary.tar.gz", "python.tar.gz"]
LAYOUTS: tuple[Layout, ...] = ("binary", "python", "binary.tar.gz", "python.tar.gz")


def records(count: int, seed: int) -> Records:
    """Images in the official order of bytes; superclass k holds the classes k, k + 20, …"""
    rows = np.random.default_rng(seed).integers(0, 256, (count, 3074), dtype=np.uint8)
    rows[:, 1] = np.random.default_rng(seed).permutation(count) % 100
    rows[:, 0] = rows[:, 1] % 20
    return rows


def dictionary(rows: Records) -> dict[bytes, Any]:
    return {
        b"filenames": [b"image_s_%06d.png" % number for number in range(len(rows))],
        b"batch_label": b"training batch 1 of 1",
        b"fine_labels": rows[:, 1].tolist(),
        b"coarse_labels": rows[:, 0].tolist(),
        b"data": rows[:, 2:].copy(),
    }


def write(root: Path, layout: Layout, train: Records, test: Records) -> Path:
    """Write one of the official layouts beneath `root`."""
    kind, _, packed = layout.partition(".")
    folder = root / f"cifar-100-{kind}"
    folder.mkdir(parents=True)
    for name, rows in (("train", train), ("test", test)):
        if kind == "binary":
            (folder / f"{name}.bin").write_bytes(rows.tobytes())
        else:
            (folder / name).write_bytes(pickle.dumps(dictionary(rows), protocol=2))
    if not packed:
        return folder
    archive = root / f"{folder.name}.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(folder, folder.name)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return archive


def values(split: Split) -> torch.Tensor:
    assert isinstance(split.samples, InMemory)
    return split.samples.values


def same(one: Tasks, other: Tasks) -> bool:
    return one.classes == other.classes and all(
        torch.equal(values(a), values(b))
        and torch.equal(a.labels, b.labels)
        and torch.equal(a.task, b.task)
        for a, b in ((one.train, other.train), (one.test, other.test))
    )


@pytest.fixture(autouse=True)
def _no_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNGAP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# The layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_pixel_by_pixel(layout: Layout, tmp_path: Path) -> None:
    train, test = records(200, 0), records(100, 1)
    write(tmp_path, layout, train, test)
    tasks = cifar100(0, tmp_path)
    for rows, split in ((train, tasks.train), (test, tasks.test)):
        assert torch.equal(values(split).flatten(1), torch.from_numpy(rows[:, 2:].copy()))
        assert split.labels.tolist() == rows[:, 1].tolist()
        assert split.samples.shape == (3, 32, 32)
        assert values(split).dtype == torch.uint8


@pytest.mark.parametrize("labels", ["classes", "superclasses"])
def test_layouts_give_identical_tasks(
    labels: Literal["classes", "superclasses"], tmp_path: Path
) -> None:
    train, test = records(200, 0), records(100, 1)
    for layout in LAYOUTS:
        write(tmp_path / layout, layout, train, test)
    first, *others = (cifar100(3, tmp_path / layout, labels=labels) for layout in LAYOUTS)
    assert all(same(first, other) for other in others)


def test_real_layouts_give_identical_tasks(tmp_path: Path) -> None:
    real = unpacked("cifar100") / "cifar-100-binary"
    train, test = (
        np.fromfile(real / f"{name}.bin", np.uint8, 4000 * 3074).reshape(-1, 3074)
        for name in ("train", "test")
    )
    write(tmp_path, "binary", train, test)
    write(tmp_path / "other", "python", train, test)
    assert same(cifar100(1, tmp_path), cifar100(1, tmp_path / "other"))


def test_all_of_the_real_one_is_read() -> None:
    tasks = cifar100(0, unpacked("cifar100"), labels="superclasses")
    assert torch.bincount(tasks.train.labels).tolist() == [2500] * 20
    assert torch.bincount(tasks.train.task).tolist() == [10_000] * 5
    assert torch.bincount(tasks.test.task).tolist() == [2000] * 5
    pixels = values(tasks.test).float() / tasks.pixels.scale
    normal = (pixels.mean((0, 2, 3)) - torch.tensor(tasks.pixels.mean)) / torch.tensor(
        tasks.pixels.std
    )
    assert normal.abs().max() < 0.02


# The tasks ---------------------------------------------------------------------------------------


def test_tasks_hold_equal_numbers_of_classes_in_an_order_drawn_from_the_seed(
    tmp_path: Path,
) -> None:
    write(tmp_path, "binary", records(200, 0), records(100, 1))

    def classes(seed: int, **options: Any) -> list[set[int]]:
        train = cifar100(seed, tmp_path, **options).train
        return [
            set(train.labels[train.task == k].tolist()) for k in range(int(train.task.max()) + 1)
        ]

    assert [len(task) for task in classes(0)] == [10] * 10
    assert [len(task) for task in classes(0, tasks=20)] == [5] * 20
    assert set.union(*classes(0)) == set(range(100))
    assert classes(0) == classes(0) != classes(1)


def test_superclass_tasks_bring_one_new_class_of_each(tmp_path: Path) -> None:
    train = records(200, 0)
    write(tmp_path, "binary", train, records(100, 1))
    tasks, other = (cifar100(seed, tmp_path, labels="superclasses") for seed in (0, 1))
    fine = torch.from_numpy(train[:, 1].astype(np.int64))
    assert (tasks.count, tasks.classes) == (5, 20)
    for task in range(5):
        new = fine[tasks.train.task == task].unique()
        assert sorted((new % 20).tolist()) == list(range(20))
    assert torch.equal(tasks.train.labels, fine % 20)
    assert not torch.equal(tasks.train.task, other.train.task)


def test_impossible_numbers_of_tasks_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "binary", records(100, 0), records(100, 1))
    with refused("stream.tasks", "7", "10"):
        cifar100(0, tmp_path, tasks=7)
    with refused("stream.tasks", "got 10", "5"):
        cifar100(0, tmp_path, tasks=10, labels="superclasses")
    assert cifar100(0, tmp_path, tasks=5, labels="superclasses").count == 5


# Where it lies -----------------------------------------------------------------------------------


def test_data_may_be_the_folder_itself_its_parent_or_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "data", "binary", records(100, 0), records(100, 1))
    whole = cifar100(0, tmp_path / "data")
    assert same(whole, cifar100(0, folder))
    monkeypatch.chdir(folder)
    assert same(whole, cifar100(0, Path(".")))
    monkeypatch.setenv("SYNGAP_DATA", str(tmp_path / "data"))
    assert same(whole, cifar100(0, None))


def test_the_default_cache_is_looked_at_last(tmp_path: Path) -> None:
    write(tmp_path / "cache" / "syngap", "binary", records(100, 0), records(100, 1))
    here = cifar100(0, None)
    write(tmp_path / "named", "binary", records(100, 2), records(100, 3))
    assert not same(here, cifar100(0, tmp_path / "named"))


def test_missing_data_is_said_with_every_place_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("SYNGAP_DATA", str(tmp_path / "theirs"))
    with refused(
        f"{tmp_path / 'mine'} (--data)",
        f"{tmp_path / 'theirs'} (SYNGAP_DATA)",
        str(tmp_path / "cache" / "syngap"),
        "syngap data cifar100",
    ):
        cifar100(0, tmp_path / "mine")
    with refused("--data", "nowhere"):
        cifar100(0, tmp_path / "nowhere")


# Files that are not what they should be ----------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def relabelled(column: int, value: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        rows = np.fromfile(path, np.uint8).reshape(-1, 3074)
        rows[7, column] = value
        path.write_bytes(rows.tobytes())

    return change


def halved(path: Path) -> None:
    rows = np.fromfile(path, np.uint8).reshape(-1, 3074)
    path.write_bytes(rows[rows[:, 1] < 50].tobytes())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, ["bytes", "3074"]),
        (empty, ["0 bytes"]),
        (Path.unlink, ["has no test.bin"]),
        (relabelled(1, 100), ["fine label is 100", "0 to 99"]),
        (relabelled(0, 20), ["coarse label is 20", "0 to 19"]),
        (halved, ["50 classes", "all 100"]),
        (lambda path: os.truncate(path, 1 << 29), ["not CIFAR-100's"]),
    ],
    ids=["cut", "empty", "gone", "fine", "coarse", "halved", "huge"],
)
def test_odd_binary_files_are_refused(
    damage: Callable[[Path], None], words: list[str], tmp_path: Path
) -> None:
    folder = write(tmp_path, "binary", records(100, 0), records(100, 1))
    damage(folder / "test.bin")
    with refused("test.bin", *words):
        cifar100(0, tmp_path)


def test_superclasses_of_other_than_five_classes_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "binary", records(100, 0), records(100, 1))
    relabelled(0, 19)(folder / "test.bin")
    with refused("superclasses of five classes"):
        cifar100(0, tmp_path, labels="superclasses")


class Attack:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("trap",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({b"data": Attack()}, ["refused", "mkdir"]),
        ({b"data": None}, ['"data"']),
        ({b"data": np.zeros((100, 3000), np.uint8)}, ['"data"', "3072"]),
        ({b"data": np.zeros((99, 3072), np.uint8)}, ["99 images", "100 fine"]),
        ({b"fine_labels": ["one"] * 100}, ['"fine_labels"']),
        ({b"coarse_labels": [1 << 60] * 100}, ['"coarse_labels"']),
        ({b"fine_labels": [200] * 100}, ["fine label is 200"]),
    ],
    ids=["attack", "nothing", "narrow", "few", "text", "large", "range"],
)
def test_odd_python_files_are_refused_and_never_run(
    change: dict[bytes, Any],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path, "python", records(100, 0), records(100, 1))
    odd = {**dictionary(records(100, 0)), **change}
    (folder / "train").write_bytes(pickle.dumps(odd, protocol=2))
    with refused("train", *words):
        cifar100(0, tmp_path)
    assert not Path("trap").exists()


def member(name: str, contents: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, io.BytesIO]:
    info = tarfile.TarInfo(name)
    info.size = len(contents)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, io.BytesIO(contents)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (member("../train.bin", b"x"), ["would leave the folder"]),
        (member("/train.bin", b"x"), ["would leave the folder"]),
        (
            member("cifar-100-binary/train.bin", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
            ["no plain file"],
        ),
        (
            member("cifar-100-binary/train.bin", type=tarfile.LNKTYPE, linkname="test.bin"),
            ["no plain file"],
        ),
        (member("cifar-100-binary/other.bin", b"x"), ["has no train.bin and no test.bin"]),
    ],
    ids=["up", "root", "symlink", "link", "other"],
)
def test_odd_archives_are_refused(
    entry: tuple[tarfile.TarInfo, io.BytesIO], words: list[str], tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz") as tar:
        tar.addfile(*entry)
    with refused("cifar-100-binary.tar.gz", *words):
        cifar100(0, tmp_path)


def test_archives_that_claim_too_much_are_refused(tmp_path: Path) -> None:
    for claimed in (tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME):
        header, _ = member("cifar-100-binary/train.bin", type=claimed)
        header.size = 1 << 40
        archive = tmp_path / "cifar-100-binary.tar.gz"
        archive.write_bytes(gzip.compress(header.tobuf() + bytes(4096)))
        with refused("cifar-100-binary.tar.gz"):
            cifar100(0, tmp_path)


def test_cut_archives_are_refused(tmp_path: Path) -> None:
    archive = write(tmp_path, "binary.tar.gz", records(100, 0), records(100, 1))
    cut(archive)
    with refused("cifar-100-binary.tar.gz", "damaged"):
        cifar100(0, tmp_path)
    archive.write_bytes(b"not a gzip file")
    with refused("cifar-100-binary.tar.gz", "damaged"):
        cifar100(0, tmp_path)
