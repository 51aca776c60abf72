"""When importance is refreshed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """Which steps, counted from 0, refresh importance: each of the first, then every k-th.

    Where importance comes from few observations its noise leaves the gate too open, just while
    steps are largest: weights grow in the first tens of steps, and stay grown. Later importance
    changes by a thousandth a step, so that most of the passes that refresh it can be left out.

    Args:
        every: k.
        warmup: so many steps come before, all of which refresh.

    Examples:
        >>> schedule = Schedule(every=4, warmup=2)
        >>> {step: schedule.elapsed(step) for step in range(12) if schedule.is_due(step)}
        {0: 1, 1: 1, 2: 1, 6: 4, 10: 4}
        >>> [schedule.refreshes(step) for step in (0, 1, 2, 5, 6, 10)]
        [1, 2, 3, 3, 4, 5]
    """

    every: int
    warmup: int

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("warmup", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number ≥ {least}, got {value!r}")

    def is_due(self, step: int) -> bool:
        """Return whether a step refreshes importance."""
        return step < self.warmup or (step - self.warmup) % self.every == 0

    def refreshes(self, step: int) -> int:
        """Return how many steps up to this one were due, it included."""
        return min(step, self.warmup) + 1 + max(0, step - self.warmup) // self.every

    def elapsed(self, step: int) -> int:
        """Return how many steps the average moves on by at a step that is due: 1 or k."""
        return self.every if step > self.warmup else 1
