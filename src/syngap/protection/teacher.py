"""The model's former self: its answers on known inputs, and KL(before ‖ now).

Distillation from the model before training is Learning without Forgetting (Li and Hoiem 2016).
Of many classes the likeliest are stored, and some that are drawn from all others and stand for them
(Anshumann et al. 2025): over the draws, the mean of the gradient is that of all classes. The others
as one class would forget more, since nothing says which of them was likely. The draws are those of
the first pass: with few inputs and many steps a model could learn them by heart, like labels.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, kl_divergence

from syngap.optim.errors import NotFiniteError
from syngap.optim.tensors import wide

__all__ = ["Answers", "divergence", "former_classes", "take_answers"]

WHOLE = 1024  # so many classes are stored whole
LIKELIEST, DRAWN = 64, 64  # of more, so many of each kind
AT_A_TIME = 1 << 24  # probabilities from which classes are drawn


@dataclass
class Answers:
    """What the model predicted for one batch.

    Attributes:
        logs: log-probabilities (..., classes), or of the likeliest classes and then of drawn ones.
        classes: which those are, None where it is all.
        rest: the probability (..., 1) of all classes but the likeliest.
        distribution: in place of both, for a prediction that is no logits.
        mask: which predictions count, None for all.
        width: how many classes there were in all.
    """

    logs: Tensor | None
    classes: Tensor | None
    distribution: Distribution | None
    mask: Tensor | None
    width: int = 0
    rest: Tensor | None = None

    @property
    def count(self) -> int:
        """How many predictions count."""
        if self.mask is not None:
            return int(self.mask.sum())
        if self.logs is not None:
            return self.logs.shape[:-1].numel()
        assert self.distribution is not None
        return self.distribution.batch_shape.numel()

    def entropy(self) -> Tensor:
        """Return the mean entropy of the answers: the loss that nothing can undercut."""
        if self.logs is None:
            assert self.distribution is not None
            return _mean(self.distribution.entropy(), self.mask)
        return _mean(-_expected(self.chances(), self.logs), self.mask)

    def chances(self) -> Tensor:
        """Return what each of `logs` counts: its probability, or its share of the rest."""
        assert self.logs is not None
        if self.rest is None:
            return self.logs.exp()
        likeliest = self.logs[..., :LIKELIEST].exp()
        drawn = (self.rest / DRAWN).expand(*self.rest.shape[:-1], DRAWN)
        return torch.cat([likeliest, drawn], -1)

    def first(self) -> Tensor | None:
        """Return the likeliest class of each prediction."""
        if self.logs is None:
            return None
        return self.logs.argmax(-1) if self.classes is None else self.classes[..., 0].long()


@torch.no_grad()
def take_answers(
    prediction: Tensor | Distribution, mask: Tensor | None, *, seed: int = 0
) -> Answers:
    """Return what to remember of a prediction.

    Args:
        prediction: of the model before training.
        mask: which of it counts, None for all.
        seed: of the classes that are drawn where there are many.
    """
    if isinstance(prediction, Distribution):
        copied = _detached(prediction)
        values = [value for value in vars(copied).values() if isinstance(value, Tensor)]
        if any(bool(value.isnan().any()) for value in values if value.is_floating_point()):
            raise NotFiniteError(f"the model answers a known input with NaN in {prediction}")
        return Answers(None, None, copied, mask)
    if not isinstance(prediction, Tensor):
        raise TypeError(
            "the model must answer known inputs with logits (a Tensor) or a "
            f"torch.distributions.Distribution, got {type(prediction).__name__}: predict= makes "
            "one of them from a batch"
        )
    if not prediction.is_floating_point() or prediction.dim() < 2 or prediction.shape[-1] < 2:
        raise ValueError(
            "the model must answer known inputs with floating-point logits of shape (N, classes) "
            f"or (N, ..., classes), got {prediction.dtype} {tuple(prediction.shape)}; for a single "
            "logit or regression let predict= return a distribution"
        )
    logs = wide(prediction.detach()).log_softmax(-1)
    if bool(logs.isnan().any()):
        raise NotFiniteError(
            "the model answers known inputs with logits that are not finite: look at the inputs, "
            "and in float16 load the model in bfloat16 or float32"
        )
    width = logs.shape[-1]
    if width <= WHOLE:
        return Answers(logs, None, None, mask, width)
    likeliest = logs.topk(LIKELIEST, dim=-1).indices
    drawn, rest = _draw_others(logs.flatten(0, -2), likeliest.flatten(0, -2), seed)
    shape = logs.shape[:-1]
    classes = torch.cat([likeliest, drawn.view(*shape, DRAWN)], -1)
    return Answers(logs.gather(-1, classes), classes.int(), None, mask, width, rest.view(*shape, 1))


def _draw_others(logs: Tensor, likeliest: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return classes drawn from all but the likeliest, and the probability of all those."""
    generator = torch.Generator(logs.device).manual_seed(seed)
    rows = max(1, AT_A_TIME // logs.shape[-1])
    found = []
    for begin in range(0, len(logs), rows):
        some = slice(begin, begin + rows)
        chances = logs[some].exp().scatter_(-1, likeliest[some], 0.0)
        rest = chances.sum(-1, keepdim=True)
        chances.masked_fill_(rest == 0, 1.0)  # any will do, as it counts nothing
        found.append((torch.multinomial(chances, DRAWN, True, generator=generator), rest))
    drawn, rests = zip(*found, strict=True)
    return torch.cat(drawn), torch.cat(rests)


def divergence(
    answers: Answers,
    prediction: Tensor | Distribution,
    *,
    may_grow: bool = False,
    bound: bool = False,
) -> Tensor:
    """Return the mean of KL(before ‖ now) over the predictions that count.

    Where classes were drawn it is an estimate, whose mean over the draws is the KL. Classes that
    the model gained since are left out: the probabilities of the former ones then are those given
    that it is one of them.

    Args:
        answers: those of before.
        prediction: the model's now.
        may_grow: whether it may have more classes than before.
        bound: where classes were drawn, return the KL with all but the likeliest as one class: a
            lower bound, at least zero, whatever a model has learned of the draws.
    """
    prediction = former_classes(answers, prediction) if may_grow else prediction
    if isinstance(prediction, Distribution):
        former = answers.distribution
        if former is None:
            raise TypeError("the model gave logits before, and gives a distribution now")
        shapes = [(*each.batch_shape, *each.event_shape) for each in (prediction, former)]
        if shapes[0] != shapes[1] or _width(prediction) != _width(former):
            raise _other_shape(_describe(prediction), _describe(former))
        return _mean(kl_divergence(former, prediction), answers.mask)
    if not isinstance(prediction, Tensor):
        raise TypeError(
            f"the model answers known inputs with {type(prediction).__name__} now, and gave "
            "logits or a distribution before"
        )
    if answers.logs is None:
        raise TypeError("the model gave a distribution before, and gives logits now")
    before, chances = answers.logs.to(prediction.device), answers.chances().to(prediction.device)
    logits = wide(prediction)
    expected = (*before.shape[:-1], answers.width)
    if tuple(logits.shape) != expected:
        raise _other_shape(
            f"logits of shape {tuple(prediction.shape)}", f"logits of shape {expected}"
        )
    if answers.classes is None:
        now = logits.log_softmax(-1)
    else:
        classes = answers.classes.to(logits.device).long()
        now = logits.gather(-1, classes) - logits.logsumexp(-1, keepdim=True)
        if bound:
            before, now = (_others_as_one(logs) for logs in (before, now))
            chances = before.exp()
    return _mean(_expected(chances, before - now), answers.mask)


def former_classes(answers: Answers, prediction: Tensor | Distribution) -> Tensor | Distribution:
    """Return a prediction without the classes that were not there before."""
    if isinstance(prediction, Tensor):
        if answers.logs is not None and prediction.shape[-1] > answers.width:
            return prediction[..., : answers.width]
    elif isinstance(prediction, Categorical):
        width = _width(answers.distribution)
        if width is not None and prediction.logits.shape[-1] > width:
            return type(prediction)(logits=prediction.logits[..., :width])
    return prediction


def _width(distribution: Distribution | None) -> int | None:
    """Return how many classes a distribution has, None where it has none."""
    return distribution.logits.shape[-1] if isinstance(distribution, Categorical) else None


def _describe(distribution: Distribution) -> str:
    shapes = f"batch {tuple(distribution.batch_shape)}, event {tuple(distribution.event_shape)}"
    width = _width(distribution)
    classes = "" if width is None else f", {width} classes"
    return f"{type(distribution).__name__} ({shapes}{classes})"


def _other_shape(now: str, before: str) -> ValueError:
    return ValueError(
        f"the model answers known inputs with {now}, and before with {before}: for a head that "
        "grew, call protection.grow(old, new); for another tokenizer or other inputs, protect() "
        "the model anew"
    )


def _expected(chances: Tensor, values: Tensor) -> Tensor:
    """Return the mean of values; what is impossible counts zero."""
    return (chances * values.masked_fill(chances == 0, 0.0)).sum(-1)


def _others_as_one(logs: Tensor) -> Tensor:
    """Return log-probabilities of the likeliest classes and of all others together."""
    likeliest = logs[..., :LIKELIEST]
    smallest = torch.finfo(logs.dtype).eps
    rest = (1.0 - likeliest.exp().sum(-1, keepdim=True)).clamp(min=smallest).log()
    return torch.cat([likeliest, rest], -1)


def _mean(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return values.mean()
    mask = mask.to(values.device)
    return (values * mask).sum() / mask.sum().clamp(min=1)


def _detached(distribution: Distribution) -> Distribution:
    """Return a copy without a graph; parameters of torch's distributions are their attributes."""
    found = copy.copy(distribution)
    for name, value in vars(found).items():
        if isinstance(value, Tensor):
            vars(found)[name] = value.detach().clone()
        elif isinstance(value, Distribution):
            vars(found)[name] = _detached(value)
    return found
