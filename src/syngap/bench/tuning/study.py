"""The search for hyper-parameters in a folder: runs of trials, and what follows from their ends.

What a row tries depends on its name, method and spaces, the scores of its earlier trials and the
search's first seed, and on nothing else: not on other rows, the number of workers, or on whether
the search was killed and resumed. So nothing of a search is kept but the folders of its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from syngap.bench import methods, seeds
from syngap.bench.config.component import Component, Options
from syngap.bench.config.experiment import Experiment
from syngap.bench.config.search import Search
from syngap.bench.errors import UserError
from syngap.bench.methods import Learner
from syngap.bench.metrics import accuracy
from syngap.bench.options import checked, defaults, signature
from syngap.bench.runner.local import Event
from syngap.bench.runner.plan import IfThere, Plan, check_equal, is_done, jobs_of, make_plan
from syngap.bench.runner.run import Job
from syngap.bench.storage import remove
from syngap.bench.store.folder_reader import read_run, read_status, read_yaml
from syngap.bench.store.records import write_yaml
from syngap.bench.store.removal import remove_checkpoints
from syngap.bench.tuning.chosen import write_trials
from syngap.bench.tuning.halving import Source, Standing, Trial, Values, mean_score, standing

__all__ = ["RowSearch", "Tuning", "is_divergence", "trial_source"]

SAMPLER = "Latin hypercube and successive halving over seeds"


class RowSearch:
    """The search of one row: its runs, and what came of those that have ended.

    Args:
        row: its name.
        search: the rules, which all rows share.
        jobs: a run of the row as it stands with each seed of the search; where trials get the
            rest of their configuration from.
        out: the folder of the search.
    """

    def __init__(self, row: str, search: Search, jobs: Sequence[Job], out: Path) -> None:
        self.row, self.search, self._out = row, search, out
        self._jobs = {job.config.seed: job for job in jobs}
        self.scores: dict[tuple[int, int], float | None] = {}
        self.reasons: dict[int, str] = {}
        self.seconds: dict[int, float] = {}
        self.stopped = ""
        self._source = trial_source(row, search, jobs[0].config.method)
        self.standing: Standing = standing(self._source, search, {})
        self._under_way: set[str] = set()

    @property
    def best(self) -> Trial | None:
        """The trial that is chosen, None before the end, and where all have diverged."""
        if self.standing.to_do or self.score(self.standing.left[0]) == 0:
            return None
        return self.standing.left[0]

    @property
    def waits(self) -> bool:
        """Whether runs of this round have not ended, or cannot be gone on with."""
        return bool(self._under_way or self.stopped)

    @property
    def runs_left(self) -> int:
        """How many runs are to come."""
        return self.search.runs - len(self.scores)

    def seeds_of(self, trial: Trial) -> list[int]:
        """Return the seeds with which a trial has been run."""
        return [seed for seed in self.search.seeds if (trial.number, seed) in self.scores]

    def score(self, trial: Trial) -> float:
        """Return the mean ACC over the seeds that a trial has had; 0 where one diverged."""
        return mean_score(trial, self.seeds_of(trial), self.scores)

    def job(self, trial: Trial, seed: int) -> Job:
        """Return the run of a trial with a seed."""
        like = self._jobs[seed]
        config = replace(like.config, method=like.config.method.with_options(trial.values))
        folder = self._out / f"{self.row}-trial{trial.number}-{seed}"
        return replace(like, folder=folder, config=config)

    def advance(self) -> list[Job]:
        """Note the runs that have ended, and return those to do next."""
        while True:
            self.standing = standing(self._source, self.search, self.scores)
            jobs = {
                (trial.number, seed): self.job(trial, seed) for trial, seed in self.standing.to_do
            }
            ended = {key: job for key, job in jobs.items() if _has_ended(job)}
            if not ended:
                self._under_way = {job.name for job in jobs.values()}
                return list(jobs.values())
            for (number, seed), job in ended.items():
                self._note(number, seed, job)

    def after(self, ended: Event) -> list[Job]:
        """Return the runs to do after the end of one: none before all of its round have ended."""
        if ended.kind == "failed" and not is_divergence(ended.message):
            self.stopped = f"{ended.job.name} failed: {ended.message}"
        self._under_way.discard(ended.job.name)
        return [] if self.waits else self.advance()

    def _note(self, number: int, seed: int, job: Job) -> None:
        """Note what came of a run; its weights are not kept."""
        remove_checkpoints(job.folder, within=job.folder.parent)
        run = read_run(job.folder)
        if reason := run.status.error:
            self.reasons.setdefault(number, reason)
        self.scores[number, seed] = None if reason else accuracy(run.accuracy)
        self.seconds[number] = self.seconds.get(number, 0.0) + (run.status.seconds or 0.0)


class Tuning:
    """A search in a folder: which runs come first, and which after one that ended.

    Args:
        experiment: whose rows are searched; it has a `search`.
        rows: those to be searched now; None is every row that has a space.
        out: the folder.
        data: where data sets are.
        if_there: what to do with an earlier search in `out`.
        device: what the runs will have, where they are done on other machines.
    """

    def __init__(
        self,
        experiment: Experiment,
        rows: Sequence[str] | None,
        out: Path,
        *,
        data: Path | None = None,
        if_there: IfThere = "refuse",
        device: str | None = None,
    ) -> None:
        self.experiment, self.search = experiment, _search_of(experiment)
        chosen = experiment.select(rows or list(self.search.spaces), None)
        for row in chosen.methods:
            if row not in self.search.spaces:
                raise UserError(f"search.spaces.{row}: missing, so there is nothing to try")
        chosen = replace(chosen, stream=self.search.stream, seeds=self.search.seeds)
        self.plan: Plan = make_plan(chosen, out, data=data, if_there=if_there, device=device)
        self._now = list(chosen.methods)
        for row in self.plan.experiment.methods:  # also those of earlier searches in the folder
            if row not in self.search.spaces:
                raise UserError(
                    f"search.spaces.{row}: missing, but {out} has trials of it; "
                    "give another --out, or --fresh"
                )
        every = replace(self.plan.experiment, seeds=self.search.seeds)
        jobs: dict[str, list[Job]] = {}
        for job in jobs_of(every, out, data, device):
            assert isinstance(job, Job)  # of a stream, as the experiment is
            jobs.setdefault(job.config.row, []).append(job)
        self.rows = {
            row: RowSearch(row, self.search, jobs[row], out)
            for row in experiment.methods
            if row in jobs
        }
        self._say: Callable[[str], None] = lambda line: None
        if if_there != "replace":
            self._check_same_search()

    @contextmanager
    def begin(self, say: Callable[[str], None] = lambda line: None) -> Iterator[list[Job]]:
        """Begin, or go on, and give the runs to do first.

        Args:
            say: as in `Plan.begin`; it also hears what was widened.
        """
        with self.plan.begin(say):
            out = self.plan.out
            remove(out / "tuned.yaml", within=out)  # of an earlier search; written anew
            to_do = {row: found.advance() for row, found in self.rows.items()}
            self._write()
            self._say = say
            yield [job for row in self._now for job in to_do[row]]

    def to_come(self) -> list[Job]:
        """Return as many runs of each row as are to come; which they are is not known yet."""
        found = [self.rows[row] for row in self._now]
        return [
            each.job(each.standing.trials[0], self.search.seeds[0])
            for each in found
            for _ in range(each.runs_left)
        ]

    def following(self, ended: Event) -> list[Job]:
        """Return what is to be done after a run."""
        found = self.rows[ended.job.config.row]
        before = len(found.standing.widened)
        to_do = found.after(ended)
        for each in found.standing.widened[before:]:
            self._say(f"{found.row}: {each.text}")
        if to_do or not found.waits:
            self._write()
        return to_do

    def as_mapping(self) -> dict[str, Any]:
        """Return how is searched, and what was widened, as search.yaml says it."""
        search = self.search.of(self.rows).as_mapping()
        rounds = [list(pair) for pair in self.search.counts]
        every = {"trials": rounds[0][0], "runs": self.search.runs, "rounds": rounds}
        widened = {
            row: [each.as_mapping() for each in found.standing.widened]
            for row, found in self.rows.items()
            if found.standing.widened
        }
        return {
            "experiment": self.experiment.name,
            **search,
            "sampler": {"name": SAMPLER},
            "every_row": every,
            "widened": widened,
        }

    def _check_same_search(self) -> None:
        path = self.plan.out / "search.yaml"
        if not path.is_file():
            return
        was, now = read_yaml(path), self.as_mapping()
        shared = [row for row in now["spaces"] if row in was.get("spaces", {})]
        for mapping in (was, now):
            mapping["spaces"] = {row: mapping["spaces"][row] for row in shared}
        same = ("trials", "added", "rounds", "seeds", "spaces")
        check_equal(path, {key: was.get(key) for key in same}, {key: now[key] for key in same})

    def _write(self) -> None:
        write_trials(self.plan.out / "trials.csv", self)
        write_yaml(self.plan.out / "search.yaml", self.as_mapping(), within=self.plan.out)


def is_divergence(message: str) -> bool:
    """Return whether a run failed because of the values it tried, and not of something else."""
    return message.startswith(FloatingPointError.__name__)


def _has_ended(job: Job) -> bool:
    return is_done(job) or is_divergence(read_status(job.folder).error)


def trial_source(row: str, search: Search, method: Component) -> Source:
    """Return what a row's trials come from: its spaces, and the values it need not search for."""
    spaces, kind = search.spaces[row], methods.registry.get(method.name)
    allowed = signature(kind)

    def known(options: Options) -> Values:
        return {option: options[option] for option in spaces}

    def allows(option: str, value: Any) -> bool:
        try:
            return bool(checked({option: value}, {option: allowed[option]}, row))
        except UserError:
            return False

    def accepts(values: Values) -> bool:
        learner = Learner(nn.Linear(1, 2), lambda x, generator: x)
        try:
            kind(learner, **method.with_options(values).options)
        except UserError:  # options that do not go together, such as a teacher without an average
            return False
        except Exception:  # of so small a network; the real one is made before the first run
            return True
        return True

    return Source(
        known={
            "default": known({**method.options, **defaults(kind)}),
            "row": known(method.options),
        },
        spaces=spaces,
        seed=seeds.derive(search.seeds[0], f"search/{row}"),
        accepts=accepts,
        allows=allows,
    )


def _search_of(experiment: Experiment) -> Search:
    if experiment.search is None:
        raise UserError("search: missing, and it says what to try; see docs/tuning.md")
    return experiment.search
