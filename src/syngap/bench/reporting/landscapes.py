"""Landscapes of the loss as the page and the figures draw them: contours, labels, page data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from syngap.bench.reporting.labels import labels
from syngap.bench.reporting.statistics import finite, round_digits
from syngap.bench.store.surface import Grid, Landscape

__all__ = ["contour_levels", "landscape_data", "landscape_labels"]

_LEAST = 1e-3  # a smaller loss is drawn as this one


def contour_levels(landscapes: Sequence[Landscape], most: int = 12) -> list[float]:
    """Return losses at which contours are drawn: round, rising by ratios, the same for all panels.

    They reach from at most the lowest loss to at least the highest, of both planes of every
    landscape, so that a colour means the same in all of them. They are as close as possible without
    being more than `most`: six in a power of ten, three, two or one. The highest are left out where
    that is still too many, because far out a loss has no bound.
    """
    planes = [grid for each in landscapes for grid in (each.grid, each.random) if grid]
    losses = [finite(value) for grid in planes for row in grid.loss for value in row]
    known = [max(loss, _LEAST) for loss in losses if loss is not None]
    low, high = (min(known), max(known)) if known else (0.1, 1.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        steps = [round(factor * 10.0**power, 12) for power in powers for factor in factors]
        chosen = _around(steps, low, high)
        if len(chosen) <= most:
            break
    return chosen[:most]


def landscape_labels(landscapes: Sequence[Landscape]) -> list[str]:
    """Return the method of each landscape, with its seed where there are several."""
    methods = labels({each.row: {"name": each.method} for each in landscapes})
    several = len({each.seed for each in landscapes}) > 1
    return [methods[each.row] + (f", seed {each.seed}" if several else "") for each in landscapes]


def landscape_data(landscapes: Sequence[Landscape]) -> dict[str, Any]:
    """Return the landscapes as plain values for the page, and the contour levels they share."""
    return {
        "levels": contour_levels(landscapes) if landscapes else [],
        "landscapes": [
            {
                "label": label,
                "losses": {name: finite(loss) for name, loss in each.losses_at_points.items()},
                "grid": _grid(each.grid),
                "random": _grid(each.random) if each.random else None,
            }
            for label, each in zip(landscape_labels(landscapes), landscapes, strict=True)
        ],
    }


def _grid(grid: Grid) -> dict[str, Any]:
    return {
        "x": [round_digits(value, 4) for value in grid.x],
        "y": [round_digits(value, 4) for value in grid.y],
        "loss": [[round_digits(value, 4) for value in row] for row in grid.loss],
        "accuracy": [[round_digits(value, 3) for value in row] for row in grid.accuracy],
        "path": [[round_digits(x, 4), round_digits(y, 4)] for x, y, _ in grid.path],
        "points": {
            name: [round_digits(x, 4), round_digits(y, 4)] for name, (x, y) in grid.points.items()
        },
    }


def _around(steps: Sequence[float], low: float, high: float) -> list[float]:
    """Return the steps from the last that is not above `low` to the first not below `high`."""
    below = [step for step in steps if step <= low]
    above = [step for step in steps if step >= high]
    first = below[-1] if below else steps[0]
    last = above[0] if above else steps[-1]
    kept = [step for step in steps if first <= step <= last]
    return kept if len(kept) > 1 else [first, first * 10]
