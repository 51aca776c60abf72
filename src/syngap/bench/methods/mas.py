"""Memory aware synapses (Aljundi et al. 2018) without task boundaries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syngap.bench.methods.ewcpp import Anchored
from syngap.bench.methods.learner import Learner
from syngap.bench.options import NonNegative

__all__ = ["MAS"]


class MAS(Anchored):
    """Cross-entropy + strength · Σ Ω (θ - θ*)², Ω being how sensitive the outputs are to θ.

    Every step observes |∂/∂θ mean ‖f(x)‖²|, f(x) being the logits of the samples it learns from. A
    consolidation makes Ω ← retention · Ω + the mean of what the last `interval` steps observed, and
    moves the anchor θ* to where the network is.

    The paper observes after a task, sample by sample over all of its samples. Here it is during
    training, and the gradient is that of a batch's mean, as in the authors' code. The paper adds up
    tasks (retention 1, λ 1). Here Ω fades, and it is the sum of ten intervals: λ is 0.01.

    Args:
        learner: the network and how it sees samples.
        strength: λ, the weight of the penalty.
        **anchored: other options of `Anchored` and `ER`: interval, retention, buffer.
    """

    def __init__(self, learner: Learner, *, strength: NonNegative = 0.01, **anchored: Any) -> None:
        super().__init__(learner, strength=strength, **anchored)
        self._sensitivity: list[Tensor | None] = []

    def predict(self, x: Tensor, y: Tensor) -> Tensor:
        """Return logits for learning; sensitivity comes from the same forward pass."""
        logits = super().predict(x, y)
        length = logits.square().sum(1).mean()
        parameters = self.learner.parameters()
        gradients = torch.autograd.grad(length, parameters, retain_graph=True, allow_unused=True)
        self._sensitivity = list(gradients)
        return logits

    @torch.no_grad()
    def adjust(self) -> None:
        """Collect the sensitivity of this step, and add the penalty's gradient."""
        for recent, sensitivity in zip(self.recent, self._sensitivity, strict=True):
            if sensitivity is not None:
                recent.add_(sensitivity.abs(), alpha=1 / self.interval)
        self._sensitivity = []
        super().adjust()

    def consolidate(self) -> None:
        """Add what was collected to Ω."""
        for pull, recent in zip(self.pull, self.recent, strict=True):
            pull.mul_(self.retention).add_(recent, alpha=2 * self.strength)

    def undo(self) -> None:
        """Discard also the sensitivity."""
        super().undo()
        self._sensitivity = []
