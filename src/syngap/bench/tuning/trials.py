"""A trial: some values of a row's options, a run with each seed, and what came of it."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from syngap.bench.config.component import Value
from syngap.bench.metrics import accuracy
from syngap.bench.runner.plan import is_done
from syngap.bench.runner.run import Job
from syngap.bench.storage import write
from syngap.bench.store.folder_reader import read_run, read_status
from syngap.bench.store.removal import remove_checkpoints

__all__ = ["Outcome", "Trial", "is_divergence", "write_trials"]


@dataclass(frozen=True)
class Trial:
    """Values to try, and the runs that do it."""

    row: str
    number: int
    values: dict[str, Value]
    jobs: list[Job]

    def to_do(self) -> list[Job]:
        """Return the runs that have not ended yet."""
        return [job for job in self.jobs if not _ended(job)]

    def outcome(self) -> Outcome:
        """Return what came of a trial whose runs have all ended; their weights are not kept."""
        for job in self.jobs:
            remove_checkpoints(job.folder, within=job.folder.parent)
        reasons = [read_status(job.folder).error for job in self.jobs]
        why = next(filter(None, reasons), "")
        runs = [read_run(job.folder) for job in self.jobs]
        return Outcome(
            trial=self,
            accuracy=0.0 if why else fmean(accuracy(run.accuracy) for run in runs),
            seconds=sum(run.status.seconds or 0.0 for run in runs),
            why=why,
        )


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Args:
        trial: the trial.
        accuracy: final ACC on the validation samples, the mean over seeds; 0 where a run diverged.
        seconds: of training, all runs together.
        why: the reason, where a run diverged.
    """

    trial: Trial
    accuracy: float
    seconds: float
    why: str = ""


def is_divergence(message: str) -> bool:
    """Return whether a run failed because of the values it tried, and not of something else."""
    return message.startswith(FloatingPointError.__name__)


def write_trials(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Put all trials into a table: a line each, a column for every option of any row."""
    options = list(dict.fromkeys(name for outcome in outcomes for name in outcome.trial.values))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["row", "trial", "seeds", *options, "ACC", "seconds", "state", "why"])
    for outcome in outcomes:
        trial = outcome.trial
        table.writerow(
            [
                trial.row,
                trial.number,
                " ".join(str(job.config.seed) for job in trial.jobs),
                *(trial.values.get(option, "") for option in options),
                round(outcome.accuracy, 4),
                round(outcome.seconds, 3),
                "diverged" if outcome.why else "done",
                outcome.why,
            ]
        )
    write(path, text.getvalue().encode(), within=path.parent)


def _ended(job: Job) -> bool:
    return is_done(job) or is_divergence(read_status(job.folder).error)
