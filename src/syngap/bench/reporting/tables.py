"""The table of an experiment, for a terminal and as Markdown, and the table of all experiments."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from syngap.bench.config.experiment import is_shipped, read
from syngap.bench.config.finetuning import AnyExperiment, parse_experiment
from syngap.bench.errors import UserError
from syngap.bench.reporting import paper
from syngap.bench.reporting.rows import MEASURES, Row, concurrency_note, concurrent_runs, omissions
from syngap.bench.reporting.statistics import (
    TOO_FEW_SEEDS,
    Spread,
    format_spread,
    half_width,
    paired_difference,
)
from syngap.bench.store.folder_reader import Run
from syngap.messages import count_of, duration, nearest

__all__ = [
    "Column",
    "best_keys",
    "best_rows",
    "columns",
    "decimals",
    "default_columns",
    "markdown",
    "overview",
    "run_count",
    "table",
    "wall_clock",
]

_Key = TypeVar("_Key", bound=Hashable)

_MAIN = ("ACC", "FM", "INT", "seconds")  # measures of the table, which have more decimals
_DIFFERENCE, _PAPER = "ACC-ER", "paper-"
# A narrow terminal goes without these, the first of them first.
_DISPENSABLE = ("paper-INT", "paper-FM", "seconds", "INT", "paper-ACC", "FM", "ACC-ER")
_MEANINGS = {"ACC": "accuracy at the end", "FM": "points forgotten", "INT": "points below joint"}
_LABEL_WIDTH = 30  # longer labels are folded before columns are left out


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Args:
        name: by which a document chooses it.
        heading: that a reader sees.
        cells: a text for each row, equally long, the points and the ± under each other.
        best: names of the rows that are best.
    """

    name: str
    heading: str
    cells: list[str]
    best: set[str]


def table(rows: Sequence[Row], width: int | None = None) -> Table:
    """Return the table for a terminal. The best have a star too, because a pipe has no bold.

    Args:
        rows: of the experiment.
        width: of the terminal; columns that do not fit are left out, and the caption names them.
    """
    names = default_columns(rows)
    left_out: list[str] = []
    found = _terminal_table(rows, names, left_out)
    for name in _DISPENSABLE:
        if width is None or Console(width=1000).measure(found).maximum <= width:
            break
        if name in names:
            left_out.append(name)
            found = _terminal_table(rows, [n for n in names if n not in left_out], left_out)
    return found


def markdown(
    rows: Sequence[Row],
    names: Sequence[str] | None = None,
    among: Sequence[Row] | None = None,
    more: Sequence[str] = (),
) -> str:
    """Return the table as Markdown that is also readable as plain text.

    Args:
        rows: of the table.
        names: of its columns; all that the rows have values for by default.
        among: all rows of the experiment, where the table has some of them.
        more: sentences to add below.
    """
    chosen = columns(rows, default_columns(rows, among) if names is None else names, among)
    labels = [_label(row).replace("\\", "\\\\").replace("|", "\\|") for row in rows]
    cells = [["method", *labels]]
    for column in chosen:
        bold = [
            f"**{cell.strip()}**" if row.name in column.best else cell.strip()
            for row, cell in zip(rows, column.cells, strict=True)
        ]
        cells.append([column.heading, *bold])
    widths = [max(map(len, column)) for column in cells]
    head, *body = (
        "| " + " | ".join([name.ljust(widths[0]), *map(str.rjust, line, widths[1:])]) + " |"
        for name, *line in zip(*cells, strict=True)
    )
    rule = "| " + " | ".join(["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]) + " |"
    caption = " ".join([*_caption(rows, chosen, "bold is"), *more])
    return "\n".join([head, rule, *body, "", caption, *_omissions(rows)]) + "\n"


def default_columns(rows: Sequence[Row], among: Sequence[Row] | None = None) -> list[str]:
    """Return the names of the columns that `rows` have values for, and ACC.

    INT needs a joint run, the difference to ER a row of that name, the paper's numbers a row that
    it reports.

    Args:
        rows: of the table.
        among: all rows of the experiment, where the table has some of them.
    """
    names = ["ACC", "paper-ACC", _DIFFERENCE, "FM", "paper-FM", "INT", "paper-INT", "seconds"]
    absent = {name for name in _MAIN[1:] if not any(row.spread(name) for row in rows)}
    absent |= {name for name in _paper_columns() if not any(_quote(row, name) for row in rows)}
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
        syngap.bench.errors.UserError: no column "paper-AC"; did you mean "paper-ACC"?
    """
    return [_column(rows, name, among or rows) for name in names]


def best_rows(rows: Sequence[Row], measure: str) -> set[str]:
    """Return the names of the rows with the best mean as it is shown, joint training apart.

    Rows that tie are all best; where all rows tie, none is.
    """
    places = decimals(rows, measure)
    means = {
        row.name: round(value.mean, places)
        for row in rows
        if not row.joint and (value := row.spread(measure))
    }
    best = best_keys(means, measure)
    return best if len(best) < len(means) else set()


def best_keys(means: Mapping[_Key, float], measure: str) -> set[_Key]:
    """Return the keys with the best mean; of a measure without a better end there is none.

    A mean below the measure's floor counts as the floor, and is never best itself: a negative FM
    is no forgetting, and says that tasks were learned late, not that less was forgotten.

    Examples:
        >>> best_keys({"er": 50.0, "sgd": 20.0}, "ACC"), best_keys({"er": 9.0, "sgd": 80.0}, "FM")
        ({'er'}, {'er'})
        >>> best_keys({"er": 9.0, "mean": -1.0}, "FM"), best_keys({"er": 0.0, "mean": -1.0}, "FM")
        (set(), {'er'})
    """
    sign = {"up": 1, "down": -1, None: 0}[MEASURES[measure].better]
    floor = MEASURES[measure].floor
    scores = {key: sign * max(mean, floor) for key, mean in means.items()}
    best = {key for key, score in scores.items() if sign and score == max(scores.values())}
    return {key for key in best if means[key] >= floor}


def decimals(rows: Sequence[Row], measure: str) -> int:
    """Return how many decimals a column is shown with: the same in all its cells."""
    if measure != "seconds":
        return 2 if measure in _MAIN else 1
    longest = max((value.mean for row in rows if (value := row.spread(measure))), default=0)
    return 2 if longest < 10 else 1 if longest < 1000 else 0


def overview(experiments: Mapping[str, Sequence[Run]]) -> str:
    """Return a table of experiments as Markdown: runs, hardware and times.

    Args:
        experiments: name → its runs.
    """
    lines = [
        "| experiment | runs | hardware | training, all runs | wall-clock |",
        "|---|---|---|---:|---:|",
    ]
    for name, runs in experiments.items():
        seconds = sum(float(run.status.seconds or 0) for run in runs)
        wall = wall_clock(runs)
        cells = [
            f"[{name}]({name})",
            run_count(runs) + _absent_rows(runs),
            _hardware(runs),
            duration(seconds),
            "not recorded" if wall is None else duration(wall),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def run_count(runs: Sequence[Run]) -> str:
    """Return "70 of 90": finished runs, of those in the experiment that ships with the package."""
    done = sum(run.done for run in runs)
    experiment = _shipped_experiment(runs)
    planned = len(experiment.runs()) if experiment else 0
    whole = max(planned, len(runs))
    return str(done) if done == whole else f"{done} of {whole}"


def wall_clock(runs: Sequence[Run]) -> float | None:
    """Return for how many seconds at least one run trained; None where a time is not recorded.

    Runs that trained at the same time count once, and pauses between them do not count.
    """
    spans = []
    for run in runs:
        if run.done:
            try:
                started = datetime.fromisoformat(run.environment.started or "")
                spans.append((started, datetime.fromisoformat(run.status.ended or "")))
            except ValueError:
                return None
    total, until = 0.0, None
    for start, end in sorted(spans):
        begin = start if until is None else max(start, until)
        total += max((end - begin).total_seconds(), 0.0)
        until = end if until is None else max(until, end)
    return total if spans else None


def _column(rows: Sequence[Row], name: str, among: Sequence[Row]) -> Column:
    if name in MEASURES:
        places = decimals(rows, name)
        cells = _align([format_spread(row.spread(name), places) for row in rows])
        return Column(name, MEASURES[name].heading, cells, best_rows(rows, name))
    if name == _DIFFERENCE:
        cells = _align([_format_difference(_difference(row, among)) for row in rows])
        return Column(name, "ACC - ER", cells, set())
    if name in _paper_columns():
        cells = _align([format_spread(_quote(row, name)) for row in rows])
        return Column(name, f"paper's {name.removeprefix(_PAPER)}", cells, set())
    known = [*MEASURES, _DIFFERENCE, *_paper_columns()]
    hint = nearest(name, known) or f"; there are {', '.join(known)}"
    raise UserError(f'no column "{name}"{hint}')


def _difference(row: Row, among: Sequence[Row]) -> Spread | None:
    """Return the row's ACC less that of ER with the same seeds."""
    er = next((other for other in among if other.name == "er"), None)
    if er is None or er.name == row.name:
        return None
    return paired_difference(row.values["ACC"], er.values["ACC"])


def _format_difference(difference: Spread | None) -> tuple[str, str]:
    """Return a difference and half its 95 % interval as text, or that there are too few seeds."""
    if difference is None:
        return format_spread(None)
    mean, half = format_spread(Spread(difference.mean, half_width(difference)), sign="+")
    return mean, half or TOO_FEW_SEEDS


def _paper_columns() -> list[str]:
    return [f"{_PAPER}{measure}" for measure in paper.QUOTED_MEASURES]


def _quote(row: Row, name: str) -> Spread | None:
    return paper.quotes(row.experiment, row.name).get(name.removeprefix(_PAPER))


def _align(pairs: Sequence[tuple[str, str]]) -> list[str]:
    if not pairs:
        return []
    left = max(len(mean) for mean, _ in pairs)
    right = max((len(sd) for _, sd in pairs if sd != TOO_FEW_SEEDS), default=0)

    def text(mean: str, sd: str) -> str:
        after = f" ({sd})" if sd == TOO_FEW_SEEDS else f" ± {sd:>{right}}" if sd else ""
        return f"{mean:>{left}}{after}"

    texts = [text(*pair) for pair in pairs]
    return [text.ljust(max(map(len, texts))) for text in texts]


def _terminal_table(rows: Sequence[Row], names: Sequence[str], left_out: Sequence[str]) -> Table:
    chosen = columns(rows, names)
    sentences = _caption(rows, chosen, "*")
    meanings = [f"{name}: {text}" for name, text in _MEANINGS.items() if name in names]
    sentences += [f"{'; '.join(meanings)}."] if meanings else []
    if left_out:
        headings = ", ".join(column.heading.rstrip(" ↑↓") for column in columns(rows, left_out))
        sentences.append(f"Too wide to show: {headings}; --markdown has all.")
    # Text throughout, because a row's name or an error may look like rich's markup.
    caption = Text("\n".join([" ".join(sentences), *_omissions(rows)]))
    found = Table(box=box.SIMPLE, pad_edge=False, caption=caption, caption_justify="left")
    found.add_column("method", overflow="fold", max_width=_LABEL_WIDTH)
    for column in chosen:
        found.add_column(column.heading, no_wrap=True)
    for number, row in enumerate(rows):
        before_joint = [other.joint for other in rows[number : number + 2]] == [False, True]
        cells = (_cell(column, row, column.cells[number]) for column in chosen)
        found.add_row(Text(_label(row)), *cells, end_section=before_joint)
    return found


def _cell(column: Column, row: Row, text: str) -> Text:
    return Text(f"{text}*", "bold") if row.name in column.best else Text(text)


def _label(row: Row) -> str:
    note = row.seed_note()
    return f"{row.label} ({note})" if note else row.label


def _caption(rows: Sequence[Row], chosen: Sequence[Column], mark: str) -> list[str]:
    """Return the sentences that explain the columns and the paper's numbers."""
    names = {column.name for column in chosen}
    bound = next((f", {row.label} (an upper bound) apart" for row in rows if row.joint), "")
    sentences = [f"Mean ± sd over finished seeds; {mark} the best of its column{bound}."]
    if _DIFFERENCE in names:
        sentences.append(
            "ACC - ER is taken seed by seed and its ± is a 95 % interval (Student's t)."
        )
    if "seconds" in names and (note := concurrency_note(rows)):
        sentences.append(note)
    if any(name.startswith(_PAPER) for name in names):
        for experiment in dict.fromkeys(row.experiment for row in rows):
            sentences += paper.notes(experiment)
    return sentences


def _omissions(rows: Sequence[Row]) -> list[str]:
    lines = omissions(rows)
    return ["", "Not in these numbers:", "", *(f"- {line}" for line in lines)] if lines else []


def _absent_rows(runs: Sequence[Run]) -> str:
    """Return which rows of the experiment that ships have no run at all."""
    experiment = _shipped_experiment(runs)
    there = {run.family for run in runs}
    absent = [row for row in experiment.methods if row not in there] if experiment else []
    return f", without {', '.join(absent)}" if absent else ""


def _shipped_experiment(runs: Sequence[Run]) -> AnyExperiment | None:
    name = runs[0].config.experiment or ""
    try:
        return parse_experiment(read(name)) if is_shipped(name) else None
    except UserError:  # it names a method or stream that is not installed here
        return None


def _hardware(runs: Sequence[Run]) -> str:
    found: dict[str, None] = {}
    for run in runs:
        environment = run.environment
        device = environment.device or "unknown"
        cores = count_of(environment.cores, "core") if environment.cores else "? cores"
        cpu = f"{environment.processor or 'a CPU'}, {cores}"
        count = concurrent_runs(run) or 1
        beside = f", {count_of(count, 'run')} at a time" if count > 1 else ""
        found[(cpu if device == "cpu" else device) + beside] = None
    return "; ".join(found)
