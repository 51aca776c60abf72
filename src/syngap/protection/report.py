"""What was kept: how far a model is from its former answers, and how its weights were protected."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.messages import count_of
from syngap.optim.knowledge import Known
from syngap.protection.answers import Answers, computed, divergence, first_classes

__all__ = ["Coverage", "Kept", "Report", "advice", "compare", "coverage"]


_UNIFORM = 0.95  # of the entropy of a uniform answer


@dataclass(frozen=True)
class Coverage:
    """How one parameter is protected.

    Attributes:
        name: of the parameter.
        how: "directions", "entries", "new" (of no known importance) or "frozen".
        numel: how many numbers it has.
        directions: of its two sides, None for entries.
    """

    name: str
    how: str
    numel: int
    directions: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True)
class Report:
    """What changed on known inputs since `protect()`, and which parts protected the model.

    Attributes:
        kl: the mean of KL(before ‖ now), in nats a prediction; 0 where nothing changed, NaN where
            the model now answers with NaN. None for a distribution of which torch has no KL
            divergence.
        loss_before: the mean loss on the model's former answers, before: their entropy, None for a
            distribution of which torch has none.
        loss_now: the same now, None where one of both is. The difference is `kl`.
        agreement: the share of predictions whose likeliest class is the former one, None where a
            prediction has no classes. Classes that the model gained by `grow` do not count; an
            answer with NaN has no likeliest class.
        agreement_with_new: the same where they count, None where it gained none.
        moved: how far the weights are from the start, relative to their norm.
        parts: what was used: "gate", "teacher", "interpolation".
        advice: what seems to be forgotten in the training loop, in sentences.
        coverage: how each parameter is protected.
    """

    kl: float | None
    loss_before: float | None
    loss_now: float | None
    agreement: float | None
    agreement_with_new: float | None
    moved: float
    parts: tuple[str, ...]
    advice: tuple[str, ...]
    coverage: tuple[Coverage, ...] = field(repr=False)

    @classmethod
    def of(cls, kept: Kept, **others: Any) -> Report:
        """Return a report of what was kept, with all other attributes."""
        return cls(
            kl=kept.kl,
            loss_before=kept.entropy,
            loss_now=kept.loss_now,
            agreement=kept.agreement,
            agreement_with_new=kept.agreement_with_new,
            **others,
        )

    def __str__(self) -> str:
        """Return the report as a few lines of text."""
        kept = []
        if self.kl is not None:
            kept.append(f"KL(before || now) {_number(self.kl, ' nats')}")
        if self.loss_before is not None and self.loss_now is not None:
            losses = f"{_number(self.loss_before)} before and {_number(self.loss_now)} now"
            kept.append(f"cross-entropy with its former answers {losses}")
        if self.agreement is not None:
            kept.append(f"same first answer {self.agreement:.1%}")
        if self.agreement_with_new is not None:
            kept[-1] += f" among former classes and {self.agreement_with_new:.1%} among all"
        lines = [f"On known inputs: {', '.join(kept)}."] if kept else []
        if kept and "teacher" in self.parts:
            lines[0] += " The teacher trained on these inputs: others may have changed more."
        if math.isfinite(self.moved):
            lines.append(f"Weights moved by {self.moved:.2%} of their norm.")
        lines += self._failures()
        if self.parts or self.moved:
            lines.append(f"Protected by: {', '.join(self.parts) or 'nothing'}.")
        lines += self.advice
        numbers: Counter[str] = Counter()
        tensors: Counter[str] = Counter()
        for one in self.coverage:
            numbers[one.how] += one.numel
            tensors[one.how] += 1
        total = max(1, sum(numbers.values()))
        words = {
            "directions": "along directions",
            "entries": "entry by entry",
            "new": "new or without importance, so not protected",
            "frozen": "frozen",
        }
        for how, text in words.items():
            if numbers[how]:
                share, count = numbers[how] / total, count_of(tensors[how], "tensor")
                lines.append(f"  {share:6.1%} of parameters {text} ({count})")
        return "\n".join(lines)

    def _failures(self) -> Iterator[str]:
        """Yield what is not finite, of which no number says how much was kept."""
        if not math.isfinite(self.moved):
            yield "Weights are NaN or infinite: go back to a checkpoint from before."
        if self.kl is not None and math.isnan(self.kl):
            yield "The model answers known inputs with NaN: what it knew is lost."
        elif self.kl is not None and math.isinf(self.kl):
            yield "The model rules out what it answered before: an infinite KL."


def _number(value: float, unit: str = "") -> str:
    """Return a number for people.

    Examples:
        >>> [_number(value, " nats") for value in (0.5, math.nan, math.inf)]
        ['0.5000 nats', 'NaN', 'infinite']
    """
    if math.isnan(value):
        return "NaN"
    return "infinite" if math.isinf(value) else f"{value:.4f}{unit}"


def advice(kept: Kept, moved: float, steps: int | None, calls: int | None) -> Iterator[str]:
    """Yield what a training loop seems to have forgotten.

    Args:
        kept: of the answers.
        moved: how far the weights are from the start.
        steps: of the protected optimizer, None without a gate.
        calls: of `Protection.loss`, None without a teacher.

    Examples:
        >>> kept = Kept(0.0, entropy=0.1, agreement=1.0, agreement_with_new=None, classes=2)
        >>> list(advice(kept, 0.0, steps=0, calls=0))
        ['Nothing has been trained yet.']
        >>> list(advice(kept, 0.1, steps=8, calls=8))
        []
    """
    if kept.is_nearly_uniform:
        yield (
            "The former answers are nearly uniform, as of a model that was not trained: load its "
            "weights before protect()."
        )
    if not (moved or steps or calls):
        yield "Nothing has been trained yet."
    elif moved and steps == 0:
        yield "The gate took no part: call step() of what protection.optimizer() returned."
    if calls is not None and (calls < (steps or 0) or (moved and not calls)):
        share = f"{calls} of {count_of(steps, 'step')}" if steps else "no step"
        yield f"The teacher took part in {share}: add protection.loss() to the loss of each."


@dataclass(frozen=True)
class Kept:
    """Means over the predictions for known inputs; see `Report`."""

    kl: float | None
    entropy: float | None
    agreement: float | None
    agreement_with_new: float | None
    classes: int | None

    @property
    def is_nearly_uniform(self) -> bool:
        """Whether the former answers say no more than the number of classes does."""
        return (
            self.entropy is not None
            and self.classes is not None
            and self.entropy > _UNIFORM * math.log(self.classes)
        )

    @property
    def loss_now(self) -> float | None:
        """The cross-entropy of the answers of now with those of before."""
        return None if self.entropy is None or self.kl is None else self.entropy + self.kl


@torch.no_grad()
def compare(
    answers: Iterable[tuple[Answers, Tensor | Distribution]], width: int | None = None
) -> Kept:
    """Compare the answers of before and of now, batch by batch.

    Args:
        answers: of before, and of now with all classes.
        width: how many classes there were before, None where there are no new ones.
    """
    total = same = same_with_new = 0.0
    has_new = False
    kls, entropies = list[float | None](), list[float | None]()
    has_classes, classes = True, 0
    for before, whole in answers:
        count, now = before.count, first_classes(whole, width)
        total += count
        kls.append(_times(count, partial(divergence, before, now)))
        entropies.append(_times(count, before.entropy))
        if not isinstance(now, Tensor) or not isinstance(before.prediction, Tensor):
            has_classes = False
            continue
        assert isinstance(whole, Tensor)
        classes = before.prediction.shape[-1]
        former = before.prediction.argmax(-1).to(now.device)
        mask = True if before.mask is None else before.mask.to(now.device)
        same += float(((_likeliest(now) == former) & mask).sum())
        has_new = has_new or whole.shape[-1] > now.shape[-1]
        same_with_new += float(((_likeliest(whole) == former) & mask).sum())
    total = max(1.0, total)
    kl, entropy = (
        None if None in values else sum(filter(None, values)) / total for values in (kls, entropies)
    )
    shares = [each / total if has_classes else None for each in (same, same_with_new)]
    kl = 0.0 if kl is not None and kl < 0 else kl  # rounding may leave it a little below
    known = classes if has_classes else None
    return Kept(kl, entropy, shares[0], shares[1] if has_new else None, known)


def _likeliest(logits: Tensor) -> Tensor:
    """Return the likeliest classes, -1 for logits that make no probabilities."""
    highest, classes = logits.max(-1)  # NaN where one of them is
    return classes.masked_fill(~highest.isfinite(), -1)


def _times(count: int, mean: Callable[[], Tensor]) -> float | None:
    """Return a count times a mean, None where torch cannot compute it for a distribution."""
    found = computed(mean)
    return None if found is None else count * float(found)


def coverage(model: nn.Module, known: Mapping[Tensor, Known]) -> Iterator[Coverage]:
    """Yield how each parameter is protected."""
    for name, param in model.named_parameters():
        found = known.get(param)
        if not param.requires_grad:
            yield Coverage(name, "frozen", param.numel())
        elif found is None or not found.mean > 0:
            yield Coverage(name, "new", param.numel())
        elif found.basis is None:
            yield Coverage(name, "entries", param.numel())
        else:
            left, right = (
                None if side is None else int(side.shape[-1])
                for side in (found.basis.left, found.basis.right)
            )
            yield Coverage(name, "directions", param.numel(), (left, right))
