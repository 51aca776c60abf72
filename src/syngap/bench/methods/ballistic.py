"""Ballistic (Vastola, Gershman, Rajan 2025) on whatever arrives."""

from __future__ import annotations

from syngap import optim
from syngap.bench.methods.learner import Learner
from syngap.bench.methods.method import Method
from syngap.bench.options import NonNegative, Positive, Retention

__all__ = ["Ballistic"]


class Ballistic(Method):
    """s ← β s + (1-β) g²;  θ ← θ - η g / sqrt(s + 1e-8).

    Args:
        learner: the network and how it sees samples.
        lr: learning rate η.
        beta: retention β.
        weight_decay: decoupled from the gradient.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        lr: Positive = 1e-3,
        beta: Retention = 0.999,
        weight_decay: NonNegative = 0.0,
    ) -> None:
        super().__init__(learner)
        self.optimizer = optim.Ballistic(
            learner.parameters(), lr=lr, beta=beta, weight_decay=weight_decay
        )
