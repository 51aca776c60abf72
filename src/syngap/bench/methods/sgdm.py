"""Stochastic gradient descent with momentum on whatever arrives."""

from __future__ import annotations

import torch

from syngap.bench.methods.learner import Learner
from syngap.bench.methods.method import Method
from syngap.bench.options import NonNegative, Positive, Retention

__all__ = ["SGDM"]


class SGDM(Method):
    """m ← momentum · m + ∇L(θ);  θ ← θ - η m.

    Args:
        learner: the network and how it sees samples.
        lr: learning rate η.
        momentum: the share of m that stays.
        weight_decay: added to the gradient.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        lr: Positive = 0.01,
        momentum: Retention = 0.9,
        weight_decay: NonNegative = 0.0,
    ) -> None:
        super().__init__(learner)
        self.optimizer = torch.optim.SGD(
            learner.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay
        )
