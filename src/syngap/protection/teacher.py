"""The model's former self: its answers on known inputs, and KL(before ‖ now).

Distillation from the model before training is Learning without Forgetting (Li and Hoiem 2016).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from syngap.optim.tensors import wide

__all__ = ["Answers", "divergence", "take_answers"]

WHOLE = 1024  # so many classes are stored whole
TOP = 128  # of more, so many, and the rest as one


@dataclass
class Answers:
    """What the model predicted for one batch.

    Attributes:
        logs: log-probabilities (..., classes), or of the likeliest classes and, last, of all others
            together.
        classes: which those are, None where it is all.
        distribution: in place of both, for a prediction that is no logits.
        mask: which predictions count, None for all.
    """

    logs: Tensor | None
    classes: Tensor | None
    distribution: Distribution | None
    mask: Tensor | None

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
        return _mean(-_expected(self.logs, self.logs), self.mask)

    def first(self) -> Tensor | None:
        """Return the likeliest class of each prediction."""
        if self.logs is None:
            return None
        return self.logs.argmax(-1) if self.classes is None else self.classes[..., 0].long()


@torch.no_grad()
def take_answers(prediction: Tensor | Distribution, mask: Tensor | None) -> Answers:
    """Return what to remember of a prediction."""
    if isinstance(prediction, Distribution):
        return Answers(None, None, _detached(prediction), mask)
    logs = wide(prediction.detach()).log_softmax(-1)
    if logs.shape[-1] <= WHOLE:
        return Answers(logs, None, None, mask)
    top = logs.topk(TOP, dim=-1)
    return Answers(_with_rest(top.values), top.indices.int(), None, mask)


def divergence(answers: Answers, prediction: Tensor | Distribution) -> Tensor:
    """Return the mean of KL(before ‖ now) over the predictions that count.

    Where only the likeliest classes were stored it is that of the probabilities of each of those
    and of all others together, a lower bound.
    """
    if isinstance(prediction, Distribution):
        if answers.distribution is None:
            raise TypeError("the model gave logits before, and gives a distribution now")
        return _mean(kl_divergence(answers.distribution, prediction), answers.mask)
    if answers.logs is None:
        raise TypeError("the model gave a distribution before, and gives logits now")
    before = answers.logs.to(prediction.device)
    logits = wide(prediction)
    if before.shape[:-1] != logits.shape[:-1] or (
        answers.classes is None and before.shape != logits.shape
    ):
        raise ValueError(
            f"the model answers known inputs with logits of shape {tuple(logits.shape)}, and "
            f"before of {tuple(before.shape)}: for a head that grew, call protection.grow()"
        )
    if answers.classes is None:
        now = logits.log_softmax(-1)
    else:
        classes = answers.classes.to(logits.device).long()
        total = logits.logsumexp(-1, keepdim=True)
        now = _with_rest(logits.gather(-1, classes) - total)
    return _mean(_expected(before, before) - _expected(before, now), answers.mask)


def _expected(before: Tensor, logs: Tensor) -> Tensor:
    """Return the mean of log-probabilities under those of before; impossible classes count zero."""
    chances = before.exp()
    return (chances * logs.masked_fill(chances == 0, 0.0)).sum(-1)


def _with_rest(logs: Tensor) -> Tensor:
    """Append the log-probability of all classes that are not listed."""
    smallest = torch.finfo(logs.dtype).eps
    rest = (1.0 - logs.exp().sum(-1, keepdim=True)).clamp(min=smallest).log()
    return torch.cat([logs, rest], -1)


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
