"""Synaptic intelligence (Zenke, Poole and Ganguli 2017) without task boundaries."""

from __future__ import annotations

from typing import Any

import torch

from syngap.bench.methods.ewcpp import Anchored
from syngap.bench.methods.learner import Learner
from syngap.bench.options import Positive
from syngap.bench.streams.stream import Batch

__all__ = ["SI"]


class SI(Anchored):
    """Cross-entropy + strength · Σ Ω (θ - θ*)², Ω from what each parameter did for the loss.

    Every step adds ω ← ω - g Δθ, where g is the gradient of the loss without the penalty and Δθ the
    step that was taken. A consolidation makes Ω ← max(0, retention · Ω + ω / ((θ - θ*)² + ξ)), sets
    ω to 0 and moves the anchor θ* to where the network is.

    The paper consolidates at the end of a task and adds up (retention 1). Here it is each
    `interval` of steps, and Ω fades: a sum over a long stream grows until steps diverge. Below 0 Ω
    is cut off, as in the authors' code.

    Args:
        learner: the network and how it sees samples.
        damping: ξ, which bounds Ω where a parameter hardly moved.
        **anchored: options of `Anchored` and `ER`: strength (c in the paper), interval, retention.
    """

    def __init__(self, learner: Learner, *, damping: Positive = 0.1, **anchored: Any) -> None:
        super().__init__(learner, **anchored)
        self.damping = damping

    def learn(self, batch: Batch) -> None:
        """Take a step, and add to ω what it did for the loss."""
        self.optimizer.zero_grad()
        self.backward(self.objective(batch))
        before = [
            (omega, parameter, parameter.grad.clone(), parameter.detach().clone())
            for omega, parameter in zip(self.recent, self.learner.parameters(), strict=True)
            if parameter.grad is not None
        ]
        self.adjust()
        self.optimizer.step()
        with torch.no_grad():
            for omega, parameter, gradient, start in before:
                omega.addcmul_(gradient, start - parameter)
        self.learner.follow(batch.y)
        self.remember(batch)

    def consolidate(self) -> None:
        """Add ω to Ω, per squared distance from the anchor."""
        parts = zip(self.pull, self.recent, self.learner.parameters(), self.anchor, strict=True)
        for pull, omega, parameter, anchor in parts:
            gained = omega / ((parameter - anchor).square() + self.damping)
            pull.mul_(self.retention).add_(gained, alpha=2 * self.strength).clamp_(min=0)
