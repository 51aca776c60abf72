"""Labelled samples and the task that each belongs to: what a stream is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from syngap.bench.errors import UserError
from syngap.bench.seeds import generator
from syngap.messages import count_of

__all__ = [
    "InMemory",
    "Pixels",
    "Samples",
    "Split",
    "Subset",
    "Tasks",
    "by_class",
    "permuted_groups",
]


class Samples(Protocol):
    """Inputs as they are stored: un-augmented, images as uint8 (channels, height, width)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        ...

    def __len__(self) -> int: ...

    def take(self, index: Tensor) -> Tensor:
        """Return the samples at `index` (a 1-D CPU tensor) as one tensor."""
        ...

    def to(self, device: torch.device) -> Samples:
        """Return the same samples nearer to `device`, or themselves where that is no gain."""
        ...


class InMemory:
    """Samples that fit: one tensor.

    Examples:
        >>> InMemory(torch.arange(6).reshape(3, 2)).take(torch.tensor([2, 0]))
        tensor([[4, 5],
                [0, 1]])
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.values.shape[1:])

    def __len__(self) -> int:
        return len(self.values)

    def take(self, index: Tensor) -> Tensor:
        """Return the samples at `index`, where the values are."""
        # On a CPU this takes a third of the time of `values[index]`.
        return self.values.index_select(0, index.to(self.values.device, non_blocking=True))

    def to(self, device: torch.device) -> InMemory:
        """Return the same samples on `device`."""
        return InMemory(self.values.to(device))


class Subset:
    """Some of other samples, in an order of their own; nothing is copied.

    Examples:
        >>> few = Subset(InMemory(torch.arange(10)), torch.tensor([7, 3]))
        >>> len(few), few.take(torch.tensor([1]))
        (2, tensor([3]))
    """

    def __init__(self, samples: Samples, index: Tensor) -> None:
        self._samples, self._index = samples, index

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self._samples.shape

    def __len__(self) -> int:
        return len(self._index)

    def take(self, index: Tensor) -> Tensor:
        """Return the samples at `index` of these."""
        return self._samples.take(self._index[index])

    def to(self, device: torch.device) -> Subset:
        """Return the same with the samples near `device`."""
        return Subset(self._samples.to(device), self._index)


@dataclass(frozen=True)
class Split:
    """Samples with their labels and tasks, the two as int64 tensors on the CPU."""

    samples: Samples
    labels: Tensor
    task: Tensor

    def __post_init__(self) -> None:
        if not len(self.samples) == len(self.labels) == len(self.task):
            raise ValueError(
                f"{count_of(len(self.samples), 'sample')}, {count_of(len(self.labels), 'label')} "
                f"and {count_of(len(self.task), 'task number')}"
            )

    def to(self, device: torch.device) -> Split:
        """Return the same with the samples near `device`."""
        return replace(self, samples=self.samples.to(device))

    def first(self, tasks: int) -> Split:
        """Return the samples of the first `tasks` tasks."""
        return self.only(self.task < tasks)

    def only(self, mask: Tensor) -> Split:
        """Return the samples where the boolean `mask` is true."""
        index = mask.nonzero().flatten()
        return Split(Subset(self.samples, index), self.labels[index], self.task[index])


@dataclass(frozen=True)
class Pixels:
    """Scaling of stored values to network inputs: (x / scale - mean) / std, by channel."""

    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Tasks:
    """A data set in tasks 0, 1, ...

    Args:
        train: the training samples.
        test: the test samples; every task has some of both.
        classes: the number of the head's outputs.
        pixels: how values are scaled.
        augments: whether shifted and mirrored images are still images of the same thing.
    """

    train: Split
    test: Split
    classes: int
    pixels: Pixels = Pixels()
    augments: bool = False

    def __post_init__(self) -> None:
        splits = (("training", self.train), ("test", self.test))
        for name, split in splits:
            if not len(split.task):
                raise UserError(f"there are no {name} samples")
            if (lowest := int(split.task.min())) < 0:
                raise UserError(f"some {name} samples have task {lowest}; tasks count from 0")
        for name, split in splits:
            missing = (torch.bincount(split.task, minlength=self.count) == 0).nonzero()
            if len(missing):
                first = int(missing[0]) + 1
                raise UserError(f"task {first} of {self.count} has no {name} samples")
            low, high = int(split.labels.min()), int(split.labels.max())
            if low < 0 or high >= self.classes:
                raise UserError(
                    f"labels run from {low} to {high}, expected 0 to {self.classes - 1}"
                )

    @property
    def count(self) -> int:
        """How many tasks there are."""
        return int(max(self.train.task.max(), self.test.task.max())) + 1

    def first(self, tasks: int) -> Tasks:
        """Return the first tasks alone; the head keeps its size."""
        if tasks > self.count:
            raise UserError(
                f"stream.first: got {tasks}; the stream has {count_of(self.count, 'task')}"
            )
        return replace(self, train=self.train.first(tasks), test=self.test.first(tasks))

    def validation_tasks(self, share: float) -> Tasks:
        """Return tasks that test on `share` of the training samples, for choosing hyper-parameters.

        They are the last of every class in every task, in the order they are stored and rounded to
        at least one: the same whatever the seed, and neighbouring frames of a video stay together.
        The test samples are not used.

        Examples:
            >>> labels, task = torch.tensor([0, 1, 0, 1, 0, 0]), torch.zeros(6, dtype=torch.long)
            >>> split = Split(InMemory(torch.arange(6)), labels, task)
            >>> half = Tasks(split, split, classes=2).validation_tasks(0.5)
            >>> half.train.samples.take(torch.arange(3)), half.test.samples.take(torch.arange(3))
            (tensor([0, 1, 2]), tensor([3, 4, 5]))
        """
        held_out = torch.zeros(len(self.train.task), dtype=torch.bool)
        pairs = torch.stack([self.train.task, self.train.labels], dim=1)
        for pair in torch.unique(pairs, dim=0):
            members = (pairs == pair).all(dim=1).nonzero().flatten()
            count = max(round(len(members) * share), 1)
            if count == len(members):
                raise UserError(
                    f"stream.validation: {share} would leave nothing to learn from of class "
                    f"{pair[1]} in task {pair[0] + 1}, which has "
                    f"{count_of(count, 'training sample')}"
                )
            held_out[members[-count:]] = True
        return replace(self, train=self.train.only(~held_out), test=self.train.only(held_out))


def by_class(labels: Tensor, groups: Sequence[Sequence[int]]) -> Tensor:
    """Return the task of each sample where task k holds the classes `groups[k]`.

    Examples:
        >>> by_class(torch.tensor([2, 0, 1]), [[0, 2], [1]])
        tensor([0, 0, 1])
    """
    task = torch.full((max(max(group) for group in groups) + 1,), -1)
    for number, group in enumerate(groups):
        task[torch.as_tensor(group)] = number
    return task[labels]


def permuted_groups(classes: int, tasks: int, seed: int) -> list[list[int]]:
    """Return `classes` in an order drawn from `seed`, cut into `tasks` groups of equal size."""
    if classes % tasks:
        fitting = ", ".join(str(n) for n in range(2, classes + 1) if classes % n == 0)
        raise UserError(
            f"stream.tasks: {count_of(classes, 'class')} cannot be cut into "
            f"{count_of(tasks, 'equal task')}; "
            f"{fitting} would do"
        )
    order = torch.randperm(classes, generator=generator(seed, "classes")).tolist()
    size = classes // tasks
    return [order[start : start + size] for start in range(0, classes, size)]
