"""What was kept: how far a model is from its former answers, and how its weights were protected."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Coverage", "Report"]


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
        coverage: how each parameter is protected.
    """

    kl: float
    loss_before: float
    loss_now: float
    agreement: float | None
    moved: float
    parts: tuple[str, ...]
    coverage: tuple[Coverage, ...] = field(repr=False)

    def __str__(self) -> str:
        """Return the report as a few lines of text."""
        same = "" if self.agreement is None else f", same first answer {self.agreement:.1%}"
        lines = [
            f"On known inputs: KL(before || now) {self.kl:.4f} nats, loss {self.loss_before:.4f} "
            f"before and {self.loss_now:.4f} now{same}.",
            f"Weights moved by {self.moved:.2%} of their norm.",
            f"Protected by: {', '.join(self.parts) or 'nothing'}.",
        ]
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
                share, count = numbers[how] / total, tensors[how]
                lines.append(f"  {share:6.1%} of parameters {text} ({count} tensors)")
        return "\n".join(lines)
