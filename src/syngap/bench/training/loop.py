"""The training loop: learns a stream from its first batch to its last, with evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from syngap.bench.errors import UserError
from syngap.bench.methods.learner import Learner
from syngap.bench.methods.method import Method
from syngap.bench.metrics import Evaluation
from syngap.bench.streams.stream import Batch, Stream
from syngap.bench.training.capture import CapturedMethod, CudaGraphs
from syngap.bench.training.checkpoint import random_states, restore_random_states
from syngap.bench.training.watch import Watch
from syngap.messages import count_of

__all__ = ["Journal", "evaluate", "step_function", "train"]

_CHUNK = 1024  # samples that are evaluated at once


class Journal(Protocol):
    """Stores the evaluations and checkpoints of a run."""

    def load(self) -> dict[str, Any] | None:
        """Return the state to resume from, or None for a new run."""
        ...

    def record(self, evaluation: Evaluation, summary: Mapping[str, float]) -> None:
        """Store an evaluation and the method's summary at that step."""
        ...

    def advance(self, step: int) -> bool:
        """Count that `step` batches are learned; return whether a checkpoint is due."""
        ...

    def save(self, state: dict[str, Any]) -> None:
        """Store `state` as the checkpoint to resume from."""
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
    any of them is evaluated or stored, or skips the step, as the learner's `non_finite` says.

    Args:
        stream: the batches, and what to test on.
        begin: makes the method with a fresh network; called again at every restart of the stream.
        journal: stores evaluations and checkpoints, and returns the one to resume from.
        evaluate_every: steps between evaluations within a task; 0 evaluates at task ends alone.
    """
    method = begin()
    device = method.learner.device
    at_once = len(stream.ends) == 1  # joint training: every task is being learned all the time
    state = journal.load()
    if state is None:
        state = {"step": 0, "task": 0, "seconds": 0.0}
        first = stream.tasks - 1 if at_once else 0
        journal.record(evaluate(method.learner, stream, 0, first, False), method.summary())
    else:
        try:
            method.load_state_dict(state["method"])
            restore_random_states(state["random"], device)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"the checkpoint does not fit this run ({error})") from error

    take = step_function(method)
    step, task, clock = state["step"], state["task"], _Clock(state["seconds"], method.learner)
    watch = Watch(method, stream, step, state.get("skipped", (0, 0)))
    while step < len(stream):
        if step and step in stream.restarts:
            method = begin()
            take = step_function(method)
            watch = Watch(method, stream, step, watch.skip_counts)
            clock.stop()
            clock = _Clock(clock.seconds, method.learner)
        step += 1
        watch.step(take, stream[step - 1], step)

        end = step in stream.ends
        measure = end or (evaluate_every > 0 and step % evaluate_every == 0)
        keep = journal.advance(step) or end
        if not (measure or keep):
            continue
        clock.stop()
        watch.check(step)
        if measure:
            learned = stream.tasks - 1 if at_once else task
            with watch.advice_on_error():
                evaluation = evaluate(method.learner, stream, step, learned, end)
            journal.record(evaluation, method.summary() | watch.summary())
        task += end
        if keep:
            progress = {"step": step, "task": task, "seconds": clock.seconds}
            if watch.skips:
                progress["skipped"] = watch.skip_counts
            random = random_states(device)
            journal.save({**progress, "method": method.state_dict(), "random": random})
        clock.go()
    return method


def step_function(method: Method) -> Callable[[Batch], None]:
    """Return the function that runs a step: eagerly, or by CUDA graphs."""
    own = type(method).step is not Method.step  # then learn may be but a part of it
    if own or not method.learner.captured:
        return method.step
    captured = CapturedMethod(method, CudaGraphs(method.learner.device))

    def take(batch: Batch) -> None:
        captured.learn(batch)
        method.after_step()

    return take


def evaluate(learner: Learner, stream: Stream, step: int, task: int, end: bool) -> Evaluation:
    """Return the accuracy on every task's test samples, in percent.

    Args:
        learner: the network.
        stream: where the test samples are.
        step: how many batches have been learned.
        task: the task that the last of them belonged to.
        end: whether it was the last of that task.
    """
    predicted = _predictions(learner, stream, step)
    right = predicted == stream.test.labels
    counts = torch.bincount(stream.test.task, minlength=stream.tasks)
    hits = torch.bincount(stream.test.task[right], minlength=stream.tasks)
    accuracy = (100.0 * hits.double() / counts).tolist()
    return Evaluation(step, task, end, tuple(accuracy), _newest(predicted, stream, task))


def _predictions(learner: Learner, stream: Stream, step: int) -> Tensor:
    found = []
    for index in torch.split(torch.arange(len(stream.test.labels)), _CHUNK):
        logits = learner.evaluate(stream.test.samples.take(index))
        found.append(torch.where(logits.isfinite().all(1), logits.argmax(1), -1))
    predicted = torch.cat(found).cpu()
    if (predicted < 0).any():
        steps = count_of(step, "step")
        raise FloatingPointError(f"the network's outputs are not finite after {steps}")
    return predicted


def _newest(predicted: Tensor, stream: Stream, task: int) -> float | None:
    """Return the share of predictions on seen tasks' samples that name a class of `task`."""
    if stream.class_task is None:
        return None
    seen = stream.test.task <= task
    return float(100.0 * (stream.class_task[predicted[seen]] == task).double().mean())


class _Clock:
    """Seconds spent learning: not evaluating, not writing, not compiling."""

    def __init__(self, seconds: float, learner: Learner) -> None:
        self.seconds, self._learner = seconds, learner
        self.go()

    def go(self) -> None:
        self._since = time.perf_counter() - self._learner.compiling

    def stop(self) -> None:
        if self._learner.device.type == "cuda":  # steps are only queued so far
            torch.cuda.synchronize(self._learner.device)
        self.seconds += time.perf_counter() - self._learner.compiling - self._since
