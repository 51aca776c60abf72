"""A measure over one option: the rows of a method that differ in nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from syngap.errors import UserError
from syngap.experiments.config import complete_method
from syngap.report.columns import shown
from syngap.report.rows import MEASURES, Row

__all__ = ["curve", "label", "markdown"]


def curve(rows: Sequence[Row], method: str, over: str) -> dict[Any, Row]:
    """Return value of the option → row, in the order of the values.

    The rows are those that agree with the row of that name in everything but `over`; where there is
    none of that name, with the method's first. A row may have no finished seed.

    Args:
        rows: of the experiment.
        method: a method's name, or a row's.
        over: the option's.
    """
    ordered = [row for row in rows if _orders(row.options.get(over))]
    named = [row for row in ordered if row.name == method]
    own = next(iter(named or [row for row in ordered if row.method == method]), None)
    same = [row for row in ordered if own and row.method == own.method]
    found = {row.options[over]: row for row in same if own and _rest(row, over) == _rest(own, over)}
    return {value: found[value] for value in sorted(found, key=_text_last)}


def markdown(rows: Sequence[Row], methods: Sequence[str], over: str, measure: str) -> str:
    """Return the curves of several methods as a table, the best of each in bold."""
    if measure not in MEASURES:
        raise UserError(f'no measure "{measure}"; there are {", ".join(MEASURES)}')
    curves = {method: curve(rows, method, over) for method in methods}
    for method, found in curves.items():
        if not any(row.seeds for row in found.values()):
            raise UserError(f'no finished row of "{method}" with an option "{over}"')
    places = sorted({value for found in curves.values() for value in found}, key=_text_last)
    sign = -1 if MEASURES[measure].better == "down" else 1
    lines = [f"| {MEASURES[measure].heading} by {over} | {' | '.join(map(str, places))} |"]
    lines.append(f"|---|{'---:|' * len(places)}")
    for method, found in curves.items():
        means = {value: row.spread(measure) for value, row in found.items()}
        best = max((sign * spread.mean for spread in means.values() if spread), default=None)
        cells = []
        for value in places:
            spread = means.get(value)
            mean, sd = shown(spread, 1)
            cell = f"{mean} ± {sd}" if sd else mean
            cell = f"**{cell}**" if spread and sign * spread.mean == best else cell
            few = found[value].few() if value in found else ""
            cells.append(f"{cell} ({few})" if few else cell)
        lines.append(f"| {label(method, found, over)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def label(method: str, found: Mapping[Any, Row], over: str) -> str:
    """Return what a curve is called: as the row of its name is, or the method."""
    named = [row.label for row in found.values() if row.name == method]
    if not named:
        return next(iter(found.values())).label.partition(", ")[0]
    parts = named[0].split(", ")
    return ", ".join(part for part in parts if not part.startswith(f"{over} "))


def _orders(value: Any) -> bool:
    return isinstance(value, (int, float, str))


def _text_last(value: Any) -> tuple[bool, Any]:
    return isinstance(value, str), value


def _rest(row: Row, over: str) -> dict[str, Any]:
    return {name: value for name, value in complete_method(row.options).items() if name != over}
