"""Learning without forgetting (Li and Hoiem 2017), taught by the average of the weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from syngap.bench.methods.average import Average
from syngap.bench.methods.er import ER
from syngap.bench.methods.learner import Learner
from syngap.bench.methods.teacher import refuse_teacher
from syngap.bench.options import Natural, NonNegative, Positive, Proportion
from syngap.bench.streams.stream import Batch

__all__ = ["LwF"]


class LwF(ER):
    """Cross-entropy of labels + strength · cross-entropy of what an earlier network answers.

    The second is the mean of -Σ p log q, with p and q the softmax of logits / T, p of the earlier
    network and q of this one, on the samples that arrive.

    In the paper the earlier network is the one before the task, and answers for the old classes by
    their own head. Here it is the moving average of the weights, so that no task is known, and it
    answers for all classes. It begins to teach when it has had `warmup` updates. The network that
    learns is evaluated.

    Args:
        learner: the network and how it sees samples.
        buffer: samples the memory holds; none by default. What is replayed is taught, too.
        strength: λ, the weight of the earlier answers.
        temperature: T, of both softmaxes.
        retention: of the average of the weights.
        warmup: steps before it teaches.
        **er: other options of `ER`, but for its teacher.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        buffer: Natural = 0,
        strength: NonNegative = 1.0,
        temperature: Positive = 2.0,
        retention: Proportion = 0.99,
        warmup: Natural = 100,
        **er: Any,
    ) -> None:
        refuse_teacher(er, "lwf")
        super().__init__(learner, buffer=buffer, **er)
        self.strength, self.temperature, self.warmup = strength, temperature, warmup
        self.earlier = Average(learner.model, retention)

    def loss(self, batch: Batch) -> Tensor:
        """Return the two cross-entropies, of what arrives and what is drawn."""
        x, y = self.with_replay(batch)
        inputs = self.learner.augment(x)
        logits = self.learner.forward(inputs)
        earlier = self.learner.forward_without_gradient(inputs, self.earlier.model)
        # Towards its own answers nothing pulls.
        answers = torch.where(self.earlier.has_seen(self.warmup), earlier, logits.detach())
        probabilities = (answers / self.temperature).softmax(1)
        distillation = cross_entropy(logits / self.temperature, probabilities)
        return cross_entropy(logits, y) + self.strength * distillation

    def remember(self, batch: Batch) -> None:
        """Offer samples to the memory, and update the average of the weights."""
        super().remember(batch)
        self.earlier.follow()

    def finite_tensors(self) -> Iterable[Tensor]:
        """Add the averaged parameters."""
        yield from super().finite_tensors()
        yield from self.earlier.model.parameters()
