"""Joint training: every task at once, the upper bound and the reference of intransigence."""

from __future__ import annotations

from typing import Any

from syngap.bench.methods.descent import Descent
from syngap.bench.methods.learner import Learner

__all__ = ["Joint"]


class Joint(Descent):
    """As many passes over all samples, mixed, as the others have over each task.

    Args:
        learner: the network and how it sees samples.
        retrained: train anew on tasks 1..k for every k, which gives intransigence the reference of
            Chaudhry 2018 at (T + 1) / 2 times the cost.
        **descent: options of `Descent`: lr, momentum, weight_decay, optimizer, average.
    """

    def __init__(self, learner: Learner, *, retrained: bool = False, **descent: Any) -> None:
        super().__init__(learner, **descent)
        self.sees = "everything so far" if retrained else "everything"
