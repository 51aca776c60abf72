"""Rows that differ in one number alone: what a measure does as that option changes."""

from __future__ import annotations

from collections.abc import Sequence
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
    """

    label: str
    method: str
    rows: list[Row]
    values: list[float]

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
        """Every value that a line has, rising."""
        return sorted({value for line in self.lines for value in line.values})

    @property
    def logarithmic(self) -> bool:
        """Whether equal ratios are worth equal room: a range of more than one power of ten."""
        low, high = self.values[0], self.values[-1]
        return low > 0 and high / low > 10


def sweeps(rows: Sequence[Row]) -> list[Sweep]:
    """Return what `rows` say of options, learning rates first.

    A method's rows are those of its curve: all else is as in the row of its own name. Two rates
    make a curve, of any other option it takes three values.
    """
    finished = [row for row in rows if row.spread("ACC") is not None]
    methods = dict.fromkeys(row.method for row in finished)
    options = dict.fromkeys(
        option for row in finished for option, value in row.options.items() if _number(value)
    )
    called = labels({method: {"name": method} for method in methods})
    found = []
    for option in options:
        least = 2 if option == _FIRST else 3
        curves = {method: curve(finished, method, option) for method in methods}
        lines = [
            Line(called[method], method, list(points.values()), [float(value) for value in points])
            for method, points in curves.items()
            if len(points) >= least
        ]
        found += [Sweep(option, lines)] if lines else []
    return sorted(found, key=lambda sweep: sweep.option != _FIRST)


def variants(found: Sequence[Sweep]) -> list[str]:
    """Return the names of the rows that are in a sweep and not their method's own row."""
    rows = [row for sweep in found for line in sweep.lines for row in line.rows]
    return list(dict.fromkeys(row.name for row in rows if row.name != row.method))


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
