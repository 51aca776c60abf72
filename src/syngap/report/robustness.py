"""How much a choice matters: the mean over an option, and how far its best value reaches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from syngap.errors import UserError
from syngap.metrics import mean_and_spread
from syngap.report.columns import shown
from syngap.report.curve import curve, label
from syngap.report.rows import MEASURES, Row, Spread

__all__ = ["area", "markdown", "reach"]

WITHIN = 2.0  # points of the best


def area(points: Mapping[float, float]) -> float:
    """Return the mean of a curve over the logarithm of its values, straight between two of them.

    Examples:
        >>> area({0.01: 10.0, 0.1: 30.0, 1.0: 30.0})
        25.0
    """
    total = sum(
        (math.log(b) - math.log(a)) * (points[a] + points[b]) / 2 for a, b in _pairs(points)
    )
    return total / (math.log(max(points)) - math.log(min(points)))


def reach(points: Mapping[float, float], within: float = WITHIN) -> tuple[float, float]:
    """Return from where to where, around its best value, a curve stays so near to it.

    Examples:
        >>> reach({0.01: 10.0, 0.1: 30.0, 1.0: 26.0})  # 28 lies half-way to 1.0
        (0.0794, 0.316)
    """
    best = max(points, key=lambda value: points[value])
    ends = []
    for side in (-1, 1):
        way = sorted((v for v in points if side * v >= side * best), reverse=side < 0)
        end = way[-1]
        for here, there in pairwise(way):
            if points[there] < points[best] - within:
                share = (points[here] - points[best] + within) / (points[here] - points[there])
                end = here * (there / here) ** share
                break
        ends.append(float(f"{end:.3g}"))
    return ends[0], ends[1]


def markdown(rows: Sequence[Row], methods: Sequence[str], over: str, measure: str) -> str:
    """Return a table: each method's best, its mean over all values, and how far the best reaches.

    All of it is over the seeds that every value of the method has.
    """
    if measure not in MEASURES or MEASURES[measure].better != "up":
        raise UserError(f'robustness is of a measure of which more is better, got "{measure}"')
    lines = [
        f"| | best {MEASURES[measure].heading} | at {over} | mean over all {over} "
        f"| within {WITHIN:g} of the best | seeds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for method in methods:
        found = curve(rows, method, over)
        curves = _by_seed(found, measure)
        if not curves or len(curves[0]) < 2:
            raise UserError(f'no seed of "{method}" that has finished two values of "{over}"')
        means = {value: fmean(curve[value] for curve in curves) for value in curves[0]}
        best = max(means, key=lambda value: means[value])
        low, high = reach(means)
        mean, sd = shown(Spread(*mean_and_spread([area(curve) for curve in curves])), 1)
        lines.append(
            f"| {label(method, found)} | {means[best]:.1f} | {best:g} "
            f"| {f'{mean} ± {sd}' if sd else mean} "
            f"| {low:.2g} to {high:.2g} (× {high / low:.1f}) | {len(curves)} |"
        )
    return "\n".join(lines) + "\n"


def _by_seed(found: Mapping[float, Row], measure: str) -> list[dict[float, float]]:
    """Return the curve of every seed that all values have."""
    values = {float(value): row.values[measure] for value, row in found.items() if row.seeds}
    common = set.intersection(*map(set, values.values())) if values else set()
    return [{value: of[seed] for value, of in values.items()} for seed in sorted(common)]


def _pairs(points: Mapping[float, float]) -> list[tuple[float, float]]:
    return list(pairwise(sorted(points)))
