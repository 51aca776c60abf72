"""The model's former self: distillation from it is Learning without Forgetting (Li and Hoiem 2016).

Its answers are stored where they take little memory. Others, such as those of a language model over
its whole vocabulary, are calculated again from the start's weights when they are needed: to store a
few likely tokens of each forgets more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.optim.consolidation import Predict, call, in_eval_mode
from syngap.optim.sharded import reshard
from syngap.protection import anchors
from syngap.protection.answers import (
    Answers,
    divergence,
    first_classes,
    take_answers,
    width_of,
)
from syngap.protection.start import Start

__all__ = ["Teacher"]

STORED = 1 << 28  # bytes that are little whatever the size of the model


def room_for_answers(model: nn.Module) -> int:
    """Return how many bytes of answers are stored: not more than weights to answer with again."""
    learned = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    return max(STORED, learned)


class Teacher:
    """A model's former self, asked about batches of known inputs.

    Args:
        model: the model, as it is before training.
        start: its weights.
        batches: the known inputs.
        predict: computes a prediction from a batch in place of the model.

    Attributes:
        batches: the known inputs.
        may_grow: whether the model may have gained classes, which then do not count.
    """

    def __init__(
        self, model: nn.Module, start: Start, batches: list[Any], predict: Predict | None
    ) -> None:
        self.batches, self.may_grow = batches, False
        self._model, self._start, self._predict = model, start, predict
        self._stored: list[Answers] = []
        with in_eval_mode(model), torch.no_grad():
            first = self._take(batches[0])
            self._width = width_of(first.prediction)
            if first.bytes * len(batches) <= room_for_answers(model):
                self._stored = [first, *map(self._take, batches[1:])]
        reshard(model)

    @property
    def stores(self) -> bool:
        """Whether former answers are stored, and not calculated again."""
        return bool(self._stored)

    def loss(self, place: int) -> Tensor:
        """Return KL(before ‖ now) on one batch, with its graph."""
        before = self.before(place)
        with in_eval_mode(self._model), torch.enable_grad():
            return divergence(before, self._now(place))

    @torch.no_grad()
    def comparisons(self) -> Iterator[tuple[Answers, Tensor | Distribution]]:
        """Yield the answers of before and of now, batch by batch."""
        for place in range(len(self.batches)):
            with in_eval_mode(self._model):
                now = self._now(place)
            yield self.before(place), now

    @torch.no_grad()
    def before(self, place: int) -> Answers:
        """Return what the model answered to one batch before training."""
        if self.stores:
            return self._stored[place]
        with in_eval_mode(self._model), self._start.in_model(self._model):
            prediction = self._asked(self.batches[place])
        answers = Answers(prediction, anchors.mask_of(self.batches[place], prediction))
        return answers.only(self._width) if self.may_grow else answers

    def _now(self, place: int) -> Tensor | Distribution:
        prediction = self._asked(self.batches[place])
        return first_classes(prediction, self._width) if self.may_grow else prediction

    def _asked(self, batch: Any) -> Tensor | Distribution:
        batch = anchors.moved(batch, next(self._model.parameters()).device)
        found: Tensor | Distribution = (
            self._predict(batch) if self._predict else call(self._model, batch)
        )
        return found

    def _take(self, batch: Any) -> Answers:
        prediction = self._asked(batch)
        return take_answers(prediction, anchors.mask_of(batch, prediction))
