"""The table of an experiment, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from syngap.report.rows import MEASURES, Row, Spread, missing

__all__ = ["COLUMNS", "best", "decimals", "markdown", "shown", "table"]

COLUMNS = ("ACC", "FM", "INT", "seconds")


def shown(value: Spread | None, decimals: int = 2) -> tuple[str, str]:
    """Return mean and sd as text: an empty sd for a single seed, a dash for nothing.

    Examples:
        >>> shown(Spread(27.284, 0.58)), shown(Spread(1234.5, None), 0), shown(None)
        (('27.28', '0.58'), ('1234', ''), ('–', ''))
    """
    if value is None:
        return "–", ""
    mean = round(value.mean, decimals) + 0.0  # never -0.00
    return f"{mean:.{decimals}f}", "" if value.sd is None else f"{value.sd:.{decimals}f}"


def decimals(rows: Sequence[Row], measure: str) -> int:
    """Return how many decimals a column is shown with: the same in all its cells."""
    if measure != "seconds":
        return 2 if measure in COLUMNS else 1
    longest = max((value.mean for row in rows if (value := row.spread(measure))), default=0)
    return 2 if longest < 10 else 1 if longest < 1000 else 0


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


def table(rows: Sequence[Row]) -> Table:
    """Return the table for a terminal. The best carry a sign too, as a pipe has no bold."""
    # Text throughout, because a row's name or an error may look like rich's markup.
    caption = Text("\n".join(_caption(rows, "*")))
    drawn = Table(box=box.SIMPLE, pad_edge=False, caption=caption, caption_justify="left")
    drawn.add_column("method", overflow="fold")
    columns = []
    for measure in COLUMNS:
        drawn.add_column(MEASURES[measure].heading, no_wrap=True)
        marked = best(rows, measure)
        columns.append(
            [
                Text(
                    cell + ("*" if row.name in marked else ""), "bold" if row.name in marked else ""
                )
                for row, cell in zip(rows, _cells(rows, measure), strict=True)
            ]
        )
    for number, row in enumerate(rows):
        apart = [other.joint for other in rows[number : number + 2]] == [False, True]
        drawn.add_row(Text(_named(row)), *(cells[number] for cells in columns), end_section=apart)
    return drawn


def markdown(rows: Sequence[Row]) -> str:
    """Return the table as Markdown that is also readable as it stands."""
    names = [_named(row).replace("\\", "\\\\").replace("|", "\\|") for row in rows]
    columns = [["method", *names]]
    for measure in COLUMNS:
        marked = best(rows, measure)
        cells = [cell.strip() for cell in _cells(rows, measure)]
        bold = [
            f"**{cell}**" if row.name in marked else cell
            for row, cell in zip(rows, cells, strict=True)
        ]
        columns.append([MEASURES[measure].heading, *bold])
    widths = [max(map(len, column)) for column in columns]
    head, *body = (
        "| " + " | ".join([name.ljust(widths[0]), *map(str.rjust, line, widths[1:])]) + " |"
        for name, *line in zip(*columns, strict=True)
    )
    rule = "| " + " | ".join(["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]) + " |"
    return "\n".join([head, rule, *body, "", *_caption(rows, "bold is")]) + "\n"


def _named(row: Row) -> str:
    finished, all_seeds = len(row.seeds), len(row.seeds) + len(row.unfinished)
    return row.label + (f" ({finished} of {all_seeds} seeds)" if row.unfinished else "")


def _cells(rows: Sequence[Row], measure: str) -> list[str]:
    """Return a column of equally long cells, the points and the ± under each other."""
    places = decimals(rows, measure)
    pairs = [shown(row.spread(measure), places) for row in rows]
    left, right = (max(map(len, part)) for part in zip(*pairs, strict=True))
    texts = [f"{mean:>{left}}" + (f" ± {sd:>{right}}" if sd else "") for mean, sd in pairs]
    return [text.ljust(max(map(len, texts))) for text in texts]


def _caption(rows: Sequence[Row], mark: str) -> list[str]:
    bound = next((f", {row.label} (an upper bound) apart" for row in rows if row.joint), "")
    lines = [f"Mean ± sd over finished seeds; {mark} the best of its column{bound}."]
    if left_out := missing(rows):
        lines += ["", "Not in these numbers:", "", *(f"- {line}" for line in left_out)]
    return lines
