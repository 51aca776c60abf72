"""Queries: words in a document that say which number or table of the results stands there.

`QUERIES` has every kind. Of a query's form, a word in capitals is written in its place, and one
after the star as name=value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from syngap.bench.config.reading import text_in
from syngap.bench.config.values import seeds_of
from syngap.bench.errors import UserError
from syngap.bench.reporting import curves, paper
from syngap.bench.reporting.finetuning import comparison_table
from syngap.bench.reporting.finetuning.columns import forgetting_of
from syngap.bench.reporting.finetuning.comparison import compare_methods
from syngap.bench.reporting.results import Results
from syngap.bench.reporting.rows import MEASURES, Row
from syngap.bench.reporting.searches import search_table
from syngap.bench.reporting.statistics import (
    TOO_FEW_SEEDS,
    Spread,
    format_number,
    half_width,
    paired_difference,
    time_ratio,
)
from syngap.bench.reporting.tables import decimals, markdown, overview, run_count
from syngap.messages import nearest

__all__ = ["QUERIES", "run_query"]


def run_query(query: str, results: Results) -> str:
    """Return the Markdown that a query, such as "value NAME er ACC", gives.

    Raises:
        UserError: where the query is of no known kind or form.
    """
    kind, *words = query.split() or [""]
    if kind not in QUERIES:
        hint = nearest(kind, QUERIES) or f"; there are {', '.join(QUERIES)}"
        raise UserError(f'unknown "{kind}"{hint}')
    options = dict(word.split("=", 1) for word in words if "=" in word)
    arguments = [word for word in words if "=" not in word]
    try:
        inspect.signature(QUERIES[kind]).bind(results, *arguments, **options)
    except TypeError:
        raise UserError(f'"{query}" is not of the form {_form(kind)}') from None
    return QUERIES[kind](results, *arguments, **options)


def _table(results: Results, NAME: str, *, rows: str = "", columns: str = "") -> str:
    among = results.rows(NAME)
    names = rows.split(",") if rows else []
    chosen = [results.row(NAME, row, finished=False) for row in names] or among
    source = f"Made by `syngap report {results.place}/{NAME}`."
    return markdown(chosen, columns.split(",") if columns else None, among, [source])


def _comparison(
    results: Results, NAME: str, *, rows: str = "", columns: str = "", level: str = ""
) -> str:
    source = f"Made by `syngap report {results.place}/{NAME} --markdown`."
    return comparison_table.markdown(
        compare_methods(results.runs(NAME)),
        rows.split(",") if rows else None,
        [source],
        only=columns.split(",") if columns else None,
        level=_share(level),
    )


def _answers(
    results: Results, NAME: str, KIND: str, *, row: str = "", measure: str = "exact"
) -> str:
    return comparison_table.answers(compare_methods(results.runs(NAME)), KIND, row, measure)


def _forgetting(
    results: Results, NAME: str, ROW: str, KIND: str, *, at: str = "trained", level: str = ""
) -> str:
    found = compare_methods(results.runs(NAME))
    return forgetting_of(found, ROW, KIND, at, _share(level))


def _share(level: str) -> float | None:
    try:
        return float(level) if level else None
    except ValueError:
        raise UserError(f"level: got {level!r}, expected a share of AdamW's best gain") from None


def _relative(results: Results, NAME: str, ROW: str, MEASURE: str) -> str:
    return comparison_table.relative_to_adamw(compare_methods(results.runs(NAME)), ROW, MEASURE)


def _by_value(write: Callable[[Sequence[Row], list[str], str, str], str]) -> Callable[..., str]:
    """Return the query of a table of methods by the values of an option."""

    def query(
        results: Results,
        NAME: str,
        *,
        methods: str = "er,syngap",
        over: str = "lr",
        measure: str = "ACC",
    ) -> str:
        return write(results.rows(NAME), methods.split(","), over, measure)

    return query


def _gain(
    results: Results, NAME: str, METHOD: str, OTHER: str, *, over: str = "lr", measure: str = "ACC"
) -> str:
    rows = results.rows(NAME)
    found = curves.gain(rows, METHOD, OTHER, over, measure)
    row = next(iter(curves.curve(rows, METHOD, over).values()))
    return _interval(found, 1, row.seed_note(found.seeds))


def _value(results: Results, NAME: str, ROW: str, MEASURE: str, *, only: str = "") -> str:
    places = _places(results, NAME, MEASURE, only)
    row = results.row(NAME, ROW)
    note = row.seed_note()
    spread = row.spread(MEASURE)
    number = format_number(_mean(spread) if only else spread, places)
    return f"{number} ({note})" if note else number


def _difference(
    results: Results,
    NAME: str,
    ROW: str,
    OTHER: str,
    MEASURE: str,
    *,
    only: str = "",
    seeds: str = "",
) -> str:
    places = _places(results, NAME, MEASURE, only)
    row, other = results.row(NAME, ROW), results.row(NAME, OTHER)
    found = paired_difference(*(_of_seeds(one.values[MEASURE], seeds) for one in (row, other)))
    note = "" if seeds or found is None else row.seed_note(found.seeds)
    if found is None or only:
        number = format_number(_mean(found), places, "+")
        return f"{number} ({note})" if note else number
    return _interval(found, places, note)


def _of_seeds(values: Mapping[int, float], seeds: str) -> Mapping[int, float]:
    """Return the values of seeds such as "5..14", each of which has to be there; "" is all."""
    chosen = seeds_of(seeds) if seeds else list(values)
    missing = [seed for seed in chosen if seed not in values]
    if missing:
        raise UserError(f"seeds: there are no runs of {', '.join(map(str, missing))}")
    return {seed: values[seed] for seed in chosen}


def _time(results: Results, NAME: str, ROW: str, OTHER: str) -> str:
    row, other = results.row(NAME, ROW), results.row(NAME, OTHER)
    found = time_ratio(row.values["seconds"], other.values["seconds"])
    if found is None:
        raise UserError(f'"{ROW}" and "{OTHER}" have no seconds of the same seeds')
    return f"{found:.1f}"


def _paper(results: Results, NAME: str, ROW: str, MEASURE: str, *, less: str = "") -> str:
    _check_measure(MEASURE)
    quote, other = (paper.quotes(NAME, row).get(MEASURE) for row in (ROW, less or ROW))
    if quote is None or other is None:
        raise UserError(f"the paper has no {MEASURE} for these rows of {NAME}")
    if less:
        return format_number(Spread(quote.mean - other.mean, None), sign="+")
    return format_number(quote, 2)


def _notes(results: Results, NAME: str) -> str:
    return " ".join(paper.notes(NAME))


def _search(results: Results, NAME: str) -> str:
    found = results.search(NAME)
    if found is None:
        raise UserError(f"{results.folder / NAME}: no search there (search/search.yaml is missing)")
    return search_table(found, results.search_place(NAME))


def _option(results: Results, NAME: str, ROW: str, OPTION: str) -> str:
    options = results.row(NAME, ROW).options
    if OPTION not in options:
        raise UserError(f'"{ROW}" has no option "{OPTION}"; there are {", ".join(options)}')
    return str(options[OPTION])


def _runs(results: Results, NAME: str) -> str:
    return run_count(results.runs(NAME))


def _experiments(results: Results) -> str:
    return overview({name: results.runs(name) for name in results.names()})


def _measurement(results: Results, PATH: str, *, table: str = "1") -> str:
    path = results.folder / "speed" / f"{PATH}.md"
    if not path.is_file():
        raise UserError(f"{path}: not there; make bench writes such files")
    tables = _tables(text_in(path))
    if not table.isdecimal() or not 1 <= int(table) <= len(tables):
        raise UserError(f'{path}: no table "{table}"; it has {len(tables)}')
    return tables[int(table) - 1]


QUERIES: dict[str, Callable[..., str]] = {
    "table": _table,  # of an experiment, or some of its rows and columns
    "curve": _by_value(curves.curve_table),  # a measure by the values of an option
    "value": _value,  # mean ± sd over seeds, or the mean alone
    "difference": _difference,  # one row less another, seed by seed, and the 95 % interval
    "time": _time,  # training time as a multiple of another row's
    "paper": _paper,  # what the paper reports for a row, or its difference to the row `less`
    "notes": _notes,  # the sentences that belong beside the paper's numbers
    "search": _search,  # values that a search tried and chose
    "option": _option,  # the value of an option of a row's method
    "runs": _runs,  # how many runs of an experiment have finished
    "experiments": _experiments,  # a table of all experiments: runs, hardware, times
    "measured": _measurement,  # a table of a benchmark, by its number in speed/PATH.md
    "robustness": _by_value(curves.robustness_table),  # how much an option's value matters
    "gain": _gain,  # the mean over all values of an option less another method's
    "comparison": _comparison,  # of fine-tuning methods, or some of its rows
    "answers": _answers,  # right answers beside the rise of an old loss, time and memory
    "forgetting": _forgetting,  # of a fine-tuning method on one kind of old text
    "relative": _relative,  # its gain, time or memory as a multiple of AdamW's
}


def _form(kind: str) -> str:
    """Return the form of a query.

    Examples:
        >>> _form("value")
        '"value NAME ROW MEASURE [only=…]"'
    """
    _, *parameters = inspect.signature(QUERIES[kind]).parameters.values()
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


def _check_measure(measure: str) -> None:
    if measure not in MEASURES:
        hint = nearest(measure, MEASURES) or f"; there are {', '.join(MEASURES)}"
        raise UserError(f'no measure "{measure}"{hint}')


def _places(results: Results, name: str, measure: str, only: str) -> int:
    """Return how many decimals a measure has in a sentence: one fewer than in its table."""
    _check_measure(measure)
    if only not in ("", "mean"):
        raise UserError(f'only: got "{only}", expected mean')
    return max(decimals(results.rows(name), measure) - 1, 0)


def _mean(value: Spread | None) -> Spread | None:
    return value and Spread(value.mean, None)


def _interval(difference: Spread, places: int, note: str) -> str:
    """Return a difference with its 95 % interval, or that there are too few seeds for one."""
    mean, width = format_number(_mean(difference), places, "+"), half_width(difference)
    if width is None:
        interval = TOO_FEW_SEEDS
    else:
        low, high = (_bound(difference.mean + side * width, places) for side in (-1, 1))
        interval = f"95 % interval {low} to {high}"
    return f"{mean} ({', '.join(filter(None, [interval, note]))})"


def _bound(value: float, places: int) -> str:
    """Return an end of an interval; one near zero with enough decimals to show its sign."""
    while value and not round(value, places) and places < 6:
        places += 1
    return format_number(Spread(value, None), places, "+")
