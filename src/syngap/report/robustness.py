"""How much a choice matters: the mean over an option, and how far its best value reaches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from syngap.errors import UserError
from syngap.metrics import mean_and_spread
from syngap.report.columns import shown
from syngap.report.curve import curve, label
from syngap.report.rows import MEASURES, Row, Spread

__all__ = ["area", "gain", "markdown", "reach"]

WITHIN = 2.0  # points of the best


def area(points: Mapping[float, float]) -> float:
    """Return the mean of a curve over the logarithm of its values, straight between two of them.

    Examples:
        >>> area({0.01: 10.0, 0.1: 30.0, 1.0: 30.0})
        25.0
    """
    pairs = pairwise(sorted(points))
    total = sum((math.log(b) - math.log(a)) * (points[a] + points[b]) / 2 for a, b in pairs)
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

    All of it is over the seeds that every value of the method has. A run that diverged counts as 0.
    """
    found = _curves(rows, methods, over, measure)
    lines = [
        f"| | best {MEASURES[measure].heading} | at {over} | mean over all {over} "
        f"| within {WITHIN:g} of the best | seeds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for method, by_value in found.items():
        seeds = list(_by_seed(by_value, measure).values())
        if not seeds:
            raise UserError(f'no seed of "{method}" has finished at every value of "{over}"')
        means = {value: fmean(points[value] for points in seeds) for value in by_value}
        best = max(means, key=lambda value: means[value])
        low, high = reach(means)
        mean, sd = shown(Spread(*mean_and_spread([area(points) for points in seeds])), 1)
        lines.append(
            f"| {label(method, by_value, over)} | {means[best]:.1f} | {best:g} "
            f"| {f'{mean} ± {sd}' if sd else mean} "
            f"| {low:.2g} to {high:.2g} (× {high / low:.1f}) | {len(seeds)} |"
        )
    return "\n".join(lines) + "\n"


def gain(rows: Sequence[Row], method: str, other: str, over: str, measure: str) -> Spread:
    """Return the difference of two methods' means over all values, seed by seed."""
    if method == other:
        raise UserError(f'"{method}" has no gain over itself')
    found = _curves(rows, (method, other), over, measure)
    ours, theirs = (_by_seed(by_value, measure) for by_value in found.values())
    differences = [area(ours[seed]) - area(theirs[seed]) for seed in ours if seed in theirs]
    if not differences:
        raise UserError(f'"{method}" and "{other}" have no seed that finished at every "{over}"')
    return Spread(*mean_and_spread(differences), len(differences))


def _curves(
    rows: Sequence[Row], methods: Sequence[str], over: str, measure: str
) -> dict[str, dict[Any, Row]]:
    if measure not in MEASURES or MEASURES[measure].better != "up":
        raise UserError(f'robustness is of a measure of which more is better, got "{measure}"')
    found = {method: curve(rows, method, over) for method in methods}
    _check_values(found, over)
    return found


def _check_values(found: Mapping[str, Mapping[Any, Row]], over: str) -> None:
    values = {method: set(by_value) for method, by_value in found.items()}
    for method, own in values.items():
        if len(own) < 2:
            raise UserError(f'no two rows of "{method}" that differ in "{over}" alone')
        if not all(isinstance(value, (int, float)) and value > 0 for value in own):
            raise UserError(f'robustness is over positive numbers, and "{over}" has others')
    (first, wanted), *others = values.items()
    for method, own in others:
        if own != wanted:
            raise UserError(f'"{first}" and "{method}" have other values of "{over}"')


def _by_seed(found: Mapping[Any, Row], measure: str) -> dict[int, dict[Any, float]]:
    """Return the curve of every seed that all values have."""
    ended = {
        value: {run.seed: 0.0 for run in row.unfinished if run.diverged} | row.values[measure]
        for value, row in found.items()
    }
    common = set.intersection(*map(set, ended.values()))
    return {seed: {value: of[seed] for value, of in ended.items()} for seed in sorted(common)}
