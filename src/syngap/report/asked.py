"""What a marked block of a document can ask of the results, and the answers, as Markdown."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import groupby

from syngap.errors import UserError, nearest
from syngap.experiments.reading import text_in
from syngap.report import curve as curves
from syngap.report import overview, searches
from syngap.report import paper as papers
from syngap.report import robustness as robust
from syngap.report.columns import decimals, shown
from syngap.report.differences import half, paired, times
from syngap.report.results import Results
from syngap.report.rows import MEASURES, Spread
from syngap.report.table import markdown

__all__ = ["ASKED", "answer"]


def answer(asked: str, results: Results) -> str:
    """Return what `asked`, such as "value NAME er ACC", gives; UserError where it asks nothing."""
    kind, *words = asked.split() or [""]
    if kind not in ASKED:
        hint = nearest(kind, ASKED) or f"; there are {', '.join(ASKED)}"
        raise UserError(f'unknown "{kind}"{hint}')
    options = dict(word.split("=", 1) for word in words if "=" in word)
    given = [word for word in words if "=" not in word]
    try:
        inspect.signature(ASKED[kind]).bind(results, *given, **options)
    except TypeError:
        raise UserError(f'"{asked}" is not of the form {_form(kind)}') from None
    return ASKED[kind](results, *given, **options)


def table(results: Results, NAME: str, *, rows: str = "", columns: str = "") -> str:
    """Return the table of an experiment, or some of its rows and columns."""
    among = results.rows(NAME)
    names = rows.split(",") if rows else []
    chosen = [results.row(NAME, row, finished=False) for row in names] or among
    made = f"Made by `syngap report {results.place}/{NAME}`."
    return markdown(chosen, columns.split(",") if columns else None, among, [made])


def curve(
    results: Results,
    NAME: str,
    *,
    methods: str = "er,syngap",
    over: str = "lr",
    measure: str = "ACC",
) -> str:
    """Return a measure by the values of an option."""
    return curves.markdown(results.rows(NAME), methods.split(","), over, measure)


def robustness(
    results: Results,
    NAME: str,
    *,
    methods: str = "er,syngap",
    over: str = "lr",
    measure: str = "ACC",
) -> str:
    """Return how much the choice of an option's value matters to each method."""
    return robust.markdown(results.rows(NAME), methods.split(","), over, measure)


def gain(
    results: Results, NAME: str, METHOD: str, OTHER: str, *, over: str = "lr", measure: str = "ACC"
) -> str:
    """Return one method's mean over all values of an option less another's, with its interval."""
    rows = results.rows(NAME)
    found = robust.gain(rows, METHOD, OTHER, over, measure)
    few = next(iter(curves.curve(rows, METHOD, over).values())).few(found.seeds)
    return _interval(found, 1, few)


def value(results: Results, NAME: str, ROW: str, MEASURE: str, *, only: str = "") -> str:
    """Return mean ± sd over seeds, or its mean alone."""
    _check(MEASURE, only)
    row = results.row(NAME, ROW)
    few = row.few()
    number = _text(row.spread(MEASURE), _places(results, NAME, MEASURE), only)
    return f"{number} ({few})" if few else number


def difference(
    results: Results, NAME: str, ROW: str, OTHER: str, MEASURE: str, *, only: str = ""
) -> str:
    """Return one row less another, seed by seed, with its 95 % interval, or its mean alone."""
    _check(MEASURE, only)
    row = results.row(NAME, ROW)
    found = paired(row, results.row(NAME, OTHER), MEASURE)
    places = _places(results, NAME, MEASURE)
    if found is None or only:
        return _text(found, places, "mean", "+")
    return _interval(found, places, row.few(found.seeds))


def time(results: Results, NAME: str, ROW: str, OTHER: str) -> str:
    """Return the training time of one row as a multiple of another's."""
    found = times(results.row(NAME, ROW), results.row(NAME, OTHER))
    if found is None:
        raise UserError(f'"{ROW}" and "{OTHER}" have no seconds of the same seeds')
    return f"{found:.1f}"


def paper(results: Results, NAME: str, ROW: str, MEASURE: str, *, less: str = "") -> str:
    """Return what the paper reports for a row, or by how much it is above the row `less`."""
    _check(MEASURE)
    quotes = [papers.quoted(NAME, row).get(MEASURE) for row in (ROW, less or ROW)]
    if quotes[0] is None or quotes[1] is None:
        raise UserError(f"the paper has no {MEASURE} for these rows of {NAME}")
    if less:
        return _text(Spread(quotes[0].mean - quotes[1].mean, None), 1, sign="+")
    return _text(quotes[0], 2)


def notes(results: Results, NAME: str) -> str:
    """Return what is to be said of the paper's numbers."""
    return " ".join(papers.notes(NAME))


def search(results: Results, NAME: str) -> str:
    """Return what a search tried and chose for every row of an experiment."""
    found = results.search(NAME)
    if found is None:
        raise UserError(f"{results.folder / NAME}: no search there (search/search.yaml is missing)")
    return searches.markdown(found, f"{results.place}/{NAME}/{searches.FOLDER}")


def option(results: Results, NAME: str, ROW: str, OPTION: str) -> str:
    """Return the value of an option of a row's method."""
    options = results.row(NAME, ROW).options
    if OPTION not in options:
        raise UserError(f'"{ROW}" has no option "{OPTION}"; there are {", ".join(options)}')
    return str(options[OPTION])


def runs(results: Results, NAME: str) -> str:
    """Return how many runs of an experiment have finished."""
    return overview.counted(results.runs(NAME))


def measured(results: Results, PATH: str, *, table: str = "1") -> str:
    """Return a table that a benchmark printed, by its number in speed/PATH.md."""
    path = results.folder / "speed" / f"{PATH}.md"
    if not path.is_file():
        raise UserError(f"{path}: not there; make bench writes such files")
    tables = _tables(text_in(path))
    if not table.isdecimal() or not 1 <= int(table) <= len(tables):
        raise UserError(f'{path}: no table "{table}"; it has {len(tables)}')
    return tables[int(table) - 1]


def experiments(results: Results) -> str:
    """Return a table of all experiments: runs, hardware, times."""
    return overview.overview(results)


ASKED: dict[str, Callable[..., str]] = {
    kind.__name__: kind
    for kind in (
        *(table, curve, value, difference, time, paper, notes, search, option, runs, experiments),
        *(measured, robustness, gain),
    )
}


def _form(kind: str) -> str:
    """Return how a kind is asked for.

    Examples:
        >>> _form("value")
        '"value NAME ROW MEASURE [only=…]"'
    """
    _, *parameters = inspect.signature(ASKED[kind]).parameters.values()
    words = [p.name if p.kind is not p.KEYWORD_ONLY else f"[{p.name}=…]" for p in parameters]
    return f'"{" ".join([kind, *words])}"'


def _tables(text: str) -> list[str]:
    r"""Return the Markdown tables of a text.

    Examples:
        >>> _tables("one:\n\n| a |\n| - |\n\nother:\n| b |")
        ['| a |\n| - |', '| b |']
    """
    lines = groupby(text.splitlines(), key=lambda line: line.startswith("|"))
    return ["\n".join(group) for is_table, group in lines if is_table]


def _check(measure: str, only: str = "") -> None:
    if measure not in MEASURES:
        hint = nearest(measure, MEASURES) or f"; there are {', '.join(MEASURES)}"
        raise UserError(f'no measure "{measure}"{hint}')
    if only not in ("", "mean"):
        raise UserError(f'only: got "{only}", expected mean')


def _places(results: Results, name: str, measure: str) -> int:
    return max(decimals(results.rows(name), measure) - 1, 0)


def _interval(difference: Spread, places: int, few: str = "") -> str:
    """Return a difference with its 95 % interval, which a single seed has none of."""
    width = half(difference)
    mean = _text(difference, places, "mean", "+")
    if width is None:
        return mean
    low, high = (_bound(difference.mean + side * width, places) for side in (-1, 1))
    return f"{mean} (95 % interval {low} to {high}{f', {few}' if few else ''})"


def _bound(value: float, places: int) -> str:
    """Return an end of an interval; one near zero with its side of it."""
    while value and not round(value, places) and places < 6:
        places += 1
    return _text(Spread(value, None), places, sign="+")


def _text(value: Spread | None, places: int, only: str = "", sign: str = "-") -> str:
    """Return a number as it stands in a sentence."""
    mean, sd = shown(value, places, sign)
    return (f"{mean} ± {sd}" if sd and not only else mean).replace("-", "−")
