"""What was kept: how far a model is from its former answers, and how its weights were protected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.messages import count_of
from syngap.optim.knowledge import Known
from syngap.protection.answers import Answers, divergence

__all__ = ["Coverage", "Kept", "Report", "advice", "compare", "coverage"]


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
        kl: the mean of KL(before ‖ now), in nats a prediction; 0 where nothing changed.
        loss_before: the mean loss on the model's former answers, before: their entropy.
        loss_now: the same now. The difference is `kl`.
        agreement: the share of predictions whose likeliest class is the former one, None where a
            prediction has no classes.
        moved: how far the weights are from the start, relative to their norm.
        parts: what was used: "gate", "teacher", "interpolation".
        advice: what seems to be forgotten in the training loop, in sentences.
        coverage: how each parameter is protected.
    """

    kl: float
    loss_before: float
    loss_now: float
    agreement: float | None
    moved: float
    parts: tuple[str, ...]
    advice: tuple[str, ...]
    coverage: tuple[Coverage, ...] = field(repr=False)

    def __str__(self) -> str:
        """Return the report as a few lines of text."""
        same = "" if self.agreement is None else f", same first answer {self.agreement:.1%}"
        lines = [
            f"On known inputs: KL(before || now) {self.kl:.4f} nats, loss {self.loss_before:.4f} "
            f"before and {self.loss_now:.4f} now{same}.",
            f"Weights moved by {self.moved:.2%} of their norm.",
        ]
        if self.parts or self.moved:
            lines.append(f"Protected by: {', '.join(self.parts) or 'nothing'}.")
        lines += self.advice
        if "teacher" in self.parts:
            lines[0] += " The teacher trained on these inputs: others may have changed more."
        numbers: Counter[str] = Counter()
        tensors: Counter[str] = Counter()
        for one in self.coverage:
            numbers[one.how] += one.numel
            tensors[one.how] += 1
        total = max(1, sum(numbers.values()))
        words = {
            "directions": "along directions",
            "entries": "entry by entry",
            "new": "not known, so not protected",
            "frozen": "frozen",
        }
        for how, text in words.items():
            if numbers[how]:
                share, count = numbers[how] / total, count_of(tensors[how], "tensor")
                lines.append(f"  {share:6.1%} of parameters {text} ({count})")
        return "\n".join(lines)


def advice(moved: float, steps: int | None, calls: int | None) -> Iterator[str]:
    """Yield what a training loop seems to have forgotten.

    Args:
        moved: how far the weights are from the start.
        steps: of the protected optimizer, None without a gate.
        calls: of `Protection.loss`, None without a teacher.

    Examples:
        >>> list(advice(0.0, steps=0, calls=0))
        ['Nothing has been trained yet.']
        >>> list(advice(0.1, steps=8, calls=8))
        []
    """
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

    kl: float
    entropy: float
    agreement: float | None


@torch.no_grad()
def compare(answers: Iterable[tuple[Answers, Tensor | Distribution]]) -> Kept:
    """Compare the answers of before and of now, batch by batch."""
    total = kl = entropy = same = 0.0
    has_classes = True
    for before, now in answers:
        count = before.count
        total += count
        kl += count * float(divergence(before, now))
        entropy += count * float(before.entropy())
        if not isinstance(now, Tensor) or not isinstance(before.prediction, Tensor):
            has_classes = False
            continue
        hits = now.argmax(-1) == before.prediction.argmax(-1).to(now.device)
        if before.mask is not None:
            hits = hits & before.mask.to(hits.device)
        same += float(hits.sum())
    total = max(1.0, total)
    return Kept(kl / total, entropy / total, same / total if has_classes else None)


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
