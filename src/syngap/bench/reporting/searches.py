"""What a recorded search tried and chose, as tables for documents and the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from syngap.bench.config.reading import reading, text_in
from syngap.bench.config.space import Space
from syngap.bench.reporting.headline import below_untuned
from syngap.bench.reporting.rows import Row
from syngap.bench.store.folder_reader import read_yaml
from syngap.messages import count_of, duration

__all__ = ["SEARCH", "Search", "SearchRow", "read_search", "search_data", "search_table"]

SEARCH = "search"  # its folder in that of the experiment
_SEARCH_COLUMNS = (
    *("method", "tried", "chosen", "validation ACC ↑", "trials", "diverged"),
    *("training", "device time"),
)
_TRIAL_COLUMNS = ("method", "trial", "values", "validation ACC ↑", "by seed")
_NOT_DRAWN = ("default", "row")  # sources of trials


@dataclass(frozen=True)
class SearchRow:
    """What a search tried and chose for one row.

    Args:
        name: the row's.
        label: the row's, as a reader sees it.
        spaces: option → values that the search could try.
        chosen: option → its value; nothing before all trials have ended.
        accuracy: of the chosen trial on validation samples, in percent.
        trials: how many there were.
        diverged: how many of them.
        used: whether the row of the table has the chosen values.
        initial: whether the chosen trial has values that the search began with.
        widened: options whose space was widened.
        seconds: of training, all its runs together; None where they were not recorded.
        device_seconds: the same, divided by how many runs shared the device.
        trial_cells: the texts of each trial's line.
    """

    name: str
    label: str
    spaces: Mapping[str, Space]
    chosen: Mapping[str, Any]
    accuracy: float | None
    trials: int
    diverged: int
    used: bool
    initial: bool
    widened: Sequence[str] = ()
    seconds: float | None = None
    device_seconds: float | None = None
    trial_cells: Sequence[list[str]] = ()

    @property
    def cells(self) -> list[str]:
        """The texts of its line in the table."""
        tried = [
            f"{option} {space.text}{', widened' if option in self.widened else ''}"
            for option, space in self.spaces.items()
        ]
        chosen = [
            f"{option} {_value(value)}{_edge(self.spaces.get(option), value)}"
            for option, value in self.chosen.items()
        ]
        accuracy = "–" if self.accuracy is None else f"{self.accuracy:.2f}"
        return [
            *(self.label, "; ".join(tried), "; ".join(chosen) or "nothing yet", accuracy),
            *(str(self.trials), str(self.diverged)),
            *(
                "–" if took is None else duration(took)
                for took in (self.seconds, self.device_seconds)
            ),
        ]


@dataclass(frozen=True)
class Search:
    """How values were chosen, and which.

    Args:
        rows: in the order of the experiment.
        seeds: of the runs of a trial.
        stream: options of its stream that differ from the table's.
        sampler: the algorithm that suggested values.
        rounds: how many trials a row had with how many seeds; of earlier searches, all with all.
        at_a_time: how many runs there were at a time; several where that changed.
        left: how many runs are to come; 0 of a search that has ended.
        warning: which rows end below untuned ones; "" for none.
    """

    rows: list[SearchRow]
    seeds: list[int]
    stream: Mapping[str, Any]
    sampler: str
    rounds: Sequence[Sequence[int]] = ()
    at_a_time: Sequence[int] = ()
    left: int = 0
    warning: str = ""

    @property
    def caption(self) -> str:
        """What a reader of its table has to know."""
        counts = {row.trials for row in self.rows}
        every = "Trials as counted"
        if len(counts) == 1:
            every = f"{count_of(counts.pop(), 'trial')} of every row"
        stream = ", ".join(f"{option} {_value(value)}" for option, value in self.stream.items())
        seeds = ", ".join(map(str, self.seeds))
        halved = [
            f", the best {number} with {count_of(count, 'seed')}"
            for number, count in self.rounds[1:]
        ]
        sentences = [
            f"{every} with seed {seeds if not halved else self.seeds[0]}{''.join(halved)}, by "
            f"{self.sampler}; on the table's stream with {stream}, so that this ACC is not the "
            "table's.",
            "The trial with the highest was chosen; one that diverged counts as 0.",
        ]
        if self.left:
            sentences.insert(0, f"The search has not ended: {count_of(self.left, 'run')} to come.")
        if times := [row.seconds for row in self.rows if row.seconds is not None]:
            each = f"{duration(min(times))} to {duration(max(times))}"
            sentences.append(f"Training took {each} a row, {duration(sum(times))} in all.")
        if times := [row.device_seconds for row in self.rows if row.device_seconds is not None]:
            count = " or ".join(map(str, self.at_a_time))
            sentences.append(
                f"With {count} at a time, that is {duration(sum(times))} of device time: training "
                "divided by the runs that shared the device."
            )
        if any(row.widened for row in self.rows):
            sentences.append("Spaces were widened where the best stood at an edge.")
        if any("edge" in row.cells[2] for row in self.rows):
            sentences.append("At an edge of what was tried, better values may lie beyond.")
        if initial := [row.label for row in self.rows if row.initial]:
            names = " and ".join(initial)
            sentences.append(f"Of {names} it has values that the search began with.")
        if others := [row.label for row in self.rows if row.chosen and not row.used]:
            sentences.append(f"The table does not have what was chosen for {', '.join(others)}.")
        if self.warning:
            sentences.append(self.warning)
        return " ".join(sentences)


def read_search(folder: Path, rows: Sequence[Row]) -> Search | None:
    """Return the search in an experiment's folder, None where there is none.

    Args:
        folder: the experiment's.
        rows: of its table.
    """
    path = folder / SEARCH / "search.yaml"
    if not path.is_file():
        return None
    found, trials = read_yaml(path), _trials(path.with_name("trials.csv"))
    by_name = {row.name: row for row in rows}
    chosen = found.get("chosen", {})
    with reading(path):
        widened, every = dict(found.get("widened", {})), found.get("every_row", {})
        cost = dict(found.get("cost", {}).get("rows", {}))
        runs = sum(of["runs"] for of in cost.values())
        search = Search(
            rows=[
                _search_row(
                    name,
                    {**spaces, **{one["option"]: one["space"] for one in widened.get(name, ())}},
                    chosen.get(name),
                    trials,
                    by_name.get(name),
                    [one["option"] for one in widened.get(name, ())],
                    cost.get(name, {}).get("device_seconds"),
                )
                for name, spaces in found["spaces"].items()
            ],
            seeds=list(found["seeds"]),
            stream=dict(found["stream"]),
            sampler=str(found["sampler"]["name"]),
            rounds=[(int(n), int(seeds)) for n, seeds in every.get("rounds", ())],
            at_a_time=sorted(
                {int(each.get("at_a_time", 1)) for each in found.get("environments", ())}
            ),
            left=max(0, len(found["spaces"]) * every.get("runs", 0) - runs),
        )
        searched = {row.name: row.spaces for row in search.rows if row.used}
        search = replace(search, warning=below_untuned(rows, searched))
        search_data(search)  # so that a value that cannot be written is an error of this file
        return search


def search_data(search: Search) -> dict[str, Any]:
    """Return the table of a search as plain values for the page."""
    return {
        "columns": list(_SEARCH_COLUMNS),
        "rows": [row.cells for row in search.rows],
        "says": search.caption,
        "trial_columns": list(_TRIAL_COLUMNS),
        "trials": [cells for row in search.rows for cells in row.trial_cells],
    }


def search_table(search: Search, place: str) -> str:
    """Return the table of a search as Markdown; `place` is where its files are."""
    rule = (*("---",) * 3, *("---:",) * 5)
    lines = [_SEARCH_COLUMNS, rule, *(row.cells for row in search.rows)]
    body = [f"| {' | '.join(cells)} |" for cells in lines]
    caption = f"{search.caption} Every trial is in `{place}/trials.csv`."
    return "\n".join([*body, "", caption]) + "\n"


def _search_row(
    name: str,
    spaces: Mapping[str, Any],
    chosen: Mapping[str, Any] | None,
    trials: Sequence[Mapping[str, str]],
    row: Row | None,
    widened: Sequence[str],
    device_seconds: float | None,
) -> SearchRow:
    trials = [trial for trial in trials if trial["row"] == name]
    states = [trial["state"] for trial in trials]
    times = [seconds for trial in trials if (seconds := trial.get("seconds"))]
    values = dict(chosen["values"]) if chosen else {}
    label = row.label if row else name
    if chosen and chosen["trials"] != len(states):
        counted = count_of(chosen["trials"], "trial")
        raise ValueError(f"{name}: {counted}, trials.csv has {len(states)}")
    return SearchRow(
        name=name,
        label=label,
        spaces={option: _space(space) for option, space in spaces.items()},
        chosen=values,
        accuracy=float(chosen["ACC"]) if chosen else None,
        trials=len(states),
        diverged=states.count("diverged"),
        used=row is not None
        and bool(values)
        and all(row.options.get(o) == v for o, v in values.items()),
        initial=bool(values)
        and (
            (chosen or {}).get("source") in _NOT_DRAWN
            or all(spaces[o].get("start") == v for o, v in values.items())
        ),
        widened=widened,
        seconds=sum(map(float, times)) if times else None,
        device_seconds=None if device_seconds is None else float(device_seconds),
        trial_cells=[_trial_cells(label, spaces, trial) for trial in trials],
    )


def _trial_cells(label: str, spaces: Mapping[str, Any], trial: Mapping[str, str]) -> list[str]:
    source = trial.get("source")
    by_seed = [
        f"{column.removeprefix('ACC ')}: {float(score):.2f}"
        for column, score in trial.items()
        if column and column.startswith("ACC ") and score
    ]
    return [
        label,
        trial["trial"] + (f" ({source})" if source else ""),
        "; ".join(f"{option} {trial[option]}" for option in spaces if trial.get(option)),
        "diverged" if trial["state"] == "diverged" else f"{float(trial['ACC']):.2f}",
        "; ".join(by_seed) or f"seed {trial.get('seeds', '')}",
    ]


def _space(content: Mapping[str, Any]) -> Space:
    (kind,) = (key for key in content if key not in ("start", "or"))
    return Space(kind, list(content[kind]), content.get("or"))


def _trials(path: Path) -> list[dict[str, str]]:
    with reading(path):
        try:
            return list(csv.DictReader(io.StringIO(text_in(path), newline="")))
        except csv.Error as error:
            raise ValueError(error) from error


def _edge(space: Space | None, value: Any) -> str:
    edge = space.edge(value) if space else ""
    return f" ({edge} edge)" if edge else ""


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
