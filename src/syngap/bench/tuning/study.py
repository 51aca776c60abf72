"""The search for hyper-parameters in a folder: runs of trials, and what follows from their ends.

What a row tries depends on its name, method and spaces, the scores of its earlier trials and the
search's first seed, and on nothing else: not on other rows, the number of workers, or on whether
the search was killed and resumed. So all that going on needs is the scores: those of run folders,
or of the record of the search where a folder is missing or damaged.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from syngap.bench.config.component import Options
from syngap.bench.config.experiment import Experiment, complete_run
from syngap.bench.config.reading import reading
from syngap.bench.config.run_config import RunConfig
from syngap.bench.config.search import Search
from syngap.bench.errors import DamagedError, UserError
from syngap.bench.metrics import accuracy
from syngap.bench.runner.local import Event
from syngap.bench.runner.plan import IfThere, Plan, check_equal, is_done, jobs_of, make_plan
from syngap.bench.runner.run import Job
from syngap.bench.storage import move, remove
from syngap.bench.store.folder_reader import read_run, read_status, read_yaml
from syngap.bench.store.layout import holds_experiment
from syngap.bench.store.outcome import Environment, Run
from syngap.bench.store.records import write_yaml
from syngap.bench.store.removal import remove_checkpoints
from syngap.bench.store.search_record import (
    SEARCH,
    SearchRecord,
    TrialRun,
    environments_of,
    read_record,
    write_trials,
)
from syngap.bench.tuning.chosen import recorded_parts, recorded_trials
from syngap.bench.tuning.halving import Standing, Trial, mean_score, standing, trial_source

__all__ = ["RowSearch", "Tuning", "is_divergence"]

SAMPLER = "Latin hypercube and successive halving over seeds"


class RowSearch:
    """The search of one row: its runs, and what came of those that have ended.

    Args:
        row: its name.
        search: the rules, which all rows share.
        jobs: a run of the row as it stands with each seed of the search; where trials get the
            rest of their configuration from.
        out: the folder of the search.
        records: what was recorded of the search, here or elsewhere.
    """

    def __init__(
        self,
        row: str,
        search: Search,
        jobs: Sequence[Job],
        out: Path,
        records: Sequence[SearchRecord] = (),
    ) -> None:
        self.row, self.search, self._out, self._records = row, search, out, records
        self._jobs = {job.config.seed: job for job in jobs}
        self.runs: dict[tuple[int, int], TrialRun] = {}
        self.stopped = ""
        self.say: Callable[[str], None] = lambda line: None
        self._source = trial_source(row, search, jobs[0].config.method)
        self.standing: Standing = standing(self._source, search, {})
        self._under_way: dict[str, tuple[Trial, int]] = {}

    @property
    def config(self) -> RunConfig:
        """The configuration of the row as it stands, with the first seed."""
        return self._jobs[self.search.seeds[0]].config

    @property
    def scores(self) -> dict[tuple[int, int], float | None]:
        """Trial and seed → ACC on validation samples, None where the run diverged."""
        return {key: run.accuracy for key, run in self.runs.items()}

    @property
    def diverged(self) -> set[int]:
        """Trials that diverged with any seed."""
        return {number for (number, _), run in self.runs.items() if run.accuracy is None}

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
        return self.search.runs - len(self.runs)

    def seeds_of(self, trial: Trial) -> list[int]:
        """Return the seeds with which a trial has been run."""
        return [seed for seed in self.search.seeds if (trial.number, seed) in self.runs]

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
            jobs = {self.job(*pair).name: (*pair, self.job(*pair)) for pair in self.standing.to_do}
            noted = [self._note(*each) for each in jobs.values()]
            if not any(noted):
                self._under_way = {name: (trial, seed) for name, (trial, seed, _) in jobs.items()}
                return [job for *_, job in jobs.values()]

    def after(self, ended: Event) -> list[Job]:
        """Note the end of a run, and return what follows: nothing before its round has ended."""
        trial, seed = self._under_way.pop(ended.job.name)
        if ended.kind == "failed" and not is_divergence(ended.message):
            self.stopped = f"{ended.job.name} failed: {ended.message}"
        else:
            self._note(trial, seed, self.job(trial, seed))
        return [] if self.waits else self.advance()

    def check_records(self) -> None:
        """Refuse records whose trials are others than those of this search; change nothing."""
        scores: dict[tuple[int, int], float | None] = {}
        ended = True
        while ended:
            to_do = standing(self._source, self.search, scores).to_do
            found = {(trial.number, seed): self._recorded(trial, seed) for trial, seed in to_do}
            ended = any(found.values())
            scores |= {key: run.accuracy for key, run in found.items() if run}

    def _recorded(self, trial: Trial, seed: int) -> TrialRun | None:
        found = [one.run(self.row, trial.number, trial.values, seed) for one in self._records]
        return next(filter(None, found), None)

    def _note(self, trial: Trial, seed: int, job: Job) -> bool:
        """Note what came of a run, where it has ended; its weights are not kept."""
        known = self._recorded(trial, seed)
        try:
            if _has_ended(job):
                remove_checkpoints(job.folder, within=job.folder.parent)
                known = _outcome(read_run(job.folder))
        except DamagedError as error:
            if known is None:
                aside = job.folder.with_name(f"{job.folder.name}.damaged-{secrets.token_hex(2)}")
                move(job.folder, aside, within=self._out)
                self.say(f"{error}; the run begins again, and what was there is in {aside.name}")
        if known is not None:
            self.runs[trial.number, seed] = known
        return known is not None


class Tuning:
    """A search in a folder: which runs come first, and which after one that ended.

    Args:
        experiment: whose rows are searched; it has a `search`.
        rows: those to be searched now; None is every row that has a space.
        out: the folder.
        data: where data sets are.
        if_there: what to do with an earlier search in `out`.
        device: what the runs will have, where they are done on other machines.
        record: a folder with the record of the same search, whose runs count.
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
        record: Path | None = None,
    ) -> None:
        self.experiment, self.search = experiment, _search_of(experiment)
        chosen = experiment.select(rows or list(self.search.spaces), None)
        for row in chosen.methods:
            if row not in self.search.spaces:
                raise UserError(f"search.spaces.{row}: missing, so there is nothing to try")
        chosen = replace(chosen, stream=self.search.stream, seeds=self.search.seeds)
        if (out / SEARCH).is_file() and not holds_experiment(out):
            raise UserError(
                f"{out}: holds the record of a search; --from {out} with another --out goes on"
            )
        records = [_recorded(record)] if record else []
        plan = make_plan(chosen, out, data=data, if_there=if_there, device=device)
        if if_there == "resume" and (here := _read_own(out)):
            records.append(here)
        self._now = list(chosen.methods)
        earlier = dict.fromkeys(plan.experiment.methods, out)  # also of earlier searches
        earlier |= {row: found.folder for found in records for row in found.rows}
        for row, folder in earlier.items():
            if row not in self.search.spaces:
                raise UserError(
                    f"search.spaces.{row}: missing, but {folder} has trials of it; "
                    "give another --out, or --fresh"
                )
        assert isinstance(plan.experiment, Experiment)  # of a stream, as `experiment` is
        methods = {**experiment.methods, **plan.experiment.methods}
        methods = {row: methods[row] for row in experiment.methods if row in earlier}
        every = replace(plan.experiment, methods=methods, seeds=self.search.seeds)
        self.plan: Plan = replace(plan, experiment=every)
        jobs: dict[str, list[Job]] = {}
        for job in jobs_of(every, out, data, device):
            assert isinstance(job, Job)
            jobs.setdefault(job.config.row, []).append(job)
        self.rows = {row: RowSearch(row, self.search, jobs[row], out, records) for row in jobs}
        self._say: Callable[[str], None] = lambda line: None
        self._environments = environments_of((), [e for one in records for e in one.environments])
        self._is_written = False
        for folder in [out] * (if_there != "replace") + [found.folder for found in records]:
            self._check_same_search(folder / SEARCH)
        for each in self.rows.values():
            each.check_records()

    def check_place(self, place: Path) -> None:
        """Refuse a folder of results that has something else than this search and its table."""
        folder = place / "search"
        other = holds_experiment(place) and not (folder / SEARCH).is_file()
        if (folder / SEARCH).is_file():
            there, ours = read_record(folder), SearchRecord(folder, self.as_mapping(), {})
            other = there is None or not ours.is_like(
                there, [r for r in there.rows if r in self.rows]
            )
        if other:
            raise UserError(
                f"{place}: holds results of another search, or of none; give another --results, "
                f"or remove {place}"
            )

    @contextmanager
    def begin(self, say: Callable[[str], None] = lambda line: None) -> Iterator[list[Job]]:
        """Begin, or go on, and give the runs to do first.

        Args:
            say: as in `Plan.begin`; it also hears what was widened.
        """
        with self.plan.begin(say):
            out = self.plan.out
            remove(out / "tuned.yaml", within=out)  # of an earlier search; written anew
            self._say = say
            for found in self.rows.values():
                found.say = say
            to_do = {row: found.advance() for row, found in self.rows.items()}
            self.write()
            try:
                yield [job for row in self._now for job in to_do[row]]
            except BaseException:
                self.write()
                raise

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
        self.write(all_of_it=bool(to_do) or not found.waits)
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
            **recorded_parts(self),
        }

    def write(self, more: Options = MappingProxyType({}), *, all_of_it: bool = True) -> None:
        """Write the record as it stands: trials.csv, and search.yaml where that changes.

        Args:
            more: further entries of search.yaml.
            all_of_it: write search.yaml in any case.
        """
        out, trials, before = self.plan.out, recorded_trials(self), self._environments
        is_new = self.environments() != before or not self._is_written
        if all_of_it or is_new:  # first: trials.csv refers to it
            write_yaml(out / SEARCH, {**self.as_mapping(), **more}, within=out)
            self._is_written = True
        write_trials(out, trials, self.search.seeds, self._environments)

    def environments(self) -> list[Environment]:
        """Return what runs ran on, those that were recorded before at their places."""
        runs = (run for trial in recorded_trials(self) for run in trial.runs.values())
        self._environments = environments_of(runs, self._environments)
        return self._environments

    def _check_same_search(self, path: Path) -> None:
        if not path.is_file():
            return
        was, now = read_yaml(path), self.as_mapping()
        shared = [row for row in now["spaces"] if row in was.get("spaces", {})]
        for mapping in (was, now):
            mapping["spaces"] = {row: mapping["spaces"][row] for row in shared}
        same = ("trials", "added", "rounds", "seeds", "spaces")
        check_equal(path, {key: was.get(key) for key in same}, {key: now[key] for key in same})
        if found := was.get("configuration"):
            with reading(path):
                for row in shared:
                    config = self.rows[row].config
                    parts = {**found, "method": found["methods"][row]}
                    before, after = complete_run(parts, config), config.as_mapping()
                    parts = {key: after[key] for key in ("stream", "model", "training", "method")}
                    check_equal(path, {key: before[key] for key in parts}, parts)


def _recorded(folder: Path) -> SearchRecord:
    found = read_record(folder)
    if found is None:
        raise UserError(
            f"--from: {folder} has no record that a search can go on from; "
            "`syngap keep --unfinished` writes one"
        )
    return found


def _read_own(out: Path) -> SearchRecord | None:
    try:
        return read_record(out)
    except DamagedError as error:
        raise UserError(f"{error}; without that file, run folders alone count") from error


def _outcome(run: Run) -> TrialRun:
    """Return what came of a run that has ended; DamagedError where that is not all there."""
    entries = {key: value for key, value in run.environment.entries.items() if key != "started"}
    seconds, environment = run.status.seconds or 0.0, Environment(entries)
    if reason := run.status.error:
        return TrialRun(None, seconds, environment, reason)
    ends = sum(evaluation.end for evaluation in run.record)
    if not run.accuracy or ends != len(run.accuracy):
        raise DamagedError(f"{run.path}: lines are missing")
    return TrialRun(accuracy(run.accuracy), seconds, environment)


def is_divergence(message: str) -> bool:
    """Return whether a run failed because of the values it tried, and not of something else."""
    return message.startswith(FloatingPointError.__name__)


def _has_ended(job: Job) -> bool:
    return is_done(job) or is_divergence(read_status(job.folder).error)


def _search_of(experiment: Experiment) -> Search:
    if experiment.search is None:
        raise UserError("search: missing, and it says what to try; see docs/tuning.md")
    return experiment.search
