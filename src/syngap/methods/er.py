"""Experience replay (Chaudhry 2019): every step also learns from samples that were kept."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from syngap.memory import ClassBalanced, Reservoir
from syngap.methods.descent import Descent
from syngap.methods.learner import Learner
from syngap.options import Count, Natural
from syngap.streams.stream import Batch

__all__ = ["ER", "MemoryName"]

MemoryName: TypeAlias = Literal["reservoir", "balanced"]


class ER(Descent):
    """One mean cross-entropy over the arriving batch and a batch drawn from the memory.

    Args:
        learner: the network and how it sees samples.
        buffer: samples the memory holds; 0 is none.
        replay: samples drawn from it at each step.
        memory: "reservoir" keeps every sample with equal chance, "balanced" every class alike.
        **descent: options of `Descent`: lr, momentum, weight_decay, optimizer, average.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        buffer: Natural = 2000,
        replay: Count = 64,
        memory: MemoryName = "reservoir",
        **descent: Any,
    ) -> None:
        super().__init__(learner, **descent)
        kind = Reservoir if memory == "reservoir" else ClassBalanced
        self.memory = kind(buffer, generator=learner.generator("memory"), device=learner.device)
        self.replay = replay

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of what arrives and what is drawn, together."""
        x, y = self.with_replay(batch)
        return cross_entropy(self.predict(x, y), y)

    def predict(self, x: Tensor, y: Tensor) -> Tensor:
        """Return logits of samples for learning; whoever looks at logits and labels looks here."""
        return self.learner.predict(x)

    def with_replay(self, batch: Batch) -> Batch:
        """Return `batch` followed by samples from the memory, if it has any."""
        drawn = self.memory.draw(self.replay)
        if not drawn:
            return batch
        return Batch(torch.cat([batch.x, drawn["x"]]), torch.cat([batch.y, drawn["y"]]))

    def remember(self, batch: Batch) -> None:
        """Offer the arriving samples, as they were stored, to the memory."""
        self.memory.add(x=batch.x, y=batch.y)
