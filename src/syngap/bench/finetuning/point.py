"""One evaluation of a run: the losses of its weights, interpolated with the start or as trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Halves", "Point"]

Halves = tuple[float, float]
"""A number on each half of the test data."""


@dataclass(frozen=True)
class Point:
    """What an evaluation found.

    Args:
        step: after which it was made; 0 is the start.
        share: of the way from the start to the weights at this step; 1 is the weights as trained.
        new: mean loss on what is learned, on each half of its test part.
        old: what is kept of old data, by kind, that of the anchors first: a loss, or for encoders
            how far similarities changed.
        seconds: of set-up and training until then.
        setup: seconds of these that went before the first step.
        memory: largest number of bytes on the GPU until then, beside the start; 0 on a CPU.
        exact: share of right answers on what is learned, on each half; None without any.
        old_exact: likewise on the old data, by kind.
    """

    step: int
    share: float
    new: Halves
    old: Mapping[str, Halves]
    seconds: float
    setup: float
    memory: int
    exact: Halves | None = None
    old_exact: Mapping[str, Halves] | None = None

    @classmethod
    def from_mapping(cls, found: Mapping[str, Any]) -> Point:
        """Return the point that a line holds; ValueError where it is none."""
        step, share, memory = found["step"], found["share"], found["memory"]
        if type(step) is not int or step < 0 or type(memory) is not int or memory < 0:
            raise ValueError("a point without its step and memory")
        if not 0 <= share <= 1:
            raise ValueError(f"step {step}: a share of {share!a:.80}")
        old = {kind: _halves(losses) for kind, losses in found["old"].items()}
        if not old or not all(kind.isprintable() for kind in old):
            raise ValueError(f"step {step} without losses on old data")
        seconds, setup = _number(found["seconds"]), _number(found["setup"])
        if not 0 <= setup <= seconds < math.inf:
            raise ValueError(f"step {step} without its seconds")
        exact = None if found.get("exact") is None else _halves(found["exact"])
        right = found.get("old_exact")
        if right is not None and list(right) != list(old):
            raise ValueError(f"step {step}: right answers of other kinds than losses")
        return cls(
            step,
            float(share),
            _halves(found["new"]),
            old,
            seconds,
            setup,
            memory,
            exact,
            None if right is None else {kind: _halves(shares) for kind, shares in right.items()},
        )

    def as_mapping(self) -> dict[str, Any]:
        """Return what a line holds."""
        found = asdict(self)
        for name in ("exact", "old_exact"):
            if found[name] is None:
                del found[name]
        return found

    @property
    def is_finite(self) -> bool:
        """Whether no loss is NaN or infinite."""
        return all(
            math.isfinite(loss) for halves in (self.new, *self.old.values()) for loss in halves
        )


def _halves(found: Any) -> Halves:
    first, second = found
    return _number(first), _number(second)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!a:.80} is no number")
    return float(value)
