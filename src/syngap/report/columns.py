"""The columns of a table: what can stand in one, and its cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from syngap.errors import UserError, nearest
from syngap.report.differences import half, paired
from syngap.report.paper import QUOTED, quoted
from syngap.report.rows import MEASURES, Row, Spread

__all__ = ["COLUMNS", "Column", "best", "columns", "decimals", "shown", "usual"]

COLUMNS = ("ACC", "FM", "INT", "seconds")
_DIFFERENCE, _PAPER = "ACC-ER", "paper-"


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Args:
        name: by which it is asked for.
        heading: for people.
        cells: a text for each row, equally long, the points and the ± under each other.
        marked: names of the rows that are best.
    """

    name: str
    heading: str
    cells: list[str]
    marked: set[str]


def usual(rows: Sequence[Row], among: Sequence[Row] | None = None) -> list[str]:
    """Return the names of the columns that `rows` have something for.

    The difference to ER is there where a row of that name is, the paper's numbers where it has any.

    Args:
        rows: of the table.
        among: all rows of the experiment, where the table has some of them.
    """
    quotes = [f"{_PAPER}{measure}" for measure in QUOTED]
    names = ["ACC", "paper-ACC", _DIFFERENCE, "FM", "paper-FM", "INT", "paper-INT", "seconds"]
    absent = {name for name in quotes if not any(_quote(row, name) for row in rows)}
    if not any(_difference(row, among or rows) for row in rows):
        absent.add(_DIFFERENCE)
    return [name for name in names if name not in absent]


def columns(
    rows: Sequence[Row], names: Sequence[str], among: Sequence[Row] | None = None
) -> list[Column]:
    """Return the columns of these names: a measure, "ACC-ER", or "paper-ACC" and its like.

    Args:
        rows: of the table.
        names: of the columns.
        among: all rows of the experiment, where the table has some of them.

    Examples:
        >>> columns([], ["paper-AC"])
        Traceback (most recent call last):
        syngap.errors.UserError: no column "paper-AC"; did you mean "paper-ACC"?
    """
    return [_column(rows, name, among or rows) for name in names]


def best(rows: Sequence[Row], measure: str) -> set[str]:
    """Return the names of the rows with the best mean, as it is shown, joint ones apart."""
    sign = {"up": 1, "down": -1, None: 0}[MEASURES[measure].better]
    places = decimals(rows, measure)
    means = {
        row.name: sign * round(value.mean, places)
        for row in rows
        if not row.joint and (value := row.spread(measure))
    }
    marked = {name for name, mean in means.items() if mean == max(means.values())}
    return marked if sign and len(marked) < len(means) else set()  # where all are best, none is


def decimals(rows: Sequence[Row], measure: str) -> int:
    """Return how many decimals a column is shown with: the same in all its cells."""
    if measure != "seconds":
        return 2 if measure in COLUMNS else 1
    longest = max((value.mean for row in rows if (value := row.spread(measure))), default=0)
    return 2 if longest < 10 else 1 if longest < 1000 else 0


def shown(value: Spread | None, decimals: int = 2, sign: str = "-") -> tuple[str, str]:
    """Return mean and sd as text: an empty sd for a single seed, a dash for nothing.

    Examples:
        >>> shown(Spread(27.284, 0.58)), shown(Spread(1234.5, None), 0), shown(None)
        (('27.28', '0.58'), ('1234', ''), ('–', ''))
    """
    if value is None:
        return "–", ""
    mean = round(value.mean, decimals) + 0.0  # never -0.00
    return f"{mean:{sign}.{decimals}f}", "" if value.sd is None else f"{value.sd:.{decimals}f}"


def _column(rows: Sequence[Row], name: str, among: Sequence[Row]) -> Column:
    if name in MEASURES:
        places = decimals(rows, name)
        cells = _aligned([shown(row.spread(name), places) for row in rows])
        return Column(name, MEASURES[name].heading, cells, best(rows, name))
    if name == _DIFFERENCE:
        cells = _aligned([shown(_difference(row, among), sign="+") for row in rows])
        return Column(name, "ACC - ER", cells, set())
    if name.startswith(_PAPER) and name.removeprefix(_PAPER) in QUOTED:
        cells = _aligned([shown(_quote(row, name)) for row in rows])
        return Column(name, f"paper's {name.removeprefix(_PAPER)}", cells, set())
    known = [*MEASURES, _DIFFERENCE, *(f"{_PAPER}{measure}" for measure in QUOTED)]
    hint = nearest(name, known) or f"; there are {', '.join(known)}"
    raise UserError(f'no column "{name}"{hint}')


def _difference(row: Row, among: Sequence[Row]) -> Spread | None:
    """Return the row's ACC less that of ER with the same seeds, and half its 95 % interval."""
    er = next((other for other in among if other.name == "er"), None)
    found = paired(row, er, "ACC") if er and row.name != er.name else None
    return Spread(found.mean, half(found), found.seeds) if found else None


def _quote(row: Row, name: str) -> Spread | None:
    return quoted(row.experiment, row.name).get(name.removeprefix(_PAPER))


def _aligned(pairs: Sequence[tuple[str, str]]) -> list[str]:
    if not pairs:
        return []
    left, right = (max(map(len, part)) for part in zip(*pairs, strict=True))
    texts = [f"{mean:>{left}}" + (f" ± {sd:>{right}}" if sd else "") for mean, sd in pairs]
    return [text.ljust(max(map(len, texts))) for text in texts]
