"""EWC++ (Chaudhry 2018) without task boundaries: consolidation at a fixed interval of steps.

`Anchored` is the part of it that SI and MAS share: the penalty, and when it is renewed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from syngap.bench.methods.er import ER
from syngap.bench.methods.learner import Learner
from syngap.bench.options import Count, Natural, NonNegative, Retention, Share

__all__ = ["Anchored", "EWCpp"]


class Anchored(ER, ABC):
    """Loss + strength · Σ Ω (θ - θ*)²; Ω and the anchor θ* are renewed at each `interval` of steps.

    A subclass collects importance in `recent`, one tensor a parameter, and makes `pull` = 2 λ Ω of
    it in `consolidate`.

    Args:
        learner: the network and how it sees samples.
        buffer: samples the memory holds; none by default.
        strength: λ, the weight of the penalty.
        interval: steps between consolidations; there is no penalty before the first.
        retention: the part of the importance that a consolidation keeps; 1 adds up without end.
        **er: other options of `ER`.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        buffer: Natural = 0,
        strength: NonNegative = 1.0,
        interval: Count = 50,
        retention: Share = 0.9,
        **er: Any,
    ) -> None:
        super().__init__(learner, buffer=buffer, **er)
        self.strength, self.interval, self.retention = strength, interval, retention
        self.recent, self.pull = self._zeros(), self._zeros()
        self.anchor = [parameter.detach().clone() for parameter in learner.parameters()]
        self.steps = 0

    @abstractmethod
    def consolidate(self) -> None:
        """Make `pull` of what `recent` collected since the last consolidation."""

    @torch.no_grad()
    def adjust(self) -> None:
        """Let the penalty's gradient join that of the loss."""
        parts = zip(self.learner.parameters(), self.pull, self.anchor, strict=True)
        for parameter, pull, anchor in parts:
            if parameter.grad is not None:
                parameter.grad.addcmul_(pull, parameter - anchor)

    @torch.no_grad()
    def after_step(self) -> None:
        """Consolidate at each `interval`, and move the anchor to where the network is."""
        self.steps += 1
        if self.steps % self.interval:
            return
        self.consolidate()
        for recent, anchor, parameter in zip(
            self.recent, self.anchor, self.learner.parameters(), strict=True
        ):
            recent.zero_()
            anchor.copy_(parameter)

    def finite_tensors(self) -> Iterable[Tensor]:
        """Add recent importance, the anchor and what pulls towards it."""
        yield from super().finite_tensors()
        yield from (*self.recent, *self.anchor, *self.pull)

    def _zeros(self) -> list[Tensor]:
        return [torch.zeros_like(parameter) for parameter in self.learner.parameters()]


class EWCpp(Anchored):
    """Cross-entropy + strength · Σ F̂ (θ - θ*)², F̂ being F between 0 and 1 over the network.

    F is the empirical Fisher of the batch (the squared gradient of the cross-entropy alone)
    averaged over `interval` steps; then F ← retention · F + (1 - retention) · that average, and the
    anchor θ* moves to where the network is.

    Args:
        learner: the network and how it sees samples.
        retention: the part of F that a consolidation keeps.
        **anchored: other options of `Anchored` and `ER`: strength, interval, buffer.
    """

    def __init__(self, learner: Learner, *, retention: Retention = 0.1, **anchored: Any) -> None:
        super().__init__(learner, retention=retention, **anchored)
        self.fisher = self._zeros()

    @torch.no_grad()
    def adjust(self) -> None:
        """Observe F before the penalty's gradient joins that of the cross-entropy."""
        for parameter, recent in zip(self.learner.parameters(), self.recent, strict=True):
            if parameter.grad is not None:
                recent.addcmul_(parameter.grad, parameter.grad, value=1 / self.interval)
        super().adjust()

    def consolidate(self) -> None:
        """Let F follow its recent part, and bring it between 0 and 1."""
        for fisher, recent in zip(self.fisher, self.recent, strict=True):
            fisher.mul_(self.retention).add_(recent, alpha=1 - self.retention)
        low = torch.stack([fisher.min() for fisher in self.fisher]).min()
        high = torch.stack([fisher.max() for fisher in self.fisher]).max()
        scale = torch.where(high > low, 2 * self.strength / (high - low), 0.0)
        for fisher, pull in zip(self.fisher, self.pull, strict=True):
            torch.mul(fisher - low, scale, out=pull)

    def finite_tensors(self) -> Iterable[Tensor]:
        """Add F."""
        yield from super().finite_tensors()
        yield from self.fisher
