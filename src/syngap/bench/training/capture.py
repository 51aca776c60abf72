"""Training steps as CUDA graphs, which the GPU replays without waiting for Python.

The first steps with batches of a shape run eagerly, until all is compiled that will be. One is then
recorded: what the CPU decides in it goes onto a tape (`bench.tape`). The next is captured, and from
then on the CPU makes its decisions and the GPU replays the rest. A method's author writes none of
this. A step that cannot be captured runs eagerly, and a warning says why.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from syngap.bench.memory import Memory
from syngap.bench.methods.method import Method
from syngap.bench.streams.stream import Batch
from syngap.bench.tape import Tape, play, record
from syngap.protection.captured import recording

__all__ = ["CapturedMethod", "CudaGraphs", "Graphs"]

_WARM = 3  # steps of a shape until libraries have chosen their kernels and optimizers have states

Replay = Callable[[], None]


class Graphs(Protocol):
    """Captures steps."""

    def side_stream(self) -> Any:
        """Return a context for steps that run eagerly."""
        ...

    def capture(self, step: Callable[[], None], generators: list[torch.Generator]) -> Replay:
        """Run the Python code of `step` once and return a function that runs its kernels."""
        ...


class CudaGraphs:
    """Captures on a CUDA stream of its own, as CUDA demands; all graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Run on that stream, in order with the work before and after."""
        outside = torch.cuda.current_stream()
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)

    def capture(self, step: Callable[[], None], generators: list[torch.Generator]) -> Replay:
        """Return the graph of `step`."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        try:
            with recording(graph, pool=self._pool, stream=self._stream):
                step()
        except BaseException:
            with suppress(RuntimeError):  # the first error is the one that says why
                self._release(generators)
            raise
        replay: Replay = graph.replay
        return replay

    def _release(self, generators: list[torch.Generator]) -> None:
        """Let generators draw again: after a capture that failed they wait for its end.

        A capture that succeeds ends it for them.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            with recording(graph, stream=self._stream):
                pass


@dataclass
class _Recording:
    batch: Batch  # where the graph reads samples from
    tape: Tape
    growth: dict[str, float]  # by how much each number that Python keeps grew in one step
    replay: Replay | None = None
    is_checked: bool = False


class CapturedMethod:
    """A method whose `learn` is replayed from CUDA graphs where possible.

    Args:
        method: its `learn` is captured, one graph for each shape of batch and each `phase`.
        graphs: captures the steps.

    Attributes:
        failure: why steps are no longer captured, "" while they are.
    """

    def __init__(self, method: Method, graphs: Graphs) -> None:
        self.failure = ""
        self._method, self._graphs = method, graphs
        self._step_counts: Counter[Hashable] = Counter()
        self._recordings: dict[Hashable, _Recording] = {}

    def learn(self, batch: Batch) -> None:
        """Learn from one batch, as `method.learn` would."""
        if self.failure:
            self._method.learn(batch)
            return
        if self._method.must_run_eagerly():
            with self._graphs.side_stream():
                self._method.learn(batch)
            return
        key = (batch.x.shape, batch.x.dtype, batch.y.shape, self._method.phase())
        self._step_counts[key] += 1
        if key in self._recordings:
            self._replay(self._recordings[key], batch)
        elif self._step_counts[key] <= _WARM:
            with self._graphs.side_stream():
                self._method.learn(batch)
        else:
            before = self._method.learner.preparations
            recording = self._record(batch)
            if self._method.learner.preparations == before:  # all of it is compiled that will be
                self._recordings[key] = recording

    def _record(self, batch: Batch) -> _Recording:
        """Learn from a batch and record the CPU's decisions on a tape."""
        own, tape = Batch(batch.x.clone(), batch.y.clone()), Tape()
        before = _numbers(self._method)
        with self._graphs.side_stream(), record(tape):
            self._method.learn(own)
        return _Recording(own, tape, _growth(before, _numbers(self._method)))

    def _replay(self, step: _Recording, batch: Batch) -> None:
        step.batch.x.copy_(batch.x)
        step.batch.y.copy_(batch.y)
        before = {} if step.is_checked else _numbers(self._method)
        decisions = step.tape.make_again()
        if not step.tape.fits(decisions):  # a memory with fewer samples than a draw takes
            with self._graphs.side_stream(), play(decisions):
                self._method.learn(batch)
            return
        step.tape.put(decisions)
        if step.replay is None:
            self._capture(step)
            return
        step.replay()
        self._method.count_replay()
        if not step.is_checked:
            step.is_checked = True
            self._check(step, _growth(before, _numbers(self._method)))

    def _capture(self, step: _Recording) -> None:
        """Capture a step and run it; run it eagerly if it cannot be captured."""

        def learn() -> None:
            with play(step.tape.places):
                self._method.learn(step.batch)

        try:
            step.replay = self._graphs.capture(learn, _generators(self._method))
        except RuntimeError as error:  # something in it must not be captured
            self._give_up(" ".join(str(error).split()))
            learn()
        else:
            step.replay()

    def _check(self, step: _Recording, growth: dict[str, float]) -> None:
        """Give up if Python's counters grew otherwise than in the recorded step.

        A number that `learn` changes may decide what it does next, which no graph would notice.
        """
        for name in sorted({*growth, *step.growth}):
            if growth.get(name, 0) != step.growth.get(name, 0):
                missed = step.growth.get(name, 0) - growth.get(name, 0)
                _add(self._method, name, missed)
                self._give_up(
                    f"{name} changes in learn; count in after_step, which is not captured"
                )

    def _give_up(self, why: str) -> None:
        self.failure = why
        warnings.warn(f"steps are not captured: {why}", stacklevel=2)


def _numbers(value: Any, name: str = "", depth: int = 4) -> dict[str, float]:
    """Return the numbers that Python keeps in a method and its optimizer, by path.

    Those of a memory change with its decisions, which are made anew at every step.
    """
    if isinstance(value, (bool, Memory)) or depth < 0:
        return {}
    if isinstance(value, (int, float)):
        return {name: value}
    if isinstance(value, Optimizer):
        value = {"param_groups": value.param_groups}
    parts: Iterator[tuple[Any, Any]]
    if isinstance(value, dict):
        parts = iter(value.items())
    elif isinstance(value, (list, tuple)):
        parts = iter(enumerate(value))
    elif isinstance(value, Method) or type(value).__module__.startswith("syngap."):
        parts = iter(vars(value).items())
    else:
        return {}
    found: dict[str, float] = {}
    for key, part in parts:
        found |= _numbers(part, f"{name}.{key}" if name else str(key), depth - 1)
    return found


def _growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {k: v - before[k] for k, v in after.items() if k in before and v != before[k]}


def _add(value: Any, name: str, amount: float) -> None:
    """Add to the number at a path that `_numbers` gave."""
    *parents, last = name.split(".")
    for key in parents:
        value = _part(value, key)
    if isinstance(value, dict):
        value[last] += amount
    elif isinstance(value, list):
        value[int(last)] += amount
    else:
        setattr(value, last, getattr(value, last) + amount)


def _part(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value[key]
    return value[int(key)] if isinstance(value, (list, tuple)) else getattr(value, key)


def _generators(method: Method) -> list[torch.Generator]:
    """Return the random generators on the GPU."""
    values = [*vars(method).values(), *vars(method.learner).values()]
    found = {id(value): value for value in values if isinstance(value, torch.Generator)}
    return [generator for generator in found.values() if generator.device.type == "cuda"]
