"""The path of a network that learns a stream: snapshots of it, and their loss on task 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from syngap.bench import seeds
from syngap.bench.landscapes.plane import Weights
from syngap.bench.methods import Learner, Method
from syngap.bench.metrics import Evaluation
from syngap.bench.streams import Stream
from syngap.bench.streams.stream import Batch
from syngap.bench.training import train

__all__ = ["TaskEvaluator", "Tell", "moments", "train_with_snapshots"]

_PER_TASK = 10  # networks kept of each task, its end included
_CHUNK = 1000  # samples that are evaluated at once

Tell: TypeAlias = Callable[[str, int, int], None]


def train_with_snapshots(
    stream: Stream, begin: Callable[[], Method], tell: Tell
) -> tuple[Learner, dict[int, dict[str, Tensor]]]:
    """Train on two tasks; return the learner, and the weights it had by step."""
    album = _Album(stream.ends, tell)

    def watched() -> Method:
        album.method = begin()
        return album.method

    method = train(stream, watched, album)
    return method.learner, album.kept


class _Album:
    """A journal that keeps the network now and then, and nothing else."""

    method: Method

    def __init__(self, ends: list[int], tell: Tell) -> None:
        self.kept: dict[int, dict[str, Tensor]] = {}
        self._steps, self._last, self._tell = moments(ends), ends[-1], tell

    def load(self) -> None:
        return None

    def record(self, evaluation: Evaluation, summary: Mapping[str, float]) -> None:
        if evaluation.step == 0:
            self.advance(0)

    def advance(self, step: int) -> bool:
        self._tell("learning", step, self._last)
        if step in self._steps:
            state = self.method.learner.evaluated_model.state_dict()
            self.kept[step] = {name: value.clone() for name, value in state.items()}
        return False

    def save(self, state: dict[str, Any]) -> None:
        pass


def moments(ends: list[int]) -> set[int]:
    """Return when to look: more often where a task begins, because there the network moves most.

    Examples:
        >>> sorted(moments([100, 120]))
        [0, 1, 4, 9, 16, 25, 36, 49, 64, 81, 100, 101, 102, 103, 105, 107, 110, 113, 116, 120]
    """
    starts = [0, *ends[:-1]]
    shares = [(part / _PER_TASK) ** 2 for part in range(1, _PER_TASK + 1)]
    return {0} | {
        start + round(share * (end - start))
        for start, end in zip(starts, ends, strict=True)
        for share in shares
    }


class TaskEvaluator:
    """Mean loss and accuracy of weights on some samples of task 1, the same for every method.

    They are the training samples as the stream gives them: stored, un-augmented.
    """

    def __init__(
        self, learner: Learner, stream: Stream, epochs: int, seed: int, samples: int
    ) -> None:
        self._learner, self.device = learner, learner.device
        self._model = learner.evaluated_model.state_dict()  # writing to these writes to the network
        x, y = [], []
        once = stream.ends[0] // epochs
        chance = seeds.generator(seed, "landscape")
        for step in torch.randperm(once, generator=chance).tolist():
            batch = stream[step]
            if stream.class_task is not None:  # a blurred stream brings samples of task 2 as well
                ours = (stream.class_task[batch.y.cpu()] == 0).to(batch.y.device)
                batch = Batch(batch.x[ours], batch.y[ours])
            x.append(batch.x)
            y.append(batch.y)
            if sum(map(len, y)) >= samples:
                break
        self._x, self._y = torch.cat(x)[:samples], torch.cat(y)[:samples].to(learner.device)

    def __len__(self) -> int:
        return len(self._y)

    @torch.no_grad()
    def __call__(self, weights: Weights) -> Tensor:
        """Return (loss, accuracy in percent) as a tensor where the network is: nothing waits."""
        for name, value in weights.items():
            self._model[name].copy_(value)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for start in range(0, len(self), _CHUNK):
            x, y = self._x[start : start + _CHUNK], self._y[start : start + _CHUNK]
            logits = self._learner.evaluate(x)
            right = (logits.argmax(1) == y).sum()
            sums += torch.stack([cross_entropy(logits, y, reduction="sum"), 100.0 * right])
        return sums / len(self)
