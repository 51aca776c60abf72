"""Experience replay (Chaudhry 2019): every step also learns from samples that were kept."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from syngap.memory import ClassBalanced, Reservoir
from syngap.methods.learner import Learner
from syngap.methods.method import Method
from syngap.methods.optimizers import OptimizerName, make_optimizer
from syngap.options import Count, Natural, NonNegative, Positive, Retention
from syngap.streams.stream import Batch

__all__ = ["ER", "MemoryName"]

MemoryName: TypeAlias = Literal["reservoir", "balanced"]


class ER(Method):
    """One mean cross-entropy over the arriving batch and a batch drawn from the memory.

    Args:
        learner: the network and how it sees samples.
        lr: learning rate.
        momentum: of SGD.
        weight_decay: added to the gradient; with Ballistic, apart from it.
        optimizer: "sgd", "adam" or "ballistic".
        buffer: samples the memory holds; 0 is none.
        replay: samples drawn from it at each step.
        memory: "reservoir" keeps every sample with equal chance, "balanced" every class alike.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        lr: Positive = 0.1,
        momentum: Retention = 0.0,
        weight_decay: NonNegative = 0.0,
        optimizer: OptimizerName = "sgd",
        buffer: Natural = 2000,
        replay: Count = 64,
        memory: MemoryName = "reservoir",
    ) -> None:
        super().__init__(learner)
        self.optimizer = make_optimizer(learner.parameters(), optimizer, lr, momentum, weight_decay)
        kind = Reservoir if memory == "reservoir" else ClassBalanced
        self.memory = kind(buffer, generator=learner.generator("memory"), device=learner.device)
        self.replay = replay

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of what arrives and what is drawn, together."""
        x, y = self.with_replay(batch)
        return cross_entropy(self.learner.predict(x), y)

    def with_replay(self, batch: Batch) -> Batch:
        """Return `batch` followed by samples from the memory, if it has any."""
        drawn = self.memory.draw(self.replay)
        if not drawn:
            return batch
        return Batch(torch.cat([batch.x, drawn["x"]]), torch.cat([batch.y, drawn["y"]]))

    def remember(self, batch: Batch) -> None:
        """Offer the arriving samples, as they were stored, to the memory."""
        self.memory.add(x=batch.x, y=batch.y)
