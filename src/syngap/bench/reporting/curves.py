"""A measure over one option of a method: curves, sweeps of all options, and robustness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from syngap.bench.config.experiment import complete_method
from syngap.bench.errors import UserError
from syngap.bench.reporting.labels import labels
from syngap.bench.reporting.rows import MEASURES, Row
from syngap.bench.reporting.statistics import Spread, format_spread, paired_difference, spread_over
from syngap.bench.reporting.tables import best_keys

__all__ = [
    "Line",
    "Sweep",
    "area",
    "curve",
    "curve_table",
    "gain",
    "reach",
    "robustness_table",
    "sweeps",
    "variants",
]

_OPTION_NAMES = {
    "lr": "learning rate",
    "retention": "retention α",
    "consolidation": "consolidation τ",
    "ambient": "ambient plasticity ε",
    "buffer": "size of the buffer",
}
_LEARNING_RATE = "lr"
_NEAR_BEST = 2.0  # points


def curve(rows: Sequence[Row], method: str, over: str) -> dict[Any, Row]:
    """Return value of the option → row, in the order of the values.

    The rows are those that agree with the row named `method` in everything but `over`; where there
    is none of that name, with the method's first. A row may have no finished seed.

    Args:
        rows: of the experiment.
        method: a method's name, or a row's.
        over: the option's.
    """
    ordered = [row for row in rows if isinstance(row.options.get(over), (int, float, str))]
    named = [row for row in ordered if row.name == method]
    own = next(iter(named or [row for row in ordered if row.method == method]), None)
    if own is None:
        return {}
    same = [row for row in ordered if row.method == own.method]
    found = {row.options[over]: row for row in same if _rest(row, over) == _rest(own, over)}
    return {value: found[value] for value in sorted(found, key=_text_last)}


def curve_table(rows: Sequence[Row], methods: Sequence[str], over: str, measure: str) -> str:
    """Return the curves of several methods as a Markdown table, the best of each in bold."""
    if measure not in MEASURES:
        raise UserError(f'no measure "{measure}"; there are {", ".join(MEASURES)}')
    curves = {method: curve(rows, method, over) for method in methods}
    for method, found in curves.items():
        if not any(row.seeds for row in found.values()):
            raise UserError(f'no finished row of "{method}" with an option "{over}"')
    values = sorted({value for found in curves.values() for value in found}, key=_text_last)
    lines = [f"| {MEASURES[measure].heading} by {over} | {' | '.join(map(str, values))} |"]
    lines.append(f"|---|{'---:|' * len(values)}")
    for method, found in curves.items():
        spreads = {value: row.spread(measure) for value, row in found.items()}
        best = best_keys({value: at.mean for value, at in spreads.items() if at}, measure)
        cells = []
        for value in values:
            cell = _plus_minus(spreads.get(value))
            cell = f"**{cell}**" if value in best else cell
            note = found[value].seed_note() if value in found else ""
            cells.append(f"{cell} ({note})" if note else cell)
        lines.append(f"| {_label(method, found, over)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# Sweeps


@dataclass(frozen=True)
class Line:
    """One method at several values of an option.

    Args:
        label: that a reader sees.
        method: the method's own name.
        rows: a row for each value, in order.
        values: the option's, rising.
        unfinished_rows: values at which no seed has finished, and the row.
    """

    label: str
    method: str
    rows: list[Row]
    values: list[float]
    unfinished_rows: dict[float, Row]

    def spreads(self, measure: str) -> list[Spread]:
        """Return a measure at each value."""
        found = [row.spread(measure) for row in self.rows]
        return [spread for spread in found if spread is not None]

    @property
    def best(self) -> int:
        """The index of the value with the highest ACC."""
        means = [spread.mean for spread in self.spreads("ACC")]
        return means.index(max(means))


@dataclass(frozen=True)
class Sweep:
    """Every method that was run at several values of one option, all else being equal.

    Args:
        option: its name in the configuration.
        lines: a method each.
    """

    option: str
    lines: list[Line]

    @property
    def name(self) -> str:
        """What the option is called in a figure."""
        return _OPTION_NAMES.get(self.option, self.option)

    @property
    def values(self) -> list[float]:
        """Every value of every line, with those at which no seed has finished, rising."""
        return sorted({v for line in self.lines for v in (*line.values, *line.unfinished_rows)})

    @property
    def omissions(self) -> list[str]:
        """What is not over all seeds: "ER at 1 (2 of 5 seeds, 3 diverged)"."""
        found = [
            (line.label, value, row.seed_note())
            for line in self.lines
            for value, row in [
                *zip(line.values, line.rows, strict=True),
                *line.unfinished_rows.items(),
            ]
        ]
        return [f"{label} at {value:g} ({note})" for label, value, note in found if note]

    @property
    def logarithmic(self) -> bool:
        """Whether the axis is logarithmic: values range over more than one power of ten."""
        low, high = self.values[0], self.values[-1]
        return low > 0 and high / low > 10


def sweeps(rows: Sequence[Row]) -> list[Sweep]:
    """Return the sweeps that `rows` contain, learning rates first.

    A method's rows are those of its curve: all else is as in the row of its own name. A sweep of
    learning rates takes two finished values, of any other option three.
    """
    methods = labels({row.method: {"name": row.method} for row in rows})
    options = dict.fromkeys(
        option for row in rows for option, value in row.options.items() if _is_number(value)
    )
    found = []
    for option in options:
        least = 2 if option == _LEARNING_RATE else 3
        numeric = [row for row in rows if _is_number(row.options.get(option))]
        lines = [
            _line(label, method, curve(numeric, method, option))
            for method, label in methods.items()
        ]
        if long_enough := [line for line in lines if len(line.values) >= least]:
            found.append(Sweep(option, long_enough))
    return sorted(found, key=lambda sweep: sweep.option != _LEARNING_RATE)


def variants(found: Sequence[Sweep]) -> list[str]:
    """Return the names of the rows that are in a sweep and not their method's own row."""
    lines = [line for sweep in found for line in sweep.lines]
    rows = [row for line in lines for row in (*line.rows, *line.unfinished_rows.values())]
    return list(dict.fromkeys(row.name for row in rows if row.name != row.method))


# Robustness: how much the choice of a value matters


def area(points: Mapping[float, float]) -> float:
    """Return the mean of a curve over the logarithm of its values, linear between two of them.

    Examples:
        >>> area({0.01: 10.0, 0.1: 30.0, 1.0: 30.0})
        25.0
    """
    pairs = pairwise(sorted(points))
    total = sum((math.log(b) - math.log(a)) * (points[a] + points[b]) / 2 for a, b in pairs)
    return total / (math.log(max(points)) - math.log(min(points)))


def reach(points: Mapping[float, float], within: float = _NEAR_BEST) -> tuple[float, float]:
    """Return the range around its best value in which a curve stays so near to the best.

    Examples:
        >>> reach({0.01: 10.0, 0.1: 30.0, 1.0: 26.0})  # 28 lies half-way to 1.0
        (0.0794, 0.316)
    """
    best = max(points, key=lambda value: points[value])
    ends = []
    for side in (-1, 1):
        outwards = sorted((v for v in points if side * v >= side * best), reverse=side < 0)
        end = outwards[-1]
        for here, there in pairwise(outwards):
            if points[there] < points[best] - within:
                share = (points[here] - points[best] + within) / (points[here] - points[there])
                end = here * (there / here) ** share
                break
        ends.append(float(f"{end:.3g}"))
    return ends[0], ends[1]


def robustness_table(rows: Sequence[Row], methods: Sequence[str], over: str, measure: str) -> str:
    """Return a table: each method's best, its mean over all values, and how far the best reaches.

    All of it is over the seeds that every value of the method has. A run that diverged counts as 0.
    """
    curves = _comparable_curves(rows, methods, over, measure)
    lines = [
        f"| | best {MEASURES[measure].heading} | at {over} | mean over all {over} "
        f"| within {_NEAR_BEST:g} of the best | seeds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for method, found in curves.items():
        seeds = list(_by_seed(found, measure).values())
        if not seeds:
            raise UserError(f'no seed of "{method}" has finished at every value of "{over}"')
        means = {value: fmean(points[value] for points in seeds) for value in found}
        best = max(means, key=lambda value: means[value])
        low, high = reach(means)
        lines.append(
            f"| {_label(method, found, over)} | {means[best]:.1f} | {best:g} "
            f"| {_plus_minus(spread_over([area(points) for points in seeds]))} "
            f"| {low:.2g} to {high:.2g} (× {high / low:.1f}) | {len(seeds)} |"
        )
    return "\n".join(lines) + "\n"


def gain(rows: Sequence[Row], method: str, other: str, over: str, measure: str) -> Spread:
    """Return the difference of two methods' means over all values, seed by seed."""
    if method == other:
        raise UserError(f'"{method}" has no gain over itself')
    found = _comparable_curves(rows, (method, other), over, measure)
    ours, theirs = (
        {seed: area(points) for seed, points in _by_seed(by_value, measure).items()}
        for by_value in found.values()
    )
    difference = paired_difference(ours, theirs)
    if difference is None:
        raise UserError(f'"{method}" and "{other}" have no seed that finished at every "{over}"')
    return difference


def _comparable_curves(
    rows: Sequence[Row], methods: Sequence[str], over: str, measure: str
) -> dict[str, dict[Any, Row]]:
    """Return the curves of methods over the same positive values; UserError where they differ."""
    if measure not in MEASURES or MEASURES[measure].better != "up":
        raise UserError(f'robustness is of a measure of which more is better, got "{measure}"')
    found = {method: curve(rows, method, over) for method in methods}
    (first, expected), *_ = found.items()
    for method, by_value in found.items():
        if len(by_value) < 2:
            raise UserError(f'no two rows of "{method}" that differ in "{over}" alone')
        if not all(isinstance(value, (int, float)) and value > 0 for value in by_value):
            raise UserError(f'robustness is over positive numbers, and "{over}" has others')
    for method, by_value in found.items():
        if set(by_value) != set(expected):
            raise UserError(f'"{first}" and "{method}" have other values of "{over}"')
    return found


def _by_seed(found: Mapping[Any, Row], measure: str) -> dict[int, dict[Any, float]]:
    """Return the curve of every seed that all values have."""
    ended = {
        value: {run.seed: 0.0 for run in row.unfinished_runs if run.diverged} | row.values[measure]
        for value, row in found.items()
    }
    common = set.intersection(*map(set, ended.values()))
    return {seed: {value: of[seed] for value, of in ended.items()} for seed in sorted(common)}


def _line(label: str, method: str, points: Mapping[Any, Row]) -> Line:
    done = {float(value): row for value, row in points.items() if row.seeds}
    unfinished = {float(value): row for value, row in points.items() if not row.seeds}
    return Line(label, method, list(done.values()), list(done), unfinished)


def _label(method: str, found: Mapping[Any, Row], over: str) -> str:
    """Return the label of the row that a curve is named after, else of the method."""
    named = [row.label for row in found.values() if row.name == method]
    if not named:
        return next(iter(found.values())).label.partition(", ")[0]
    parts = named[0].split(", ")
    return ", ".join(part for part in parts if not part.startswith(f"{over} "))


def _plus_minus(value: Spread | None) -> str:
    mean, sd = format_spread(value, 1)
    return f"{mean} ± {sd}" if sd else mean


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text_last(value: Any) -> tuple[bool, Any]:
    return isinstance(value, str), value


def _rest(row: Row, over: str) -> dict[str, Any]:
    return {name: value for name, value in complete_method(row.options).items() if name != over}
