"""Where the contours of losses lie: round numbers that grow by ratios, the same for all panels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from syngap.experiments.landscapes.surface import Grid

__all__ = ["levels"]

_LEAST = 1e-3  # a loss below it is none


def levels(grids: Sequence[Grid], most: int = 12) -> list[float]:
    """Return rising losses, from at most the lowest of `grids` to at least the highest.

    They are as close as can be without being more than `most`: six of a power of ten, three, two or
    one. The highest are left out where that is still too many: far out a loss has no end.
    """
    found = [max(v, _LEAST) for grid in grids for row in grid.loss for v in row if v is not None]
    low, high = (min(found), max(found)) if found else (0.1, 1.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        steps = [round(factor * 10.0**power, 12) for power in powers for factor in factors]
        chosen = _around(steps, low, high)
        if len(chosen) <= most:
            break
    return chosen[:most]


def _around(steps: Sequence[float], low: float, high: float) -> list[float]:
    """Return the steps from the last that is not above `low` to the first not below `high`."""
    below = [step for step in steps if step <= low]
    above = [step for step in steps if step >= high]
    first = below[-1] if below else steps[0]
    last = above[0] if above else steps[-1]
    kept = [step for step in steps if first <= step <= last]
    return kept if len(kept) > 1 else [first, first * 10]
