"""A stream brings every sample as often as it says, one task after another, the same each time."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from helpers import assert_identical
from hypothesis import given
from hypothesis import strategies as st
from learning import numbered, numbers, parts, picture_tasks

from syngap.bench import streams
from syngap.bench.errors import UserError
from syngap.bench.streams import Batch, InMemory, Split, Stream, Tasks

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4)
seeds = st.integers(0, 5)
few = st.integers(1, 4)


def own(tasks: Tasks, task: int) -> list[int]:
    """The numbers of a task's training samples, in the order they are stored."""
    return (tasks.train.task == task).nonzero().flatten().tolist()


def passes(batches: list[Batch], length: int) -> list[list[int]]:
    """The numbers in these batches, cut after each `length`."""
    found = numbers(batches)
    return [found[start : start + length] for start in range(0, len(found), length)]


# What arrives, and when ---------------------------------------------------------------------------


@given(sizes=sizes, epochs=few, batch=few, seed=seeds)
def test_every_task_is_passed_over_as_often_as_asked_and_tasks_come_in_order(
    sizes: list[int], epochs: int, batch: int, seed: int
) -> None:
    tasks = numbered(sizes, shuffled=seed)
    stream = Stream(tasks, seed, epochs=epochs, batch=batch)
    for task, batches in enumerate(parts(stream)):
        members = own(tasks, task)
        each = passes(batches, len(members))
        assert len(each) == epochs
        assert all(sorted(one) == members for one in each)
    assert Counter(numbers(stream)) == dict.fromkeys(range(sum(sizes)), epochs)


@given(sizes=sizes, epochs=few, batch=few)
def test_a_batch_is_full_but_for_the_last_of_a_pass(
    sizes: list[int], epochs: int, batch: int
) -> None:
    stream = Stream(numbered(sizes), epochs=epochs, batch=batch, remainder="short")
    expected = [
        min(batch, size - start)
        for size in sizes
        for _ in range(epochs)
        for start in range(0, size, batch)
    ]
    assert [len(one.y) for one in stream] == expected
    steps = [epochs * len(range(0, size, batch)) for size in sizes]
    assert stream.ends == list(accumulate(steps))
    assert len(stream) == stream.ends[-1]
    assert stream.restarts == []


@given(sizes=sizes, epochs=few, batch=few)
def test_even_batches_of_a_pass_differ_by_one_sample_at_most(
    sizes: list[int], epochs: int, batch: int
) -> None:
    stream = Stream(numbered(sizes), epochs=epochs, batch=batch)
    short = Stream(numbered(sizes), epochs=epochs, batch=batch, remainder="short")
    assert stream.ends == short.ends  # in as many steps
    starts = iter([0, *accumulate(len(range(0, s, batch)) for s in sizes for _ in range(epochs))])
    start = next(starts)
    for end in starts:
        lengths = [len(stream[step].y) for step in range(start, end)]
        assert max(lengths) <= batch
        assert max(lengths) - min(lengths) <= 1
        # The same samples in the same order, cut elsewhere.
        passes = [torch.cat([s[k].y for k in range(start, end)]) for s in (stream, short)]
        assert torch.equal(*passes)
        start = end
    if any(size % batch and size > batch + 1 for size in sizes):
        assert stream.fingerprint() != short.fingerprint()


def test_samples_come_with_their_labels_as_they_are_stored() -> None:
    tasks = picture_tasks()
    where = {x.numpy().tobytes(): row for row, x in enumerate(tasks.train.samples.values)}
    for x, y in Stream(tasks, batch=5):
        assert x.dtype == torch.uint8
        assert y.dtype == torch.int64
        rows = [where[one.numpy().tobytes()] for one in x]
        assert tasks.train.labels[rows].tolist() == y.tolist()


@given(
    sizes=sizes,
    epochs=few,
    order=st.sampled_from(["shuffled", "frames"]),
    blur=st.sampled_from([0.0, 0.7]),
    how=st.sampled_from(["one task after another", "everything", "everything so far"]),
    random=st.randoms(use_true_random=False),
)
def test_a_step_brings_the_same_whenever_it_is_asked_for(
    sizes: list[int], epochs: int, order: Any, blur: float, how: Any, random: Any
) -> None:
    def stream() -> Stream:
        made = Stream(numbered(sizes), 3, epochs=epochs, batch=2, order=order, blur=blur)
        return made.present(how)

    in_order, asked = list(stream()), stream()
    steps = 2 * list(range(len(asked)))
    random.shuffle(steps)
    for step in steps:
        assert_identical(asked[step], in_order[step])


def test_seeds_change_the_order_and_only_the_order() -> None:
    orders = [numbers(Stream(numbered([20, 20]), seed)) for seed in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    for order in orders:
        assert order != list(range(40))
        assert sorted(order[:20]) == list(range(20))


def test_every_pass_has_an_order_of_its_own() -> None:
    first, second, third, *_ = passes(list(Stream(numbered([20, 20]), epochs=3)), 20)
    assert len({tuple(first), tuple(second), tuple(third)}) == 3


def test_every_order_is_as_likely_as_any_other() -> None:
    """Six orders of three samples, over many seeds."""
    tasks = numbered([3])
    found = Counter(tuple(numbers(Stream(tasks, seed))) for seed in range(600))
    assert len(found) == 6
    assert min(found.values()) > 60


@given(sizes=sizes, epochs=few, seed=seeds, blur=st.sampled_from([0.0, 0.5]))
def test_frames_come_in_the_order_they_are_stored(
    sizes: list[int], epochs: int, seed: int, blur: float
) -> None:
    tasks = numbered(sizes, shuffled=seed)
    stream = Stream(tasks, seed, epochs=epochs, batch=2, order="frames", blur=blur)
    for task, batches in enumerate(parts(stream)):
        each = passes(batches, len(numbers(batches)) // epochs)
        assert each == epochs * [sorted(each[0])]
        if not blur:
            assert each[0] == own(tasks, task)


def test_what_comes_first_does_not_depend_on_the_numbers_of_later_tasks() -> None:
    """The first sees to it that nothing of the future leaks into the past."""
    one, other = (
        Stream(picture_tasks(tasks=order), epochs=2, batch=3)
        for order in ((0, 0, 1, 1, 2, 2), (0, 0, 2, 3, 1, 1))
    )
    assert one.ends[0] == other.ends[0]
    for step in range(one.ends[0]):
        assert_identical(one[step], other[step])


# Blur ---------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    blur=st.floats(0, 1),
    epochs=st.integers(1, 2),
    seed=seeds,
)
def test_blur_moves_its_share_to_the_neighbours_and_loses_nothing(
    sizes: list[int], blur: float, epochs: int, seed: int
) -> None:
    tasks = numbered(sizes, shuffled=seed)
    stream = Stream(tasks, seed, blur=blur, epochs=epochs, batch=3)
    assert Counter(numbers(stream)) == dict.fromkeys(range(sum(sizes)), epochs)
    home = tasks.train.task.tolist()
    arrived = [Counter(home[n] for n in set(numbers(batches))) for batches in parts(stream)]
    assert len(arrived) == len(sizes)
    for task, size in enumerate(sizes):
        half = size * blur / 2
        for other, counts in enumerate(arrived):
            if abs(task - other) == 1:
                assert half - 1 < counts[task] <= half + 1e-9
            elif task != other:
                assert counts[task] == 0
    for batches in parts(stream):
        each = passes(batches, len(numbers(batches)) // epochs)
        assert all(sorted(one) == sorted(each[0]) for one in each)


def test_no_blur_is_no_blur() -> None:
    assert_identical(list(Stream(numbered([9, 9]), blur=0.0)), list(Stream(numbered([9, 9]))))


def test_who_moves_is_drawn_from_the_seed() -> None:
    def strangers(seed: int) -> tuple[int, ...]:
        stream = Stream(numbered([40, 40]), seed, blur=0.5)
        return tuple(sorted(number for number in numbers(parts(stream)[0]) if number >= 40))

    assert len({strangers(seed) for seed in range(4)}) == 4
    assert all(len(strangers(seed)) == 10 for seed in range(4))


def test_who_moves_is_drawn_for_each_task_alone() -> None:
    _, second, third = parts(Stream(numbered([40, 40, 40]), blur=0.5))
    onwards = [n for n in numbers(second) if n < 40], [n - 40 for n in numbers(third) if n < 80]
    assert set(onwards[0]) != set(onwards[1])


def test_both_neighbours_get_different_samples() -> None:
    stream = Stream(numbered([10, 10, 10]), blur=1.0)
    before, own, after = ({n for n in numbers(part) if 10 <= n < 20} for part in parts(stream))
    assert (len(before), len(own), len(after)) == (5, 0, 5)
    assert not before & after


# References ---------------------------------------------------------------------------------------


@given(sizes=sizes, epochs=few, batch=few, blur=st.sampled_from([0.0, 0.6]))
def test_everything_at_once_is_one_part_of_all_samples_mixed(
    sizes: list[int], epochs: int, batch: int, blur: float
) -> None:
    tasks, total = numbered(sizes), sum(sizes)
    joint = Stream(tasks, epochs=epochs, batch=batch, blur=blur).present("everything")
    each = passes(list(joint), total)
    assert len(each) == epochs
    assert all(sorted(one) == list(range(total)) for one in each)
    assert joint.ends == [len(joint)] == [epochs * len(range(0, total, batch))]
    assert joint.restarts == []


@given(sizes=sizes, epochs=few, batch=few)
def test_everything_so_far_begins_again_with_each_task(
    sizes: list[int], epochs: int, batch: int
) -> None:
    tasks = numbered(sizes, shuffled=0)
    stream = Stream(tasks, epochs=epochs, batch=batch).present("everything so far")
    assert stream.restarts == [0, *stream.ends[:-1]]
    assert len(stream.ends) == len(sizes)
    for task, batches in enumerate(parts(stream)):
        members = sorted(number for past in range(task + 1) for number in own(tasks, past))
        each = passes(batches, len(members))
        assert len(each) == epochs
        assert all(sorted(one) == members for one in each)


@pytest.mark.parametrize("how", ["everything", "everything so far"])
@pytest.mark.parametrize("order", ["shuffled", "frames"])
def test_references_mix_the_tasks(how: Any, order: Any) -> None:
    """Also those of a stream of frames."""
    stream = Stream(numbered([30, 30]), order=order, batch=20).present(how)
    for step in range(len(stream) - 3, len(stream)):
        assert set(stream[step].y.tolist()) == {0, 1}


def test_a_reference_leaves_the_stream_it_was_made_of_alone() -> None:
    stream = Stream(numbered([7, 5]), batch=2, order="frames")
    before, ends = list(stream), list(stream.ends)
    for how in ("everything", "everything so far"):
        other = stream.present(how)
        list(other)
        assert other.test is stream.test
        assert (other.tasks, other.classes, other.shape) == (2, 2, (1,))
        assert other.class_task is stream.class_task
        assert other.transform is stream.transform
    assert stream.present("one task after another") is stream
    assert_identical(list(stream), before)
    assert stream.ends == ends


# For whoever evaluates ----------------------------------------------------------------------------


def test_a_class_is_known_to_belong_to_the_task_that_has_it() -> None:
    tasks = picture_tasks(tasks=(2, 0, 1, 0, 1, 2))
    stream = Stream(tasks)
    assert stream.class_task is not None
    assert stream.class_task.tolist() == [2, 0, 1, 0, 1, 2]
    assert (stream.tasks, stream.classes, stream.shape) == (3, 6, (1, 8, 8))
    assert stream.test is tasks.test


def test_classes_of_a_domain_incremental_stream_belong_to_no_task() -> None:
    labels, task = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    split = Split(InMemory(torch.zeros(4, 1)), labels, task)
    assert Stream(Tasks(split, split, 2)).class_task is None


def test_a_class_that_never_comes_belongs_to_no_task() -> None:
    split = Split(InMemory(torch.zeros(2, 1)), torch.tensor([0, 2]), torch.tensor([0, 1]))
    found = Stream(Tasks(split, split, 4)).class_task
    assert found is not None
    assert found.tolist() == [0, -1, 1, -1]


def test_a_stream_on_another_device_is_the_same_stream() -> None:
    stream = Stream(picture_tasks(), batch=3)
    moved = stream.to(torch.device("meta"))
    assert (moved[0].x.device.type, moved[0].y.device.type) == ("meta", "meta")
    assert moved.test.samples.take(torch.tensor([0])).device.type == "meta"
    assert (moved.ends, len(moved)) == (stream.ends, len(stream))
    assert (stream[0].x.device.type, stream[0].y.device.type) == ("cpu", "cpu")
    assert_identical(list(stream.to(torch.device("cpu"))), list(stream))


@pytest.mark.parametrize(
    ("allowed", "asked", "expected"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_images_are_augmented_where_asked_and_where_the_data_set_allows(
    allowed: bool, asked: bool, expected: bool
) -> None:
    stream = Stream(picture_tasks(augments=allowed), augment=asked, batch=8)
    x = stream[0].x
    augmented = stream.transform(x, torch.Generator().manual_seed(0))
    assert (not torch.equal(augmented, stream.transform(x))) == expected
    torch.testing.assert_close(stream.transform(x), (x.double() / 255 - 0.5).float() / 0.25)


@pytest.mark.parametrize(("size", "largest"), [(8, 1), (16, 2), (32, 4)])
def test_images_are_shifted_by_an_eighth_of_their_width_at_most(size: int, largest: int) -> None:
    """A single white pixel in the middle tells how far."""
    x = torch.zeros(400, 1, size, size, dtype=torch.uint8)
    middle = size // 2
    x[:, :, middle, middle] = 1
    labels = torch.zeros(len(x), dtype=torch.int64)
    split = Split(InMemory(x), labels, labels)
    stream = Stream(Tasks(split, split, 1, augments=True))
    seen = stream.transform(x, torch.Generator().manual_seed(0))[:, 0].nonzero()
    assert len(seen) == len(x)
    assert (seen[:, 1] - middle).unique().tolist() == list(range(-largest, largest + 1))
    mirrored = size - 1 - middle
    columns = range(min(middle, mirrored) - largest, max(middle, mirrored) + largest + 1)
    assert seen[:, 2].unique().tolist() == list(columns)


# The first tasks alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["shuffled", "frames"])
def test_the_first_tasks_alone_come_as_they_would_with_the_others(order: Any) -> None:
    tasks = picture_tasks(tasks=(1, 0, 2, 0, 2, 1))
    whole = Stream(tasks, 3, batch=3, epochs=2, order=order)
    some = Stream(tasks, 3, batch=3, epochs=2, order=order, first=2)
    assert (some.tasks, some.classes, some.shape) == (2, 6, (1, 8, 8))
    assert some.ends == whole.ends[:2]
    for step in range(len(some)):
        assert_identical(some[step], whole[step])
    assert some.class_task is not None
    assert some.class_task.tolist() == [1, 0, -1, 0, -1, 1]
    assert set(some.test.labels.tolist()) == {0, 1, 3, 5}
    rows = (tasks.test.task < 2).nonzero().flatten()
    everything = torch.arange(len(rows))
    assert_identical(some.test.samples.take(everything), tasks.test.samples.take(rows))
    assert_identical(some.test.labels, tasks.test.labels[rows])
    assert (some.test.samples.shape, len(some.test.samples)) == ((1, 8, 8), len(rows))
    assert_identical(some.to(torch.device("cpu"))[0], whole[0])


def test_more_tasks_than_there_are_cannot_be_the_first() -> None:
    assert len(Stream(numbered([3, 3]), first=2)) == len(Stream(numbered([3, 3])))
    with pytest.raises(UserError, match=r"stream\.first: got 3; the stream has 2 tasks"):
        Stream(numbered([3, 3]), first=3)


# Errors -------------------------------------------------------------------------------------------


def test_steps_beyond_the_stream_are_refused() -> None:
    stream = Stream(numbered([3]), batch=2)
    for step in (-1, 2, 10):
        with pytest.raises(IndexError, match=f"step {step} of a stream of 2"):
            stream[step]


def test_samples_labels_and_tasks_are_equally_many() -> None:
    with pytest.raises(ValueError, match="3 samples, 2 labels and 1 task number"):
        Split(InMemory(torch.zeros(3, 1)), torch.zeros(2), torch.zeros(1))


def split(labels: list[int], task: list[int]) -> Split:
    samples = InMemory(torch.zeros(len(labels), 1))
    return Split(samples, torch.tensor(labels), torch.tensor(task, dtype=torch.int64))


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (([0, 1], [0, 2]), ([0, 1], [0, 2]), "task 2 of 3 has no training samples"),
        (([0, 1], [0, 1]), ([0], [0]), "task 2 of 2 has no test samples"),
        (([0], [0]), ([0, 1], [0, 1]), "task 2 of 2 has no training samples"),
        (([0, 5], [0, 1]), ([0, 1], [0, 1]), "labels run from 0 to 5, expected 0 to 1"),
        (([0, 1], [0, 1]), ([-1, 1], [0, 1]), "labels run from -1 to 1, expected 0 to 1"),
        (([0, 1, 1], [0, 1, -1]), ([0, 1], [0, 1]), "-1"),
        (([0, 1], [0, 1]), ([0, 1, 1], [0, 1, -1]), "-1"),
        (([], []), ([0], [0]), "no training samples"),
    ],
)
def test_tasks_without_samples_and_samples_without_tasks_are_refused(
    train: tuple[list[int], list[int]], test: tuple[list[int], list[int]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Tasks(split(*train), split(*test), classes=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blur": 2}, "stream.blur: got 2, expected a number between 0 and 1"),
        ({"batch": 0}, "stream.batch: got 0, expected a whole number ≥ 1"),
        ({"epochs": "many"}, 'stream.epochs: got "many", expected a whole number ≥ 1'),
        ({"remainder": "drop"}, 'stream.remainder: got "drop", expected one of "even", "short"'),
        ({"order": "sorted"}, 'stream.order: got "sorted", expected one of "shuffled", "frames"'),
        ({"augment": "maybe"}, 'stream.augment: got "maybe", expected true or false'),
        ({"bacth": 5}, 'stream.bacth: unknown option; did you mean "batch"?'),
        ({"tasks": 3}, "stream.tasks: 10 classes cannot be cut into 3 equal tasks; 2, 5, 10"),
    ],
)
def test_wrong_options_of_a_stream_are_met_at_the_door(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        streams.load("digits", **options)
    assert message in str(error.value)


def test_options_of_the_source_and_of_the_order_are_given_together() -> None:
    stream = streams.load("digits", seed=1, tasks=2, batch=7, epochs=2)
    assert stream.tasks == 2
    assert 6 <= len(stream[0].y) <= 7
    assert {"tasks", "batch", "epochs", "blur", "order", "augment"} <= set(
        streams.options("digits")
    )
    assert all(a < b for a, b in pairwise(stream.ends))
