"""The loss of task 1, for any weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from syngap.bench import seeds
from syngap.bench.landscapes.plane import Weights
from syngap.bench.methods import Learner
from syngap.bench.streams import Stream
from syngap.bench.streams.stream import Batch

__all__ = ["TaskEvaluator"]

_CHUNK = 1000


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
