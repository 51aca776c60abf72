"""Stochastic gradient descent on whatever arrives: the lower bound."""

from __future__ import annotations

import torch

from syngap.bench.methods.learner import Learner
from syngap.bench.methods.method import Method
from syngap.bench.options import NonNegative, Positive

__all__ = ["SGD"]


class SGD(Method):
    """θ ← θ - η ∇L(θ).

    Args:
        learner: the network and how it sees samples.
        lr: learning rate η.
        weight_decay: added to the gradient.
    """

    def __init__(
        self, learner: Learner, *, lr: Positive = 0.1, weight_decay: NonNegative = 0.0
    ) -> None:
        super().__init__(learner)
        self.optimizer = torch.optim.SGD(learner.parameters(), lr=lr, weight_decay=weight_decay)
