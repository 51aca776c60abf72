"""What happened over the stream, averaged over seeds.

With classes drawn by seed, tasks differ in length, so the same step is in different tasks. Seeds
are therefore averaged at the same place of the stream: 2.25 is a quarter through the third task.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from syngap.experiments.folder import Run
from syngap.metrics import mean_and_spread

__all__ = [
    "Band",
    "Curve",
    "accuracy_curve",
    "boundaries",
    "importance_curve",
    "matrix",
    "plasticity_curve",
    "steps_of",
    "thin",
]


@dataclass(frozen=True)
class Band:
    """A line with its spread over seeds, which is None for a single one."""

    mean: list[float]
    sd: list[float] | None


@dataclass(frozen=True)
class Curve:
    """Lines over the same places of the stream, by name."""

    places: list[float]
    lines: dict[str, Band]


def boundaries(runs: Sequence[Run]) -> list[float]:
    """Return the step at which each task ends, averaged over `runs`."""
    return [fmean(steps) for steps in zip(*map(_ends, runs), strict=True)]


def steps_of(places: Sequence[float], ends: Sequence[float]) -> list[float]:
    """Return the steps of `places` in a stream whose tasks end at `ends`.

    Examples:
        >>> steps_of([0, 0.5, 2], ends=[100, 300])
        [0.0, 50.0, 300.0]
    """
    bounds = {float(place): end for place, end in enumerate([0.0, *ends])}
    return _interpolated(bounds, places)


def accuracy_curve(runs: Sequence[Run], points: int = 300) -> Curve | None:
    """Return accuracy on the tasks "seen" so far and on each task ("0", "1", ...).

    None where the record of a run was not kept.
    """
    moments: list[dict[float, dict[str, float]]] = []
    for run in runs:
        ends = _ends(run)
        found = {}
        if run.initial is not None:
            found[0.0] = _at(run.initial, 0)
        for evaluation in run.record:
            found[_place(evaluation.step, ends)] = _at(evaluation.accuracy, evaluation.task)
        moments.append(found if run.record else {})
    return _average(moments, points)


def plasticity_curve(runs: Sequence[Run], points: int = 120) -> Curve | None:
    """Return "TENSOR/mean", "TENSOR/q05" and "TENSOR/q95" of the plasticity of each tensor.

    The whole network's have no tensor: "/mean". Runs that tell nothing of their plasticity are left
    out, None where that is all of them; so is a line that is not finite throughout (the run
    diverged).
    """
    return _tensor_curve(runs, "plasticity", ("mean", "q05", "q95"), points)


def importance_curve(runs: Sequence[Run], points: int = 120) -> Curve | None:
    """Return "TENSOR/mean" of the importance of each tensor, "/mean" that of the network."""
    return _tensor_curve(runs, "importance", ("mean",), points)


def _tensor_curve(
    runs: Sequence[Run], quantity: str, statistics: Sequence[str], points: int
) -> Curve | None:
    moments = []
    for run in runs:
        ends = _ends(run)
        found = {
            _place(step, ends): {
                f"{'/'.join(tensor)}/{statistic}": value
                for key, value in summary.items()
                if key.startswith(f"{quantity}/")
                for *tensor, statistic in [key.split("/")[1:]]
                if statistic in statistics and math.isfinite(value)
            }
            for step, summary in run.summaries.items()
        }
        moments.append({place: values for place, values in found.items() if values})
    return _average([found for found in moments if found], points)


def matrix(runs: Sequence[Run]) -> list[Band]:
    """Return R over seeds, a band a row."""
    return [_band(rows) for rows in zip(*(run.accuracy for run in runs), strict=True)]


def thin(places: Sequence[float], points: int) -> list[float]:
    """Return at most about `points` of `places`: the first, the ends of tasks, and an even choice.

    Examples:
        >>> thin([0, 0.2, 0.4, 0.6, 0.8, 1, 1.5, 2], 3)
        [0, 1, 2]
    """
    if len(places) <= points:
        return list(places)
    needed = {places[0], *(place for place in places if place == int(place))}
    some = max(points - len(needed), 0)
    chosen = {places[len(places) * k // some] for k in range(some)}
    return sorted(needed | chosen)


def _average(moments: Sequence[dict[float, dict[str, float]]], points: int) -> Curve | None:
    if not moments or not all(moments):
        return None
    longest = max(moments, key=len)
    places = thin(sorted(longest), points)
    names = [name for name in longest[places[-1]] if all(_always(m, name) for m in moments)]
    lines = {}
    for name in names:
        seeds = [_interpolated({p: m[name] for p, m in found.items()}, places) for found in moments]
        lines[name] = _band(seeds)
    return Curve(places, lines) if lines else None


def _always(moments: dict[float, dict[str, float]], name: str) -> bool:
    return all(name in values for values in moments.values())


def _band(seeds: Sequence[Sequence[float]]) -> Band:
    pairs = [mean_and_spread(values) for values in zip(*seeds, strict=True)]
    spread = [sd for _, sd in pairs if sd is not None]
    return Band([mean for mean, _ in pairs], spread if len(seeds) > 1 else None)


def _at(accuracy: Sequence[float], task: int) -> dict[str, float]:
    seen = fmean(accuracy[: task + 1])
    return {"seen": seen, **{str(number): value for number, value in enumerate(accuracy)}}


def _ends(run: Run) -> list[int]:
    return [evaluation.step for evaluation in run.record if evaluation.end]


def _place(step: int, ends: Sequence[int]) -> float:
    task = bisect_left(ends, step)
    if task == len(ends):
        return float(task)
    start = ends[task - 1] if task else 0
    return task + (step - start) / (ends[task] - start)


def _interpolated(values: Mapping[float, float], places: Sequence[float]) -> list[float]:
    known = sorted(values)
    found = []
    for place in places:
        after = min(bisect_left(known, place), len(known) - 1)
        before = max(after - 1, 0)
        low, high = known[before], known[after]
        share = min(max((place - low) / (high - low), 0.0), 1.0) if high > low else 0.0
        found.append(values[low] + share * (values[high] - values[low]))
    return found
