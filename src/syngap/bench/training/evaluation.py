"""Accuracy of a network on every task."""

from __future__ import annotations

import torch
from torch import Tensor

from syngap.bench.methods.learner import Learner
from syngap.bench.metrics import Evaluation
from syngap.bench.streams.stream import Stream
from syngap.messages import count_of

__all__ = ["evaluate"]

_CHUNK = 1024


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
