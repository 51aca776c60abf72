"""CLS-ER (Arani, Sarfraz and Zonooz 2022): replay, taught by a plastic and a stable average."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from syngap.bench.methods.average import OccasionalAverage
from syngap.bench.methods.er import ER
from syngap.bench.methods.learner import Learner
from syngap.bench.methods.teacher import refuse_teacher
from syngap.bench.options import Natural, NonNegative, Proportion, Share
from syngap.bench.streams.stream import Batch

__all__ = ["CLSER"]


class CLSER(ER):
    """Loss of `ER` + strength · MSE of replayed logits to those of the surer of two averages.

    Of each replayed sample the average that gives the higher probability to its label teaches.
    After every step the stable and the plastic average are each updated with a probability of their
    own. The stable one is evaluated.

    What differs from the authors' code: averages are those of `Average`, in which the initial
    weights have no part (there, α begins at 0 and rises); they answer in evaluation mode; they
    begin to teach when both have had `warmup` updates; one forward pass serves both losses.

    Args:
        learner: the network and how it sees samples.
        average: α of the stable average, which is evaluated and saved.
        update: the probability that a step updates it.
        plastic: α of the plastic average.
        plastic_update: the probability that a step updates that.
        strength: λ, the weight of the averages' answers.
        warmup: updates that both have had before they teach.
        **er: other options of `ER`, but for its teacher.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        average: Proportion = 0.999,
        update: Share = 0.7,
        plastic: Proportion = 0.999,
        plastic_update: Share = 0.9,
        strength: NonNegative = 0.1,
        warmup: Natural = 100,
        **er: Any,
    ) -> None:
        refuse_teacher(er, "cls_er")
        super().__init__(learner, **er)
        self.strength, self.warmup = strength, warmup
        model, chance = learner.model, learner.generator
        learner.average = OccasionalAverage(model, average, update, chance("stable average"))
        self.plastic = OccasionalAverage(model, plastic, plastic_update, chance("plastic average"))

    def loss(self, batch: Batch) -> Tensor:
        """Return ER's loss and how far replayed logits are from those of the surer average."""
        x, y = self.with_replay(batch)
        inputs, first = self.learner.augment(x), len(batch.y)
        logits = self.learner.forward(inputs)
        loss = cross_entropy(logits, y)
        average = self.learner.average
        if len(y) == first or average is None:  # nothing to replay yet
            return loss
        stable = self.learner.forward_average(inputs[first:])
        plastic = self.learner.forward_without_gradient(inputs[first:], self.plastic.model)
        labels = y[first:, None]
        surer = stable.softmax(1).gather(1, labels) > plastic.softmax(1).gather(1, labels)
        teach = average.has_seen(self.warmup) & self.plastic.has_seen(self.warmup)
        now = logits[first:]
        answers = torch.where(teach, torch.where(surer, stable, plastic), now.detach())
        return loss + self.strength * mse_loss(now, answers)

    def remember(self, batch: Batch) -> None:
        """Offer samples to the memory; update the plastic average, perhaps."""
        super().remember(batch)
        self.plastic.follow()

    def finite_tensors(self) -> Iterable[Tensor]:
        """Add the plastic average's parameters; the stable one's are evaluated."""
        yield from super().finite_tensors()
        yield from self.plastic.model.parameters()
