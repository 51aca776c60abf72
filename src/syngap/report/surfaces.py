"""What the page draws of landscapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from syngap.experiments.landscapes.surface import Grid, Landscape
from syngap.report.labels import labels
from syngap.report.levels import levels

__all__ = ["digits", "drawn", "named"]


def drawn(landscapes: Sequence[Landscape]) -> dict[str, Any]:
    """Return the landscapes as plain values, and the levels that they share."""
    grids = [grid for each in landscapes for grid in (each.grid, each.random) if grid]
    return {
        "levels": levels(grids) if grids else [],
        "landscapes": [
            {
                "label": name,
                "losses": each.losses_at_points,
                "grid": _grid(each.grid),
                "random": _grid(each.random) if each.random else None,
            }
            for name, each in zip(named(landscapes), landscapes, strict=True)
        ],
    }


def named(landscapes: Sequence[Landscape]) -> list[str]:
    """Return whose each is, with its seed where there are several."""
    called = labels({each.row: {"name": each.method} for each in landscapes})
    several = len({each.seed for each in landscapes}) > 1
    return [called[each.row] + (f", seed {each.seed}" if several else "") for each in landscapes]


def digits(value: float, count: int) -> float:
    """Return a number with so many digits that count, whole where it is.

    Examples:
        >>> digits(0.0123456, 3), digits(12.0, 3)
        (0.0123, 12)
    """
    short = float(f"{value:.{count}g}")
    return int(short) if short == int(short) else short


def _grid(grid: Grid) -> dict[str, Any]:
    return {
        "x": [digits(value, 4) for value in grid.x],
        "y": [digits(value, 4) for value in grid.y],
        "loss": [[None if v is None else digits(v, 4) for v in row] for row in grid.loss],
        "accuracy": [[digits(value, 3) for value in row] for row in grid.accuracy],
        "path": [[digits(x, 4), digits(y, 4)] for x, y, _ in grid.path],
        "points": {name: [digits(x, 4), digits(y, 4)] for name, (x, y) in grid.points.items()},
    }
