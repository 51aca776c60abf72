"""The loop: from the first batch of a stream to the last, measuring on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from syngap.bench.errors import UserError
from syngap.bench.methods.method import Method
from syngap.bench.metrics import Evaluation
from syngap.bench.streams.stream import Batch, Stream
from syngap.bench.training.captured import Captured, CudaGraphs
from syngap.bench.training.checkpoint import random_states, restore_random_states
from syngap.bench.training.evaluation import evaluate
from syngap.bench.training.watch import Watch

__all__ = ["Journal", "stepping", "train"]


class Journal(Protocol):
    """Where a run is written down; the loop tells, the journal keeps."""

    def load(self) -> dict[str, Any] | None:
        """Return the state to go on from, None to begin."""
        ...

    def evaluated(self, evaluation: Evaluation, summary: Mapping[str, float]) -> None:
        """Keep an evaluation and what the method says of itself at that moment."""
        ...

    def reached(self, step: int) -> bool:
        """Note that `step` batches are learned; return whether it is time for a checkpoint."""
        ...

    def save(self, state: dict[str, Any]) -> None:
        """Keep `state`: from here the run can go on."""
        ...


def train(
    stream: Stream,
    begin: Callable[[], Method],
    journal: Journal,
    *,
    evaluate_every: int = 0,
) -> Method:
    """Learn a stream to its end and return the method that learned it.

    Interrupted at any instant and called again with the same arguments, it ends with the same
    network, bit for bit on a CPU. Where numbers are not finite it raises FloatingPointError before
    any of them is measured or kept, or skips the step: as the method's learner was told.

    Args:
        stream: the batches, and what to test on.
        begin: makes the method with a fresh network; called again at every restart of the stream.
        journal: is told of everything, and says where to go on.
        evaluate_every: steps between evaluations within a task; 0 evaluates at task ends alone.
    """
    method = begin()
    device = method.learner.device
    at_once = len(stream.ends) == 1  # joint training: every task is being learned all the time
    state = journal.load()
    if state is None:
        state = {"step": 0, "task": 0, "seconds": 0.0}
        first = stream.tasks - 1 if at_once else 0
        journal.evaluated(evaluate(method.learner, stream, 0, first, False), method.summary())
    else:
        try:
            method.load_state_dict(state["method"])
            restore_random_states(state["random"], device)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"the checkpoint does not fit this run ({error})") from error

    take = stepping(method)
    step, task, clock = state["step"], state["task"], _Clock(state["seconds"], device)
    watch = Watch(method, stream, step, state.get("skipped", (0, 0)))
    while step < len(stream):
        if step and step in stream.restarts:
            method = begin()
            take = stepping(method)
            watch = Watch(method, stream, step, watch.skipped)
        step += 1
        watch.step(take, stream[step - 1], step)

        end = step in stream.ends
        measure = end or (evaluate_every > 0 and step % evaluate_every == 0)
        keep = journal.reached(step) or end
        if not (measure or keep):
            continue
        clock.stop()
        watch.look(step)
        if measure:
            learned = stream.tasks - 1 if at_once else task
            with watch.advising():
                evaluation = evaluate(method.learner, stream, step, learned, end)
            journal.evaluated(evaluation, method.summary() | watch.summary())
        task += end
        if keep:
            reached = {"step": step, "task": task, "seconds": clock.seconds}
            if watch.skips:
                reached["skipped"] = watch.skipped
            random = random_states(device)
            journal.save({**reached, "method": method.state_dict(), "random": random})
        clock.go()
    return method


def stepping(method: Method) -> Callable[[Batch], None]:
    """Return how the method takes a step: as it stands, or by CUDA graphs."""
    own = type(method).step is not Method.step  # then learn may be but a part of it
    if own or not method.learner.captured:
        return method.step
    captured = Captured(method, CudaGraphs(method.learner.device))

    def take(batch: Batch) -> None:
        captured.learn(batch)
        method.between()

    return take


class _Clock:
    """Seconds spent learning: not evaluating, not writing."""

    def __init__(self, seconds: float, device: torch.device) -> None:
        self.seconds, self._device = seconds, device
        self.go()

    def go(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        if self._device.type == "cuda":  # steps are only queued so far
            torch.cuda.synchronize(self._device)
        self.seconds += time.perf_counter() - self._since
