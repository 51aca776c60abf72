"""The search for hyper-parameters: one study a row, each trial after those it learns from.

Which values trial n of a row tries depends on the row's name, its spaces, what came of the trials
before it and the search's first seed, and on nothing else: not on other rows, the number of
workers or trials, or on whether the search was killed and resumed. So nothing of a study is kept
but the folders of its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from syngap.bench import seeds
from syngap.bench.config.component import Options, Value
from syngap.bench.config.experiment import Experiment
from syngap.bench.config.reading import reading
from syngap.bench.config.search import Search
from syngap.bench.config.space import Space
from syngap.bench.errors import UserError
from syngap.bench.extras import import_extra
from syngap.bench.runner.local import Event
from syngap.bench.runner.plan import IfThere, Plan, check_equal, jobs_of, make_plan
from syngap.bench.runner.run import Job
from syngap.bench.storage import remove
from syngap.bench.store.folder_reader import read_config, read_yaml
from syngap.bench.store.layout import CONFIG
from syngap.bench.store.records import write_yaml
from syngap.bench.tuning.trials import Outcome, Trial, is_divergence, write_trials

__all__ = ["RANDOM_FIRST", "Tuning", "suggestion"]

RANDOM_FIRST = 4  # trials of a row before the sampler learns from them


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
        import_extra("optuna", "tune")
        self.experiment, self.search = experiment, _search_of(experiment)
        chosen = experiment.select(rows or list(self.search.spaces), None)
        for row in chosen.methods:
            if row not in self.search.spaces:
                raise UserError(f"search.spaces.{row}: missing, so there is nothing to try")
        chosen = replace(chosen, stream=self.search.stream, seeds=self.search.seeds)
        self.plan: Plan = make_plan(chosen, out, data=data, if_there=if_there, device=device)
        self._rows = list(chosen.methods)
        for row in self.plan.experiment.methods:  # also those of earlier searches in the folder
            if row not in self.search.spaces:
                raise UserError(
                    f"search.spaces.{row}: missing, but {out} has trials of it; "
                    "give another --out, or --fresh"
                )
        known = [row for row in experiment.methods if row in self.plan.experiment.methods]
        self.outcomes: dict[str, list[Outcome]] = {row: [] for row in known}
        self.stopped: dict[str, str] = {}
        self._templates: dict[str, list[Job]] = {row: [] for row in known}
        every = replace(self.plan.experiment, seeds=self.search.seeds)
        for job in jobs_of(every, out, data, device):
            assert isinstance(job, Job)  # of a stream, as the experiment is
            self._templates[job.config.row].append(job)
        self._current: dict[str, Trial] = {}
        if if_there != "replace":
            self._check_same_search()
            self._check_no_fewer_trials()

    @contextmanager
    def begin(self, say: Callable[[str], None] = lambda line: None) -> Iterator[list[Job]]:
        """Begin, or go on, and give the runs to do first; `say` is as in `Plan.begin`."""
        with self.plan.begin(say):
            out = self.plan.out
            remove(out / "tuned.yaml", within=out)  # of an earlier search; written anew
            to_do = {row: self._next(row) for row in self.outcomes}
            self._write()
            yield [job for row in self._rows for job in to_do[row]]

    def to_come(self) -> list[Job]:
        """Return the runs to come once it has begun, most of them without the values they try."""
        return [
            job
            for row in self._rows
            for number in range(len(self.outcomes[row]), self.search.trials)
            for job in self._trial(row, number, self._recorded_values(row, number) or {}).to_do()
        ]

    def following(self, ended: Event) -> list[Job]:
        """Return what is to be done after a run: once its trial has ended, the next one's runs."""
        row = ended.job.config.row
        if ended.kind == "failed" and not is_divergence(ended.message):
            self.stopped[row] = f"{ended.job.name} failed: {ended.message}"
        if self._current[row].to_do():
            return []
        to_do = self._next(row)
        self._write()
        return to_do

    def _next(self, row: str) -> list[Job]:
        """Note the trials of a row that have ended, and return the runs of the first that has not.

        Trials of earlier searches in the folder tried what their folders say.
        """
        ended = self.outcomes[row]
        while len(ended) < self.search.trials:
            number, spaces = len(ended), self.search.spaces[row]
            values = self._recorded_values(row, number)
            if values is None:
                seed = seeds.derive(self.search.seeds[0], f"search/{row}/{number}")
                values = suggestion(spaces, ended, seed)
            self._current[row] = self._trial(row, number, values)
            if to_do := self._current[row].to_do():
                return to_do
            ended.append(self._current[row].outcome())
        return []

    def _trial(self, row: str, number: int, values: Options) -> Trial:
        jobs = []
        for job in self._templates[row]:
            config = replace(job.config, method=job.config.method.with_options(values))
            folder = self.plan.out / f"{row}-trial{number}-{config.seed}"
            jobs.append(replace(job, folder=folder, config=config))
        return Trial(row, number, dict(values), jobs)

    def _recorded_values(self, row: str, number: int) -> dict[str, Value] | None:
        for job in self._trial(row, number, {}).jobs:
            path = job.folder / CONFIG
            if path.is_file():
                tried = read_config(job.folder).method.options
                with reading(path):
                    return {option: tried[option] for option in self.search.spaces[row]}
        return None

    def _check_same_search(self) -> None:
        path = self.plan.out / "search.yaml"
        if not path.is_file():
            return
        was, now = read_yaml(path), self.as_mapping()
        shared = [row for row in now["spaces"] if row in was.get("spaces", {})]
        for mapping in (was, now):
            mapping["spaces"] = {row: mapping["spaces"][row] for row in shared}
        same = ("seeds", "sampler", "spaces")
        check_equal(path, {key: was.get(key) for key in same}, {key: now[key] for key in same})

    def _check_no_fewer_trials(self) -> None:
        """Refuse to leave out trials that have been made: they may be the better ones."""
        for row in self.outcomes:
            if self._recorded_values(row, self.search.trials) is not None:
                raise UserError(
                    f"search.trials: got {self.search.trials}, but {self.plan.out} has more of "
                    f"{row}; give as many, another --out, or --fresh"
                )

    def as_mapping(self) -> dict[str, Any]:
        """Return how is searched, as search.yaml says it."""
        search = self.search.of(self.outcomes).as_mapping()
        sampler = {"name": "Optuna TPE, multivariate", "random_first": RANDOM_FIRST}
        return {"experiment": self.experiment.name, **search, "sampler": sampler}

    def _write(self) -> None:
        every = [outcome for outcomes in self.outcomes.values() for outcome in outcomes]
        write_trials(self.plan.out / "trials.csv", every)
        write_yaml(self.plan.out / "search.yaml", self.as_mapping(), within=self.plan.out)


def suggestion(spaces: Mapping[str, Space], past: Sequence[Outcome], seed: int) -> dict[str, Value]:
    """Return the values to try after the trials of the `past`: first the start, if there is one."""
    starts = {option: space.start for option, space in spaces.items()}
    if not past and all(start is not None for start in starts.values()):
        return starts
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(
        n_startup_trials=RANDOM_FIRST, multivariate=True, seed=seed % 2**32
    )
    study = optuna.create_study(sampler=sampler, direction="maximize")
    distributions = {option: space.distribution() for option, space in spaces.items()}
    for outcome in past:
        drawn = {option: spaces[option].drawn(v) for option, v in outcome.trial.values.items()}
        study.add_trial(
            optuna.trial.create_trial(
                params=drawn, distributions=distributions, value=outcome.accuracy
            )
        )
    trial = study.ask(distributions)
    return {option: space.value(trial.params[option]) for option, space in spaces.items()}


def _search_of(experiment: Experiment) -> Search:
    if experiment.search is None:
        raise UserError("search: missing, and it says what to try; see docs/tuning.md")
    return experiment.search
