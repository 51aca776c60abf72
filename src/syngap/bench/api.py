"""Experiments from Python: what the command line calls, and a notebook can.

    from syngap import bench

    runs = bench.run("digits", methods=["er", "syngap"], seeds=range(3))
    runs.table()
    runs.report()

Whatever cannot be done is a `UserError` (a ValueError) that says why in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console

from syngap.bench.config.experiment import Experiment, read, with_settings
from syngap.bench.config.finetuning import (
    AnyExperiment,
    FinetuningExperiment,
    parse_experiment,
)
from syngap.bench.config.values import seeds_in
from syngap.bench.errors import UserError
from syngap.bench.options import check_value
from syngap.bench.runner.execution import EngineName, Execution
from syngap.bench.runner.plan import IfThere, make_plan
from syngap.bench.runner.recorded import repeat_experiment, repeat_finetuning, select_rows
from syngap.bench.runs import Runs
from syngap.bench.store.folder_reader import read_runs

if TYPE_CHECKING:
    from rich.table import Table

    from syngap.bench.reporting.finetuning.repeated import Repeated
    from syngap.bench.reporting.reproduction import Reproduction as ReproducedRow
    from syngap.bench.tuning.study import Tuning

__all__ = ["Reproduction", "Runs", "Tuned", "load", "report", "reproduce", "run", "tune"]

ExperimentLike: TypeAlias = "str | PathLike[str] | Mapping[str, Any] | AnyExperiment"


@dataclass(frozen=True)
class Tuned:
    """What a search has chosen.

    Args:
        tuning: the search.
        experiment: the YAML file of the experiment with what was chosen.
        runs: of the table with it, where that was run.
    """

    tuning: Tuning
    experiment: Path
    runs: Runs | None = None

    @property
    def stopped(self) -> bool:
        """Whether a run failed, so that its row has no choice yet."""
        return any(row.stopped for row in self.tuning.rows.values())

    def table(self) -> Table:
        """Return the rows with what was chosen for them."""
        from syngap.bench.tuning import chosen

        return chosen.table(self.tuning)

    def notes(self) -> list[str]:
        """Return what a reader of the table should know besides."""
        from syngap.bench.tuning import chosen

        return chosen.notes(self.tuning)


@dataclass(frozen=True)
class Reproduction:
    """Recorded rows beside the same rows run again.

    Args:
        rows: each with whether it falls inside the recorded spread.
        failed: by name, why those that failed did.
    """

    rows: Sequence[ReproducedRow | Repeated]
    failed: Mapping[str, str]

    @property
    def agrees(self) -> bool:
        """Whether all runs ended and no row is outside."""
        return not self.failed and all(row.is_inside is not False for row in self.rows)


def run(
    experiment: ExperimentLike,
    *,
    settings: Sequence[str] = (),
    methods: Sequence[str] | None = None,
    seeds: Iterable[int] | None = None,
    out: str | PathLike[str] | None = None,
    data: str | PathLike[str] | None = None,
    if_there: IfThere = "resume",
    record: str | PathLike[str] | None = None,
    workers: int | None = None,
    engine: EngineName = "local",
    address: str | None = None,
    log: Sequence[str] = (),
    hung_after: float | None = None,
    progress: bool = True,
) -> Runs:
    """Run an experiment: every method with every seed, a folder each.

    Args:
        experiment: the name of one that ships, a YAML file, or what such a file holds; of a stream,
            or of fine-tuning, which has `texts`, `pairs` or `images` in place of `stream`.
        settings: changes of it, such as "stream.epochs=2".
        methods: rows of it; None is all.
        seeds: in place of its own.
        out: the folder for the runs; runs/NAME by default.
        data: the folder that data sets are in.
        if_there: what to do with earlier runs in `out`: "resume" them, "replace" or "refuse".
        record: a folder that `syngap keep` wrote, with runs of the same experiment: those are put
            into `out` and need not be done again.
        workers: runs at a time; None is as many as fit.
        engine: "local" uses processes of this machine, "ray" a cluster.
        address: of the Ray cluster.
        log: "tensorboard", "mlflow", "wandb".
        hung_after: seconds without news after which a run has failed; 0 is never.
        progress: show how far it is.
    """
    notes: list[str] = []
    chosen = select(experiment, settings, methods, seeds, notes.append)
    if isinstance(chosen, FinetuningExperiment) and (engine != "local" or log):
        raise UserError("--engine and --log: are for streams; leave them out for fine-tuning")
    folder = Path(out) if out is not None else Path("runs") / chosen.name
    with Execution(
        workers=workers,
        engine=engine,
        address=address,
        log=log,
        hung_after=hung_after,
        console=_console(progress),
    ) as execution:
        plan = make_plan(
            chosen,
            folder,
            data=data_folder(data),
            if_there=if_there,
            device=execution.device(chosen),
            record=None if record is None else Path(record),
        )
        for note in notes:
            execution.say(note)
        return Runs(folder, execution.run(plan))


def tune(
    experiment: ExperimentLike,
    *,
    settings: Sequence[str] = (),
    methods: Sequence[str] | None = None,
    trials: int | None = None,
    out: str | PathLike[str] | None = None,
    data: str | PathLike[str] | None = None,
    if_there: IfThere = "resume",
    record: str | PathLike[str] | None = None,
    results: str | PathLike[str] | None = None,
    workers: int | None = None,
    engine: EngineName = "local",
    address: str | None = None,
    log: Sequence[str] = (),
    hung_after: float | None = None,
    progress: bool = True,
) -> Tuned:
    """Choose hyper-parameters as the experiment's `search` says, without the test samples.

    Args:
        experiment: as for `run`.
        settings: as for `run`.
        methods: rows to search; None is every row that has a space.
        trials: of every row in the first step, in place of the experiment's.
        out: the folder; runs/NAME-search by default.
        data: as for `run`.
        if_there: as for `run`.
        record: a folder with the record of the same search, which `syngap keep` wrote: its runs
            need not be done again.
        results: then run the table with what was chosen, in the folder `table` of `out`, and
            record both in this folder, under the name of the experiment.
        workers: as for `run`.
        engine: as for `run`.
        address: as for `run`.
        log: as for `run`.
        hung_after: as for `run`.
        progress: as for `run`.
    """
    from syngap.bench.config.search import Trials
    from syngap.bench.store.keep import keep, keep_search
    from syngap.bench.tuning.chosen import write_chosen
    from syngap.bench.tuning.study import Tuning

    notes: list[str] = []
    whole = select_stream(experiment, settings, say=notes.append)
    if trials is not None and whole.search:
        trials = check_value(trials, Trials, "--trials")
        whole = replace(whole, search=replace(whole.search, trials=trials))
    folder = Path(out) if out is not None else Path("runs") / f"{whole.name}-search"
    with Execution(
        workers=workers,
        engine=engine,
        address=address,
        log=log,
        hung_after=hung_after,
        console=_console(progress),
    ) as execution:
        tuning = Tuning(
            whole,
            methods,
            folder,
            data=data_folder(data),
            if_there=if_there,
            device=execution.device(whole),
            record=None if record is None else Path(record),
        )
        place = None if results is None else Path(results) / whole.name
        if place is not None:
            tuning.check_place(place)
        for note in notes:
            execution.say(note)
        with execution.begin(tuning.plan, tuning.begin(execution.say)) as first:
            execution.work(tuning.plan, first, to_come=tuning.to_come(), following=tuning.following)
            tuned = Tuned(tuning, write_chosen(tuning))
    if place is None or tuned.stopped:
        return tuned
    keep_search(folder, place / "search")
    made = run(
        tuned.experiment,
        methods=methods,
        out=folder / "table",
        data=data,
        if_there="replace" if if_there == "replace" else "resume",
        workers=workers,
        engine=engine,
        address=address,
        log=log,
        hung_after=hung_after,
        progress=progress,
    )
    keep(folder / "table", place, unfinished=True)
    return replace(tuned, runs=Runs(place, made.failed))


def reproduce(
    name: str,
    *,
    rows: Sequence[str] | None = None,
    seeds: int = 1,
    results: str | PathLike[str] = "results",
    out: str | PathLike[str] | None = None,
    data: str | PathLike[str] | None = None,
    if_there: IfThere = "resume",
    workers: int | None = None,
    progress: bool = True,
) -> Reproduction:
    """Run recorded rows again, and compare them with the record.

    Args:
        name: of an experiment in `results`.
        rows: er and syngap by default, adamw and protect of fine-tuning; ["all"] is all.
        seeds: how many of the recorded seeds.
        results: the folder of results.
        out: the folder for the runs; runs/reproduce-NAME by default.
        data: as for `run`.
        if_there: as for `run`.
        workers: as for `run`.
        progress: as for `run`.
    """
    from syngap.bench.reporting.finetuning.repeated import repeated
    from syngap.bench.reporting.reproduction import reproductions
    from syngap.bench.reporting.results import Results

    where = data_folder(data)
    recorded = Results(Path(results)).runs(name)
    experiment: AnyExperiment
    if recorded[0].is_finetuning:
        experiment = repeat_finetuning(recorded, Path(results) / name, rows, seeds)
    else:
        experiment = repeat_experiment(recorded, select_rows(recorded, rows), seeds)
    folder = Path(out) if out is not None else Path("runs") / f"reproduce-{name}"
    with Execution(workers=workers, console=_console(progress)) as execution:
        failed = execution.run(make_plan(experiment, folder, data=where, if_there=if_there))
    now = [
        run
        for run in read_runs(folder)
        if run.family in experiment.methods and run.seed in experiment.seeds
    ]
    if isinstance(experiment, FinetuningExperiment):
        return Reproduction(repeated(recorded, now), failed)
    return Reproduction(reproductions(recorded, now), failed)


def load(folder: str | PathLike[str]) -> Runs:
    """Return the runs in a folder that `run` wrote, or of a packed result."""
    runs = Runs(Path(folder))
    _ = runs.runs  # a mistake shows now
    return runs


def report(folder: str | PathLike[str], page: str | PathLike[str] | None = None) -> Path:
    """Write the page of an experiment and return where it is.

    Args:
        folder: that `run` wrote, or of a packed result; loss surfaces in it are shown too.
        page: the HTML file, or a folder for it; index.html beside the runs by default.
    """
    return Runs(Path(folder)).report(page)


def select(
    experiment: ExperimentLike,
    settings: Sequence[str] = (),
    methods: Sequence[str] | None = None,
    seeds: Iterable[int] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> AnyExperiment:
    """Return an experiment with settings put in, and of it these rows and seeds.

    Args:
        experiment: as for `run`.
        settings: as for `run`.
        methods: as for `run`.
        seeds: as for `run`.
        say: gets a line for each row that settings add: where its options come from, or that it
            is not run.
    """
    if isinstance(experiment, (Experiment, FinetuningExperiment)):
        written: Mapping[str, Any] = experiment.as_mapping()
    else:
        written = experiment if isinstance(experiment, Mapping) else read(str(experiment))
    found = parse_experiment(with_settings(written, settings, say))
    if methods is not None:
        added = found.methods.keys() - set(written.get("methods") or ())
        for row in sorted(added - set(methods)):
            say(f"methods.{row}: not run, as --methods does not name it")
    return found.select(methods, None if seeds is None else seeds_in(list(seeds)))


def select_stream(
    experiment: ExperimentLike,
    settings: Sequence[str] = (),
    methods: Sequence[str] | None = None,
    seeds: Iterable[int] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Experiment:
    """Return the same where it is of a stream; UserError otherwise."""
    found = select(experiment, settings, methods, seeds, say)
    if not isinstance(found, Experiment):
        raise UserError(f"{found.name}: compares fine-tuning methods; this needs a stream")
    return found


def data_folder(folder: str | PathLike[str] | None) -> Path | None:
    """Return the folder that data sets are in; UserError where there is none."""
    if folder is not None and not Path(folder).expanduser().is_dir():
        raise UserError(f'--data: there is no folder "{folder}"')
    return None if folder is None else Path(folder)


def _console(progress: bool) -> Console:
    return Console(stderr=True, quiet=not progress)
