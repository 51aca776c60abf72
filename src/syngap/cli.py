"""The command line: `syngap demo`, `run`, `report`, `data`, `doctor`."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syngap import __version__
from syngap.errors import UserError

if TYPE_CHECKING:
    from syngap.experiments.plan import IfThere, Plan

__all__ = ["app", "main"]

app = typer.Typer(
    name="syngap",
    help="Learning from streams without forgetting: compare methods, see tables and a page.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class DataSet(str, Enum):
    """What `syngap data` can fetch."""

    cifar100 = "cifar100"
    core50 = "core50"


_Seeds = Annotated[
    str | None, typer.Option("--seeds", help="such as 0..4 or 0,3,7", metavar="SEEDS")
]
_Methods = Annotated[
    str | None,
    typer.Option("--methods", help="rows of the experiment, such as er,syngap", metavar="ROWS"),
]
_Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="processes at a time; as many as fit by default"),
]
_Out = Annotated[
    Path | None, typer.Option("--out", help="folder for the runs; runs/NAME by default")
]
_Data = Annotated[Path | None, typer.Option("--data", help="folder the data are in")]
_Fresh = Annotated[
    bool, typer.Option("--fresh", help="remove all earlier runs in the folder first")
]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change the configuration, stream.epochs=2"),
]


@app.command()
def demo(
    seeds: _Seeds = None,
    methods: _Methods = None,
    workers: _Workers = None,
    out: _Out = None,
    fresh: _Fresh = False,
) -> None:
    """Compare all methods on handwritten digits: a table and a page, on CPU, in about a minute."""
    _experiment(
        "digits",
        (),
        seeds,
        methods,
        workers,
        out or Path("runs/demo"),
        None,
        "replace" if fresh else "resume",
        "The same command without --fresh" if fresh else "The same command",
    )


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="a YAML file, or an experiment that ships")],
    settings: _Set = None,
    seeds: _Seeds = None,
    methods: _Methods = None,
    workers: _Workers = None,
    out: _Out = None,
    data: _Data = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the runs that are there")
    ] = False,
    fresh: _Fresh = False,
) -> None:
    """Run an experiment: every method with every seed, a folder each, then the table and a page."""
    if resume and fresh:
        raise UserError("--resume goes on with earlier runs and --fresh removes them: give one")
    if_there: IfThere = "resume" if resume else "replace" if fresh else "refuse"
    again = {
        "refuse": "The same command with --resume",
        "resume": "The same command",
        "replace": "The same command with --resume in place of --fresh",
    }[if_there]
    _experiment(experiment, settings or (), seeds, methods, workers, out, data, if_there, again)


@app.command()
def report(
    runs: Annotated[Path, typer.Argument(help="the folder that `syngap run` wrote")],
    markdown: Annotated[
        bool, typer.Option("--markdown", help="print the table as Markdown")
    ] = False,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="also draw accuracy over the stream, as SVG")
    ] = None,
) -> None:
    """Make the table and the page again from the folders of an experiment."""
    _report(runs, markdown=markdown, figure=figure)


@app.command()
def data(
    name: Annotated[DataSet, typer.Argument(help="which data set")],
    to: Annotated[
        Path | None, typer.Option("--to", help="folder to put it in; the cache by default")
    ] = None,
    size: Annotated[int, typer.Option("--size", help="CORe50: 128 or 32 pixels")] = 128,
) -> None:
    """Download a data set, check it and say where it is."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    from syngap.streams.download import fetch

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name.value, total=None)
        where = fetch(
            name.value,
            to,
            size=size,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    typer.echo(f"{name.value} is in {where}")


@app.command()
def doctor() -> None:
    """Say what is here: versions, devices, data, free disk, and what each extra would add."""
    from syngap.doctor import findings

    for line in findings():
        typer.echo(line)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="say the version and end")] = False,
) -> None:
    if version:
        typer.echo(f"syngap {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 2 where what was asked for cannot be done."""
    command = typer.main.get_command(app)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # arrows in a terminal that has none
    try:
        code: Any = command.main(
            list(sys.argv[1:] if arguments is None else arguments),
            prog_name="syngap",
            standalone_mode=False,
        )
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _refused(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return _refused("stopped", 130)
    except BrokenPipeError:  # `syngap report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # no room, no permission
        said = ": ".join(str(part) for part in (error.filename, error.strerror) if part)
        return _refused(said or repr(error))
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _refused(error.format_message())  # the parser's own complaints


def _refused(message: str, code: int = 2) -> int:
    line = " ".join(message.split())
    if line:
        sys.stderr.write(f"syngap: {line}\n")
    return code


def _experiment(
    name: str,
    settings: Sequence[str],
    seeds: str | None,
    methods: str | None,
    workers: int | None,
    out: Path | None,
    data: Path | None,
    if_there: IfThere,
    again: str,
) -> None:
    from syngap.experiments.config import Experiment, read, seeds_of, with_settings
    from syngap.experiments.plan import make_plan

    if data is not None and not data.expanduser().is_dir():
        raise UserError(f'--data: there is no folder "{data}"')
    experiment = Experiment.from_mapping(with_settings(read(name), settings))
    rows = [row.strip() for row in methods.split(",")] if methods is not None else None
    experiment = experiment.select(rows, seeds_of(seeds) if seeds is not None else None)
    folder = out or Path("runs") / experiment.name
    plan = make_plan(experiment, folder, data=data, if_there=if_there)
    failed = _run(plan, workers, again)
    try:
        _report(folder)
    except UserError as error:
        if not failed:  # otherwise there may be nothing to report
            raise
        _refused(str(error))
    if failed:
        raise typer.Exit(1)


def _run(plan: Plan, workers: int | None, again: str) -> dict[str, str]:
    from rich.console import Console

    from syngap.experiments.display import Display
    from syngap.experiments.engine import default_workers, run_local

    if plan.done:
        there = f"{len(plan.done)} of {len(plan.done) + len(plan.jobs)} runs are there already"
        typer.echo(f"{there}, in {plan.out}; --fresh would run them again", err=True)
    if not plan.jobs:
        return {}
    display = Display(Console(stderr=True), plan.jobs, plan.steps)
    try:
        with plan.begun(), _terminated_like_interrupted(), display:
            run_local(plan.jobs, workers or default_workers(plan.jobs), display)
    except KeyboardInterrupt:
        typer.echo(f"Stopped. {again} goes on, in {plan.out}.", err=True)
        raise typer.Exit(130) from None
    return display.failed


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM, which batch systems send, end runs as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _report(runs: Path, *, markdown: bool = False, figure: Path | None = None) -> None:
    from rich.console import Console

    from syngap.experiments.folder import read_runs
    from syngap.report import table
    from syngap.report.figures import accuracy_figure
    from syngap.report.headline import headline
    from syngap.report.page import write_page
    from syngap.report.rows import rows

    if figure and figure.suffix != ".svg":
        raise UserError(f'--figure: got "{figure}", expected a name that ends in .svg')
    found = read_runs(runs)
    gathered = rows(found)
    if markdown:
        typer.echo(table.markdown(gathered))
    else:
        console = Console()
        console.print(table.table(gathered))
        console.print(f"{headline(gathered)}\n", highlight=False, markup=False)
    page = runs / "index.html"
    write_page(found, page, title=str(found[0].config.get("experiment", runs.name)))
    typer.echo(f"The page is {page}", err=markdown)
    if figure:
        accuracy_figure(found, figure)
        typer.echo(f"The figure is {figure}", err=markdown)


if __name__ == "__main__":
    sys.exit(main())
