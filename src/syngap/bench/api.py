"""Experiments from Python: what the command line calls, and a notebook can.

    from syngap import bench

    runs = bench.run("digits", methods=["er", "syngap"], seeds=range(3))
    runs.table()
    runs.report()

Whatever cannot be done is a `UserError` (a ValueError) that says why in one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console

from syngap.bench.config.experiment import Experiment, read, with_settings
from syngap.bench.config.values import seeds_in
from syngap.bench.errors import UserError
from syngap.bench.options import check_value
from syngap.bench.runner.execution import EngineName, Execution
from syngap.bench.runner.plan import IfThere, make_plan
from syngap.bench.runner.recorded import repeat_experiment, select_rows
from syngap.bench.storage import make_folder
from syngap.bench.store.folder_reader import Run, read_runs
from syngap.bench.store.layout import holds_experiment
from syngap.bench.store.surface import Landscape, read_landscapes

if TYPE_CHECKING:
    from rich.table import Table

    from syngap.bench.reporting.reproduction import Reproduction as ReproducedRow
    from syngap.bench.reporting.rows import Row
    from syngap.bench.tuning.study import Tuning

__all__ = ["Reproduction", "Runs", "Tuned", "load", "report", "reproduce", "run", "tune"]

ExperimentLike: TypeAlias = "str | PathLike[str] | Mapping[str, Any] | Experiment"


@dataclass(frozen=True)
class Runs:
    """The runs in a folder, as they are there when they are first looked at.

    Args:
        folder: that `run` wrote, or a packed result.
        failed: by name, why those that failed just now did.
    """

    folder: Path
    failed: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def runs(self) -> list[Run]:
        """Every run, in the order of the experiment's methods and seeds."""
        alone = self.surfaces and not holds_experiment(self.folder)
        return [] if alone else read_runs(self.folder)

    @cached_property
    def surfaces(self) -> list[Landscape]:
        """The loss surfaces that were computed; a folder may hold nothing else."""
        return list(read_landscapes(self.folder))

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of the table: a method with its options and all its seeds."""
        from syngap.bench.reporting.rows import rows

        return rows(self.runs)

    def table(self, width: int | None = None) -> Table:
        """Return the table, which terminals and notebooks can show.

        Args:
            width: characters that it may take; None is that of the terminal.
        """
        from syngap.bench.reporting.tables import table

        return table(self.rows, width or Console().width)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        from syngap.bench.reporting.tables import markdown

        return markdown(self.rows)

    def headline(self) -> str:
        """Return what the table says, in a sentence or two."""
        from syngap.bench.reporting.headline import headline

        return headline(self.rows)

    def report(
        self, page: str | PathLike[str] | None = None, *, within: Path | None = None
    ) -> Path:
        """Write the page and return where it is.

        Args:
            page: the HTML file, or a folder for it; index.html beside the runs by default.
            within: the folder that the user named, where it is one above the page's: no link below
                it is followed.
        """
        from syngap.bench.reporting.page import write_page

        place = self.folder if page is None else Path(page)
        if place.suffix != ".html":
            place = place / "index.html"
        title = (self.runs[0].config.experiment if self.runs else None) or self.folder.name
        within = within or place.parent
        make_folder(place.parent, within=within)
        write_page(self.runs, place, title, self.surfaces, search_folder=self.folder, within=within)
        return place

    def _repr_markdown_(self) -> str:
        """Return what a notebook shows."""
        return self.markdown()


@dataclass(frozen=True)
class Tuned:
    """What a search has chosen.

    Args:
        tuning: the search.
        experiment: the YAML file of the experiment with what was chosen.
    """

    tuning: Tuning
    experiment: Path

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

    rows: Sequence[ReproducedRow]
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
    workers: int | None = None,
    engine: EngineName = "local",
    address: str | None = None,
    log: Sequence[str] = (),
    hung_after: float | None = None,
    progress: bool = True,
) -> Runs:
    """Run an experiment: every method with every seed, a folder each.

    Args:
        experiment: the name of one that ships, a YAML file, or what such a file holds.
        settings: changes of it, such as "stream.epochs=2".
        methods: rows of it; None is all.
        seeds: in place of its own.
        out: the folder for the runs; runs/NAME by default.
        data: the folder that data sets are in.
        if_there: what to do with earlier runs in `out`: "resume" them, "replace" or "refuse".
        workers: runs at a time; None is as many as fit.
        engine: "local" uses processes of this machine, "ray" a cluster.
        address: of the Ray cluster.
        log: "tensorboard", "mlflow", "wandb".
        hung_after: seconds without news after which a run has failed; 0 is never.
        progress: show how far it is.
    """
    chosen = select(experiment, settings, methods, seeds)
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
        )
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
        trials: of every row, in place of the experiment's.
        out: the folder; runs/NAME-search by default.
        data: as for `run`.
        if_there: as for `run`.
        workers: as for `run`.
        engine: as for `run`.
        address: as for `run`.
        log: as for `run`.
        hung_after: as for `run`.
        progress: as for `run`.
    """
    from syngap.bench.config.search import Trials
    from syngap.bench.tuning.chosen import write_chosen
    from syngap.bench.tuning.study import Tuning

    whole = select(experiment, settings)
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
        )
        with execution.begin(tuning.plan, tuning.begin(execution.say)) as first:
            execution.work(tuning.plan, first, to_come=tuning.to_come(), following=tuning.following)
            return Tuned(tuning, write_chosen(tuning))


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
        rows: er and syngap by default; ["all"] is all.
        seeds: how many of the recorded seeds.
        results: the folder of results.
        out: the folder for the runs; runs/reproduce-NAME by default.
        data: as for `run`.
        if_there: as for `run`.
        workers: as for `run`.
        progress: as for `run`.
    """
    from syngap.bench.reporting.reproduction import reproductions
    from syngap.bench.reporting.results import Results

    where = data_folder(data)
    recorded = Results(Path(results)).runs(name)
    experiment = repeat_experiment(recorded, select_rows(recorded, rows), seeds)
    folder = Path(out) if out is not None else Path("runs") / f"reproduce-{name}"
    with Execution(workers=workers, console=_console(progress)) as execution:
        failed = execution.run(make_plan(experiment, folder, data=where, if_there=if_there))
    now = [
        run
        for run in read_runs(folder)
        if run.row in experiment.methods and run.seed in experiment.seeds
    ]
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
) -> Experiment:
    """Return an experiment with settings put in, and of it these rows and seeds."""
    if not isinstance(experiment, Experiment):
        given = experiment if isinstance(experiment, Mapping) else read(str(experiment))
        experiment = Experiment.from_mapping(with_settings(given, settings))
    elif settings:
        experiment = Experiment.from_mapping(with_settings(experiment.as_mapping(), settings))
    return experiment.select(methods, None if seeds is None else seeds_in(list(seeds)))


def data_folder(folder: str | PathLike[str] | None) -> Path | None:
    """Return the folder that data sets are in; UserError where there is none."""
    if folder is not None and not Path(folder).expanduser().is_dir():
        raise UserError(f'--data: there is no folder "{folder}"')
    return None if folder is None else Path(folder)


def _console(progress: bool) -> Console:
    return Console(stderr=True, quiet=not progress)
