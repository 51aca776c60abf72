"""Supervised contrastive replay (Mai et al. 2021) with a nearest-class-mean classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from syngap.bench.errors import UserError
from syngap.bench.methods.er import ER
from syngap.bench.methods.learner import Learner
from syngap.bench.methods.teacher import refuse_teacher
from syngap.bench.options import Positive
from syngap.bench.streams.stream import Batch

__all__ = ["SCR"]

_UNSEEN = -2.0  # the score of a class without samples: below every cosine


class SCR(ER):
    """Samples of one class attract each other; a sample is of the class whose mean is nearest.

    z is the network's output, divided by its norm. Over two views of what arrives and what is
    replayed, the loss is the mean over samples i of the mean over other samples j of i's class of
    -log (exp(zᵢ·zⱼ / T) / Σ over k ≠ i of exp(zᵢ·zₖ / T)) (Khosla et al. 2020). At an evaluation
    the memory's samples give a mean of z for each class.

    What differs from the paper: the network's output takes the place of both the projection (its
    loss) and the features (its class means); both views are augmented, by the stream; the
    first batch, without replay, is learned too.

    Args:
        learner: the network and how it sees samples.
        temperature: T.
        **er: options of `ER`, but for its teacher; the memory must hold samples.
    """

    def __init__(self, learner: Learner, *, temperature: Positive = 0.07, **er: Any) -> None:
        refuse_teacher(er, "scr")
        super().__init__(learner, **er)
        if not self.memory.size:
            raise UserError("buffer: got 0 with scr, whose classes are means over it; set buffer")
        self.temperature = temperature
        learner.classifier = self._nearest_mean

    def loss(self, batch: Batch) -> Tensor:
        """Return the supervised contrastive loss of two views of all samples."""
        x, y = self.with_replay(batch)
        views = torch.cat([self.learner.augment(x), self.learner.augment(x)])
        z, labels = normalize(self.learner.forward(views)), y.repeat(2)
        oneself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        same = (labels[:, None] == labels) & ~oneself
        similar = (z @ z.T / self.temperature).masked_fill(oneself, -torch.inf)
        chosen = similar.log_softmax(1).masked_fill(~same, 0.0)
        return -(chosen.sum(1) / same.sum(1)).mean()

    def _nearest_mean(self, outputs: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the cosine to the mean of each class; the mean is of length 1, so the nearest."""
        kept = self.memory.samples()
        if not kept:
            return outputs
        classes = one_hot(kept["y"], outputs.shape[1]).T.to(outputs.dtype)
        means = normalize(classes @ normalize(embed(kept["x"])))
        cosines = normalize(outputs) @ means.T
        return cosines.masked_fill(classes.sum(1) == 0, _UNSEEN)
