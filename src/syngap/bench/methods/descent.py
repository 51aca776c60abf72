"""The base class of methods that take gradient steps: their optimizer and averaged weights."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch.optim import Optimizer

from syngap import optim
from syngap.bench.errors import UserError
from syngap.bench.methods.average import AutomaticAverage, Average
from syngap.bench.methods.learner import Learner
from syngap.bench.methods.method import Method
from syngap.bench.options import NonNegative, Positive, Retention

__all__ = ["Descent", "OptimizerName"]

OptimizerName: TypeAlias = Literal["sgd", "adam", "ballistic"]


class Descent(Method):
    """A method whose optimizer is chosen by its options; the others pass theirs on to it.

    Args:
        learner: the network and how it sees samples.
        lr: learning rate.
        momentum: of SGD alone.
        weight_decay: added to the gradient; with Ballistic, apart from it.
        optimizer: "sgd", "adam" or "ballistic".
        average: retention of averaged weights, which are evaluated and saved; 0 is none, "auto"
            chooses by itself (`AutomaticAverage`).
    """

    def __init__(
        self,
        learner: Learner,
        *,
        lr: Positive = 0.1,
        momentum: Retention = 0.0,
        weight_decay: NonNegative = 0.0,
        optimizer: OptimizerName = "sgd",
        average: Retention | Literal["auto"] = 0.0,
    ) -> None:
        super().__init__(learner)
        if average == "auto":
            learner.average = AutomaticAverage(learner.model)
        else:
            learner.average = Average(learner.model, average) if average else None
        learner.classifier = None
        if momentum and optimizer != "sgd":
            raise UserError(
                f"momentum: got {momentum} with {optimizer}, which has none to set; leave it 0"
            )
        parameters = learner.parameters()
        self.optimizer: Optimizer
        if optimizer == "adam":
            self.optimizer = torch.optim.Adam(
                parameters, lr=lr, weight_decay=weight_decay, capturable=learner.captured
            )
        elif optimizer == "ballistic":
            self.optimizer = optim.Ballistic(parameters, lr=lr, weight_decay=weight_decay)
        else:
            self.optimizer = torch.optim.SGD(
                parameters, lr=lr, momentum=momentum, weight_decay=weight_decay
            )
