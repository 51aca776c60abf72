"""Joint training: every task at once, the upper bound and the reference of intransigence."""

from __future__ import annotations

from syngap.methods.learner import Learner
from syngap.methods.method import Method
from syngap.methods.optimizers import OptimizerName, make_optimizer
from syngap.options import NonNegative, Positive, Retention

__all__ = ["Joint"]


class Joint(Method):
    """As many passes over all samples, mixed, as the others have over each task.

    Args:
        learner: the network and how it sees samples.
        lr: learning rate.
        momentum: of SGD.
        weight_decay: added to the gradient; with Ballistic, apart from it.
        optimizer: "sgd", "adam" or "ballistic".
        retrained: train anew on tasks 1..k for every k, which gives intransigence the reference of
            Chaudhry 2018 at (T + 1) / 2 times the cost.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        lr: Positive = 0.1,
        momentum: Retention = 0.0,
        weight_decay: NonNegative = 0.0,
        optimizer: OptimizerName = "sgd",
        retrained: bool = False,
    ) -> None:
        super().__init__(learner)
        self.optimizer = make_optimizer(learner.parameters(), optimizer, lr, momentum, weight_decay)
        self.sees = "everything so far" if retrained else "everything"
