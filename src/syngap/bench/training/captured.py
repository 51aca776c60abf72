"""Steps as CUDA graphs: what Python did once the GPU repeats, without waiting for Python.

The first steps with batches of a shape run as they stand. One is then recorded: what the CPU
decided in it goes onto a tape (`bench.tape`). The next is captured, and from then on the CPU makes
its decisions, and the GPU replays the rest. A method's author writes none of this; where a step
cannot be captured it goes on as it stands, and says why.
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
from syngap.bench.tape import Tape, played, recorded

__all__ = ["Captured", "CudaGraphs", "Graphs"]

_WARM = 3  # steps of a shape until libraries have chosen their kernels and optimizers have states

Replay = Callable[[], None]


class Graphs(Protocol):
    """How a step is captured."""

    def aside(self) -> Any:
        """Return a context in which steps that are not captured run."""
        ...

    def capture(self, step: Callable[[], None], generators: list[torch.Generator]) -> Replay:
        """Return what does `step` again, having run its Python once and the rest not yet."""
        ...


class CudaGraphs:
    """Captures on a stream of its own, as CUDA demands; all graphs share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run on that stream, between what came before and what comes after."""
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
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
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
            with torch.cuda.graph(graph, stream=self._stream):
                pass


@dataclass
class _Recorded:
    batch: Batch  # where the graph reads samples from
    tape: Tape
    counted: dict[str, float]  # by how much each number that Python keeps grew in one step
    replay: Replay | None = None
    checked: bool = False


class Captured:
    """Learns as `method` does, by graphs where that can be.

    Args:
        method: whose `learn` is captured, a graph for each shape of batch and each `phase`.
        graphs: how.

    Attributes:
        why: the reason for which steps are not captured any more, "" while they are.
    """

    def __init__(self, method: Method, graphs: Graphs) -> None:
        self.why = ""
        self._method, self._graphs = method, graphs
        self._met: Counter[Hashable] = Counter()
        self._recorded: dict[Hashable, _Recorded] = {}

    def learn(self, batch: Batch) -> None:
        """Learn from one batch, as `method.learn` would."""
        if self.why:
            self._method.learn(batch)
            return
        key = (batch.x.shape, batch.x.dtype, batch.y.shape, self._method.phase())
        self._met[key] += 1
        if key in self._recorded:
            self._replay(self._recorded[key], batch)
        elif self._met[key] <= _WARM:
            with self._graphs.aside():
                self._method.learn(batch)
        else:
            self._recorded[key] = self._record(batch)

    def _record(self, batch: Batch) -> _Recorded:
        """Learn from a batch, putting what the CPU decides onto a tape."""
        own, tape = Batch(batch.x.clone(), batch.y.clone()), Tape()
        before = _numbers(self._method)
        with self._graphs.aside(), recorded(tape):
            self._method.learn(own)
        return _Recorded(own, tape, _growth(before, _numbers(self._method)))

    def _replay(self, step: _Recorded, batch: Batch) -> None:
        step.batch.x.copy_(batch.x)
        step.batch.y.copy_(batch.y)
        before = {} if step.checked else _numbers(self._method)
        decisions = step.tape.make_again()
        if not step.tape.fits(decisions):  # a memory that had less to give than was asked for
            with self._graphs.aside(), played(decisions):
                self._method.learn(batch)
            return
        step.tape.put(decisions)
        if step.replay is None:
            self._capture(step)
            return
        step.replay()
        self._method.replayed()
        if not step.checked:
            step.checked = True
            self._check(step, _growth(before, _numbers(self._method)))

    def _capture(self, step: _Recorded) -> None:
        """Capture a step and do it; where it cannot be captured, do it as it stands."""

        def learn() -> None:
            with played(step.tape.places):
                self._method.learn(step.batch)

        try:
            step.replay = self._graphs.capture(learn, _generators(self._method))
        except RuntimeError as error:  # something in it must not be captured
            self._give_up(" ".join(str(error).split()))
            learn()
        else:
            step.replay()

    def _check(self, step: _Recorded, counted: dict[str, float]) -> None:
        """Give up where Python counted otherwise than in the step that was recorded.

        A number that `learn` changes may decide what it does next, which no graph would notice.
        """
        for name in sorted({*counted, *step.counted}):
            if counted.get(name, 0) != step.counted.get(name, 0):
                missed = step.counted.get(name, 0) - counted.get(name, 0)
                _add(self._method, name, missed)
                self._give_up(f"{name} changes in learn; count in between, which is not captured")

    def _give_up(self, why: str) -> None:
        self.why = why
        warnings.warn(f"steps are not captured: {why}", stacklevel=2)


def _numbers(value: Any, name: str = "", depth: int = 4) -> dict[str, float]:
    """Return the numbers that Python keeps in a method and its optimizer, by path.

    Those of a memory change where it decides, which is done anew at every step.
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
    *way, last = name.split(".")
    for key in way:
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
    """Return the sources of random numbers that the GPU draws from itself."""
    held = [*vars(method).values(), *vars(method.learner).values()]
    found = {id(value): value for value in held if isinstance(value, torch.Generator)}
    return [generator for generator in found.values() if generator.device.type == "cuda"]
