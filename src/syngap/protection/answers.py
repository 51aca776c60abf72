"""What a model answered before training, and KL(before ‖ now)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    Transform,
    kl_divergence,
)

from syngap.messages import count_of
from syngap.optim.errors import FLOAT16, NotFiniteError
from syngap.optim.scores import how_to_predict
from syngap.optim.tensors import wide

__all__ = [
    "Answers",
    "check_divergence",
    "check_prediction",
    "computed",
    "divergence",
    "divergence_and_difference",
    "take_answers",
    "weights_of",
]

AT_A_TIME = 1 << 23  # probabilities that are in memory in full precision


@dataclass(frozen=True)
class Answers:
    """What the model predicted for one batch.

    Attributes:
        prediction: logits (..., classes), or a distribution.
        mask: which predictions count, None for all.
    """

    prediction: Tensor | Distribution
    mask: Tensor | None

    @property
    def count(self) -> int:
        """How many predictions count."""
        if self.mask is not None:
            return int(self.mask.sum())
        if isinstance(self.prediction, Tensor):
            return self.prediction.shape[:-1].numel()
        return self.prediction.batch_shape.numel()

    @property
    def bytes(self) -> int:
        """How much memory they take."""
        return sum(value.nbytes for value in _tensors(self.prediction))

    def entropy(self) -> Tensor:
        """Return the mean entropy of the answers: the lowest possible cross-entropy."""
        if isinstance(self.prediction, Distribution):
            return _mean(self.prediction.entropy(), self.mask)
        found = []
        for rows in _in_parts(self.prediction.flatten(0, -2), self.prediction.shape[-1]):
            logs = wide(rows).log_softmax(-1)
            found.append(-(logs.exp() * logs.masked_fill(logs == -torch.inf, 0.0)).sum(-1))
        return _mean(torch.cat(found).view(self.prediction.shape[:-1]), self.mask)

    def only(self, classes: int | None) -> Answers:
        """Return the same answers given that each is one of the first so many classes."""
        return Answers(first_classes(self.prediction, classes), self.mask)


def check_prediction(prediction: object) -> None:
    """Refuse what is neither logits nor a distribution."""
    if not isinstance(prediction, (Tensor, Distribution)):
        raise TypeError(
            "the model must answer known inputs with logits (a Tensor) or a "
            f"torch.distributions.Distribution, got {type(prediction).__name__}; "
            f"{how_to_predict(prediction)}"
        )


def check_divergence(prediction: object) -> None:
    """Refuse a distribution without a finite KL divergence, which a teacher needs.

    It is tried from a copy in which what the model computed is a little different: of transformed
    distributions torch knows it only where the transforms are equal.
    """
    if not isinstance(prediction, Distribution):
        return
    found = computed(lambda: kl_divergence(_copied(prediction, _nudged), prediction))
    if found is None:
        raise TypeError(
            f"the model answers known inputs with {_name(prediction)}, of which torch has no KL "
            "divergence, and the teacher needs one: pass teacher=False, or register one by "
            "torch.distributions.kl.register_kl"
        )
    changed = computed(lambda: kl_divergence(_copied(prediction, _scaled), prediction))
    if changed is not None and bool(changed.isinf().any()):
        raise TypeError(
            f"the model answers known inputs with {_name(prediction)}, whose KL divergence is "
            "infinite as soon as the model changes, and the teacher needs a finite one: pass "
            "teacher=False, or let predict= return another distribution"
        )


def computed(measure: Callable[[], Tensor]) -> Tensor | None:
    """Return a measure of distributions, None where torch has no formula for them.

    Of some, such as Wishart, torch takes a gradient to compute it.
    """
    with torch.enable_grad(), suppress(NotImplementedError):  # by which torch says so
        return measure().detach()
    return None


@torch.no_grad()
def take_answers(prediction: Tensor | Distribution, mask: Tensor | None) -> Answers:
    """Return what to remember of a prediction.

    Args:
        prediction: of the model before training.
        mask: which of it counts, None for all.
    """
    check_prediction(prediction)
    if isinstance(prediction, Distribution):
        copied = _copied(prediction, lambda value: value.detach().clone())
        if any(bool(value.isnan().any()) for value in _tensors(copied)):
            raise NotFiniteError(f"the model answers a known input with NaN in {prediction}")
        return Answers(copied, mask)
    if not prediction.is_floating_point() or prediction.dim() < 2 or prediction.shape[-1] < 2:
        raise ValueError(
            "the model must answer known inputs with floating-point logits of shape (N, classes) "
            f"or (N, ..., classes), got {prediction.dtype} {tuple(prediction.shape)}; for a single "
            "logit or regression let predict= return a distribution"
        )
    highest = prediction.detach().amax(-1)  # infinite, or NaN, where no log-probabilities exist
    if not bool(highest.isfinite().all()):
        raise NotFiniteError(
            "the model answers known inputs with logits that are not finite: look at the inputs; "
            f"{FLOAT16}"
        )
    return Answers(prediction.detach().clone(), mask)


def divergence(before: Answers, now: Tensor | Distribution) -> Tensor:
    """Return the mean of KL(before ‖ now) over the predictions that count."""
    former = before.prediction
    if isinstance(now, Distribution):
        if isinstance(former, Tensor):
            raise TypeError("the model gave logits before, and gives a distribution now")
        shapes = [(*each.batch_shape, *each.event_shape) for each in (now, former)]
        if shapes[0] != shapes[1] or width_of(now) != width_of(former):
            raise _other_shape(_describe(now), _describe(former))
        return _mean(kl_divergence(former, now), before.mask)
    if not isinstance(now, Tensor):
        raise TypeError(
            f"the model answers known inputs with {type(now).__name__} now, and gave "
            "logits or a distribution before"
        )
    if isinstance(former, Distribution):
        raise TypeError("the model gave a distribution before, and gives logits now")
    if now.shape != former.shape:
        raise _other_shape(
            f"logits of shape {tuple(now.shape)}", f"logits of shape {tuple(former.shape)}"
        )
    weights = weights_of(before.mask, now)
    found: Tensor = _KL.apply(now, former.to(now.device), weights)  # type: ignore[no-untyped-call]
    return found


def weights_of(mask: Tensor | None, logits: Tensor) -> Tensor:
    """Return what each prediction counts in a mean over those that count."""
    ones = torch.ones_like(wide(logits[..., 0]))
    weights = ones if mask is None else ones * mask.to(logits.device)
    return weights / weights.sum().clamp(min=1)


class _KL(torch.autograd.Function):
    """The weighted sum of KL(before ‖ now) over logits."""

    @staticmethod
    def forward(ctx: Any, now: Tensor, before: Tensor, weights: Tensor) -> Tensor:
        total, difference = divergence_and_difference(now, before, weights)
        ctx.save_for_backward(difference, weights)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        difference, weights = ctx.saved_tensors
        return difference * (grad * weights).to(difference.dtype).unsqueeze(-1), None, None


def divergence_and_difference(
    now: Tensor,
    before: Tensor,
    weights: Tensor,
    answer: Callable[[Tensor], Tensor] = lambda before: before,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of KL(before ‖ now), and softmax(now) - softmax(before).

    The difference, times the weights, is the gradient, and all that has to be kept. Some rows are
    taken at a time: of a vocabulary of fifty thousand tokens each further copy would count.

    Args:
        now: logits (..., classes).
        before: what the former logits are made of, row by row.
        weights: of each row.
        answer: makes logits of it.
    """
    difference = torch.empty_like(now, memory_format=torch.contiguous_format)
    total = weights.new_zeros(())
    rows = [each.flatten(0, -2) for each in (now, before, difference)]
    parts = (_in_parts(each, now.shape[-1]) for each in (*rows, weights.flatten()))
    for some, former, kept, weight in zip(*parts, strict=True):
        logs, before_logs = (wide(each).log_softmax(-1) for each in (some, answer(former)))
        chances = before_logs.exp()
        gaps = (before_logs - logs).masked_fill_(chances == 0, 0.0)  # impossible counts nothing
        # Not a product of vectors, which autocast would round.
        total += ((chances * gaps).sum(-1) * weight).sum()
        torch.sub(logs.exp_(), chances, out=logs)
        kept.copy_(logs)
    return total, difference


def _in_parts(rows: Tensor, classes: int) -> tuple[Tensor, ...]:
    return torch.split(rows, max(1, AT_A_TIME // classes))


def first_classes(prediction: Tensor | Distribution, count: int | None) -> Tensor | Distribution:
    """Return a prediction without the classes after the first so many."""
    width = width_of(prediction)
    if count is None or width is None or width <= count:
        return prediction
    if isinstance(prediction, Tensor):
        return prediction[..., :count]
    assert isinstance(prediction, Categorical)
    return type(prediction)(logits=prediction.logits[..., :count])


def width_of(prediction: Tensor | Distribution) -> int | None:
    """Return how many classes a prediction has, None where it has none."""
    if isinstance(prediction, Tensor):
        return prediction.shape[-1]
    return prediction.logits.shape[-1] if isinstance(prediction, Categorical) else None


def _name(distribution: object) -> str:
    """Return what kind a distribution is, such as "Independent of StudentT"."""
    inner = f" of {_name(distribution.base_dist)}" if isinstance(distribution, Independent) else ""
    return f"{type(distribution).__name__}{inner}"


def _describe(distribution: Distribution) -> str:
    shapes = f"batch {tuple(distribution.batch_shape)}, event {tuple(distribution.event_shape)}"
    width = width_of(distribution)
    classes = "" if width is None else f", {count_of(width, 'class')}"
    return f"{type(distribution).__name__} ({shapes}{classes})"


def _other_shape(now: str, before: str) -> ValueError:
    return ValueError(
        f"the model answers known inputs with {now}, and before with {before}: for a head that "
        "grew, call protection.grow(old, new); for another tokenizer or other inputs, protect() "
        "the model anew"
    )


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.mean()
    mask = mask.to(values.device)
    return (values * mask).sum() / mask.sum().clamp(min=1)


def _tensors(prediction: Tensor | Distribution) -> Iterator[Tensor]:
    """Yield the floating-point tensors that a prediction is made of."""
    values = [prediction] if isinstance(prediction, Tensor) else vars(prediction).values()
    for value in values:
        if isinstance(value, Distribution):
            yield from _tensors(value)
        elif isinstance(value, Tensor) and value.is_floating_point():
            yield value


def _copied(
    value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any] | None = None
) -> Any:
    """Return a copy with changed tensors: attributes of distributions, and of their transforms."""
    done = {} if done is None else done  # a transform and its inverse have each other
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list):
        return [_copied(each, change, done) for each in value]
    if not isinstance(value, (Distribution, Transform)):
        return value
    if id(value) not in done:
        done[id(value)] = found = copy.copy(value)
        for name, each in vars(value).items():
            vars(found)[name] = _copied(each, change, done)
    return done[id(value)]


def _nudged(value: Tensor) -> Tensor:
    """Return what the model computed, a little different, and a constant as it is."""
    return torch.where(value == 0, 1e-3, value * 0.999) if value.requires_grad else value


def _scaled(value: Tensor) -> Tensor:
    """Return the same, but zeros stay zeros, as those of classes that are left out."""
    return value * 0.999 if value.requires_grad else value
