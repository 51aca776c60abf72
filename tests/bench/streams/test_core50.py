import struct
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from realdata import unpacked
from refused import refused

from syngap.bench.streams.core50 import core50, parse_frames, steps
from syngap.bench.streams.files import ImageFiles
from syngap.bench.streams.tasks import Tasks

# Training frames of the objects that come together, in the order the benchmark lists them.
COUNTS = (23980, 11979, 11993, 11990, 11987, 11990, 11993, 11989, 11993)
FIRST_OBJECTS = (1, 2, 27, 3, 28, 4, 29, 5, 30)


@pytest.fixture(autouse=True)
def _no_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNGAP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tree(root: Path, sessions: tuple[int, ...], frames: tuple[int, ...] = (0,)) -> Path:
    """Write a core50_32x32 with all objects; the first pixel tells session, object and frame."""
    for session in sessions:
        for thing in range(1, 51):
            folder = root / "core50_32x32" / f"s{session}" / f"o{thing}"
            folder.mkdir(parents=True)
            for frame in frames:
                image = Image.new("RGB", (32, 32))
                image.putpixel((0, 0), (session, thing, frame))
                image.save(
                    folder / f"C_{session:02d}_{thing:02d}_{frame:03d}.png", compress_level=1
                )
    return root / "core50_32x32"


def partial(seed: int, data: Path, **options: Any) -> Tasks:
    """Read what is only a part, which it says."""
    with pytest.warns(UserWarning, match="of 164866 frames: results will not be CORe50's"):
        return core50(seed, data, size=options.pop("size", 32), **options)


# What the names say ------------------------------------------------------------------------------


def test_the_first_step_is_fixed_and_the_seed_permutes_the_others() -> None:
    orders = [steps(seed) for seed in range(20)]
    assert {order[0] for order in orders} == {(1, 6, 11, 16, 21, 26, 31, 36, 41, 46)}
    assert all(sorted(o for step in order for o in step) == [*range(1, 51)] for order in orders)
    assert all([len(step) for step in order] == [10] + [5] * 8 for order in orders)
    assert len({tuple(order) for order in orders}) == 20
    later = {(2, 7, 12, 17, 22), (27, 32, 37, 42, 47), (3, 8, 13, 18, 23), (28, 33, 38, 43, 48)}
    later |= {(4, 9, 14, 19, 24), (29, 34, 39, 44, 49), (5, 10, 15, 20, 25), (30, 35, 40, 45, 50)}
    assert all(set(order[1:]) == later for order in orders)


@pytest.mark.parametrize("seed", [0, 5])
def test_the_official_lists_give_the_official_counts(seed: int) -> None:
    root = unpacked("core50")
    train, test = (
        (root / f"{name}_filelist.txt").read_text().splitlines() for name in ("train", "test")
    )
    frames = parse_frames([*train, *test], seed)
    tested = frames.test_mask("sessions")
    assert torch.equal(tested.nonzero().flatten(), torch.arange(len(train), len(train) + len(test)))
    labels = [int(line.split()[1]) for line in [*train, *test]]
    assert frames.label.tolist() == labels
    counts = torch.bincount(frames.task[~tested]).tolist()
    expected = dict(zip(FIRST_OBJECTS, COUNTS, strict=True))
    assert counts == [expected[objects[0]] for objects in steps(seed)]
    assert frames.test_mask("frames").float().mean().item() == pytest.approx(0.25, abs=0.001)


@pytest.mark.parametrize(
    "path",
    ["s1/o1/C_01_02_000.png", "s1/o1/C_02_01_000.png", "s1/o51/C_01_51_000.png", "o1/C_01.png", ""],
)
def test_names_of_other_things_are_refused(path: str) -> None:
    with refused(f'"{path}"'):
        parse_frames([path], 0)


# What the files hold -----------------------------------------------------------------------------


def seen(tasks: Tasks, part: Literal["train", "test"]) -> list[tuple[int, ...]]:
    split = getattr(tasks, part)
    images = split.samples.take(torch.arange(len(split.labels)))
    return [tuple(image[:, 0, 0].tolist()) for image in images]


def test_official_test_sessions_are_tested_and_the_others_learned(tmp_path: Path) -> None:
    tree(tmp_path, sessions=(1, 3, 7, 10, 11))
    tasks = partial(0, tmp_path)
    assert {session for session, _, _ in seen(tasks, "train")} == {1, 11}
    assert {session for session, _, _ in seen(tasks, "test")} == {3, 7, 10}


def test_frames_belong_to_the_task_of_their_object(tmp_path: Path) -> None:
    tree(tmp_path, sessions=(1, 3))
    tasks = partial(4, tmp_path)
    assert (tasks.count, tasks.classes) == (9, 50)
    for part in ("train", "test"):
        split = getattr(tasks, part)
        for (_, thing, _), label, task in zip(
            seen(tasks, part), split.labels.tolist(), split.task.tolist(), strict=True
        ):
            assert label == thing - 1
            assert thing in steps(4)[task]


def test_frames_come_in_time(tmp_path: Path) -> None:
    tree(tmp_path, sessions=(1, 3, 11), frames=(0, 1, 2))
    order = seen(partial(0, tmp_path), "train")
    assert order == sorted(order)


def test_the_split_by_frame_tests_every_fourth_of_each_session(tmp_path: Path) -> None:
    tree(tmp_path, sessions=(2, 3), frames=(0, 1, 3, 4, 7))
    tasks = partial(0, tmp_path, split="frames")
    assert {(s, f) for s, _, f in seen(tasks, "test")} == {(2, 3), (2, 7), (3, 3), (3, 7)}
    assert {(s, f) for s, _, f in seen(tasks, "train")} == {
        (s, f) for s in (2, 3) for f in (0, 1, 4)
    }


def test_the_real_frames_are_read() -> None:
    root = unpacked("core50")
    tasks = partial(0, root, size=128)
    assert (len(tasks.train.labels), len(tasks.test.labels)) == (70, 20)
    assert isinstance(tasks.train.samples, ImageFiles)
    batch = tasks.train.samples.take(torch.tensor([3, 69]))
    assert batch.shape == (2, 3, 128, 128)
    assert batch.dtype == torch.uint8
    with Image.open(tasks.train.samples.paths[69]) as image:
        assert np.array_equal(batch[1].permute(1, 2, 0).numpy(), np.asarray(image.convert("RGB")))


# What is missing or broken -----------------------------------------------------------------------


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with refused("core50_128x128", "(--data)", "syngap data core50 --size 128"):
        core50(0, tmp_path)
    (tmp_path / "core50_32x32").mkdir()
    with refused("core50_32x32", "no frames"):
        core50(0, tmp_path, size=32)


def test_a_step_without_frames_is_named_by_its_objects(tmp_path: Path) -> None:
    root = tree(tmp_path, sessions=(1, 3))
    for thing in (2, 7, 12, 17, 22):
        (root / "s3" / f"o{thing}" / f"C_03_{thing:02d}_000.png").unlink()
    with refused("95 of 164866 frames", '"sessions"', "no test frame of objects 2, 7, 12, 17, 22"):
        core50(0, tmp_path, size=32)


def png(width: int, height: int) -> bytes:
    """A small file that claims to be an image of that size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b""))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize("resize", [False, True])
@pytest.mark.parametrize("claimed", [(9_000, 9_000), (12_000, 12_000), (60_000, 60_000)])
def test_images_that_would_fill_the_memory_are_refused(
    claimed: tuple[int, int], resize: bool, tmp_path: Path
) -> None:
    path = tmp_path / "bomb.png"
    path.write_bytes(png(*claimed))
    with refused("bomb.png", "pixels"):
        ImageFiles([path], (3, 32, 32), resize=resize).take(torch.tensor([0]))


def test_broken_images_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "frame.png"
    files = ImageFiles([path], (3, 32, 32))
    with refused("frame.png", "no such file"):
        files.take(torch.tensor([0]))
    Image.new("RGB", (32, 31)).save(path)
    with refused("frame.png", "32×31", "32×32"):
        files.take(torch.tensor([0]))
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    whole = path.read_bytes()
    assert files.take(torch.tensor([0])).shape == (1, 3, 32, 32)
    for broken in (
        b"",
        b"text",
        whole[:20],
        whole[: len(whole) // 2],
        whole.replace(b"IDAT", b"IDOT"),
    ):
        path.write_bytes(broken)
        with refused("frame.png"):
            ImageFiles([path], (3, 32, 32)).take(torch.tensor([0]))


@pytest.mark.parametrize("keep", [True, False])
def test_images_are_read_once_where_all_of_them_fit(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{name}.png" for name in ("white", "black")]
    for path in paths:
        Image.new("RGB", (4, 4), path.stem).save(path)
    monkeypatch.setattr("syngap.bench.streams.files.CACHE_BYTES", 2 * 3 * 4 * 4 - (not keep))
    files = ImageFiles(paths, (3, 4, 4))
    taken = files.take(torch.tensor([1, 0]))
    assert taken.flatten(1).float().mean(1).tolist() == [0, 255]
    taken.fill_(7)  # a copy: what is kept stays what it was
    Image.new("RGB", (4, 4), "black").save(paths[0])
    assert files.take(torch.tensor([0])).float().mean() == (255 if keep else 0)


def test_any_kind_of_image_becomes_rgb(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    for mode in ("RGB", "RGBA", "L", "LA", "1"):
        Image.new(mode, (4, 4), "white").save(path)
        files = ImageFiles([path], (3, 4, 4))
        assert files.take(torch.tensor([0])).float().mean() == 255
    palette = Image.new("P", (4, 4))
    palette.putpalette([255, 0, 0])
    palette.save(path, transparency=b"\x80")
    files = ImageFiles([path], (3, 4, 4))
    assert files.take(torch.tensor([0]))[0, :, 0, 0].tolist() == [255, 0, 0]
