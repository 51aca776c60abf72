"""The model's former self: distillation from it is Learning without Forgetting (Li and Hoiem 2016).

Its answers are stored where they take little memory. Of a language model, whose answers are over a
whole vocabulary, the inputs of its last linear layer (features) are stored. Other answers are
calculated again from the start's weights. To store a few likely tokens of each would forget more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.optim.errors import UNRELATED, Notices
from syngap.optim.predictions import Predict, as_it_was, in_eval_mode
from syngap.optim.scores import suspect_probabilities
from syngap.optim.sharded import reshard
from syngap.optim.tensors import is_sharded
from syngap.protection import anchors
from syngap.protection.answers import (
    Answers,
    divergence,
    first_classes,
    take_answers,
    weights_of,
    width_of,
)
from syngap.protection.captured import CapturedPass, capture
from syngap.protection.gradients import is_foreign, leaves_of, nodes_of, with_gradient
from syngap.protection.last_product import Head, LastProduct
from syngap.protection.recomputed import blocks_of_large, is_large, recomputed
from syngap.protection.start import Start

__all__ = ["Teacher"]

SMALL = 1 << 28  # bytes of answers that are stored whatever the size of the model
# `every` by default: on a CPU where answers are not stored, and of a large model.
PLAIN, LARGE = 2, 4


def byte_limit(model: nn.Module) -> int:
    """Return how many bytes of answers are stored: at most as many as the trained weights take."""
    learned = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    return max(SMALL, learned)


def what_to_store(
    answers: int | None, features: int | None, limit: int
) -> Literal["answers", "features", "start"]:
    """Return what is stored: answers if they are small, else what takes less, if it fits.

    Args:
        answers: their bytes; None where they cannot be stored.
        features: bytes of the last layer and its inputs, likewise.
        limit: bytes that may be stored.
    """
    if answers is not None and answers <= SMALL:
        return "answers"
    sizes = {"answers": answers, "features": features}
    fits = {name: size for name, size in sizes.items() if size is not None and size <= limit}
    if not fits:
        return "start"
    return "features" if min(fits, key=fits.__getitem__) == "features" else "answers"


class Teacher:
    """A model's former self, asked about batches of known inputs.

    Args:
        model: the model, as it is before training.
        start: its weights.
        batches: the known inputs.
        predict: computes a prediction from a batch.

    Attributes:
        batches: the known inputs.
        may_grow: whether the model may have gained classes, which then do not count.
    """

    def __init__(
        self, model: nn.Module, start: Start, batches: list[Any], predict: Predict
    ) -> None:
        self.batches, self.may_grow = _near(batches, model), False
        self._model, self._start, self._predict = model, start, predict
        self._width: int | None = None
        self._stored: list[Answers] | None = []
        self._features: list[Tensor] | None = []
        self._head: Head | None = None
        self._has_float16: dict[tuple[object, ...], bool] = {}
        self._captured: CapturedPass | None = None
        self._captured_in: tuple[object, ...] | None = None
        self._may_capture = True
        if any(is_sharded(param) for param in model.parameters()):
            self._features = None  # FSDP2 frees the weights of a layer after its product
        notices = Notices()
        with as_it_was(model, None), torch.no_grad():
            for batch in self.batches:
                with LastProduct() as product:
                    prediction = self._predict_batch(batch)
                anchors.warn_of_padding(batch, prediction, notices.warn)
                answers = take_answers(prediction, anchors.mask_of(batch, prediction))
                if batch is self.batches[0]:
                    self._width = width_of(answers.prediction)
                    _warn_of_probabilities(answers.prediction)
                self._keep(answers, product)
        self._drop_what_is_not_needed()
        reshard(model)

    def _drop_what_is_not_needed(self) -> None:
        answers = features = None
        if self._stored is not None:
            answers = sum(each.bytes for each in self._stored)
        if self._features is not None and self._head is not None:
            features = sum(each.nbytes for each in self._features) + self._head.nbytes
        stored = what_to_store(answers, features, byte_limit(self._model))
        if stored != "answers":
            self._stored = None
        if stored != "features":
            self._features, self._head = None, None

    def _keep(self, answers: Answers, product: LastProduct) -> None:
        """Store the answers to a batch, and its features, as long as there is room for them."""
        limit = byte_limit(self._model)
        if self._stored is not None:
            self._stored.append(answers)
            if sum(each.bytes for each in self._stored) > limit:
                self._stored = None
        if self._features is None:
            return
        self._head = self._head or product.head()
        features, prediction = product.features, answers.prediction
        if self._head is None or features is None or not isinstance(prediction, Tensor):
            self._features = None
            return
        features = features.clone()  # of a view it would keep the whole
        self._features.append(features)
        fits = sum(each.nbytes for each in self._features) + self._head.nbytes <= limit
        is_narrow = features.shape[-1] != self._head.weight.shape[-1]
        if not fits or is_narrow:
            self._features = None
        elif not torch.equal(self._head.answer(features).to(prediction.dtype), prediction):
            self._features = None  # more than the product of one layer

    @property
    def stores(self) -> bool:
        """Whether former answers are stored whole."""
        return self._stored is not None

    @property
    def every(self) -> int:
        """The default of `every`."""
        if is_large(self._model):
            return LARGE
        return 1 if self.stores or next(self._model.parameters()).is_cuda else PLAIN

    @property
    def runs_plainly(self) -> bool:
        """Whether its pass was tried, and could not be recorded."""
        return self._captured is None and not self._may_capture

    def loss(self, place: int, strength: float) -> Tensor:
        """Return strength · KL(before ‖ now) on one batch.

        A model that draws numbers in eval mode draws new ones here, as in each forward pass: if
        they were given back, the new batch would get the same.

        Where that is safe its gradient is taken at once, so that its graph is not in memory beside
        that of the new batch; on a GPU by a CUDA graph, from the second call on. Of a large model a
        second gradient would take more memory than a graph whose blocks run again.
        """
        if torch.is_grad_enabled() and self._is_captured():
            return self._replay(place, strength)
        learned = [param for param in self._model.parameters() if param.requires_grad]
        before = self.before(place)
        again = blocks_of_large(self._model) if torch.is_grad_enabled() else []
        with in_eval_mode(self._model), recomputed(again, self._model):
            found = strength * divergence(before, self._now(place))
        if found.requires_grad and is_foreign(found, self._model):
            raise ValueError(UNRELATED)
        if again or not found.requires_grad or not self._is_differentiable_now(found, learned):
            return found
        gradients = torch.autograd.grad(found, learned, allow_unused=True)
        pairs = [pair for pair in zip(learned, gradients, strict=True) if pair[1] is not None]
        params, known = zip(*pairs, strict=True)
        if self._may_capture:
            self._may_capture = False
            self._capture(known, params)
        return with_gradient(found.detach(), known, params)

    def _capture(self, gradients: Sequence[Tensor], params: Sequence[nn.Parameter]) -> None:
        """Record the pass that has just run, and gave these gradients, where that is possible."""
        rows = [self._rows(place) for place in range(len(self.batches))]
        is_dense = all(each.layout is torch.strided for each in gradients)
        if is_dense and not self.may_grow:
            self._captured_in = self._autocast()
            self._captured = capture(
                self._model, self._predict, self.batches, rows, self._answer, params
            )

    def _is_captured(self) -> bool:
        """Return whether there is a recorded pass that does what the model would do now."""
        if self._captured is None:
            return False
        if self.may_grow or not self._captured.fits(self._model):
            self._captured = None  # for good: to record takes as long as some steps
            return False
        return self._captured.is_free and self._captured_in == self._autocast()

    def _replay(self, place: int, strength: float) -> Tensor:
        batch, rows = self.batches[place], self._rows(place)
        assert self._captured is not None
        assert rows is not None
        weights = weights_of(anchors.mask_of(batch, rows), rows)
        return self._captured.loss(batch, rows, strength * weights)

    def _rows(self, place: int) -> Tensor | None:
        """Return what is stored of the answers to a batch, None where that is no tensor."""
        if self._stored is not None:
            prediction = self._stored[place].prediction
            return prediction if isinstance(prediction, Tensor) else None
        return None if self._features is None else self._features[place]

    def _answer(self, rows: Tensor) -> Tensor:
        return rows if self._head is None else self._head.answer(rows)

    def _is_differentiable_now(self, found: Tensor, learned: list[nn.Parameter]) -> bool:
        """Return whether a gradient can be taken before that of the whole loss.

        Not so where a graph has other leaves (parameters outside of the model, FSDP2's), where a
        hook of a parameter would run twice, where reentrant checkpointing needs `backward()`, and
        where small numbers of float16 wait for a scaler. Those are looked for in the first graph of
        each precision alone, as that takes long.
        """
        if any(param._backward_hooks for param in learned):
            return False
        nodes, own = nodes_of(found), set(learned)
        precision = self._precision()
        if precision not in self._has_float16:
            kinds = {each.dtype for node in nodes for each in node._input_metadata}
            self._has_float16[precision] = torch.float16 in kinds
        names = {node.name() for node in nodes}
        is_plain = not any(name.startswith("CheckpointFunction") for name in names)
        return is_plain and not self._has_float16[precision] and own.issuperset(leaves_of(nodes))

    def _precision(self) -> tuple[object, ...]:
        return *self._autocast(), frozenset(param.dtype for param in self._model.parameters())

    def _autocast(self) -> tuple[object, ...]:
        """Return the precision of products; weights of another type are in other memory."""
        device = next(self._model.parameters()).device.type
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    @torch.no_grad()
    def comparisons(self) -> Iterator[tuple[Answers, Tensor | Distribution]]:
        """Yield the answers of before and of now, batch by batch; now with all its classes.

        To be used inside `as_it_was`.
        """
        for place in range(len(self.batches)):
            now = self._predict_batch(self.batches[place])
            yield self.before(place), now

    @property
    def width(self) -> int | None:
        """How many classes count; None where the model may not have gained any."""
        return self._width if self.may_grow else None

    @torch.no_grad()
    def before(self, place: int) -> Answers:
        """Return what the model answered to one batch before training."""
        if self._stored is not None:
            return self._stored[place]
        if self._head is not None and self._features is not None:
            batch, features = self.batches[place], self._features[place]
            logits = self._head.answer(features)
            return Answers(logits, anchors.mask_of(batch, logits))
        with in_eval_mode(self._model), self._start.in_model(self._model):
            prediction = self._predict_batch(self.batches[place])
        answers = Answers(prediction, anchors.mask_of(self.batches[place], prediction))
        return answers.only(self.width)

    def _now(self, place: int) -> Tensor | Distribution:
        return first_classes(self._predict_batch(self.batches[place]), self.width)

    def _predict_batch(self, batch: Any) -> Tensor | Distribution:
        batch = anchors.moved(batch, next(self._model.parameters()).device)
        return self._predict(batch)


def _warn_of_probabilities(prediction: Tensor | Distribution) -> None:
    if isinstance(prediction, Tensor) and suspect_probabilities(prediction):
        Notices().warn(
            "probabilities",
            "the model's answers to known inputs are positive and sum to one: protect() takes what "
            "goes into the softmax, not what comes out; predict= can return that",
        )


def _near(batches: list[Any], model: nn.Module) -> list[Any]:
    """Return batches on the model's device, if they take little memory there."""
    size = sum(each.nbytes for batch in batches for each in anchors.tensors_of(batch))
    device = next(model.parameters()).device
    return batches if size > SMALL else [anchors.moved(batch, device) for batch in batches]
