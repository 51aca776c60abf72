"""One row less another, seed by seed: what both had in common is in neither."""

from __future__ import annotations

from syngap.metrics import half_interval, mean_and_spread
from syngap.report.rows import Row, Spread

__all__ = ["half", "paired", "times"]


def paired(ours: Row, theirs: Row, measure: str) -> Spread | None:
    """Return the difference in `measure` over the seeds that both have, None where none is."""
    a, b = ours.values[measure], theirs.values[measure]
    differences = [a[seed] - b[seed] for seed in a if seed in b]
    return Spread(*mean_and_spread(differences), len(differences)) if differences else None


def half(difference: Spread) -> float | None:
    """Return half the 95 % interval of a difference, by Student's t; None for a single seed."""
    return None if difference.sd is None else half_interval(difference.sd, difference.seeds)


def times(ours: Row, theirs: Row) -> float | None:
    """Return training time as a multiple of the other's, over the seeds that both have."""
    a, b = ours.values["seconds"], theirs.values["seconds"]
    shared = [seed for seed in a if seed in b]
    whole = sum(b[seed] for seed in shared)
    return sum(a[seed] for seed in shared) / whole if whole else None
