"""The table of an experiment, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from syngap.report import paper
from syngap.report.columns import Column, best, columns, decimals, shown, usual
from syngap.report.rows import Row, crowded, missing

__all__ = ["best", "decimals", "markdown", "shown", "table"]

# What a terminal too narrow for all goes without first.
_SPARED = ("paper-INT", "paper-FM", "seconds", "INT", "paper-ACC", "FM", "ACC-ER")
_NAMES = 30  # the width beyond which names are folded before columns are left out


def table(rows: Sequence[Row], width: int | None = None) -> Table:
    """Return the table for a terminal. The best carry a sign too, as a pipe has no bold.

    Args:
        rows: of the experiment.
        width: of the terminal; columns that do not fit are left out, and it says which.
    """
    names = usual(rows)
    spared: list[str] = []
    drawn = _drawn(rows, names, spared)
    for name in _SPARED:
        if width is None or Console(width=1000).measure(drawn).maximum <= width:
            break
        if name in names:
            spared.append(name)
            drawn = _drawn(rows, [name for name in names if name not in spared], spared)
    return drawn


def markdown(
    rows: Sequence[Row],
    names: Sequence[str] | None = None,
    among: Sequence[Row] | None = None,
    more: Sequence[str] = (),
) -> str:
    """Return the table as Markdown that is also readable as it stands.

    Args:
        rows: of the table.
        names: of its columns; all that the rows have something for unless said.
        among: all rows of the experiment, where the table has some of them.
        more: sentences to add below.
    """
    chosen = columns(rows, usual(rows, among) if names is None else names, among)
    labels = [_named(row).replace("\\", "\\\\").replace("|", "\\|") for row in rows]
    cells = [["method", *labels]]
    for column in chosen:
        bold = [
            f"**{cell.strip()}**" if row.name in column.marked else cell.strip()
            for row, cell in zip(rows, column.cells, strict=True)
        ]
        cells.append([column.heading, *bold])
    widths = [max(map(len, column)) for column in cells]
    head, *body = (
        "| " + " | ".join([name.ljust(widths[0]), *map(str.rjust, line, widths[1:])]) + " |"
        for name, *line in zip(*cells, strict=True)
    )
    rule = "| " + " | ".join(["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]) + " |"
    says = [" ".join([*_caption(rows, chosen, "bold is"), *more]), *_left_out(rows)]
    return "\n".join([head, rule, *body, "", *says]) + "\n"


def _drawn(rows: Sequence[Row], names: Sequence[str], spared: Sequence[str]) -> Table:
    chosen = columns(rows, names)
    says = _caption(rows, chosen, "*")
    if spared:
        names_left = ", ".join(column.heading.rstrip(" ↑↓") for column in columns(rows, spared))
        says.append(f"Left out for want of width: {names_left}; --markdown has all.")
    # Text throughout, because a row's name or an error may look like rich's markup.
    caption = Text("\n".join([" ".join(says), *_left_out(rows)]))
    drawn = Table(box=box.SIMPLE, pad_edge=False, caption=caption, caption_justify="left")
    drawn.add_column("method", overflow="fold", max_width=_NAMES)
    for column in chosen:
        drawn.add_column(column.heading, no_wrap=True)
    for number, row in enumerate(rows):
        apart = [other.joint for other in rows[number : number + 2]] == [False, True]
        cells = (_cell(column, row, column.cells[number]) for column in chosen)
        drawn.add_row(Text(_named(row)), *cells, end_section=apart)
    return drawn


def _cell(column: Column, row: Row, text: str) -> Text:
    return Text(f"{text}*", "bold") if row.name in column.marked else Text(text)


def _named(row: Row) -> str:
    few = row.few()
    return row.label + (f" ({few})" if few else "")


def _caption(rows: Sequence[Row], chosen: Sequence[Column], mark: str) -> list[str]:
    """Return the sentences that say what the columns are, and what is to be said of the paper's."""
    names = {column.name for column in chosen}
    bound = next((f", {row.label} (an upper bound) apart" for row in rows if row.joint), "")
    says = [f"Mean ± sd over finished seeds; {mark} the best of its column{bound}."]
    if "ACC-ER" in names:
        says.append("ACC - ER is taken seed by seed and its ± is a 95 % interval (Student's t).")
    if "seconds" in names and (said := crowded(rows)):
        says.append(said)
    if any(name.startswith("paper-") for name in names):
        for experiment in dict.fromkeys(row.experiment for row in rows):
            says += paper.notes(experiment)
    return says


def _left_out(rows: Sequence[Row]) -> list[str]:
    lines = missing(rows)
    return ["", "Not in these numbers:", "", *(f"- {line}" for line in lines)] if lines else []
