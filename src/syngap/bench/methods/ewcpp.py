"""EWC++ (Chaudhry 2018) without task boundaries: consolidation at a fixed interval of steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from syngap.bench.methods.er import ER
from syngap.bench.methods.learner import Learner
from syngap.bench.options import Count, Natural, NonNegative, Retention

__all__ = ["EWCpp"]


class EWCpp(ER):
    """Cross-entropy + strength · Σ F̂ (θ - θ*)², F̂ being F between 0 and 1 over the network.

    F is the empirical Fisher of the batch (the squared gradient of the cross-entropy alone)
    averaged over `interval` steps; then F ← retention · F + (1 - retention) · that average, and the
    anchor θ* moves to where the network is.

    Args:
        learner: the network and how it sees samples.
        buffer: samples the memory holds; none by default, as in the paper's comparison.
        strength: λ, the weight of the penalty.
        interval: steps between consolidations.
        retention: the part of F that a consolidation keeps.
        **er: other options of `ER`.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        buffer: Natural = 0,
        strength: NonNegative = 1.0,
        interval: Count = 50,
        retention: Retention = 0.1,
        **er: Any,
    ) -> None:
        super().__init__(learner, buffer=buffer, **er)
        self.strength, self.interval, self.retention = strength, interval, retention
        parameters = learner.parameters()
        self.fisher = [torch.zeros_like(parameter) for parameter in parameters]
        self.recent = [torch.zeros_like(parameter) for parameter in parameters]
        self.pull = [torch.zeros_like(parameter) for parameter in parameters]  # 2 λ F̂
        self.anchor = [parameter.detach().clone() for parameter in parameters]
        self.steps = 0

    @torch.no_grad()
    def adjust(self) -> None:
        """Observe F, and let the penalty's gradient join that of the cross-entropy."""
        for index, parameter in enumerate(self.learner.parameters()):
            if parameter.grad is None:
                continue
            self.recent[index].addcmul_(parameter.grad, parameter.grad, value=1 / self.interval)
            parameter.grad.addcmul_(self.pull[index], parameter - self.anchor[index])

    def after_step(self) -> None:
        """Consolidate at each `interval`."""
        self.steps += 1
        if self.steps % self.interval == 0:
            self._consolidate()

    def finite_tensors(self) -> Iterable[Tensor]:
        """Add F, its recent part, the anchor and what pulls towards it."""
        yield from super().finite_tensors()
        yield from (*self.fisher, *self.recent, *self.anchor, *self.pull)

    @torch.no_grad()
    def _consolidate(self) -> None:
        for fisher, recent in zip(self.fisher, self.recent, strict=True):
            fisher.mul_(self.retention).add_(recent, alpha=1 - self.retention)
            recent.zero_()
        low = torch.stack([fisher.min() for fisher in self.fisher]).min()
        high = torch.stack([fisher.max() for fisher in self.fisher]).max()
        scale = torch.where(high > low, 2 * self.strength / (high - low), 0.0)
        for fisher, pull in zip(self.fisher, self.pull, strict=True):
            torch.mul(fisher - low, scale, out=pull)
        for anchor, parameter in zip(self.anchor, self.learner.parameters(), strict=True):
            anchor.copy_(parameter)
