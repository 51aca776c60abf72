"""Rows that differ in one number alone: what a measure does as that option changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syngap.report.curve import curve
from syngap.report.labels import labels
from syngap.report.rows import Row, Spread

__all__ = ["Line", "Sweep", "sweeps", "variants"]

_NAMES = {
    "lr": "learning rate",
    "retention": "retention α",
    "consolidation": "consolidation τ",
    "ambient": "ambient plasticity ε",
    "buffer": "size of the buffer",
}
_FIRST = "lr"


@dataclass(frozen=True)
class Line:
    """One method at several values of an option.

    Args:
        label: for people.
        method: the method's own name.
        rows: a row for each value, in order.
        values: the option's, rising.
        lost: values at which no seed has finished, and the row.
    """

    label: str
    method: str
    rows: list[Row]
    values: list[float]
    lost: dict[float, Row]

    def spreads(self, measure: str) -> list[Spread]:
        """Return a measure at each value."""
        found = [row.spread(measure) for row in self.rows]
        return [spread for spread in found if spread is not None]

    @property
    def best(self) -> int:
        """Where ACC is highest."""
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
        return _NAMES.get(self.option, self.option)

    @property
    def values(self) -> list[float]:
        """Every value that a line has, or would have had, rising."""
        return sorted({value for line in self.lines for value in (*line.values, *line.lost)})

    @property
    def missing(self) -> list[str]:
        """What is not over all seeds: "ER at 1 (2 of 5 seeds, 3 diverged)"."""
        found = [
            (line.label, value, row.few())
            for line in self.lines
            for value, row in [*zip(line.values, line.rows, strict=True), *line.lost.items()]
        ]
        return [f"{label} at {value:g} ({few})" for label, value, few in found if few]

    @property
    def logarithmic(self) -> bool:
        """Whether equal ratios are worth equal room: a range of more than one power of ten."""
        low, high = self.values[0], self.values[-1]
        return low > 0 and high / low > 10


def sweeps(rows: Sequence[Row]) -> list[Sweep]:
    """Return what `rows` say of options, learning rates first.

    A method's rows are those of its curve: all else is as in the row of its own name. Two rates
    make a curve, of any other option it takes three values, and a row without a finished seed is
    no point of it.
    """
    methods = dict.fromkeys(row.method for row in rows)
    options = dict.fromkeys(
        option for row in rows for option, value in row.options.items() if _number(value)
    )
    called = labels({method: {"name": method} for method in methods})
    found = []
    for option in options:
        least = 2 if option == _FIRST else 3
        some_rows = [row for row in rows if _number(row.options.get(option))]
        curves = {method: curve(some_rows, method, option) for method in methods}
        lines = [_line(called[method], method, points) for method, points in curves.items()]
        some = [line for line in lines if len(line.values) >= least]
        found += [Sweep(option, some)] if some else []
    return sorted(found, key=lambda sweep: sweep.option != _FIRST)


def variants(found: Sequence[Sweep]) -> list[str]:
    """Return the names of the rows that are in a sweep and not their method's own row."""
    lines = [line for sweep in found for line in sweep.lines]
    rows = [row for line in lines for row in (*line.rows, *line.lost.values())]
    return list(dict.fromkeys(row.name for row in rows if row.name != row.method))


def _line(label: str, method: str, points: Mapping[Any, Row]) -> Line:
    done = {float(value): row for value, row in points.items() if row.seeds}
    lost = {float(value): row for value, row in points.items() if not row.seeds}
    return Line(label, method, list(done.values()), list(done), lost)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
