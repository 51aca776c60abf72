"""CUDA graphs for a CPU, and a stream to try them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from learning import picture_tasks

from syngap.bench.methods import Method
from syngap.bench.streams import Stream
from syngap.bench.training.capture import _add, _growth, _numbers


class Rerun:
    """Graphs for a CPU: a replay computes all over again, but leaves no trace in Python's numbers.

    That is what a replayed CUDA graph does.
    """

    def __init__(self, method: Method, refuses: str = "") -> None:
        self.method, self.refuses = method, refuses
        self.captured = self.replayed = self.asides = 0

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        self.asides += 1
        yield

    def capture(
        self, step: Callable[[], None], generators: list[torch.Generator]
    ) -> Callable[[], None]:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.captured += 1
        first = True

        def replay() -> None:
            nonlocal first
            before = _numbers(self.method)
            step()
            if not first:
                self.replayed += 1
                for name, amount in _growth(before, _numbers(self.method)).items():
                    _add(self.method, name, -amount)
            first = False

        return replay


def stream(**options: Any) -> Stream:
    return Stream(picture_tasks(per_class=13), **{"epochs": 3, "batch": 4, "seed": 5, **options})
