"""What is kept out of training to choose by: a share of every class, and never a test sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learning import numbers
from PIL import Image
from refused import refused

from syngap.bench import streams
from syngap.bench.streams import InMemory, Samples, Split, Stream, Tasks
from syngap.bench.streams import folder as module
from syngap.bench.streams.files import ImageFiles
from syngap.bench.streams.folder import folder

Pairs = list[tuple[int, int]]


def tasks_of(pairs: Pairs) -> Tasks:
    """A training sample for each (task, class), whose value is its number; tests are negative."""
    task, labels = (torch.tensor(column) for column in zip(*pairs, strict=True))
    values = torch.arange(len(pairs), dtype=torch.float32)[:, None]
    train = Split(InMemory(values), labels, task)
    return Tasks(train, Split(InMemory(-1 - values), labels, task), classes=9)


def values(split: Split) -> list[int]:
    return [int(value) for value in split.samples.take(torch.arange(len(split.labels)))]


MIXED: Pairs = [(number % 2, number % 2 * 3 + number % 3) for number in range(120)]


@pytest.mark.parametrize(("share", "each"), [(0.1, 2), (0.25, 5), (0.001, 1), (0.5, 10)])
def test_every_class_gives_its_share_and_nothing_is_lost(share: float, each: int) -> None:
    tasks = tasks_of(MIXED)
    stream = Stream(tasks, validation=share)
    kept = values(stream.test)
    assert torch.bincount(stream.test.labels).tolist() == 6 * [each]
    assert sorted(kept + numbers(stream)) == list(range(120))
    assert [tuple(MIXED[number]) for number in kept] == [
        *zip(stream.test.task.tolist(), stream.test.labels.tolist(), strict=True)
    ]


def test_a_class_that_comes_in_two_tasks_gives_its_share_in_each() -> None:
    """As superclasses do."""
    stream = Stream(tasks_of([(task, 0) for task in (0, 0, 0, 0, 1, 1)]), validation=0.5)
    assert values(stream.test) == [2, 3, 5]
    assert stream.test.task.tolist() == [0, 0, 1]


@given(st.integers(0, 9), st.sampled_from(["shuffled", "frames"]))
def test_what_is_kept_depends_on_the_data_alone(seed: int, order: Any) -> None:
    """The last of each class, so that neighbouring frames stay together."""
    stream = Stream(tasks_of(MIXED), seed, order=order, epochs=2, validation=0.1)
    assert values(stream.test) == list(range(108, 120))


def test_the_first_tasks_keep_what_they_would_with_the_others() -> None:
    whole = Stream(tasks_of(MIXED), validation=0.1)
    first = Stream(tasks_of(MIXED), validation=0.1, first=1)
    assert values(first.test) == [value for value in values(whole.test) if MIXED[value][0] == 0]
    assert set(numbers(first)) == {n for n in numbers(whole) if MIXED[n][0] == 0}


def test_however_the_samples_are_presented_none_that_is_kept_arrives() -> None:
    kept = set(range(108, 120))
    for how in ("one task after another", "everything", "everything so far"):
        stream = Stream(tasks_of(MIXED), validation=0.1, blur=0.5).present(how)  # type: ignore[arg-type]
        assert set(numbers(stream)) == set(range(120)) - kept
        assert set(values(stream.to(torch.device("cpu")).test)) == kept


def test_another_share_is_another_stream() -> None:
    prints = {Stream(tasks_of(MIXED), validation=v).fingerprint() for v in (0.0, 0.1, 0.2)}
    assert len(prints) == 3
    plain = Stream(tasks_of(MIXED))
    assert plain.fingerprint() == Stream(tasks_of(MIXED), validation=0.0).fingerprint()
    assert values(plain.test) == [-1 - number for number in range(120)]


class Files:
    """Samples that note which of them were read."""

    shape = (1,)

    def __init__(self, count: int) -> None:
        self.count, self.read = count, set[int]()

    def __len__(self) -> int:
        return self.count

    def take(self, index: torch.Tensor) -> torch.Tensor:
        self.read |= {*index.tolist()}
        return index.float()[:, None]

    def to(self, device: torch.device) -> Samples:
        return self


def test_test_samples_are_not_even_read() -> None:
    files, hidden = Files(40), Files(40)
    labels = torch.arange(40) % 4
    task = labels // 2
    tasks = Tasks(Split(files, labels, task), Split(hidden, labels, task), classes=4)
    stream = Stream(tasks, validation=0.2)
    learned = {int(value) for batch in stream for value in batch.x}
    assert files.read == learned == set(range(32))
    assert values(stream.test) == list(range(32, 40))
    assert not hidden.read


def test_images_in_files_are_kept_apart_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMORY_BYTES", 0)
    for label in range(2):
        for number in range(8):
            (tmp_path / f"c{label}").mkdir(exist_ok=True)
            Image.new("RGB", (8, 8), (label, number, 0)).save(tmp_path / f"c{label}/{number}.png")
    tasks = folder(0, tmp_path, path=".", tasks=2)
    assert isinstance(tasks.train.samples, ImageFiles)
    stream = Stream(tasks, validation=0.34, batch=1)
    learned = {tuple(int(v) for v in batch.x[0, :2, 0, 0]) for batch in stream}
    kept = stream.test.samples.take(torch.arange(len(stream.test.labels)))
    assert {tuple(int(v) for v in image[:2, 0, 0]) for image in kept}.isdisjoint(learned)
    assert (len(learned), len(kept)) == (8, 4)


def test_a_share_that_leaves_nothing_to_learn_from_is_refused() -> None:
    tasks = tasks_of([*[(0, 0)] * 20, *[(1, 3)] * 4])
    with refused("stream.validation: 0.9", "class 3", "task 2", "4 training samples"):
        Stream(tasks, validation=0.9)
    with refused("stream.validation: 1.0", "class 0", "task 1"):
        Stream(tasks, validation=1.0)


def test_every_source_has_it() -> None:
    stream, whole = streams.load("digits", validation=0.25), streams.load("digits")
    assert "validation" in streams.options("core50")
    assert len(stream.test.labels) == pytest.approx(0.25 * 1347, abs=5)
    assert len(stream) < len(whole)
    with refused("stream.validation", "got 2", "between 0 and 1"):
        streams.load("digits", validation=2)
