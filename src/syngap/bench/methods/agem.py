"""A-GEM (Chaudhry et al. 2019): a step that does not raise the loss of a replayed batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from syngap.bench.methods.er import ER
from syngap.bench.methods.learner import Learner
from syngap.bench.streams.stream import Batch

__all__ = ["AGEM"]


class AGEM(ER):
    """Descends g, the gradient of what arrives, less its part against that of what is replayed.

    With r, the gradient of the replayed batch's mean cross-entropy, over all parameters:
    g ← g - (g·r / r·r) r where g·r < 0.

    The paper fills the memory with samples of the tasks before. Here no task is known: the memory
    is that of `ER`, which has samples of the present one, too. One forward pass serves both.

    Args:
        learner: the network and how it sees samples.
        **er: options of `ER`.
    """

    def __init__(self, learner: Learner, **er: Any) -> None:
        super().__init__(learner, **er)
        self._reference: list[Tensor | None] = []

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of what arrives; keep r of what is replayed."""
        x, y = self.with_replay(batch)
        arriving, replayed = self.predict(x, y).tensor_split([len(batch.y)])
        loss = cross_entropy(arriving, batch.y)
        if not len(replayed):
            return loss
        past = cross_entropy(replayed, y[len(batch.y) :])
        parameters = self.learner.parameters()
        gradients = torch.autograd.grad(past, parameters, retain_graph=True, allow_unused=True)
        self._reference = list(gradients)
        return torch.where(past.isfinite(), loss, past)  # so that the guard sees both

    @torch.no_grad()
    def adjust(self) -> None:
        """Project the gradient where it points against that of the replayed batch."""
        pairs = [
            (parameter.grad, reference)
            for parameter, reference in zip(
                self.learner.parameters(), self._reference, strict=bool(self._reference)
            )
            if parameter.grad is not None and reference is not None
        ]
        self._reference = []
        if not pairs:
            return
        product = torch.stack([(gradient * past).sum() for gradient, past in pairs]).sum()
        square = torch.stack([past.square().sum() for _, past in pairs]).sum()
        share = torch.where(product < 0, product / square, 0.0)
        for gradient, past in pairs:
            gradient.sub_(share * past)
        self.learner.guard.check_gradients(self.learner.parameters)

    def undo(self) -> None:
        """Discard also the gradient of what was replayed."""
        super().undo()
        self._reference = []
