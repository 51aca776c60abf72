"""Runs gathered into the rows of a table: a method each, with its spread over seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from syngap.errors import UserError, printable
from syngap.experiments.files import nobody_in
from syngap.experiments.folder import Planned, Run
from syngap.metrics import mean_and_spread, reference_of, summarise
from syngap.report.labels import labels

__all__ = [
    "MEASURES",
    "Measure",
    "Row",
    "Spread",
    "Unfinished",
    "at_a_time",
    "crowded",
    "missing",
    "rows",
]


@dataclass(frozen=True)
class Measure:
    """A column of the table.

    Args:
        name: its short name, as `syngap.metrics.summarise` has it.
        better: "up" where more is better, "down" where less is, None where it depends.
        says: its definition in one line.
    """

    name: str
    better: str | None
    says: str

    @property
    def heading(self) -> str:
        """The name with an arrow towards the better end.

        Examples:
            >>> Measure("ACC", "up", "").heading
            'ACC ↑'
        """
        return self.name + {"up": " ↑", "down": " ↓", None: ""}[self.better]


MEASURES = {
    measure.name: measure
    for measure in (
        Measure("ACC", "up", "accuracy after the last task, mean over all tasks, in percent"),
        Measure(
            "FM",
            "down",
            "forgetting: how far tasks are, after the last one, below the best they had reached "
            "before it; mean over all tasks but the last, in points",
        ),
        Measure(
            "INT",
            "down",
            "intransigence: how far tasks, when just learned, stay below joint training with the "
            "same seed; mean over tasks, in points",
        ),
        Measure("seconds", "down", "wall-clock time of training, in seconds"),
        Measure(
            "anytime",
            "up",
            "accuracy on the tasks seen so far, averaged over the steps of the stream, in percent",
        ),
        Measure(
            "worst",
            "up",
            "the lowest accuracy of a task at any evaluation after its end, mean over all tasks "
            "but the last, in percent",
        ),
        Measure(
            "recency",
            None,
            "predictions that fall on the newest task's classes when a task ends, in percent; "
            "100 means nothing else is answered any more",
        ),
        Measure(
            "BWT",
            "up",
            "backward transfer: accuracy after the last task less accuracy when just learned; "
            "mean over all tasks but the last, in points",
        ),
        Measure(
            "FWT",
            "up",
            "forward transfer: accuracy on a task just before it is learned less that of the "
            "untrained network; mean over all tasks but the first, in points",
        ),
    )
}


class Spread(NamedTuple):
    """Mean and standard deviation over `seeds` of them; the latter is None for a single seed."""

    mean: float
    sd: float | None
    seeds: int = 1


@dataclass(frozen=True)
class Unfinished:
    """A run whose numbers are in no mean, and why; one that diverged is a result too."""

    seed: int
    why: str
    diverged: bool = False


@dataclass(frozen=True)
class Row:
    """What the finished seeds of one method gave.

    Args:
        name: the row's name in the experiment.
        label: the name for people.
        experiment: the experiment's name.
        options: of the method, `name` among them.
        seeds: those that finished.
        values: measure → seed → value, for the seeds where it is defined.
        unfinished: the others.
        at_a_time: how many runs went on at a time, as the commands say.
    """

    name: str
    label: str
    experiment: str
    options: Mapping[str, Any]
    seeds: tuple[int, ...]
    values: dict[str, dict[int, float]]
    unfinished: tuple[Unfinished, ...] = ()
    at_a_time: frozenset[int] = frozenset()

    @property
    def method(self) -> str:
        """The method's own name."""
        return str(self.options["name"])

    @property
    def joint(self) -> bool:
        """Whether it saw all tasks at once: an upper bound, not a rival."""
        return self.method == "joint"

    @property
    def diverged(self) -> int:
        """How many seeds ended because their numbers were no longer finite."""
        return sum(run.diverged for run in self.unfinished)

    def few(self, seeds: int | None = None) -> str:
        """Return "2 of 5 seeds, 3 diverged" where a number is not over all of them, else "".

        Args:
            seeds: that the number is over; those that finished unless said.
        """
        count = len(self.seeds) if seeds is None else seeds
        planned = len(self.seeds) + len(self.unfinished)
        if count == planned:
            return ""
        return f"{count} of {planned} seeds" + (
            f", {self.diverged} diverged" if self.diverged else ""
        )

    def spread(self, measure: str) -> Spread | None:
        """Return mean and sd of `measure`, None where no seed has it."""
        values = list(self.values.get(measure, {}).values())
        return Spread(*mean_and_spread(values), len(values)) if values else None


def rows(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each method in the order of the experiment, joint ones last.

    A row's numbers are over its finished seeds. INT is measured against the joint run of the same
    seed, of the first joint row where there are several. A run that the experiment asks for, or a
    seed that another row has, counts as unfinished where it has not begun.
    """
    planned = runs[0].planned if runs else Planned()
    named: dict[str, list[Run]] = {row: [] for row in planned.methods}
    for run in runs:
        named.setdefault(run.row, []).append(run)
    seeds = sorted({*planned.seeds, *(run.seed for run in runs)})
    reference = next((run.row for run in runs if _method(run) == "joint"), None)
    references = {run.seed: _reference(run) for run in runs if run.done and run.row == reference}
    options = {
        name: of[0].config["method"] if of else planned.methods[name] for name, of in named.items()
    }
    experiment = str(runs[0].config.get("experiment", "")) if runs else ""
    found = [
        Row(
            name=name,
            label=label,
            experiment=experiment,
            options=options[name],
            seeds=tuple(run.seed for run in named[name] if run.done),
            values=_values(named[name], references),
            unfinished=_unfinished(named[name], seeds),
            at_a_time=frozenset(filter(None, map(at_a_time, named[name]))),
        )
        for name, label in labels(options).items()
    ]
    return sorted(found, key=lambda row: row.joint)


def missing(rows: Sequence[Row]) -> list[str]:
    """Return a line for everything that the numbers of `rows` leave out."""
    lines = []
    for row in rows:
        seeds: dict[str, list[str]] = {}
        for run in row.unfinished:
            seeds.setdefault(run.why, []).append(str(run.seed))
        for why, of in seeds.items():
            lines.append(f"{row.label}, seed{'s' if of[1:] else ''} {', '.join(of)}: {why}")
    without: dict[int, list[str]] = {}
    if any(row.joint for row in rows):
        for row in rows:
            for seed in row.seeds:
                if not row.joint and seed not in row.values["INT"]:
                    without.setdefault(seed, []).append(row.label)
    return lines + [
        f"INT, seed {seed}, for want of its joint run: {', '.join(names)}"
        for seed, names in sorted(without.items())
    ]


def crowded(rows: Sequence[Row]) -> str:
    """Return what is to be said of seconds where runs shared a machine, "" where none did."""
    counts = sorted({count for row in rows for count in row.at_a_time})
    if not counts or counts == [1]:
        return ""
    said = f"Seconds are with {' or '.join(map(str, counts))} runs at a time on one machine"
    return f"{said}, so that not all rows compare." if len(counts) > 1 else f"{said}."


def at_a_time(run: Run) -> int | None:
    """Return how many runs there were at a time, None where it is not recorded."""
    if isinstance(recorded := run.environment.get("at_a_time"), int):
        return recorded
    found = re.search(r"--workers[ =](\d{1,9})\b", str(run.environment.get("command", "")))
    return int(found[1]) if found else None


def _values(
    runs: Sequence[Run], references: dict[int, tuple[float, ...]]
) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, float]] = {measure: {} for measure in MEASURES}
    for run in runs:
        if run.done:
            for measure, value in _measured(run, references.get(run.seed)).items():
                if value is not None:
                    values[measure][run.seed] = value
    return values


def _unfinished(runs: Sequence[Run], seeds: Sequence[int]) -> tuple[Unfinished, ...]:
    begun = {run.seed for run in runs}
    return (
        *(Unfinished(run.seed, _why(run), _diverged(run)) for run in runs if not run.done),
        *(Unfinished(seed, "not begun") for seed in seeds if seed not in begun),
    )


def _measured(run: Run, reference: Sequence[float] | None) -> dict[str, float | None]:
    try:
        found = summarise(run.accuracy, run.record, reference, run.initial)
    except ValueError as error:
        raise UserError(f"{run.path}: not a finished run's folder: {error}") from error
    if _method(run) == "joint":  # the other measures are about the order of tasks
        found = {"ACC": found["ACC"]}
    seconds = run.status.get("seconds")
    return {**found, "seconds": None if seconds is None else float(seconds)}


def _reference(run: Run) -> tuple[float, ...]:
    try:
        return reference_of(run.accuracy)
    except ValueError as error:
        raise UserError(f"{run.path}: not a finished run's folder: {error}") from error


def _method(run: Run) -> str:
    return str(run.config["method"]["name"])


def _diverged(run: Run) -> bool:
    return str(run.status.get("error") or "").startswith(FloatingPointError.__name__)


def _why(run: Run) -> str:
    state = str(run.status.get("state", "not begun"))
    if state == "running" and nobody_in(run.path):
        state = "stopped"
    step, steps = run.status.get("step"), run.status.get("steps")
    at = f" at step {step} of {steps}" if step is not None and steps else ""
    error = str(run.status.get("error") or "").strip().splitlines()
    return printable(state + at + (f": {error[-1]}" if error else ""))
