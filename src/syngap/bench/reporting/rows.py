"""The rows of a table: one method each, with its measures over seeds and its label."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syngap.bench.errors import UserError, printable
from syngap.bench.metrics import reference_of, summarise
from syngap.bench.reporting.labels import labels
from syngap.bench.reporting.statistics import Spread, spread_over
from syngap.bench.store.folder_reader import Planned, Run
from syngap.bench.store.records import nobody_in
from syngap.messages import count_of

__all__ = [
    "MEASURES",
    "Measure",
    "Row",
    "UnfinishedRun",
    "concurrency_note",
    "concurrent_runs",
    "finished_runs",
    "omissions",
    "rows",
]


@dataclass(frozen=True)
class Measure:
    """What is measured of a run.

    Args:
        name: its short name, as `syngap.bench.metrics.summarise` has it.
        better: "up" where more is better, "down" where less is, None where it depends.
        definition: in one line.
        floor: a smaller value counts as this one where the best is marked, and is not best itself.
    """

    name: str
    better: str | None
    definition: str
    floor: float = -math.inf

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
            floor=0.0,
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


@dataclass(frozen=True)
class UnfinishedRun:
    """A run that is in no mean, and the reason; one that diverged is a result too."""

    seed: int
    reason: str
    diverged: bool = False


@dataclass(frozen=True)
class Row:
    """The measures of one method over its finished seeds.

    Args:
        name: the row's name in the experiment.
        label: the name that a reader sees.
        experiment: the experiment's name.
        options: of the method, `name` among them.
        seeds: those that finished.
        values: measure → seed → value, for the seeds where it is defined.
        unfinished_runs: the other runs.
        concurrent: how many runs trained at the same time, one number for each setting.
    """

    name: str
    label: str
    experiment: str
    options: Mapping[str, Any]
    seeds: tuple[int, ...]
    values: dict[str, dict[int, float]]
    unfinished_runs: tuple[UnfinishedRun, ...] = ()
    concurrent: frozenset[int] = frozenset()

    @property
    def method(self) -> str:
        """The method's own name."""
        return str(self.options["name"])

    @property
    def joint(self) -> bool:
        """Whether it is joint training on all tasks: an upper bound, not a rival."""
        return self.method == "joint"

    @property
    def has_memory(self) -> bool:
        """Whether it stores samples of earlier tasks."""
        return bool(self.options.get("buffer"))

    @property
    def divergences(self) -> int:
        """How many seeds ended because their numbers were no longer finite."""
        return sum(run.diverged for run in self.unfinished_runs)

    def seed_note(self, seeds: int | None = None) -> str:
        """Return "2 of 5 seeds, 3 diverged" where a number is not over all of them, else "".

        Args:
            seeds: how many the number is over; those that finished by default.
        """
        count = len(self.seeds) if seeds is None else seeds
        planned = len(self.seeds) + len(self.unfinished_runs)
        if count == planned:
            return ""
        diverged = f", {self.divergences} diverged" if self.divergences else ""
        return f"{count} of {count_of(planned, 'seed')}{diverged}"

    def spread(self, measure: str) -> Spread | None:
        """Return mean and sd of `measure`, None where no seed has it."""
        return spread_over(list(self.values.get(measure, {}).values()))


def rows(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each method in the order of the experiment, joint training last.

    A row's numbers are over its finished seeds. INT is relative to the joint run of the same seed,
    of the first joint row where there are several. A run that experiment.yaml names, or a seed that
    another row has, counts as unfinished where it has not begun.
    """
    planned = runs[0].planned if runs else Planned()
    by_row: dict[str, list[Run]] = {row: [] for row in planned.methods}
    for run in runs:
        by_row.setdefault(run.row, []).append(run)
    seeds = sorted({*planned.seeds, *(run.seed for run in runs)})
    reference = next((run.row for run in runs if _method(run) == "joint"), None)
    references = {run.seed: _reference(run) for run in runs if run.done and run.row == reference}
    options = {
        name: (own[0].config.method if own else planned.methods[name]).as_mapping()
        for name, own in by_row.items()
    }
    experiment = (runs[0].config.experiment if runs else None) or ""
    found = [
        Row(
            name=name,
            label=label,
            experiment=experiment,
            options=options[name],
            seeds=tuple(run.seed for run in by_row[name] if run.done),
            values=_values(by_row[name], references),
            unfinished_runs=_unfinished_runs(by_row[name], seeds),
            concurrent=frozenset(filter(None, map(concurrent_runs, by_row[name]))),
        )
        for name, label in labels(options).items()
    ]
    return sorted(found, key=lambda row: row.joint)


def finished_runs(runs: Sequence[Run], row: Row) -> list[Run]:
    """Return the finished runs of a row."""
    return [run for run in runs if run.row == row.name and run.done]


def omissions(rows: Sequence[Row]) -> list[str]:
    """Return a line for everything that the numbers of `rows` leave out."""
    lines = []
    for row in rows:
        seeds: dict[str, list[str]] = {}
        for run in row.unfinished_runs:
            seeds.setdefault(run.reason, []).append(str(run.seed))
        for reason, some in seeds.items():
            lines.append(f"{row.label}, seed{'s' if some[1:] else ''} {', '.join(some)}: {reason}")
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


def concurrency_note(rows: Sequence[Row]) -> str:
    """Return a sentence on the seconds of runs that shared a machine, "" where none did."""
    counts = sorted({count for row in rows for count in row.concurrent})
    if not counts or counts == [1]:
        return ""
    note = f"Seconds are with {' or '.join(map(str, counts))} runs at a time on one machine"
    return f"{note}, so that not all rows compare." if len(counts) > 1 else f"{note}."


def concurrent_runs(run: Run) -> int | None:
    """Return how many runs trained at the same time, None where it is not recorded."""
    if run.environment.at_a_time is not None:
        return run.environment.at_a_time
    found = re.search(r"--workers[ =](\d{1,9})\b", run.environment.command or "")
    return int(found[1]) if found else None


def _values(
    runs: Sequence[Run], references: Mapping[int, Sequence[float]]
) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, float]] = {measure: {} for measure in MEASURES}
    for run in runs:
        if run.done:
            for measure, value in _measures(run, references.get(run.seed)).items():
                if value is not None:
                    values[measure][run.seed] = value
    return values


def _measures(run: Run, reference: Sequence[float] | None) -> dict[str, float | None]:
    try:
        found = summarise(run.accuracy, run.record, reference, run.initial)
    except ValueError as error:
        raise UserError(f"{run.path}: not a finished run's folder: {error}") from error
    if _method(run) == "joint":  # the other measures are about the order of tasks
        found = {"ACC": found["ACC"]}
    seconds = run.status.seconds
    return {**found, "seconds": None if seconds is None else float(seconds)}


def _reference(run: Run) -> tuple[float, ...]:
    try:
        return reference_of(run.accuracy)
    except ValueError as error:
        raise UserError(f"{run.path}: not a finished run's folder: {error}") from error


def _unfinished_runs(runs: Sequence[Run], seeds: Sequence[int]) -> tuple[UnfinishedRun, ...]:
    started = {run.seed for run in runs}
    return (
        *(
            UnfinishedRun(run.seed, _reason(run), _has_diverged(run))
            for run in runs
            if not run.done
        ),
        *(UnfinishedRun(seed, "not begun") for seed in seeds if seed not in started),
    )


def _method(run: Run) -> str:
    return run.config.method.name


def _has_diverged(run: Run) -> bool:
    return run.status.error.startswith(FloatingPointError.__name__)


def _reason(run: Run) -> str:
    state = run.status.state or "not begun"
    if state == "running" and nobody_in(run.path):
        state = "stopped"
    step, steps = run.status.step, run.status.steps
    progress = f" at step {step} of {steps}" if step is not None and steps else ""
    error = run.status.error.strip().splitlines()
    return printable(state + progress + (f": {error[-1]}" if error else ""))
