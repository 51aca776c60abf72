"""What a search has found: its trials, what they cost, the best of each row, and the experiment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from syngap.bench.store.records import write_yaml
from syngap.bench.store.search_record import (
    RecordedTrial,
    TrialRun,
    cost_of,
    value_text,
)
from syngap.messages import count_of, duration

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from syngap.bench.config.component import Value
    from syngap.bench.tuning.halving import Trial
    from syngap.bench.tuning.study import RowSearch, Tuning

__all__ = ["best_trials", "notes", "recorded_parts", "recorded_trials", "table", "write_chosen"]


def best_trials(tuning: Tuning) -> dict[str, Trial]:
    """Return the chosen trial of every row whose search has ended."""
    return {row: found.best for row, found in tuning.rows.items() if found.best}


def recorded_trials(tuning: Tuning) -> list[RecordedTrial]:
    """Return all trials that have a run that ended, row by row."""
    return [
        RecordedTrial(
            row=row,
            number=trial.number,
            source=trial.source,
            values={option: value_text(value) for option, value in trial.values.items()},
            mean=found.score(trial),
            runs={seed: found.runs[trial.number, seed] for seed in seeds},
        )
        for row, found in tuning.rows.items()
        for trial in found.standing.trials
        if (seeds := found.seeds_of(trial))
    ]


def recorded_parts(tuning: Tuning) -> dict[str, Value]:
    """Return what search.yaml says of the runs: their cost, configuration and environments."""
    first = next(iter(tuning.rows.values())).config
    return {
        "cost": {
            "rows": {row: cost_of(found.runs.values()) for row, found in tuning.rows.items()},
            "all": cost_of([run for found in tuning.rows.values() for run in found.runs.values()]),
        },
        "configuration": {
            "stream": first.stream.as_mapping(),
            "model": first.model.as_mapping(),
            "training": first.training.as_mapping(),
            "methods": {
                row: found.config.method.as_mapping() for row, found in tuning.rows.items()
            },
        },
        "environments": [each.as_mapping() for each in tuning.environments()],
    }


def write_chosen(tuning: Tuning) -> Path:
    """Write what was found into search.yaml, and tuned.yaml: the experiment with it."""
    found, out = best_trials(tuning), tuning.plan.out
    tuning.write({"chosen": {row: _summary(tuning.rows[row], best) for row, best in found.items()}})
    methods = {
        row: method.with_options(found[row].values) if row in found else method
        for row, method in tuning.experiment.methods.items()
    }
    tuned = replace(tuning.experiment, methods=methods)
    write_yaml(out / "tuned.yaml", tuned.as_mapping(), within=out)
    return out / "tuned.yaml"


def table(tuning: Tuning) -> Table:
    """Return the rows with what was chosen for them, what that took, and what `--trials` counts."""
    shown = Table("row", header_style="bold", caption_justify="left")
    if added := tuning.search.added:
        more = " and ".join(map(str, added))
        shown.caption = (
            f"Trials of each row: {tuning.search.trials} in the first step (--trials), then {more} "
            "more around its best."
        )
    shown.add_column("chosen", overflow="fold")
    for heading in ("validation ACC", "trials", "runs", "training", "device time"):
        shown.add_column(heading, justify="right")
    chosen = best_trials(tuning)
    for row, found in tuning.rows.items():
        best = chosen.get(row)
        values = best.values if best else {}
        runs, every = len(found.runs), tuning.search.runs
        shown.add_row(
            row,
            ", ".join(f"{key} {value}" for key, value in values.items()) or "nothing yet",
            f"{found.score(best):.2f}" if best else "–",
            str(len(found.standing.trials)),
            str(runs) if runs == every else f"{runs} of {every}",
            *_times(found.runs.values()),
        )
    every_run = [run for found in tuning.rows.values() for run in found.runs.values()]
    if tuning.rows.keys() - {row}:
        shown.add_section()
        shown.add_row("all", "", "", "", str(len(every_run)), *_times(every_run))
    return shown


def notes(tuning: Tuning) -> list[str]:
    """Return what a reader of the table should know besides."""
    chosen, said = best_trials(tuning), []
    for row, found in tuning.rows.items():
        said += [f"{row}: {each.text}" for each in found.standing.widened]
        if found.diverged:
            trials = count_of(len(found.standing.trials), "trial")
            said.append(f"{row}: {len(found.diverged)} of {trials} diverged, with a score of 0")
        if row in chosen:
            said += [
                f"{row}: {option} {chosen[row].values[option]} is at the {edge} edge of what was "
                "tried"
                for option, edge in _edges(found, chosen[row]).items()
            ]
    said += [found.stopped for found in tuning.rows.values() if found.stopped]
    said += _best_row(tuning, chosen)
    if left := [row for row in tuning.experiment.methods if row not in chosen]:
        said.append(f"not chosen, and as they were in tuned.yaml: {', '.join(left)}")
    return said


def _best_row(tuning: Tuning, chosen: Mapping[str, Trial]) -> list[str]:
    """Return which row is best on validation samples, joint training apart, and how clearly."""
    rivals = [row for row in chosen if tuning.experiment.methods[row].name != "joint"]
    scores = {row: tuning.rows[row].score(chosen[row]) for row in rivals}
    best, *others = sorted(rivals, key=lambda row: -scores[row]) or [""]
    if not others:
        return []
    ours, theirs = (_by_seed(tuning.rows[row], chosen[row]) for row in (best, others[0]))
    higher = sum(theirs[seed] > ours[seed] for seed in ours if seed in theirs)
    said = (
        f"best on validation samples: {best}, {scores[best]:.2f}; {others[0]} is next, "
        f"{scores[others[0]]:.2f}, and higher with {higher} of {count_of(len(ours), 'seed')}"
    )
    diverged = len(tuning.rows[best].diverged)
    return [f"{said}; {diverged} of the trials of {best} diverged" if diverged else said]


def _by_seed(found: RowSearch, trial: Trial) -> dict[int, float]:
    return {seed: found.runs[trial.number, seed].accuracy or 0.0 for seed in found.seeds_of(trial)}


def _summary(found: RowSearch, best: Trial) -> dict[str, Value]:
    return {
        "values": {**best.values},
        "ACC": found.score(best),
        "trial": best.number,
        "source": best.source,
        "seeds": [*found.seeds_of(best)],
        "trials": len(found.standing.trials),
        **cost_of(found.runs.values()),
        "diverged": len(found.diverged),
        "edges": {**_edges(found, best)},
    }


def _edges(found: RowSearch, best: Trial) -> dict[str, str]:
    """Return the options whose chosen value is at an edge of what was tried, widened or not."""
    edges = {
        option: found.standing.spaces[option].edge(best.values[option]) for option in best.values
    }
    return {option: edge for option, edge in edges.items() if edge}


def _times(runs: Collection[TrialRun]) -> tuple[str, str]:
    seconds = sum(run.seconds for run in runs), sum(run.device_seconds for run in runs)
    return duration(seconds[0]), duration(seconds[1])
