"""Dark experience replay++ (Buzzega 2020): the memory keeps what the network said, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from syngap.bench.methods.er import ER
from syngap.bench.methods.learner import Learner
from syngap.bench.options import NonNegative
from syngap.bench.streams.stream import Batch

__all__ = ["DERpp"]


class DERpp(ER):
    """Cross-entropy of what arrives + alpha · MSE to stored logits + beta · replayed cross-entropy.

    The two terms use two draws from the memory, `replay` samples each. Logits are those of the step
    at which the sample arrived.

    Args:
        learner: the network and how it sees samples.
        alpha: weight of the stored logits.
        beta: weight of the replayed labels.
        **er: options of `ER`.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        alpha: NonNegative = 0.1,
        beta: NonNegative = 0.5,
        **er: Any,
    ) -> None:
        super().__init__(learner, **er)
        self.alpha, self.beta = alpha, beta
        self._said: Tensor | None = None

    def loss(self, batch: Batch) -> Tensor:
        """Return the three terms, from one forward pass over all samples."""
        past = self._draws()
        parts = [batch.x, *(drawn["x"] for drawn in past)]
        labels = [batch.y, *(drawn["y"] for drawn in past)]
        logits = self.predict(torch.cat(parts), torch.cat(labels))
        arriving, *replayed = torch.split(logits, [len(part) for part in parts])
        self._said = arriving.detach()
        loss = cross_entropy(arriving, batch.y)
        if replayed:
            loss = loss + self.alpha * mse_loss(replayed[0], past[0]["logits"])
            loss = loss + self.beta * cross_entropy(replayed[1], past[1]["y"])
        return loss

    def remember(self, batch: Batch) -> None:
        """Offer samples to the memory with the logits that this step gave them."""
        assert self._said is not None
        self.memory.add(x=batch.x, y=batch.y, logits=self._said)
        self._said = None

    def undo(self) -> None:
        """Forget also what the network said."""
        super().undo()
        self._said = None

    def _draws(self) -> list[dict[str, Tensor]]:
        return [self.memory.draw(self.replay) for _ in range(2)] if len(self.memory) else []
