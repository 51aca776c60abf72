"""Commands that train: demo, run, tune, reproduce, landscape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from syngap.bench.cli.arguments import (
    Address,
    Data,
    Engine,
    EngineChoice,
    Experiment,
    Fresh,
    HungAfter,
    Log,
    Methods,
    Out,
    Points,
    Results,
    Seeds,
    Set,
    Workers,
    checked,
    names_in,
    seeds_in,
    workers_in,
)
from syngap.bench.cli.reports import print_report
from syngap.bench.errors import UserError
from syngap.bench.options import Count, Seed

if TYPE_CHECKING:
    from syngap.bench.api import Runs
    from syngap.bench.runner.plan import IfThere

__all__ = ["demo", "landscape", "reproduce", "run", "tune"]


def demo(
    seeds: Seeds = None,
    methods: Methods = None,
    workers: Workers = "auto",
    out: Out = None,
    fresh: Fresh = False,
) -> None:
    """Show what syngap does, in one or two minutes.

    First it protects a small language model. Then it compares all methods on handwritten digits.
    It prints two tables and writes an HTML page with both. With --methods or --seeds it runs only
    the digits.
    """
    from syngap.bench import api

    where = out or Path("runs/demo")
    parts: list[tuple[str, list[str] | None, Path]] = [
        ("digits", names_in(methods, "--methods"), where)
    ]
    if methods is None and seeds is None:
        parts.insert(
            0, ("finetune-demo", ["adamw", "protect"], where.with_name(where.name + "-finetuning"))
        )
    protected: Runs | None = None
    for experiment, rows, folder in parts:
        with _resumable("The same command without --fresh" if fresh else "The same command"):
            runs = api.run(
                experiment,
                seeds=seeds_in(seeds),
                methods=rows,
                workers=workers_in(workers),
                out=folder,
                if_there="replace" if fresh else "resume",
            )
        _print_result(runs, opening=protected)
        protected = runs


def run(
    experiment: Experiment,
    settings: Set = None,
    seeds: Seeds = None,
    methods: Methods = None,
    workers: Workers = "auto",
    out: Out = None,
    data: Data = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue the runs in the folder")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RECORD",
            help="skip the runs in this folder, which `syngap keep` wrote",
        ),
    ] = None,
    fresh: Fresh = False,
    engine: Engine = EngineChoice.local,
    address: Address = None,
    log: Log = None,
    hung_after: HungAfter = None,
) -> None:
    """Run an experiment.

    Every method runs with every seed. Each run has its own folder. Then the table is printed and
    an HTML page is written.
    """
    from syngap.bench import api

    if_there, again = _if_there(resume, fresh)
    with _resumable(again):
        runs = api.run(
            experiment,
            settings=settings or (),
            seeds=seeds_in(seeds),
            methods=names_in(methods, "--methods"),
            workers=workers_in(workers),
            out=out,
            data=data,
            if_there=if_there,
            record=record,
            engine=engine.value,
            address=address,
            log=names_in(log, "--log") or (),
            hung_after=hung_after,
        )
    _print_result(runs)


def tune(
    experiment: Experiment,
    settings: Set = None,
    methods: Methods = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            callback=checked(Count),
            help="trials of a row in the first step; more follow; default: the file's, or 16",
        ),
    ] = None,
    workers: Workers = "auto",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="write the search to this folder; default: runs/NAME-search"),
    ] = None,
    data: Data = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue the search in the folder")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RECORD",
            help="continue a search from a folder that `syngap keep --unfinished` wrote",
        ),
    ] = None,
    table: Annotated[
        bool,
        typer.Option(
            "--table", help="then run the table with the chosen values; record search and table"
        ),
    ] = False,
    results: Results = Path("results"),
    fresh: Fresh = False,
    engine: Engine = EngineChoice.local,
    address: Address = None,
    log: Log = None,
    hung_after: HungAfter = None,
) -> None:
    """Search hyper-parameters.

    The section `search` of the experiment says which values to try. Every method has the same
    number of runs, as long as those of the table. Test samples are not used. With --table the same
    command then makes the table. After a stop, add --resume to continue.
    """
    from rich.console import Console

    from syngap.bench import api

    if_there, again = _if_there(resume, fresh)
    with _resumable(again):
        tuned = api.tune(
            experiment,
            settings=settings or (),
            methods=names_in(methods, "--methods"),
            trials=trials,
            workers=workers_in(workers),
            out=out,
            data=data,
            if_there=if_there,
            record=record,
            results=results if table else None,
            engine=engine.value,
            address=address,
            log=names_in(log, "--log") or (),
            hung_after=hung_after,
        )
    Console().print(tuned.table())
    for note in tuned.notes():
        typer.echo(note)
    typer.echo(f"With what was chosen: syngap run {tuned.experiment}")
    if tuned.stopped:
        raise typer.Exit(1)
    if tuned.runs is not None:
        _print_result(tuned.runs)
        typer.echo(f"The table and the search are recorded in {tuned.runs.folder}")


def reproduce(
    name: Annotated[str, typer.Argument(help="name of a recorded experiment")],
    row: Annotated[
        str | None,
        typer.Option(
            "--row", metavar="ROWS", help="methods, or all; default: er,syngap or adamw,protect"
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds", callback=checked(Count), help="how many of the recorded seeds to run"
        ),
    ] = 1,
    data: Data = None,
    results: Results = Path("results"),
    workers: Workers = "auto",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="write the runs to this folder; default: runs/reproduce-NAME"),
    ] = None,
    fresh: Fresh = False,
) -> None:
    """Run recorded experiments again.

    It says whether each new result is in the range that is expected from the recorded ones.
    """
    from syngap.bench import api

    with _resumable(f"The same command{' without --fresh' if fresh else ''}"):
        found = api.reproduce(
            name,
            rows=names_in(row, "--row"),
            seeds=seeds,
            results=results,
            out=out,
            data=data,
            if_there="replace" if fresh else "resume",
            workers=workers_in(workers),
        )
    for compared in found.rows:
        typer.echo("\n".join(compared.describe()))
    if not found.agrees:
        raise typer.Exit(1)


def landscape(
    experiment: Experiment,
    methods: Methods = None,
    seed: Annotated[int, typer.Option("--seed", callback=checked(Seed), help="random seed")] = 0,
    settings: Set = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="write to this folder; default: runs/NAME/landscapes"),
    ] = None,
    data: Data = None,
    points: Annotated[
        int,
        typer.Option(
            "--points", callback=checked(Points), help="number of grid points in each direction"
        ),
    ] = 31,
    samples: Annotated[
        int,
        typer.Option(
            "--samples", callback=checked(Count), help="largest number of samples of task 1 to use"
        ),
    ] = 1000,
    random: Annotated[
        bool, typer.Option("--random", help="also compute a plane of two random directions")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="compute everything again, also what is in the folder")
    ] = False,
) -> None:
    """Compute a loss landscape.

    The model learns two tasks. The landscape is the loss on the first task, in the plane through
    the weights at the start, after task 1 and after task 2.
    """
    from rich.console import Console

    from syngap.bench import api
    from syngap.bench.landscapes.landscape import compute, plan_landscapes

    notes: list[str] = []
    chosen = api.select_stream(
        experiment, settings or (), names_in(methods, "--methods"), [seed], notes.append
    )
    folder = out or Path("runs") / chosen.name / "landscapes"
    jobs = plan_landscapes(
        chosen,
        folder,
        data=api.data_folder(data),
        replaced=fresh,
        within=None if out else folder.parent,
    )
    for note in notes:
        typer.echo(note, err=True)
    compute(jobs, Console(stderr=True), points=points, samples=samples, random=random)
    whole = folder.parent if folder.name == "landscapes" else folder
    typer.echo(f"The landscapes are in {folder}; `syngap report {whole}` draws them", err=True)


def _if_there(resume: bool, fresh: bool) -> tuple[IfThere, str]:
    """Return what to do with earlier runs, and what to say would go on with these."""
    if resume and fresh:
        raise UserError(
            "--resume and --fresh: got both, expected one. --resume continues earlier runs; "
            "--fresh deletes them"
        )
    if fresh:
        return "replace", "The same command with --resume in place of --fresh"
    return (
        ("resume", "The same command") if resume else ("refuse", "The same command with --resume")
    )


@contextmanager
def _resumable(again: str) -> Iterator[None]:
    """Say of interrupted runs what goes on with them."""
    from syngap.bench.runner.execution import Interrupted

    try:
        yield
    except Interrupted as stop:
        typer.echo(f"Stopped. {again} goes on, in {stop.plan.out}.", err=True)
        raise typer.Exit(130) from None


def _print_result(runs: Runs, opening: Runs | None = None) -> None:
    try:
        print_report(runs.folder, opening=opening)
    except UserError as error:
        if not runs.failed:  # otherwise there may be nothing to report
            raise
        typer.echo(f"syngap: {error}", err=True)
    if runs.failed:
        raise typer.Exit(1)
