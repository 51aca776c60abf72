"""Marked blocks in documents, filled with what the results give.

    <!-- results: curve table1-cifar100-shared -->
    (a table)
    <!-- end -->

    SynGAP ends at <!-- results: value table1-cifar100-shared syngap ACC -->34.3 ± 1.7<!-- end -->.

The words after "results:" are a query; `QUERIES` has every kind. Fenced code is left alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import unified_diff
from itertools import groupby
from pathlib import Path

from syngap.bench.config.reading import SMALL, text_in
from syngap.bench.errors import UserError
from syngap.bench.reporting import curves, paper
from syngap.bench.reporting.finetuning import comparison_table
from syngap.bench.reporting.finetuning.comparison import compare_methods
from syngap.bench.reporting.results import Results, search_table
from syngap.bench.reporting.rows import MEASURES
from syngap.bench.reporting.statistics import (
    TOO_FEW_SEEDS,
    Spread,
    format_number,
    half_width,
    paired_difference,
    time_ratio,
)
from syngap.bench.reporting.tables import decimals, markdown, overview, run_count
from syngap.bench.storage import read, write
from syngap.messages import nearest

__all__ = ["QUERIES", "StaleBlock", "fill", "run_query", "stale_blocks"]

_FENCED = re.compile(r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)[`~]*[ \t]*$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(
    r"<!--\s*(?:(?P<opens>(?i:results?)\s*:)(?P<query>.*?)|(?P<end>end)\s*)-->", re.DOTALL
)
_LINE_START = re.compile(r"[\s>]*(?:[-*+]|\d+[.)])?\s*")  # of a line, a quotation or a list's item


@dataclass(frozen=True)
class StaleBlock:
    """A block that does not hold what the results give: where it is, and the difference."""

    place: str
    query: str
    diff: str


@dataclass(frozen=True)
class _Block:
    query: str
    line: int
    begin: int  # of its content
    end: int
    in_a_line: bool


def fill(path: Path, results: Results) -> int:
    """Write what the results give into the blocks of a document; return how many are in it."""
    text, newline = _read(path)
    parts, done = [], 0
    contents = _contents(text, results, path)
    for block, content in contents:
        parts += [text[done : block.begin], content]
        done = block.end
    new = "".join([*parts, text[done:]])
    if new != text:
        write(path, new.replace("\n", newline).encode(), within=path.parent)
    return len(contents)


def stale_blocks(path: Path, results: Results) -> list[StaleBlock]:
    """Return the blocks of a document that do not hold what the results give."""
    text, _ = _read(path)
    found = []
    for block, content in _contents(text, results, path):
        now = text[block.begin : block.end]
        if now != content:
            a, b = (side.strip().splitlines() for side in (now, content))
            diff = unified_diff(a, b, str(path), str(results.folder), lineterm="")
            found.append(StaleBlock(f"{path}, line {block.line}", block.query, "\n".join(diff)))
    return found


def _contents(text: str, results: Results, where: Path) -> list[tuple[_Block, str]]:
    """Return every block with the content that the results give."""
    found = []
    for block in _blocks(text, str(where)):
        try:
            content = run_query(block.query, results).strip()
        except UserError as error:
            raise UserError(f"{where}, line {block.line}: {error}") from error
        found.append((block, content if block.in_a_line else f"\n\n{content}\n\n"))
    return found


def _blocks(text: str, where: str) -> list[_Block]:
    fences = [match.span() for match in _FENCED.finditer(text)]
    found: list[_Block] = []
    opening: re.Match[str] | None = None
    for mark in _MARK.finditer(text):
        if any(begin <= mark.start() < end for begin, end in fences):
            continue
        place = f"{where}, line {_line(text, mark.start())}"
        if mark["end"]:
            if opening is None:
                raise UserError(f"{place}: <!-- end --> without a beginning, <!-- results: … -->")
            found.append(_block(text, opening, mark, where))
            opening = None
        elif mark["opens"] != "results:":
            raise UserError(f'{place}: a block begins with "results:", not "{mark["opens"]}"')
        elif opening is not None:
            raise UserError(f"{place}: a block begins within another; <!-- end --> is missing")
        else:
            opening = mark
    if opening is not None:
        line = _line(text, opening.start())
        raise UserError(f"{where}, line {line}: the block has no <!-- end -->")
    return found


def _block(text: str, opening: re.Match[str], end: re.Match[str], where: str) -> _Block:
    line = _line(text, opening.start())
    in_a_line = not text[opening.end() :].startswith("\n")
    if in_a_line and _LINE_START.fullmatch(text[: opening.start()].rpartition("\n")[2]):
        raise UserError(
            f"{where}, line {line}: a line that begins with a comment is not Markdown; "
            "move the block within its line, or its content to a line of its own"
        )
    return _Block(" ".join(opening["query"].split()), line, opening.end(), end.start(), in_a_line)


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _read(path: Path) -> tuple[str, str]:
    """Return a document, and how its lines end."""
    try:
        text = read(path, SMALL).decode("utf-8")
        return text.replace("\r\n", "\n"), "\r\n" if "\r\n" in text else "\n"
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"{path}: cannot be read ({reason})") from error


# Queries. A parameter in capitals is a word of the query, one after the star is written name=value.


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
    return comparison_table.forgetting_of(found, ROW, KIND, at, _share(level))


def _share(level: str) -> float | None:
    try:
        return float(level) if level else None
    except ValueError:
        raise UserError(f"level: got {level!r}, expected a share of AdamW's best gain") from None


def _relative(results: Results, NAME: str, ROW: str, MEASURE: str) -> str:
    return comparison_table.relative_to_adamw(compare_methods(results.runs(NAME)), ROW, MEASURE)


def _curve(
    results: Results,
    NAME: str,
    *,
    methods: str = "er,syngap",
    over: str = "lr",
    measure: str = "ACC",
) -> str:
    return curves.curve_table(results.rows(NAME), methods.split(","), over, measure)


def _robustness(
    results: Results,
    NAME: str,
    *,
    methods: str = "er,syngap",
    over: str = "lr",
    measure: str = "ACC",
) -> str:
    return curves.robustness_table(results.rows(NAME), methods.split(","), over, measure)


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
    results: Results, NAME: str, ROW: str, OTHER: str, MEASURE: str, *, only: str = ""
) -> str:
    places = _places(results, NAME, MEASURE, only)
    row, other = results.row(NAME, ROW), results.row(NAME, OTHER)
    found = paired_difference(row.values[MEASURE], other.values[MEASURE])
    if found is None or only:
        return format_number(_mean(found), places, "+")
    return _interval(found, places, row.seed_note(found.seeds))


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
    "curve": _curve,  # a measure by the values of an option
    "value": _value,  # mean ± sd over seeds, or the mean alone
    "difference": _difference,  # one row less another, seed by seed, with its 95 % interval
    "time": _time,  # training time as a multiple of another row's
    "paper": _paper,  # what the paper reports for a row, or its difference to the row `less`
    "notes": _notes,  # the sentences that belong beside the paper's numbers
    "search": _search,  # values that a search tried and chose
    "option": _option,  # the value of an option of a row's method
    "runs": _runs,  # how many runs of an experiment have finished
    "experiments": _experiments,  # a table of all experiments: runs, hardware, times
    "measured": _measurement,  # a table of a benchmark, by its number in speed/PATH.md
    "robustness": _robustness,  # how much the choice of an option's value matters
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
