"""CORe50, New Classes (Lomonaco & Maltoni 2017): 50 objects before a camera, in 11 sessions."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from syngap.bench.errors import UserError
from syngap.bench.options import shown
from syngap.bench.seeds import generator
from syngap.bench.streams import places
from syngap.bench.streams.files import ImageFiles
from syngap.bench.streams.tasks import Pixels, Split, Tasks, by_class

__all__ = ["Frames", "core50", "parse_frames", "steps"]

OBJECTS, FRAMES = 50, 164_866
TEST_SESSIONS = (3, 7, 10)
EVERY = 4  # of the split by frame, close to the official share of 3 sessions in 11
# Those of ImageNet, as others normalise CORe50.
PIXELS = Pixels(255.0, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))

FIRST = tuple(range(1, 51, 5))
LATER = tuple(tuple(range(first, first + 25, 5)) for o in (2, 3, 4, 5) for first in (o, o + 25))

_PATH = re.compile(r"s(\d{1,2})/o(\d{1,2})/C_(\d\d)_(\d\d)_(\d{3})\.png")


class Frames(NamedTuple):
    """The fields in frames' names, one value a frame: int64 tensors."""

    label: Tensor
    session: Tensor
    frame: Tensor
    task: Tensor

    def test_mask(self, split: Literal["sessions", "frames"]) -> Tensor:
        """Return a boolean mask of the frames held out for testing."""
        if split == "sessions":
            return torch.isin(self.session, torch.tensor(TEST_SESSIONS))
        return self.frame % EVERY == EVERY - 1


def core50(
    seed: int,
    data: Path | None,
    *,
    size: Literal[128, 32] = 128,
    split: Literal["sessions", "frames"] = "sessions",
) -> Tasks:
    """Return CORe50 in nine tasks of new objects: ten at first, then five at a time.

    Test frames belong to the task that brings their object. Images are read when they are needed.

    Args:
        seed: of the order of the eight later tasks; the first is always the same.
        data: the folder with core50_128x128 or core50_32x32.
        size: of an image.
        split: "sessions": the official one, sessions 3, 7 and 10 are for testing.
            "frames": not official: every fourth frame of every session is for testing, so each test
            frame has near copies among the training frames and accuracies are far higher. For
            comparison with papers that split so.
    """
    root = places.find(data, [f"core50_{size}x{size}"], f"syngap data core50 --size {size}")
    names = _find_frames(root)
    frames = parse_frames(names, seed)
    test = frames.test_mask(split)
    _check_complete(frames, test, root, split, steps(seed))
    shape = (3, size, size)

    def part(chosen: Tensor) -> Split:
        index = chosen.nonzero().flatten()
        paths = [root / names[number] for number in index.tolist()]
        return Split(ImageFiles(paths, shape), frames.label[index], frames.task[index])

    return Tasks(part(~test), part(test), OBJECTS, PIXELS, augments=True)


def steps(seed: int) -> list[tuple[int, ...]]:
    """Return the objects (1 to 50) that each task brings.

    Examples:
        >>> steps(0)[0], len(steps(0)), steps(0)[1:] == steps(1)[1:]
        ((1, 6, 11, 16, 21, 26, 31, 36, 41, 46), 9, False)
    """
    order = torch.randperm(len(LATER), generator=generator(seed, "classes")).tolist()
    return [FIRST, *(LATER[number] for number in order)]


def parse_frames(paths: Iterable[str], seed: int) -> Frames:
    """Parse the official relative paths of frames.

    A line of an official file list, the path and its label, will do as well.

    Examples:
        >>> parse_frames(["s11/o6/C_11_06_042.png 5"], seed=0)._asdict()
        {'label': tensor([5]), 'session': tensor([11]), 'frame': tensor([42]), 'task': tensor([0])}
    """
    rows = []
    for path in paths:
        match = _PATH.fullmatch(path.partition(" ")[0])
        if not match:
            raise UserError(
                f"{shown(path)} is not named like a frame of CORe50, s1/o2/C_01_02_003.png"
            )
        session, thing, again, thing_again, frame = map(int, match.groups())
        if (session, thing) != (again, thing_again) or not 1 <= thing <= OBJECTS:
            raise UserError(f"{shown(path)}: not the session and object that its folder says")
        rows.append((thing - 1, session, frame))
    label, session_, frame_ = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).unbind(1)
    task = by_class(label, [[thing - 1 for thing in group] for group in steps(seed)])
    return Frames(label, session_, frame_, task)


def _find_frames(root: Path) -> list[str]:
    """Return the frames beneath `root`, session by session, object by object, in time."""
    found = [f"{p.parts[-3]}/{p.parts[-2]}/{p.name}" for p in root.glob("s*/o*/C_*.png")]
    if not found:
        raise UserError(f"{root} has no frames s1/o1/C_01_01_000.png; is it CORe50's folder?")
    return sorted(found, key=lambda name: name.rpartition("/")[2])


def _check_complete(
    frames: Frames, test: Tensor, root: Path, split: str, groups: list[tuple[int, ...]]
) -> None:
    total = len(frames.label)
    lacking = []
    for number, objects in enumerate(groups):
        own = frames.task == number
        for name, chosen in (("training", ~test), ("test", test)):
            if not (own & chosen).any():
                lacking.append(f"no {name} frame of objects {', '.join(map(str, objects))}")
    if lacking:
        raise UserError(
            f'{root} holds {total} of {FRAMES} frames, and for the split by "{split}" '
            f"{'; '.join(lacking)}"
        )
    if total < FRAMES:
        warnings.warn(
            f"{root} holds {total} of {FRAMES} frames: results will not be CORe50's", stacklevel=3
        )
