"""SynGAP: what mattered before moves less, with a small replay buffer or without one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal

from torch import Tensor

from syngap import optim
from syngap.bench.errors import UserError
from syngap.bench.methods.descent import OptimizerName
from syngap.bench.methods.er import ER
from syngap.bench.methods.learner import Learner
from syngap.bench.options import Count, Natural, NonNegative, Positive, Proportion, Retention
from syngap.optim import DEFAULTS

__all__ = ["SynGAP"]


class SynGAP(ER):
    """Experience replay whose optimizer stands behind the gate.

    The paper's ablations are options: `bounded: false` (unbounded linear mask), a low `retention`,
    `scope: tensor`, `estimator: empirical` (true labels), `buffer: 0`; without the gate it is `er`.

    Args:
        learner: the network and how it sees samples.
        lr: learning rate.
        momentum: of SGD, before the gate.
        weight_decay: added to the gradient, before the gate.
        optimizer: "sgd", or "adam" or "ballistic" with the gate on their update.
        retention: α, how slowly importance fades.
        consolidation: τ, how much steps shrink at mean importance.
        damping: λ, keeps F/μ defined.
        ambient: ε, plasticity that always remains.
        scope: the mean importance is that of the "network" or of each "tensor".
        directions: importance along directions of weights, with optimizer "sgd" alone.
        estimator: "sampled", "exact" or "empirical".
        every: refresh importance at each k-th step.
        warmup: before that, all of so many steps refresh it.
        bounded: False replaces tanh by its argument.
        compact: keep importance in bfloat16, two bytes a parameter.
        **er: other options of `ER`.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        lr: Positive = 0.3,
        momentum: Retention = 0.0,
        weight_decay: NonNegative = 0.0,
        optimizer: OptimizerName = "sgd",
        retention: Retention = DEFAULTS.retention,
        consolidation: Proportion = DEFAULTS.consolidation,
        damping: NonNegative = DEFAULTS.damping,
        ambient: NonNegative = DEFAULTS.ambient,
        scope: Literal["network", "tensor"] = "network",
        directions: bool = False,
        estimator: Literal["sampled", "exact", "empirical"] = "sampled",
        every: Count = DEFAULTS.every,
        warmup: Natural = DEFAULTS.warmup,
        bounded: bool = True,
        compact: bool = False,
        **er: Any,
    ) -> None:
        if directions and optimizer != "sgd":
            raise UserError(f"directions: true takes optimizer: sgd, got {optimizer}")
        own: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(learner, optimizer=optimizer, **own, **er)
        self.labels = learner.generator("labels", learner.device)
        self.true_labels = estimator == "empirical"
        gate: dict[str, Any] = {
            "retention": retention,
            "consolidation": consolidation,
            "damping": damping,
            "ambient": ambient,
            "scope": scope,
            "estimator": estimator,
            "every": every,
            "warmup": warmup,
            "bounded": bounded,
            "compact": compact,
            "non_finite": None,  # the learner's guard looks, for every method alike
            "generator": self.labels,
            "model": learner.model,
        }
        self.optimizer: optim.GatedOptimizer
        if optimizer == "sgd":  # the same steps as wrap would take, with less traffic
            self.optimizer = optim.SynGAP(
                learner.parameters(),
                capturable=learner.captured,
                directions=directions,
                **own,
                **gate,
            )
        else:
            self.optimizer = optim.SynGAP.wrap(self.optimizer, **gate)

    def predict(self, x: Tensor, y: Tensor) -> Tensor:
        """Return logits of samples for learning; importance comes from the same forward pass."""
        logits = super().predict(x, y)
        self.optimizer.observe(logits, targets=y if self.true_labels else None)
        return logits

    def undo(self) -> None:
        """Forget also what was observed."""
        self.optimizer.discard()
        super().undo()

    def phase(self) -> Hashable:
        """Return whether importance is observed in the next step, and how far it moves on."""
        return self.optimizer.is_due() and self.optimizer.elapsed()

    def must_run_eagerly(self) -> bool:
        """Return whether the next step refreshes directions."""
        return self.optimizer.refreshes_directions()

    def count_replay(self) -> None:
        """Count the step, which decides when importance is next observed."""
        self.optimizer.count()

    def summary(self) -> dict[str, float]:
        """Return plasticity and importance, overall and by tensor."""
        return self.optimizer.summary()
