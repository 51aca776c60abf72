"""From an experiment and a folder to the runs that are still to be done."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from syngap.errors import UserError
from syngap.experiments.config import Experiment
from syngap.experiments.environment import chosen_device
from syngap.experiments.files import write_yaml
from syngap.experiments.folder import read_run
from syngap.experiments.run import Job, beginning, stream_of
from syngap.options import shown

__all__ = ["Plan", "make_plan"]

IfThere: TypeAlias = Literal["refuse", "resume", "replace"]


@dataclass(frozen=True)
class Plan:
    """What is to be done in `out`, what is done already, and how many steps a row's runs have."""

    experiment: Experiment
    out: Path
    jobs: list[Job]
    done: list[Job]
    steps: dict[str, int]

    def begin(self) -> None:
        """Make the folder; everything was checked before."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_yaml(self.out / "experiment.yaml", self.experiment.as_mapping())


def make_plan(
    experiment: Experiment, out: Path, *, data: Path | None = None, if_there: IfThere = "refuse"
) -> Plan:
    """Return the plan, having checked all that can be checked before the first step.

    Nothing is written unless `if_there` is "replace", which removes an earlier run of the same
    experiment.

    Args:
        experiment: what to run.
        out: where.
        data: where data sets are.
        if_there: what to do with earlier runs in `out`: refuse to begin, go on with them, or
            remove them first.
    """
    jobs = [Job(out / f"{run['row']}-{run['seed']}", run, data) for run in experiment.runs()]
    earlier = _earlier(experiment, out, if_there)
    _check_writable(out)
    steps = _check_buildable(jobs)
    if earlier and if_there == "replace":
        for config in list(out.glob("*/config.yaml")):
            shutil.rmtree(config.parent)
        earlier = None
    done = []
    for job in jobs:
        if (job.folder / "config.yaml").is_file():
            _check_same(job)
            if read_run(job.folder).done:
                done.append(job)
    merged = _merged(experiment, earlier) if earlier else experiment
    return Plan(merged, out, [job for job in jobs if job not in done], done, steps)


def _earlier(experiment: Experiment, out: Path, if_there: IfThere) -> dict[str, Any] | None:
    """Return what experiment.yaml in `out` says, None where nothing is there yet."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is not a folder")
    try:
        inside = sorted(path.name for path in out.iterdir()) if out.exists() else []
    except OSError as error:
        raise UserError(f"{out}: cannot be read ({error.strerror})") from error
    if not inside:
        return None
    if "experiment.yaml" not in inside:
        raise UserError(f"{out}: holds other things ({inside[0]}) and no runs; give another --out")
    earlier = yaml.safe_load((out / "experiment.yaml").read_text())
    if not isinstance(earlier, dict) or earlier.get("name") != experiment.name:
        other = shown(earlier.get("name") if isinstance(earlier, dict) else None)
        raise UserError(
            f'{out}: holds runs of another experiment, {other}, not "{experiment.name}"; '
            "give another --out"
        )
    if if_there == "refuse":
        raise UserError(
            f"{out}: holds runs already; --resume goes on with them, --fresh removes them, "
            "or give another --out"
        )
    return earlier


def _check_writable(out: Path) -> None:
    there = out
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{out}: no permission to write in {there}")


def _check_buildable(jobs: list[Job]) -> dict[str, int]:
    """Load the data and make each method once, so that a mistake shows before the first run."""
    steps: dict[str, int] = {}
    stream = stream_of(jobs[0].config, jobs[0].data)
    device = chosen_device(jobs[0].config["training"]["device"])
    for job in jobs:
        row = job.config["row"]
        if row not in steps:
            method = beginning(job.config, stream, device)()
            steps[row] = len(stream.presented(method.sees))
    return steps


def _check_same(job: Job) -> None:
    """Refuse to go on with a run that was begun with other options."""
    path = job.folder / "config.yaml"
    before = yaml.safe_load(path.read_text())
    here = json.loads(json.dumps(job.config))  # as it would be read back
    if before != here:
        raise UserError(f"{path}: {_difference(before, here)}; give another --out, or --fresh")


def _difference(before: Any, now: Any, path: str = "") -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*now, *before]:
            if before.get(key) != now.get(key):
                inner = f"{path}.{key}" if path else str(key)
                return _difference(before.get(key), now.get(key), inner)
    return f"{path or 'the configuration'} was {shown(before)} there and is {shown(now)} now"


def _merged(experiment: Experiment, earlier: dict[str, Any]) -> Experiment:
    """Return the experiment with the rows and seeds that were asked for before as well."""
    before = Experiment.from_mapping(earlier)
    rows = {**before.methods, **experiment.methods}
    return Experiment(
        experiment.name,
        experiment.stream,
        experiment.model,
        experiment.training,
        rows,
        sorted({*before.seeds, *experiment.seeds}),
    )
