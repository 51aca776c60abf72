"""What a search has found: its trials, the best of each row, and the experiment with these."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from syngap.bench.storage import write
from syngap.bench.store.environment import environment, resolve_device
from syngap.bench.store.records import write_yaml
from syngap.messages import count_of

if TYPE_CHECKING:
    from syngap.bench.tuning.halving import Trial
    from syngap.bench.tuning.study import RowSearch, Tuning

__all__ = ["best_trials", "notes", "table", "write_chosen", "write_trials"]


def best_trials(tuning: Tuning) -> dict[str, Trial]:
    """Return the chosen trial of every row whose search has ended."""
    return {row: found.best for row, found in tuning.rows.items() if found.best}


def write_trials(path: Path, tuning: Tuning) -> None:
    """Put all trials that were run into a table: a line each, columns for options and seeds."""
    options = list(dict.fromkeys(name for row in tuning.rows for name in tuning.search.spaces[row]))
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    scores = [f"ACC {seed}" for seed in tuning.search.seeds]
    lines.writerow(
        ["row", "trial", "source", "seeds", *options, "ACC", *scores, "seconds", "state", "why"]
    )
    for row, found in tuning.rows.items():
        for trial in found.standing.trials:
            if seeds := found.seeds_of(trial):
                by_seed = [found.scores.get((trial.number, s), "") for s in tuning.search.seeds]
                why = found.reasons.get(trial.number, "")
                lines.writerow(
                    [
                        *(row, trial.number, trial.source, " ".join(map(str, seeds))),
                        *(trial.values.get(option, "") for option in options),
                        round(found.score(trial), 4),
                        *(round(score, 4) if isinstance(score, float) else "" for score in by_seed),
                        round(found.seconds[trial.number], 3),
                        *("diverged" if why else "done", why),
                    ]
                )
    write(path, text.getvalue().encode(), within=path.parent)


def write_chosen(tuning: Tuning) -> Path:
    """Write what was found into search.yaml, and tuned.yaml: the experiment with it."""
    found, out = best_trials(tuning), tuning.plan.out
    summary = {row: _summary(tuning.rows[row], best) for row, best in found.items()}
    device = resolve_device(tuning.experiment.training.device)
    versions = environment(device).as_mapping()
    search = {**tuning.as_mapping(), "chosen": summary, "environment": versions}
    write_yaml(out / "search.yaml", search, within=out)
    methods = {
        row: method.with_options(found[row].values) if row in found else method
        for row, method in tuning.experiment.methods.items()
    }
    tuned = replace(tuning.experiment, methods=methods)
    write_yaml(out / "tuned.yaml", tuned.as_mapping(), within=out)
    return out / "tuned.yaml"


def table(tuning: Tuning) -> Table:
    """Return the rows with what was chosen for them, and what that took."""
    shown = Table("row", "chosen", header_style="bold")
    for heading in ("ACC on validation", "seeds", "trials", "runs", "training"):
        shown.add_column(heading, justify="right")
    chosen = best_trials(tuning)
    for row, found in tuning.rows.items():
        best = chosen.get(row)
        values = best.values if best else {}
        runs, every = len(found.scores), tuning.search.runs
        shown.add_row(
            row,
            ", ".join(f"{key} {value}" for key, value in values.items()) or "nothing yet",
            f"{found.score(best):.2f}" if best else "–",
            str(len(found.seeds_of(best))) if best else "–",
            str(len(found.standing.trials)),
            str(runs) if runs == every else f"{runs} of {every}",
            f"{sum(found.seconds.values()):.0f} s",
        )
    return shown


def notes(tuning: Tuning) -> list[str]:
    """Return what a reader of the table should know besides."""
    chosen, said = best_trials(tuning), []
    for row, found in tuning.rows.items():
        said += [f"{row}: {each.text}" for each in found.standing.widened]
        if found.reasons:
            trials = count_of(len(found.standing.trials), "trial")
            said.append(f"{row}: {len(found.reasons)} of {trials} diverged, with a score of 0")
        for option, value in chosen[row].values.items() if row in chosen else ():
            if edge := found.standing.spaces[option].edge(value):
                said.append(f"{row}: {option} {value} is at the {edge} edge of what was tried")
    said += [found.stopped for found in tuning.rows.values() if found.stopped]
    if left := [row for row in tuning.experiment.methods if row not in chosen]:
        said.append(f"not chosen, and as they were in tuned.yaml: {', '.join(left)}")
    return said


def _summary(found: RowSearch, best: Trial) -> dict[str, Any]:
    return {
        "values": best.values,
        "ACC": round(found.score(best), 4),
        "trial": best.number,
        "source": best.source,
        "seeds": found.seeds_of(best),
        "trials": len(found.standing.trials),
        "runs": len(found.scores),
        "seconds": round(sum(found.seconds.values()), 3),
        "diverged": len(found.reasons),
    }
