"""What a search tried and chose, read from what `syngap tune` wrote beside the runs that use it.

DIR/search/
    search.yaml          spaces, sampler, what was chosen
    trials.csv           every trial, a line each
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syngap.experiments.folder import read_yaml
from syngap.experiments.reading import reading, text_in
from syngap.experiments.tuning.space import Space
from syngap.report.rows import Row

__all__ = ["FOLDER", "Search", "Searched", "markdown", "read_search", "tabled"]

FOLDER = "search"
_COLUMNS = ("method", "tried", "chosen", "validation ACC ↑", "trials", "diverged")


@dataclass(frozen=True)
class Searched:
    """What came of one row.

    Args:
        label: the row's, for people.
        spaces: option → what was tried.
        chosen: option → its value; nothing before all trials have ended.
        accuracy: of the chosen trial on validation samples, in percent.
        trials: how many there were.
        diverged: how many of them.
        used: whether the row of the table has what was chosen.
        started: whether the chosen trial began the search, at values that were given to it.
    """

    label: str
    spaces: Mapping[str, Space]
    chosen: Mapping[str, Any]
    accuracy: float | None
    trials: int
    diverged: int
    used: bool
    started: bool

    @property
    def cells(self) -> list[str]:
        """What stands in the table."""
        tried = [f"{option} {_range(space)}" for option, space in self.spaces.items()]
        chosen = [
            f"{option} {_value(value)}{_edge(self.spaces.get(option), value)}"
            for option, value in self.chosen.items()
        ]
        accuracy = "–" if self.accuracy is None else f"{self.accuracy:.2f}"
        return [
            *(self.label, "; ".join(tried), "; ".join(chosen) or "nothing yet", accuracy),
            *(str(self.trials), str(self.diverged)),
        ]


@dataclass(frozen=True)
class Search:
    """How values were chosen, and which.

    Args:
        rows: in the order of the experiment.
        seeds: of the runs of a trial.
        stream: what its stream had that the table's has not.
        sampler: what suggested values.
    """

    rows: list[Searched]
    seeds: list[int]
    stream: Mapping[str, Any]
    sampler: str

    @property
    def says(self) -> str:
        """What a reader of its table has to know."""
        counts = {row.trials for row in self.rows}
        every = f"{counts.pop()} trials of every row" if len(counts) == 1 else "Trials as counted"
        stream = ", ".join(f"{option} {_value(value)}" for option, value in self.stream.items())
        seeds = ", ".join(map(str, self.seeds))
        said = [
            f"{every} with seed {seeds}, by {self.sampler}; on the table's stream with {stream}, "
            "so that this ACC is not the table's.",
            "The trial with the highest was chosen; one that diverged counts as 0.",
        ]
        if any("edge" in row.cells[2] for row in self.rows):
            said.append("At an edge of what was tried, better values may lie beyond.")
        if begun := [row.label for row in self.rows if row.started]:
            said.append(f"Of {' and '.join(begun)} it is the first, at values given to the search.")
        if others := [row.label for row in self.rows if row.chosen and not row.used]:
            said.append(f"The table does not have what was chosen for {', '.join(others)}.")
        return " ".join(said)


def read_search(folder: Path, rows: Sequence[Row]) -> Search | None:
    """Return the search in an experiment's folder, None where there is none.

    Args:
        folder: the experiment's.
        rows: of its table.
    """
    path = folder / FOLDER / "search.yaml"
    if not path.is_file():
        return None
    found, lines = read_yaml(path), _lines(path.with_name("trials.csv"))
    table = {row.name: row for row in rows}
    with reading(path):
        search = Search(
            rows=[
                _searched(name, spaces, found.get("chosen", {}).get(name), lines, table.get(name))
                for name, spaces in found["spaces"].items()
            ],
            seeds=list(found["seeds"]),
            stream=dict(found["stream"]),
            sampler=str(found["sampler"]["name"]),
        )
        _ = search.says, [row.cells for row in search.rows]  # so that it fails here, if it does
        return search


def tabled(search: Search) -> dict[str, Any]:
    """Return the table of a search as plain values."""
    return {
        "columns": list(_COLUMNS),
        "rows": [row.cells for row in search.rows],
        "says": search.says,
    }


def markdown(search: Search, place: str) -> str:
    """Return the table of a search as Markdown; `place` is where its files are."""
    lines = [_COLUMNS, ("---", "---", "---", "---:", "---:", "---:")]
    body = [f"| {' | '.join(cells)} |" for cells in (*lines, *(row.cells for row in search.rows))]
    return "\n".join([*body, "", f"{search.says} Every trial is in `{place}/trials.csv`."]) + "\n"


def _searched(
    name: str,
    spaces: Mapping[str, Any],
    chosen: Mapping[str, Any] | None,
    trials: Sequence[Mapping[str, str]],
    row: Row | None,
) -> Searched:
    own = [trial["state"] for trial in trials if trial["row"] == name]
    values = dict(chosen["values"]) if chosen else {}
    if chosen and chosen["trials"] != len(own):
        raise ValueError(f"{name}: {chosen['trials']} trials, trials.csv has {len(own)}")
    return Searched(
        label=row.label if row else name,
        spaces={option: _space(given) for option, given in spaces.items()},
        chosen=values,
        accuracy=float(chosen["ACC"]) if chosen else None,
        trials=len(own),
        diverged=own.count("diverged"),
        used=row is not None and all(row.options.get(o) == v for o, v in values.items()),
        started=bool(values) and all(spaces[o].get("start") == v for o, v in values.items()),
    )


def _space(given: Mapping[str, Any]) -> Space:
    (kind,) = (key for key in given if key != "start")
    return Space(kind, list(given[kind]), given.get("start"))


def _lines(path: Path) -> list[dict[str, str]]:
    with reading(path):
        try:
            return list(csv.DictReader(io.StringIO(text_in(path), newline="")))
        except csv.Error as error:
            raise ValueError(error) from error


def _range(space: Space) -> str:
    """Return what may be tried.

    Examples:
        >>> _range(Space("log", [0.003, 1.0])), _range(Space("choose", [0.0, 0.9]))
        ('0.003 to 1 (log)', '0 or 0.9')
    """
    values = [_value(value) for value in space.values]
    if space.kind == "choose":
        return " or ".join(filter(None, [", ".join(values[:-1]), values[-1]]))
    return " to ".join(values) + (" (log)" if space.kind == "log" else "")


def _edge(space: Space | None, value: Any) -> str:
    edge = space.edge(value) if space else ""
    return f" ({edge} edge)" if edge else ""


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
