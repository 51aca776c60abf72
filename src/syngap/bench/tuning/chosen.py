"""What a search has found: the best values of each row, and the experiment with them put in."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from rich.table import Table

from syngap.bench.store.environment import environment, resolve_device
from syngap.bench.store.records import write_yaml
from syngap.bench.tuning.study import Tuning
from syngap.bench.tuning.trials import Outcome

__all__ = ["best_outcomes", "notes", "table", "write_chosen"]


def best_outcomes(tuning: Tuning) -> dict[str, Outcome]:
    """Return the best trial, the first of equals, of every row that has had all of its trials."""
    best = {}
    for row, outcomes in tuning.outcomes.items():
        if len(outcomes) == tuning.search.trials and any(not outcome.why for outcome in outcomes):
            best[row] = max(outcomes, key=lambda outcome: outcome.accuracy)
    return best


def write_chosen(tuning: Tuning) -> Path:
    """Write what was found into search.yaml, and tuned.yaml: the experiment with it."""
    found, out = best_outcomes(tuning), tuning.plan.out
    summary = {
        row: {
            "values": best.trial.values,
            "ACC": round(best.accuracy, 4),
            "trial": best.trial.number,
            "trials": len(tuning.outcomes[row]),
            "diverged": sum(bool(outcome.why) for outcome in tuning.outcomes[row]),
        }
        for row, best in found.items()
    }
    device = resolve_device(tuning.experiment.training.device)
    versions = {**environment(device).as_mapping(), "optuna": version("optuna")}
    search = {**tuning.as_mapping(), "chosen": summary, "environment": versions}
    write_yaml(out / "search.yaml", search, within=out)
    methods = {
        row: method.with_options(found[row].trial.values) if row in found else method
        for row, method in tuning.experiment.methods.items()
    }
    tuned = replace(tuning.experiment, methods=methods)
    write_yaml(out / "tuned.yaml", tuned.as_mapping(), within=out)
    return out / "tuned.yaml"


def table(tuning: Tuning) -> Table:
    """Return the rows with what was chosen for them."""
    shown = Table("row", "chosen", header_style="bold")
    shown.add_column("ACC on validation", justify="right")
    shown.add_column("trials", justify="right")
    found = best_outcomes(tuning)
    for row, outcomes in tuning.outcomes.items():
        if row in found:
            values = ", ".join(f"{key} {value}" for key, value in found[row].trial.values.items())
            shown.add_row(row, values, f"{found[row].accuracy:.2f}", str(len(outcomes)))
        else:
            shown.add_row(row, "nothing yet", "–", f"{len(outcomes)} of {tuning.search.trials}")
    return shown


def notes(tuning: Tuning) -> list[str]:
    """Return what a reader of the table should know besides."""
    found, said = best_outcomes(tuning), []
    for row, outcomes in tuning.outcomes.items():
        broken = sum(bool(outcome.why) for outcome in outcomes)
        if broken:
            said.append(f"{row}: {broken} of {len(outcomes)} trials diverged and count as 0")
        for option, value in found[row].trial.values.items() if row in found else ():
            if edge := tuning.search.spaces[row][option].edge(value):
                said.append(f"{row}: {option} {value} is at the {edge} edge of what was tried")
    said += tuning.stopped.values()
    if left := [row for row in tuning.experiment.methods if row not in found]:
        said.append(f"not chosen, and as they were in tuned.yaml: {', '.join(left)}")
    return said
