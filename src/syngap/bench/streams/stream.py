"""A stream: batches in the order they arrive, and test samples."""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_right
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from syngap.bench.errors import UserError
from syngap.bench.options import Count, Share
from syngap.bench.seeds import generator
from syngap.bench.streams.tasks import Split, Tasks
from syngap.bench.streams.transform import Transform
from syngap.messages import count_of

__all__ = ["Batch", "Presentation", "Stream"]

Presentation: TypeAlias = Literal["one task after another", "everything", "everything so far"]


_PASSES = 1_000_000


class Batch(NamedTuple):
    """Stored samples and their labels, without the task."""

    x: Tensor
    y: Tensor


class Stream:
    """The training samples of `tasks`, one task after the other, as a sequence of batches.

    `stream[step]` is always the same batch, so a run can resume at any step. Training uses batches
    alone; `ends`, `test` and `class_task` are for evaluation.

    Args:
        tasks: samples, labels and the task of each.
        seed: of the order of samples.
        epochs: passes over each task before the next begins; 1 is the online setting.
        batch: samples that arrive together, at most.
        remainder: what is done where a pass is not a whole number of batches: "even" makes all its
            batches alike, give or take one sample; "short" fills all but the last, which is what
            data loaders do, and leaves a few noisy samples for the step before an evaluation.
        blur: share of a task's samples that arrive during its neighbours instead, half in each.
        order: "shuffled" within the task, or "frames" as they were stored (video).
        augment: shift and mirror images while training, where the data set allows it.
        first: learn only so many tasks and test on those; None is all.
        validation: share of the training samples of every class that is kept out of training and
            tested on in place of the test samples; for choosing hyper-parameters.

    Examples:
        >>> from syngap.bench.streams.arrays import arrays
        >>> x, y = torch.arange(8.0).reshape(8, 1), torch.arange(8) % 4
        >>> stream = Stream(arrays(x, y, x, y, tasks=2), seed=0, batch=2)
        >>> len(stream), stream.ends
        (4, [2, 4])
        >>> stream[0].y.shape
        torch.Size([2])
    """

    def __init__(
        self,
        tasks: Tasks,
        seed: int = 0,
        *,
        epochs: Count = 1,
        batch: Count = 10,
        remainder: Literal["even", "short"] = "even",
        blur: Share = 0.0,
        order: Literal["shuffled", "frames"] = "shuffled",
        augment: bool = True,
        first: Count | None = None,
        validation: Share = 0.0,
    ) -> None:
        tasks = tasks.first(first) if first else tasks
        tasks = tasks.validation_tasks(validation) if validation else tasks
        self.classes, self.shape, self.tasks = tasks.classes, tasks.train.samples.shape, tasks.count
        self.test: Split = tasks.test
        self.class_task = _class_task(tasks)
        pad = self.shape[-1] // 8 if len(self.shape) == 3 else 0
        self.transform = Transform(tasks.pixels, augment and tasks.augments, pad=pad)
        self._train, self._seed, self._batch = tasks.train, seed, batch
        self._epochs, self._order, self._even = epochs, order, remainder == "even"
        self._device = torch.device("cpu")
        if epochs * tasks.count > _PASSES:
            raise UserError(
                f"stream.epochs: got {epochs}, expected at most {_PASSES // tasks.count} with "
                f"{count_of(tasks.count, 'task')}; a stream plans {_PASSES} passes"
            )
        own = [(tasks.train.task == task).nonzero().flatten() for task in range(self.tasks)]
        self._arrange(_blur(own, blur, seed))

    def _arrange(self, parts: list[Tensor], restarts: bool = False) -> None:
        """Set which samples arrive in which part of the stream, each for `epochs` passes."""
        self._parts = parts
        passes = [-(-len(part) // self._batch) for part in parts for _ in range(self._epochs)]
        self._starts = [0, *accumulate(passes)]  # the first step of each pass, and the end
        self.ends = self._starts[self._epochs :: self._epochs]
        self.restarts = self._starts[: -1 : self._epochs] if restarts else []
        self._pass: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, step: int) -> Batch:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of a stream of {len(self)}")
        number = bisect_right(self._starts, step) - 1
        members, place = self._pass_order(number), step - self._starts[number]
        if self._even:
            count, steps = len(members), self._starts[number + 1] - self._starts[number]
            index = members[place * count // steps : (place + 1) * count // steps]
        else:
            index = members[place * self._batch : (place + 1) * self._batch]
        x, y = self._train.samples.take(index), self._train.labels.index_select(0, index)
        # Blocking, these would wait until the GPU has done all steps so far.
        return Batch(x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True))

    def to(self, device: torch.device) -> Stream:
        """Return the same stream with batches on `device`, and its samples near it."""
        moved = copy.copy(self)
        moved._device = device
        moved._train, moved.test = self._train.to(device), self.test.to(device)
        return moved

    def sample_bytes(self) -> int:
        """Return how many bytes one stored sample has."""
        one = self._train.samples.take(torch.tensor([0]))
        return one.numel() * one.element_size()

    def fingerprint(self) -> str:
        """Return a hash of the labels, tasks and length of the stream."""
        digest = hashlib.sha256(repr((self.shape, self.classes, self._starts, self._even)).encode())
        for split in (self._train, self.test):
            digest.update(split.labels.numpy().tobytes())
            digest.update(split.task.numpy().tobytes())
        return digest.hexdigest()

    def present(self, how: Presentation) -> Stream:
        """Return the same samples all at once, or all so far with a fresh start a task.

        Both are references, not methods of learning from a stream: "everything" is joint training;
        "everything so far" trains anew on tasks 0..k for every k (`restarts` are the steps at which
        that begins).
        """
        if how == "one task after another":
            return self
        other = copy.copy(self)
        other._order = "shuffled"
        if how == "everything":
            other._arrange([torch.cat(self._parts)])
        else:
            so_far = [torch.cat(self._parts[: k + 1]) for k in range(len(self._parts))]
            other._arrange(so_far, restarts=True)
        return other

    def _pass_order(self, number: int) -> Tensor:
        if self._pass is None or self._pass[0] != number:
            members = self._parts[number // self._epochs]
            if self._order == "shuffled":
                chance = generator(self._seed, f"order/{number}")
                members = members[torch.randperm(len(members), generator=chance)]
            self._pass = (number, members)
        return self._pass[1]


def _blur(parts: list[Tensor], blur: float, seed: int) -> list[Tensor]:
    """Let `blur / 2` of every part arrive with each of its neighbours."""
    arriving: list[list[Tensor]] = [[] for _ in parts]
    for task, members in enumerate(parts):
        leaving = int(len(members) * blur / 2)
        chance = generator(seed, f"blur/{task}")
        mixed = members[torch.randperm(len(members), generator=chance)] if leaving else members
        before, after, staying = mixed[:leaving], mixed[leaving : 2 * leaving], mixed[2 * leaving :]
        arriving[max(task - 1, 0)].append(before)
        arriving[task].append(staying)
        arriving[min(task + 1, len(parts) - 1)].append(after)
    return [torch.cat(pieces).sort().values for pieces in arriving]


def _class_task(tasks: Tasks) -> Tensor | None:
    """Return the task of every class, or None where a class comes in more than one."""
    pairs = torch.unique(torch.stack([tasks.train.labels, tasks.train.task], dim=1), dim=0)
    if len(pairs) != len(torch.unique(pairs[:, 0])):
        return None
    task = torch.full((tasks.classes,), -1)
    task[pairs[:, 0]] = pairs[:, 1]
    return task
