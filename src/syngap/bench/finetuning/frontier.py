"""Forgetting at matched new loss, along all points of a method: pure functions of points.

A method's points are its evaluations at every rate, step and share of interpolation. Points are
chosen on one half of the test text and evaluated on the other, both ways, so that a method gains
nothing by many tries. Levels of new loss are shares of the gain that AdamW reaches at its best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from syngap.bench.finetuning.point import Point

__all__ = [
    "LEVELS",
    "as_trained",
    "best_answers",
    "best_new_loss",
    "exact_match",
    "forgetting",
    "frontier",
    "good_rates",
    "held_out_gain",
    "losses_at_best",
    "relative_forgetting",
    "same_start",
]

LEVELS = (0.7, 0.8, 0.9, 0.95)  # of AdamW's best gain
NEAR_BEST = 1.05  # times the best new loss
NEAR_LEAST = 2.0  # times the least forgetting
_ROUNDING = 1e-3  # of a loss: evaluations of one model in half precision, on two machines
_NEAR_ZERO = 1e-4


def as_trained(points: Sequence[Point]) -> list[Point]:
    """Return the points without interpolation."""
    return [point for point in points if point.share == 1]


def same_start(one: Point, other: Point) -> bool:
    """Return whether two evaluations before the first step are of one model on the same data.

    Forgetting from one start says nothing about forgetting from another.
    """
    if list(one.old) != list(other.old):
        return False
    losses = [
        (*each.new, *(loss for halves in each.old.values() for loss in halves))
        for each in (one, other)
    ]
    return all(
        math.isclose(first, second, rel_tol=_ROUNDING, abs_tol=_NEAR_ZERO)
        for first, second in zip(*losses, strict=True)
    )


def best_gain(points: Sequence[Point], start: Point, half: int) -> float:
    """Return by how much the new loss falls where it is lowest, on one half."""
    return start.new[half] - min(point.new[half] for point in points)


def best_new_loss(points: Sequence[Point]) -> float:
    """Return the lowest new loss: chosen on one half, evaluated on the other, mean of both ways."""
    return fmean(point.new[half] for point, half in _best(points))


def losses_at_best(points: Sequence[Point]) -> dict[str | None, float]:
    """Return the losses where the new one is lowest, chosen and evaluated alike.

    They are by kind of old data; that of what is learned is at None.
    """
    found: dict[str | None, float] = {None: best_new_loss(points)}
    for kind in points[0].old:
        found[kind] = fmean(point.old[kind][half] for point, half in _best(points))
    return found


def exact_match(points: Sequence[Point], kind: str | None = None) -> float | None:
    """Return the share of right answers where the new loss is lowest, chosen and evaluated alike.

    Args:
        points: of a method.
        kind: of old data; None is what is learned.
    """
    found = []
    for point, half in _best(points):
        exact = point.exact if kind is None else (point.old_exact or {}).get(kind)
        if exact is None:
            return None
        found.append(exact[half])
    return fmean(found)


def _best(points: Sequence[Point]) -> list[tuple[Point, int]]:
    """Return the points with the lowest new loss on each half, and the half to evaluate it on."""
    return [(min(points, key=lambda point: point.new[half]), 1 - half) for half in (0, 1)]


def best_answers(points: Sequence[Point], start: Point, kind: str) -> tuple[float, float] | None:
    """Return the highest share of right answers, and the rise of an old loss there.

    The point is chosen on one half, of equal ones that with the lower old loss, and evaluated on
    the other; means of both ways. None: there are no answers to give.

    Args:
        points: of a method.
        start: the start.
        kind: of old data.
    """
    shares, rises = [], []
    for half in (0, 1):
        answered = [(point.exact, point) for point in points if point.exact is not None]
        if not answered:
            return None
        exact, point = max(answered, key=lambda each: (each[0][half], -each[1].old[kind][half]))
        shares.append(exact[1 - half])
        rises.append(point.old[kind][1 - half] - start.old[kind][1 - half])
    return fmean(shares), fmean(rises)


def held_out_gain(points: Sequence[Point], start: Point) -> float:
    """Return by how much the new loss falls from the start to the lowest."""
    return fmean(start.new) - best_new_loss(points)


def forgetting(
    points: Sequence[Point], adamw: Sequence[Point], start: Point, kind: str, level: float
) -> float | None:
    """Return the rise of the loss on old text of a kind, at a level of AdamW's best gain.

    Among the points that reach the level, the one with the lowest old loss is chosen on one half
    and evaluated on the other; the mean of both ways. None: a half has no such point.
    """
    rises = []
    for half in (0, 1):
        target = start.new[half] - level * best_gain(adamw, start, half)
        reached = [point for point in points if point.new[half] <= target]
        if not reached:
            return None
        point = min(reached, key=lambda point: point.old[kind][half])
        rises.append(point.old[kind][1 - half] - start.old[kind][1 - half])
    return fmean(rises)


def relative_forgetting(
    points: Sequence[Point],
    adamw: Sequence[Point],
    start: Point,
    kind: str,
    levels: Sequence[float] = LEVELS,
) -> float | None:
    """Return forgetting relative to AdamW as trained, mean over the levels.

    A level at which the old loss falls counts as 0: it makes up for no rise at another.
    None: the points do not reach each level, or AdamW forgets nothing there.
    """
    ratios = []
    for level in levels:
        ours = forgetting(points, adamw, start, kind, level)
        theirs = forgetting(adamw, adamw, start, kind, level)
        if ours is None or theirs is None or theirs <= 0:
            return None
        ratios.append(max(0.0, ours / theirs))
    return fmean(ratios)


def frontier(points: Sequence[Point], start: Point, kind: str) -> list[tuple[float, float]]:
    """Return (gain, forgetting) of the points that no other beats in both, from low gain to high.

    Means of both halves: it is for a figure, which chooses nothing.
    """
    pairs = [
        (fmean(start.new) - fmean(point.new), fmean(point.old[kind]) - fmean(start.old[kind]))
        for point in points
    ]
    best: list[tuple[float, float]] = []
    least = math.inf
    for gain, forgot in sorted(pairs, key=lambda pair: (-pair[0], pair[1])):
        if forgot < least:
            best.append((gain, forgot))
            least = forgot
    return best[::-1]


def good_rates(
    by_rate: Mapping[float, Sequence[Point]],
    adamw: Sequence[Point],
    start: Point,
    kind: str,
    level: float = 0.9,
) -> list[float]:
    """Return the rates at which a method learns well and forgets little.

    Its new loss is within 5 % of its best there, and at the level it forgets at most twice as much
    as at the rate where it forgets least.

    Args:
        by_rate: a method's points by learning rate.
        adamw: AdamW's points as trained, which say where the level is.
        start: the start.
        kind: of old text.
        level: share of AdamW's best gain.
    """
    losses = {rate: best_new_loss(points) for rate, points in by_rate.items()}
    found = {rate: forgetting(p, adamw, start, kind, level) for rate, p in by_rate.items()}
    rises = {rate: rise for rate, rise in found.items() if rise is not None}
    if not rises:
        return []
    most = NEAR_LEAST * max(0.0, min(rises.values()))
    best = NEAR_BEST * min(losses.values())
    return sorted(rate for rate, rise in rises.items() if losses[rate] <= best and rise <= most)
