"""The record of a search: all that is needed to go on with it, on this machine or another.

FOLDER/search.yaml    how is searched, what was widened and chosen, what it cost, environments
FOLDER/trials.csv     a line a trial: its values and, by seed, ACC, seconds and the environment

Numbers have all their digits: a search that goes on from its record has the scores of one that was
not interrupted, and makes the same choice.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from syngap.bench.config.component import Options, Value
from syngap.bench.config.reading import reading, text_in
from syngap.bench.errors import UserError
from syngap.bench.options import shown
from syngap.bench.storage import write
from syngap.bench.store.folder_reader import read_yaml
from syngap.bench.store.outcome import LARGEST, Environment
from syngap.bench.store.records import yaml_of

__all__ = [
    "SEARCH",
    "TRIALS",
    "RecordedTrial",
    "SearchRecord",
    "TrialRun",
    "cost_of",
    "environments_of",
    "read_record",
    "value_text",
    "write_trials",
]

SEARCH, TRIALS = "search.yaml", "trials.csv"


@dataclass(frozen=True)
class TrialRun:
    """What came of a trial with one seed.

    Args:
        accuracy: ACC on validation samples in percent, None where the run diverged.
        seconds: of training.
        environment: what it ran on; when it began is left out.
        why: it diverged, "" where it did not.
    """

    accuracy: float | None
    seconds: float
    environment: Environment = field(default_factory=Environment)
    why: str = ""

    @property
    def device_seconds(self) -> float:
        """Its part of the time of the card or machine that runs shared."""
        return self.seconds / max(1, self.environment.at_a_time or 1)


@dataclass(frozen=True)
class RecordedTrial:
    """A line of trials.csv.

    Args:
        row: which it is a trial of.
        number: among those of its row.
        source: how its values were found.
        values: option → value, as text.
        mean: of ACC over its seeds, 0 where a run diverged.
        runs: by seed.
    """

    row: str
    number: int
    source: str
    values: Mapping[str, str]
    mean: float
    runs: Mapping[int, TrialRun]


@dataclass(frozen=True)
class SearchRecord:
    """A search as it was recorded.

    Args:
        folder: where.
        entries: what search.yaml holds.
        trials: by row and number.
        environments: of its runs, as search.yaml lists them.
    """

    folder: Path
    entries: Options
    trials: Mapping[tuple[str, int], RecordedTrial]
    environments: Sequence[Environment] = ()

    @property
    def seeds(self) -> list[int]:
        """Those of the search."""
        seeds = self.entries["seeds"]
        return [int(str(seed)) for seed in seeds] if isinstance(seeds, list) else []

    @property
    def rows(self) -> list[str]:
        """Rows that have trials."""
        return list(dict.fromkeys(row for row, _ in self.trials))

    def run(self, row: str, number: int, values: Options, seed: int) -> TrialRun | None:
        """Return what came of a trial with a seed, None where that is not recorded.

        Raises:
            UserError: the trial of that number had other values.
        """
        found = self.trials.get((row, number))
        if found is None:
            return None
        for option, value in values.items():
            if found.values.get(option) != value_text(value):
                raise UserError(
                    f"{self.folder / TRIALS}: {row}, trial {number}: {option} was "
                    f"{shown(found.values.get(option, ''))} there and is {shown(value)} now; "
                    "give the search that it is the record of"
                )
        return found.runs.get(seed)

    def continues(self, earlier: SearchRecord) -> bool:
        """Return whether this is the same search, with all runs of the rows that both have."""
        shared = [row for row in earlier.rows if row in self.rows]
        return self.is_like(earlier, shared) and all(
            (trial := self.trials.get(key)) is not None
            and all(trial.values.get(option, "") == text for option, text in was.values.items())
            and all(
                seed in trial.runs and trial.runs[seed].accuracy == run.accuracy
                for seed, run in was.runs.items()
            )
            for key, was in earlier.trials.items()
            if key[0] in shared
        )

    @property
    def has_ended(self) -> bool:
        """Whether each row has all its runs; where all trials of a row diverged, none is chosen."""
        counts = dict.fromkeys(_mapping(self.entries.get("spaces")), 0)
        for (row, _), trial in self.trials.items():
            counts[row] = counts.get(row, 0) + len(trial.runs)
        return all(count == _part(self, "every_row", "runs") for count in counts.values())

    def is_like(self, other: SearchRecord, rows: Sequence[str]) -> bool:
        """Return whether both search in the same way, and these rows in the same spaces."""
        return self._rules(rows) == other._rules(rows)

    def with_rows_of(self, earlier: SearchRecord) -> SearchRecord:
        """Return the record of both: rows that `earlier` alone has, then those of this one.

        Args:
            earlier: a record that this one `continues`.
        """
        other = {key: trial for key, trial in earlier.trials.items() if key[0] not in self.rows}
        if not other:
            return self
        entries = {**self.entries}
        for name in ("spaces", "widened", "chosen"):
            if name in entries or name in earlier.entries:
                entries[name] = _joined(earlier.entries.get(name), entries.get(name))
        trials = {**other, **self.trials}
        rows = _joined(_part(earlier, "cost", "rows"), _part(self, "cost", "rows"))
        runs = [run for trial in trials.values() for run in trial.runs.values()]
        entries["cost"] = {"rows": rows, "all": cost_of(runs)}
        methods = [_part(each, "configuration", "methods") for each in (earlier, self)]
        parts = _mapping(entries.get("configuration"))
        entries["configuration"] = {**parts, "methods": _joined(*methods)}
        environments = environments_of((), [*earlier.environments, *self.environments])
        entries["environments"] = [each.as_mapping() for each in environments]
        return SearchRecord(self.folder, entries, trials, environments)

    def files(self) -> dict[str, bytes]:
        """Return the contents of trials.csv and search.yaml, in this order."""
        trials = _lines(list(self.trials.values()), self.seeds, self.environments)
        return {TRIALS: trials, SEARCH: yaml_of(self.entries)}

    def _rules(self, rows: Sequence[str]) -> dict[str, Value]:
        """Return how is searched, of these rows: others may be added to a search."""
        names = ("experiment", "trials", "added", "rounds", "seeds", "stream", "spaces")
        found = {name: self.entries.get(name) for name in (*names, "configuration")}
        parts = found.pop("configuration")
        return {
            **found,
            **_mapping(parts),
            "spaces": _only(found["spaces"], rows),
            "methods": _only(_part(self, "configuration", "methods"), rows),
            "searched": found["stream"],
        }


def read_record(folder: Path) -> SearchRecord | None:
    """Return the record in `folder`; None where there is none that can be gone on from.

    Earlier versions rounded scores: their records are shown, and are no place to go on from.
    """
    search, trials = folder / SEARCH, folder / TRIALS
    if not search.is_file() or not trials.is_file():
        return None
    found = read_yaml(search)
    if "environments" not in found:
        return None
    with reading(search):
        environments = [Environment(dict(each)) for each in found["environments"]]
        seeds = [int(seed) for seed in found["seeds"]]
    with reading(trials):
        try:
            lines = list(csv.DictReader(io.StringIO(text_in(trials), newline=""), strict=True))
        except csv.Error as error:
            raise ValueError(error) from error
        known: dict[tuple[str, int], RecordedTrial] = {}
        for line in lines:
            trial = _trial(line, seeds, environments)
            if (trial.row, trial.number) in known:
                raise ValueError(f"row {trial.row}, trial {trial.number} is there twice")
            known[trial.row, trial.number] = trial
    return SearchRecord(folder, found, known, environments)


def write_trials(
    folder: Path,
    trials: Sequence[RecordedTrial],
    seeds: Sequence[int],
    environments: Sequence[Environment],
) -> None:
    """Write trials.csv: all trials that have a run, in this order.

    Args:
        folder: of the search.
        trials: of all rows.
        seeds: of the search.
        environments: of all runs, as search.yaml lists them.
    """
    write(folder / TRIALS, _lines(trials, seeds, environments), within=folder)


def _lines(
    trials: Sequence[RecordedTrial], seeds: Sequence[int], environments: Sequence[Environment]
) -> bytes:
    options = list(dict.fromkeys(option for trial in trials for option in trial.values))
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(
        [
            *("row", "trial", "source", "seeds", *options, "ACC"),
            *(f"ACC {seed}" for seed in seeds),
            *("seconds", *(f"seconds {seed}" for seed in seeds)),
            *("environments", "state", "why"),
        ]
    )
    place = {_key(each): number for number, each in enumerate(environments)}
    for trial in trials:
        runs = {seed: trial.runs[seed] for seed in seeds if seed in trial.runs}
        why = next((run.why for run in runs.values() if run.accuracy is None), "")
        diverged = any(run.accuracy is None for run in runs.values())
        lines.writerow(
            [
                *(trial.row, trial.number, trial.source, " ".join(map(str, runs))),
                *(trial.values.get(option, "") for option in options),
                trial.mean,
                *(runs[seed].accuracy if seed in runs else None for seed in seeds),
                sum(run.seconds for run in runs.values()),
                *(runs[seed].seconds if seed in runs else None for seed in seeds),
                " ".join(str(place[_key(run.environment)]) for run in runs.values()),
                *("diverged" if diverged else "done", why),
            ]
        )
    return text.getvalue().encode()


def cost_of(runs: Collection[TrialRun]) -> dict[str, Value]:
    """Return how many runs there were, and the seconds they took together.

    Device time is that of training, divided by how many runs shared the device.
    """
    return {
        "runs": len(runs),
        "seconds": round(sum(run.seconds for run in runs), 3),
        "device_seconds": round(sum(run.device_seconds for run in runs), 3),
    }


def environments_of(
    runs: Iterable[TrialRun], known: Iterable[Environment] = ()
) -> list[Environment]:
    """Return environments, each once: the known ones, then others of runs as they are met.

    Lines of trials.csv name them by their place. So nothing is put before others: each of the two
    files may be older than the other, where a search was killed.
    """
    met = [*known, *(run.environment for run in runs)]
    return list({_key(each): each for each in met}.values())


def value_text(value: Value) -> str:
    """Return an option's value as trials.csv has it.

    Examples:
        >>> value_text(0.1), value_text(None), value_text([8, 8])
        ('0.1', '', '[8, 8]')
    """
    return "" if value is None else str(value)


def _trial(
    line: Mapping[str, str], seeds: Sequence[int], environments: Sequence[Environment]
) -> RecordedTrial:
    fixed = {"row", "trial", "source", "seeds", "ACC", "seconds", "environments", "state", "why"}
    fixed |= {f"{name} {seed}" for name in ("ACC", "seconds") for seed in seeds}
    if None in line or None in line.values():
        raise ValueError("a line that is shorter or longer than the first")
    had = [int(seed) for seed in line["seeds"].split()]
    places = [int(place) for place in line["environments"].split()]
    runs: dict[int, TrialRun] = {}
    for seed, place in zip(had, places, strict=True):
        score = line[f"ACC {seed}"]
        run = TrialRun(
            accuracy=float(score) if score else None,
            seconds=float(line[f"seconds {seed}"]),
            environment=environments[place],
            why="" if score else line["why"],
        )
        percent = run.accuracy is None or 0 <= run.accuracy <= 100.001
        if seed in runs or place < 0 or not percent or not 0 <= run.seconds < LARGEST:
            raise ValueError(f"row {line['row']}, trial {line['trial']}: no such run, seed {seed}")
        runs[seed] = run
    return RecordedTrial(
        row=line["row"],
        number=int(line["trial"]),
        source=line["source"],
        values={name: text for name, text in line.items() if name not in fixed},
        mean=float(line["ACC"]),
        runs=runs,
    )


def _key(environment: Environment) -> str:
    return json.dumps(environment.as_mapping(), sort_keys=True)


def _only(mapping: Value, names: Sequence[str]) -> Value:
    return {name: _mapping(mapping).get(name) for name in names}


def _mapping(value: Value) -> Options:
    return value if isinstance(value, dict) else {}


def _part(record: SearchRecord, name: str, part: str) -> Value:
    return _mapping(record.entries.get(name)).get(part)


def _joined(first: Value, second: Value) -> dict[str, Value]:
    return {**_mapping(first), **_mapping(second)}
