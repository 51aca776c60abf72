import sys

import pytest
import torch
from refused import refused

from syngap.bench.streams.digits import digits
from syngap.bench.streams.tasks import InMemory, Tasks

pytest.importorskip("sklearn")


def images(tasks: Tasks) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(tasks.train.samples, InMemory)
    assert isinstance(tasks.test.samples, InMemory)
    return tasks.train.samples.values, tasks.test.samples.values


def test_all_digits_are_there_as_bytes_up_to_the_scale() -> None:
    tasks = digits(0, None)
    train, test = images(tasks)
    assert (len(train) + len(test), train.shape[1:]) == (1797, (1, 8, 8))
    assert train.dtype == torch.uint8
    assert int(train.max()) == tasks.pixels.scale == 16


def test_a_quarter_of_every_digit_is_held_out() -> None:
    tasks = digits(0, None)
    train, test = torch.bincount(tasks.train.labels), torch.bincount(tasks.test.labels)
    assert ((test / (train + test) - 0.25).abs() < 0.005).all()


def test_the_seed_moves_classes_but_not_the_split() -> None:
    one, again, other = digits(0, None), digits(0, None), digits(1, None)
    assert torch.equal(one.train.task, again.train.task)
    assert not torch.equal(one.train.task, other.train.task)
    assert all(torch.equal(a, b) for a, b in zip(images(one), images(other), strict=True))


def test_tasks_hold_equal_numbers_of_digits() -> None:
    for count in (1, 2, 5, 10):
        tasks = digits(0, None, tasks=count)
        assert tasks.count == count
        for k in range(count):
            assert tasks.test.labels[tasks.test.task == k].unique().numel() == 10 // count
    with refused("stream.tasks", "3", "2, 5, 10"):
        digits(0, None, tasks=3)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with refused("pip install scikit-learn"):
        digits(0, None)
