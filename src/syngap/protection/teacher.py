"""The model's former self: distillation from it is Learning without Forgetting (Li and Hoiem 2016).

Its answers are stored where they take little memory. Those of a language model over its whole
vocabulary are stored as what its last layer made them of. Others are calculated again from the
start's weights. To store a few likely tokens of each would forget more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributions import Distribution

from syngap.optim.consolidation import Predict, call, in_eval_mode
from syngap.optim.sharded import reshard
from syngap.optim.tensors import alike
from syngap.protection import anchors
from syngap.protection.answers import (
    Answers,
    divergence,
    first_classes,
    take_answers,
    width_of,
)
from syngap.protection.last_product import Head, LastProduct
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
        self._features: list[Tensor] = []
        self._head: Head | None = None
        self._is_alone: bool | None = None  # whether the model has all that its answers depend on
        room = room_for_answers(model)
        with in_eval_mode(model), torch.no_grad():
            with LastProduct() as product:
                first = self._take(batches[0])
            self._width = width_of(first.prediction)
            if first.bytes * self._times_the_first() <= room:
                self._stored = [first, *map(self._take, batches[1:])]
            else:
                self._store_features(first, product, room)
        reshard(model)

    def _times_the_first(self) -> float:
        """Return how many times as large as the first batch all are together."""
        first, *others = map(anchors.length, self.batches)
        return len(self.batches) if not first else 1 + sum(each or first for each in others) / first

    def _store_features(self, first: Answers, product: LastProduct, room: int) -> None:
        """Store what the last layer makes answers of, where that is all it does."""
        features = product.features()
        if features is None or features.nbytes * self._times_the_first() > room:
            return
        self._head = product.head_of(first.prediction)
        if self._head is None:
            return
        self._features = [features]
        for batch in self.batches[1:]:
            with product:
                self._asked(batch)
            found = product.features()
            assert found is not None
            self._features.append(found)

    @property
    def stores(self) -> bool:
        """Whether former answers are stored whole."""
        return bool(self._stored)

    def loss(self, place: int) -> Tensor:
        """Return KL(before ‖ now) on one batch.

        Its gradient is taken here and now, so that the graph is gone before that of the new batch
        is made, or before its backward pass.
        """
        before = self.before(place)
        learned = [param for param in self._model.parameters() if param.requires_grad]
        with in_eval_mode(self._model), torch.enable_grad():
            found = divergence(before, self._now(place))
            if not found.requires_grad:
                return found
            if self._is_alone is None:
                self._is_alone = _leaves(found) <= set(learned)
            if not self._is_alone:  # FSDP2's shards, or parameters outside of the model
                return found
            gradients = torch.autograd.grad(found, learned, allow_unused=True)
        return cast(Tensor, _Given.apply(found.detach(), gradients, *learned))  # type: ignore[no-untyped-call]

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
        if self._stored:
            return self._stored[place]
        if self._head is not None:
            batch, features = self.batches[place], self._features[place]
            logits = self._head.answer(features)
            return Answers(logits, anchors.mask_of(batch, logits))
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


class _Given(torch.autograd.Function):
    """A loss whose gradient is known."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: tuple[Tensor | None, ...], *params: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled: dict[Tensor, Tensor] = {}
        for some in alike([each for each in ctx.gradients if each is not None]):
            scaled |= zip(some, torch._foreach_mul(some, grad.to(some[0])), strict=True)
        return None, None, *(None if each is None else scaled[each] for each in ctx.gradients)


def _leaves(found: Tensor) -> set[Tensor]:
    """Return the tensors that a graph ends in."""
    leaves, seen, left = set(), set(), [found.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        left += [following for following, _ in node.next_functions]
    return leaves
