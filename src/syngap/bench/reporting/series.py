"""Accuracy, plasticity and importance over the stream, averaged over seeds.

With classes drawn by seed, tasks differ in length, so the same step is in different tasks. Seeds
are therefore averaged at the same place of the stream: 2.25 is a quarter through the third task.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from syngap.bench.metrics import mean_and_spread
from syngap.bench.reporting.statistics import finite
from syngap.bench.store.folder_reader import Run

__all__ = [
    "Band",
    "Curve",
    "Layers",
    "accuracy_curve",
    "boundaries",
    "importance_curve",
    "is_weight",
    "layers",
    "mean_matrix",
    "plasticity_curve",
    "steps_of",
    "tensor_title",
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
    return _interpolate(bounds, places)


def accuracy_curve(runs: Sequence[Run], points: int = 300) -> Curve | None:
    """Return accuracy on the tasks "seen" so far and on each task ("0", "1", ...).

    None where the record of a run was not kept.
    """
    moments: list[dict[float, dict[str, float]]] = []
    for run in runs:
        ends = _ends(run)
        found = {}
        if run.initial is not None:
            found[0.0] = _accuracies(run.initial, 0)
        for evaluation in run.record:
            found[_place(evaluation.step, ends)] = _accuracies(evaluation.accuracy, evaluation.task)
        moments.append(found if run.record else {})
    return _average(moments, points)


def plasticity_curve(runs: Sequence[Run], points: int = 120) -> Curve | None:
    """Return "TENSOR/mean", "TENSOR/q05" and "TENSOR/q95" of the plasticity of each tensor.

    Those of the whole network have no tensor: "/mean". A run without a record of its plasticity is
    left out; the result is None where that is every run. A line that is not finite throughout (the
    run diverged) is left out too.
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
                if statistic in statistics and finite(value) is not None
            }
            for step, summary in run.summaries.items()
        }
        moments.append({place: values for place, values in found.items() if values})
    return _average([found for found in moments if found], points)


def mean_matrix(runs: Sequence[Run]) -> list[Band]:
    """Return R averaged over seeds, a band for each of its rows."""
    return [_band(rows) for rows in zip(*(run.accuracy for run in runs), strict=True)]


@dataclass(frozen=True)
class Layers:
    """Importance and plasticity of each tensor after each task, from the input to the output.

    Args:
        names: of the tensors.
        importance: by tensor and task, as a multiple of the network's mean; None where it is
            unknown.
        plasticity: by tensor and task, mean over the tensor.
    """

    names: list[str]
    importance: list[list[float]] | None
    plasticity: list[list[float]]

    def only(self, names: Sequence[str]) -> Layers:
        """Return the same for some of the tensors."""
        places = [self.names.index(name) for name in names]
        some = None if self.importance is None else [self.importance[place] for place in places]
        return Layers(list(names), some, [self.plasticity[place] for place in places])


def layers(runs: Sequence[Run]) -> Layers | None:
    """Return the tensors of a row's runs, averaged over the runs that recorded them."""
    plasticity = plasticity_curve(runs)
    if plasticity is None:
        return None
    plasticities = _after_tasks(plasticity)
    names = [name for name in plasticities if name]
    importance = importance_curve(runs)
    importances = _after_tasks(importance) if importance else {}
    known = all(name in importances for name in [*names, ""]) and all(importances.get("", [0.0]))
    return Layers(
        names,
        [_ratios(importances[name], importances[""]) for name in names] if known else None,
        [plasticities[name] for name in names],
    )


def is_weight(name: str) -> bool:
    """Return whether a tensor's name is that of a layer's weights, not of its bias or of a norm.

    Examples:
        >>> [is_weight(name) for name in ("stem.conv.weight", "stem.norm.weight", "head.bias")]
        [True, False, False]
    """
    module, _, last = name.rpartition(".")
    words = module.lower()
    return last == "weight" and "norm" not in words and "bn" not in words


def tensor_title(name: str) -> str:
    """Return a tensor's name as it is shown: a layer's for its weights, where it has one.

    Examples:
        >>> [tensor_title(name) for name in ("stem.conv.weight", "stem.norm.weight", "0.weight")]
        ['stem.conv', 'stem.norm.weight', '0.weight']
    """
    layer = name.removesuffix(".weight")
    return layer if is_weight(name) and not layer.isdigit() else name


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
        seeds = [_interpolate({p: m[name] for p, m in found.items()}, places) for found in moments]
        lines[name] = _band(seeds)
    return Curve(places, lines) if lines else None


def _always(moments: dict[float, dict[str, float]], name: str) -> bool:
    return all(name in values for values in moments.values())


def _band(seeds: Sequence[Sequence[float]]) -> Band:
    pairs = [mean_and_spread(values) for values in zip(*seeds, strict=True)]
    spread = [sd for _, sd in pairs if sd is not None]
    return Band([mean for mean, _ in pairs], spread if len(seeds) > 1 else None)


def _accuracies(accuracy: Sequence[float], task: int) -> dict[str, float]:
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


def _interpolate(values: Mapping[float, float], places: Sequence[float]) -> list[float]:
    known = sorted(values)
    found = []
    for place in places:
        after = min(bisect_left(known, place), len(known) - 1)
        before = max(after - 1, 0)
        low, high = known[before], known[after]
        share = min(max((place - low) / (high - low), 0.0), 1.0) if high > low else 0.0
        found.append(values[low] + share * (values[high] - values[low]))
    return found


def _after_tasks(curve: Curve) -> dict[str, list[float]]:
    """Return tensor → its mean after each task."""
    ends = [place for place, at in enumerate(curve.places) if at and at == int(at)]
    return {
        name[: -len("/mean")]: [band.mean[end] for end in ends]
        for name, band in curve.lines.items()
        if name.endswith("/mean")
    }


def _ratios(values: Sequence[float], wholes: Sequence[float]) -> list[float]:
    return [value / whole for value, whole in zip(values, wholes, strict=True)]
