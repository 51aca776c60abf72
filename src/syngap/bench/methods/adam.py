"""Adam on whatever arrives."""

from __future__ import annotations

import torch

from syngap.bench.methods.learner import Learner
from syngap.bench.methods.method import Method
from syngap.bench.options import NonNegative, Positive, Retention

__all__ = ["Adam"]


class Adam(Method):
    """Adam (Kingma & Ba 2015), as torch has it.

    Args:
        learner: the network and how it sees samples.
        lr: learning rate.
        beta1: retention of the gradient's mean.
        beta2: retention of the mean of its square.
        weight_decay: added to the gradient.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        lr: Positive = 1e-3,
        beta1: Retention = 0.9,
        beta2: Retention = 0.999,
        weight_decay: NonNegative = 0.0,
    ) -> None:
        super().__init__(learner)
        self.optimizer = torch.optim.Adam(
            learner.parameters(),
            lr=lr,
            betas=(beta1, beta2),
            weight_decay=weight_decay,
            capturable=learner.captured,
        )
