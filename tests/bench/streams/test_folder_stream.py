from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from realdata import unpacked
from refused import refused

from syngap.bench.streams import folder as module
from syngap.bench.streams.files import ImageFiles
from syngap.bench.streams.folder import folder
from syngap.bench.streams.tasks import InMemory, Tasks


def tree(root: Path, classes: int, frames: int, size: tuple[int, int] = (4, 3)) -> Path:
    """Class folders c1, c2, …; the first pixel tells the class and the number of the frame."""
    for label in range(classes):
        place = root / f"c{label + 1}"
        place.mkdir(parents=True)
        for number in range(frames):
            image = Image.new("RGB", size)
            image.putpixel((0, 0), (label, number, 0))
            image.save(place / f"{number}.png")
    return root


def held_out(tasks: Tasks, label: int) -> list[int]:
    own = (tasks.test.labels == label).nonzero().flatten()
    return [int(image[1, 0, 0]) for image in tasks.test.samples.take(own)]


def learned(tasks: Tasks, label: int) -> list[int]:
    own = (tasks.train.labels == label).nonzero().flatten()
    return [int(image[1, 0, 0]) for image in tasks.train.samples.take(own)]


def test_classes_and_frames_come_in_natural_order(tmp_path: Path) -> None:
    tasks = folder(0, tree(tmp_path, classes=12, frames=12), path=".", tasks=3)
    images = tasks.train.samples.take(torch.arange(len(tasks.train.labels)))
    assert images[:, 0, 0, 0].tolist() == tasks.train.labels.tolist()
    for label in range(12):
        assert learned(tasks, label) == sorted(learned(tasks, label))


@pytest.mark.parametrize(("holdout", "count"), [(0.25, 5), (0.01, 1), (0.5, 10), (0.99, 19)])
def test_what_is_held_out_is_one_piece_of_every_class(
    holdout: float, count: int, tmp_path: Path
) -> None:
    tasks = folder(0, tree(tmp_path, classes=6, frames=20), path=".", tasks=2, holdout=holdout)
    for label in range(6):
        held = held_out(tasks, label)
        assert held == list(range(held[0], held[0] + count))
        assert sorted(held + learned(tasks, label)) == list(range(20))


def test_the_seed_draws_the_piece_and_the_order_of_classes(tmp_path: Path) -> None:
    root = tree(tmp_path, classes=6, frames=20)
    one, again, other = (folder(seed, root, path=".", tasks=3) for seed in (0, 0, 1))
    assert torch.equal(one.test.task, again.test.task)
    assert not torch.equal(one.test.task, other.test.task)
    pieces = [[held_out(tasks, label) for label in range(6)] for tasks in (one, again, other)]
    assert pieces[0] == pieces[1] != pieces[2]
    assert len({piece[0] for piece in pieces[0]}) > 1


def test_what_is_held_out_can_be_the_same_for_every_seed(tmp_path: Path) -> None:
    root = tree(tmp_path, classes=6, frames=20)
    tasks = [folder(seed, root, path=".", tasks=3, holdout_seed=7) for seed in (0, 1, 7)]
    pieces = [[held_out(one, label) for label in range(6)] for one in tasks]
    assert pieces[0] == pieces[1] == pieces[2]
    assert len({piece[0] for piece in pieces[0]}) > 1
    assert not torch.equal(tasks[0].test.task, tasks[1].test.task), "the order is the seed's"
    usual = folder(7, root, path=".", tasks=3)
    assert [held_out(usual, label) for label in range(6)] == pieces[0]


def test_tasks_hold_equal_numbers_of_classes(tmp_path: Path) -> None:
    root = tree(tmp_path, classes=6, frames=2)
    tasks = folder(0, root, path=".", tasks=3)
    for split in (tasks.train, tasks.test):
        assert [split.labels[split.task == k].unique().numel() for k in range(3)] == [2, 2, 2]
    with refused("stream.tasks", "6 classes", "4 equal tasks"):
        folder(0, root, path=".", tasks=4)


def test_the_path_is_absolute_or_inside_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SYNGAP_DATA", raising=False)
    root = tree(tmp_path / "mine", classes=2, frames=2)
    monkeypatch.chdir(tmp_path)
    for data, path in ((tmp_path, "mine"), (None, str(root)), (None, "mine"), (root, str(root))):
        assert folder(0, data, path=path, tasks=2).count == 2
    with refused("stream.path", str(tmp_path / "yours"), "--data"):
        folder(0, tmp_path, path="yours", tasks=2)
    with refused("--data", "nowhere"):
        folder(0, tmp_path / "nowhere", path="mine", tasks=2)


def test_images_keep_their_size_or_are_brought_to_one(tmp_path: Path) -> None:
    root = tree(tmp_path, classes=2, frames=4)
    Image.new("RGB", (8, 8), "white").save(root / "c2" / "2.png")
    with refused("2.png", "8×8", "4×3"):
        folder(0, root, path=".", tasks=2)
    for size in (2, 16):
        tasks = folder(0, root, path=".", tasks=2, size=size)
        assert tasks.train.samples.shape == (3, size, size)
        assert tasks.test.samples.take(torch.tensor([0])).shape == (1, 3, size, size)


def test_shrinking_takes_the_mean(tmp_path: Path) -> None:
    root = tree(tmp_path, classes=2, frames=2)
    for path in root.glob("*/*.png"):
        image = Image.new("L", (2, 2), 0)
        image.putpixel((0, 0), 200)
        image.save(path)
    tasks = folder(0, root, path=".", tasks=2, size=1)
    assert tasks.train.samples.take(torch.tensor([0])).flatten().tolist() == [50, 50, 50]


def test_what_does_not_fit_stays_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, classes=2, frames=4)
    near = folder(0, root, path=".", tasks=2)
    monkeypatch.setattr(module, "MEMORY_BYTES", 8 * 36 - 1)
    far = folder(0, root, path=".", tasks=2)
    assert isinstance(near.train.samples, InMemory)
    assert isinstance(far.train.samples, ImageFiles)
    every = torch.arange(len(far.train.samples))
    assert torch.equal(near.train.samples.take(every), far.train.samples.take(every))
    Image.new("RGB", (8, 8)).save(root / "c2" / "2.png")
    with refused("2.png", "8×8", "4×3", "stream.size"):
        folder(0, root, path=".", tasks=2)


def test_frames_may_lie_deeper_and_other_files_are_left_alone(tmp_path: Path) -> None:
    root = tree(tmp_path, classes=2, frames=4)
    (root / "c1" / "session").mkdir()
    (root / "c1" / "0.png").rename(root / "c1" / "session" / "0.png")
    (root / "c1" / "notes.txt").write_text("not an image")
    (root / ".cache").mkdir()
    (root / "notes.txt").write_text("not a class")
    tasks = folder(0, root, path=".", tasks=2)
    assert len(tasks.train.labels) + len(tasks.test.labels) == 8


def test_trees_that_cannot_be_cut_are_refused(tmp_path: Path) -> None:
    root = tree(tmp_path / "one", classes=1, frames=2)
    with refused("1 class folder, expected 2 or more"):
        folder(0, root, path=".", tasks=1)
    with refused("not a folder"):
        folder(0, root, path="c1/0.png", tasks=1)
    (root / "c2").mkdir()
    with refused("c2 holds 0 of the 2 or more images", ".png"):
        folder(0, root, path=".", tasks=1)
    (root / "c1" / "0.png").rename(root / "c2" / "0.png")
    with refused("c1 holds 1 of the 2 or more images"):
        folder(0, root, path=".", tasks=1)


def test_a_turntable_is_read(tmp_path: Path) -> None:
    real = unpacked("coil100") / "coil100"
    for number in range(1, 101, 5):  # a fifth, for time
        (tmp_path / f"obj{number}").symlink_to(real / f"obj{number:03d}")
    tasks = folder(0, tmp_path, path=".", tasks=10)
    assert (tasks.count, tasks.classes) == (10, 20)
    assert tasks.train.samples.shape == (3, 64, 64)
    assert torch.bincount(tasks.train.labels).tolist() == [54] * 20
    assert torch.bincount(tasks.test.labels).tolist() == [18] * 20
    own = (tasks.test.labels == 1).nonzero().flatten()
    views = tasks.test.samples.take(own).permute(0, 2, 3, 1).numpy()
    names = sorted((real / "obj006").iterdir())
    images = [np.asarray(Image.open(name).convert("RGB")) for name in names]
    starts = [k for k in range(55) if np.array_equal(images[k], views[0])]
    assert any(np.array_equal(images[start : start + 18], views) for start in starts)
