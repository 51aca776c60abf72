"""Snapshots of a network that learns a stream: at the start, now and then, and at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from syngap.bench.methods import Learner, Method
from syngap.bench.metrics import Evaluation
from syngap.bench.streams import Stream
from syngap.bench.training import train

__all__ = ["Tell", "moments", "train_with_snapshots"]

_PER_TASK = 10  # networks kept of each task, its end included

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
