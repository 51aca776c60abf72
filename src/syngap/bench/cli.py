"""The command line: `syngap run` and all that leads to it or comes after, a function each."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from annotated_types import Ge, Le

from syngap import __version__
from syngap.bench.errors import UserError
from syngap.bench.options import Count, NonNegative, Says, Seed, check_value

if TYPE_CHECKING:
    from syngap.bench.config.experiment import Experiment
    from syngap.bench.runner.cluster import Cluster
    from syngap.bench.runner.local import Event
    from syngap.bench.runner.plan import IfThere, Plan
    from syngap.bench.runner.run import Job
    from syngap.bench.store.folder import Run
    from syngap.bench.tuning.study import Tuning

__all__ = ["app", "main"]

app = typer.Typer(
    name="syngap",
    help="Learning from streams and forgetting less: compare methods, see tables and a page.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class DataSet(str, Enum):
    """What `syngap data` can fetch."""

    cifar100 = "cifar100"
    core50 = "core50"


class Engine(str, Enum):
    """Where runs are done."""

    local = "local"
    ray = "ray"


_LISTS = ("SEEDS", "ROWS", "LOGGERS")  # the metavars of options that take several, with commas


_Points = Annotated[int, Ge(2), Le(1001), Says("a whole number from 2 to 1001")]


def _number(kind: Any) -> Callable[[typer.CallbackParam, Any], Any]:
    """Return what checks an option by the rule for configurations: to be one of the type `kind`."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        return None if value is None else check_value(value, kind, param.opts[0])

    return check


_Seeds = Annotated[
    str | None, typer.Option("--seeds", help="such as 0..4 or 0,3,7", metavar="SEEDS")
]
_Methods = Annotated[
    str | None,
    typer.Option("--methods", help="rows of the experiment, such as er,syngap", metavar="ROWS"),
]
_Workers = Annotated[
    str,
    typer.Option(
        "--workers",
        metavar="N",
        callback=_number(Literal["auto"] | Count),
        help="runs at a time; auto is as many as fit",
    ),
]
_HungAfter = Annotated[
    float | None,
    typer.Option(
        "--hung-after",
        metavar="SECONDS",
        callback=_number(NonNegative),
        help="stop a run of which nothing is heard for so long; 1800 by default, 0 never",
    ),
]
_Engine = Annotated[
    Engine, typer.Option("--engine", help="processes of this machine, or a Ray cluster")
]
_Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="of the Ray cluster; auto by default"),
]
_Log = Annotated[
    str | None,
    typer.Option("--log", metavar="LOGGERS", help="also log to these: tensorboard,mlflow,wandb"),
]
_Out = Annotated[
    Path | None, typer.Option("--out", help="folder for the runs; runs/NAME by default")
]
_Data = Annotated[Path | None, typer.Option("--data", help="folder the data are in")]
_Fresh = Annotated[
    bool, typer.Option("--fresh", help="remove all earlier runs in the folder first")
]
_Results = Annotated[Path, typer.Option("--results", help="folder of results")]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change the configuration, stream.epochs=2"),
]


_Experiment = Annotated[
    str,
    typer.Argument(help="a YAML file, or an experiment that ships: `syngap doctor` lists them"),
]


@app.command()
def demo(
    seeds: _Seeds = None,
    methods: _Methods = None,
    workers: _Workers = "auto",
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
    experiment: _Experiment,
    settings: _Set = None,
    seeds: _Seeds = None,
    methods: _Methods = None,
    workers: _Workers = "auto",
    out: _Out = None,
    data: _Data = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the runs that are there")
    ] = False,
    fresh: _Fresh = False,
    engine: _Engine = Engine.local,
    address: _Address = None,
    log: _Log = None,
    hung_after: _HungAfter = None,
) -> None:
    """Run an experiment: every method with every seed, a folder each, then the table and a page."""
    if_there, again = _if_there(resume, fresh)
    with _cluster(engine, address, hung_after) as cluster:
        _experiment(
            experiment,
            settings or (),
            seeds,
            methods,
            workers,
            out,
            data,
            if_there,
            again,
            cluster,
            _names(log),
            hung_after,
        )


@app.command()
def tune(
    experiment: _Experiment,
    settings: _Set = None,
    methods: _Methods = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials", callback=_number(Count), help="of every row, in place of the file's"
        ),
    ] = None,
    workers: _Workers = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", help="folder; runs/NAME-search by default")
    ] = None,
    data: _Data = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the search that is there")
    ] = False,
    fresh: _Fresh = False,
    engine: _Engine = Engine.local,
    address: _Address = None,
    log: _Log = None,
    hung_after: _HungAfter = None,
) -> None:
    """Choose hyper-parameters as the experiment's `search` says, without the test samples."""
    from syngap.bench.config.search import Trials
    from syngap.bench.tuning.study import Tuning

    if_there, again = _if_there(resume, fresh)
    whole = _chosen(experiment, settings or (), None, None, data)
    if trials and whole.search:
        trials = check_value(trials, Trials, "--trials")
        whole = replace(whole, search=replace(whole.search, trials=trials))
    folder = out or Path("runs") / f"{whole.name}-search"
    with _cluster(engine, address, hung_after) as cluster:
        device = cluster.device(whole.training["device"]) if cluster else None
        rows = _names(methods)
        tuning = Tuning(whole, rows, folder, data=data, if_there=if_there, device=device)
        _tune(tuning, workers, again, cluster, _names(log), hung_after)


@app.command()
def report(
    runs: Annotated[
        Path, typer.Argument(help="the folder that `syngap run` wrote, or one that holds several")
    ],
    markdown: Annotated[
        bool, typer.Option("--markdown", help="print the table as Markdown")
    ] = False,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="also draw accuracy over the stream, as SVG")
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", help="also draw all figures into this folder, as SVG and PDF"),
    ] = None,
) -> None:
    """Make the table and the page again from the folders of an experiment, or of several."""
    from syngap.bench.reporting.results import Results, holds_experiments

    if not holds_experiments(runs):
        _report(runs, markdown=markdown, figure=figure, figures=figures)
        return
    if figure:
        raise UserError(f"--figure: {runs} holds several experiments; name the folder of one")
    for name in Results(runs).names():
        if _holds_trials(runs / name):
            typer.echo(f"{runs / name}: holds trials of a search; left out", err=True)
            continue
        typer.echo(f"## {name}\n" if markdown else name)
        own = figures / name if figures else None
        _report(runs / name, runs, markdown=markdown, figures=own, figures_within=figures)


@app.command()
def fill(
    documents: Annotated[list[Path], typer.Argument(help="Markdown files with marked blocks")],
    results: _Results = Path("results"),
    check: Annotated[
        bool, typer.Option("--check", help="change nothing; exit code 1 where a block is stale")
    ] = False,
) -> None:
    """Put numbers and tables from results into the marked blocks of documents."""
    from syngap.bench.reporting.documents import fill as fill_blocks
    from syngap.bench.reporting.documents import stale_blocks
    from syngap.bench.reporting.results import Results

    known = Results(results)
    if not check:
        for document in documents:
            typer.echo(f"{document}: blocks filled: {fill_blocks(document, known)}", err=True)
        return
    stale = [found for document in documents for found in stale_blocks(document, known)]
    for found in stale:
        typer.echo(f"{found.place}: not what {results} gives: {found.query}\n{found.diff}\n")
    if stale:
        raise typer.Exit(1)


@app.command()
def keep(
    runs: Annotated[Path, typer.Argument(help="the folder that `syngap run` or `tune` wrote")],
    to: Annotated[
        Path | None,
        typer.Argument(help="where to keep them; results/NAME, or results/NAME/search, by default"),
    ] = None,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="keep failed runs too, leave out those under way"),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="write over what is there with another content")
    ] = False,
) -> None:
    """Copy runs to where results are kept: without checkpoints and folders of this machine."""
    from syngap.bench.store.folder import read_runs
    from syngap.bench.store.keep import keep as keep_runs
    from syngap.bench.store.keep import keep_search, search_of

    if searched := search_of(runs):
        place = to or Path("results") / searched / "search"
        written = keep_search(runs, place, replaced=replace)
        typer.echo(f"The search is in {place}; files written: {written}")
        return
    place = to or Path("results") / str(read_runs(runs)[0].config.get("experiment", runs.name))
    kept = keep_runs(runs, place, unfinished=unfinished, replaced=replace)
    for name in kept.left_out:
        typer.echo(f"{name} has not ended and is left out", err=True)
    typer.echo(f"{len(kept.runs)} runs are in {place}; files written: {kept.written}")


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="an experiment in the folder of results")],
    row: Annotated[
        str | None,
        typer.Option("--row", metavar="ROWS", help="er,syngap by default, or all"),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option("--seeds", callback=_number(Count), help="how many of the recorded seeds"),
    ] = 1,
    data: _Data = None,
    results: _Results = Path("results"),
    workers: _Workers = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", help="folder; runs/reproduce-NAME by default")
    ] = None,
    fresh: _Fresh = False,
) -> None:
    """Run recorded rows again, and say whether they fall inside the recorded spread."""
    from syngap.bench.reporting.results import Results
    from syngap.bench.runner.plan import make_plan
    from syngap.bench.runner.recorded import again, chosen_rows

    _check_data(data)
    recorded = Results(results).runs(name)
    experiment = again(recorded, chosen_rows(recorded, _names(row)), seeds)
    folder = out or Path("runs") / f"reproduce-{name}"
    plan = make_plan(experiment, folder, data=data, if_there="replace" if fresh else "resume")
    failed = _run(plan, workers, f"The same command{' without --fresh' if fresh else ''}")
    outside = _compare(recorded, folder, experiment)
    if failed or outside:
        raise typer.Exit(1)


@app.command()
def landscape(
    experiment: _Experiment,
    methods: _Methods = None,
    seed: Annotated[int, typer.Option("--seed", callback=_number(Seed), help="of the runs")] = 0,
    settings: _Set = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="folder; runs/NAME/landscapes by default")
    ] = None,
    data: _Data = None,
    points: Annotated[
        int, typer.Option("--points", callback=_number(_Points), help="of the grid, each way")
    ] = 31,
    samples: Annotated[
        int, typer.Option("--samples", callback=_number(Count), help="of task 1, at most")
    ] = 1000,
    random: Annotated[
        bool, typer.Option("--random", help="also in a plane of two random directions")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="compute again what is there already")
    ] = False,
) -> None:
    """Learn two tasks and compute the loss of the first in the plane of the path."""
    from rich.console import Console

    from syngap.bench.landscapes.display import compute
    from syngap.bench.landscapes.landscape import plan_landscapes

    chosen = _chosen(experiment, settings or (), str(seed), methods, data)
    folder = out or Path("runs") / chosen.name / "landscapes"
    jobs = plan_landscapes(
        chosen, folder, data=data, replaced=fresh, within=None if out else folder.parent
    )
    compute(jobs, Console(stderr=True), points=points, samples=samples, random=random)
    whole = folder.parent if folder.name == "landscapes" else folder
    typer.echo(f"The landscapes are in {folder}; `syngap report {whole}` draws them", err=True)


@app.command()
def data(
    name: Annotated[DataSet, typer.Argument(help="which data set")],
    to: Annotated[
        Path | None, typer.Option("--to", help="folder to put it in; the cache by default")
    ] = None,
    size: Annotated[
        int, typer.Option("--size", callback=_number(Count), help="CORe50: 128 or 32 pixels")
    ] = 128,
) -> None:
    """Download a data set, check it and say where it is."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    from syngap.bench.streams.download import fetch

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
    from syngap.bench.doctor import findings

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
        given = list(sys.argv[1:] if arguments is None else arguments)
        message = error.format_message()  # the parser's own complaints
        context = getattr(error, "ctx", None) if "extra argument" in message else None
        return _refused(message + _list_hint(context, given))


def _list_hint(context: Any, given: Sequence[str]) -> str:
    """Return how a list is written, where one was given with a space in place of a comma."""
    params = context.command.params if context else ()
    lists = {name for param in params if param.metavar in _LISTS for name in param.opts}
    for place, word in enumerate(given):
        option, equals, value = word.partition("=")
        words = [*([value] if equals else []), *given[place + 1 :]][:2]
        if option in lists and len(words) == 2 and not words[1].startswith("-"):
            return f"; a list has commas and no spaces: {option} {words[0].strip(',')},{words[1]}"
    return ""


def _refused(message: str, code: int = 2) -> int:
    line = " ".join(message.split())
    if line:
        sys.stderr.write(f"syngap: {line}\n")
    return code


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _if_there(resume: bool, fresh: bool) -> tuple[IfThere, str]:
    """Return what to do with earlier runs, and what to say would go on with these."""
    if resume and fresh:
        raise UserError("--resume goes on with earlier runs and --fresh removes them: give one")
    if fresh:
        return "replace", "The same command with --resume in place of --fresh"
    return (
        ("resume", "The same command") if resume else ("refuse", "The same command with --resume")
    )


def _do(
    jobs: Sequence[Job],
    workers: str,
    cluster: Cluster | None,
    on_event: Callable[[Event], None],
    following: Callable[[Event], Sequence[Job]] = lambda ended: (),
    hung_after: float | None = None,
) -> None:
    """Do the runs where they were asked for, "auto" or a number of them at a time."""
    from syngap.bench.runner.local import default_workers, run_local

    def heard(event: Event) -> None:
        if event.kind == "step" and event.message:
            typer.echo(event.message, err=True)
            return
        on_event(event)

    number = None if workers == "auto" else int(workers)
    if cluster:
        cluster.run(jobs, number, heard, following)
        return
    patience = {} if hung_after is None else {"hung_after": hung_after}
    run_local(jobs, number or default_workers(jobs), heard, following, **patience)


@contextmanager
def _cluster(
    engine: Engine, address: str | None, hung_after: float | None
) -> Iterator[Cluster | None]:
    if engine is Engine.local:
        if address is not None:
            raise UserError("--address: is that of a Ray cluster; give --engine ray with it")
        yield None
        return
    if hung_after is not None:
        raise UserError("--hung-after: is for the processes of this machine, not for --engine ray")
    from syngap.bench.runner.cluster import connected

    with connected(address or "auto", _say) as cluster:
        yield cluster


def _alone(cluster: Cluster | None, plan: Plan) -> AbstractContextManager[object]:
    """Return a context in which no other driver of the cluster is at work in the plan's folder."""
    return cluster.alone(plan.out) if cluster else nullcontext()


def _names(listed: str | None) -> list[str] | None:
    return [name.strip() for name in listed.split(",")] if listed is not None else None


def _experiment(
    name: str,
    settings: Sequence[str],
    seeds: str | None,
    methods: str | None,
    workers: str,
    out: Path | None,
    data: Path | None,
    if_there: IfThere,
    again: str,
    cluster: Cluster | None = None,
    log: Sequence[str] | None = None,
    hung_after: float | None = None,
) -> None:
    from syngap.bench.runner.plan import make_plan

    experiment = _chosen(name, settings, seeds, methods, data)
    folder = out or Path("runs") / experiment.name
    device = cluster.device(experiment.training["device"]) if cluster else None
    plan = make_plan(experiment, folder, data=data, if_there=if_there, device=device)
    failed = _run(plan, workers, again, cluster, log, hung_after)
    try:
        _report(folder)
    except UserError as error:
        if not failed:  # otherwise there may be nothing to report
            raise
        _refused(str(error))
    if failed:
        raise typer.Exit(1)


def _check_data(data: Path | None) -> None:
    if data is not None and not data.expanduser().is_dir():
        raise UserError(f'--data: there is no folder "{data}"')


def _chosen(
    name: str,
    settings: Sequence[str],
    seeds: str | None,
    methods: str | None,
    data: Path | None,
) -> Experiment:
    """Return the part of an experiment that was asked for."""
    from syngap.bench.config.experiment import Experiment, read, seeds_of, with_settings

    _check_data(data)
    experiment = Experiment.from_mapping(with_settings(read(name), settings))
    return experiment.select(_names(methods), seeds_of(seeds) if seeds is not None else None)


def _run(
    plan: Plan,
    workers: str,
    again: str,
    cluster: Cluster | None = None,
    log: Sequence[str] | None = None,
    hung_after: float | None = None,
) -> dict[str, str]:
    from rich.console import Console

    from syngap.bench.runner.progress import Display

    logged = _logged(plan, log)
    if plan.done:
        there = f"{len(plan.done)} of {len(plan.done) + len(plan.jobs)} runs are there already"
        typer.echo(f"{there}, in {plan.out}; --fresh would run them again", err=True)
    if not plan.jobs:
        with logged:
            return {}
    display = Display(Console(stderr=True), plan.jobs, plan.steps)
    try:
        with (
            _alone(cluster, plan),
            plan.begun(_say),
            _terminated_like_interrupted(),
            logged,
            display,
        ):
            _do(plan.jobs, workers, cluster, display, hung_after=hung_after)
    except KeyboardInterrupt:
        typer.echo(f"Stopped. {again} goes on, in {plan.out}.", err=True)
        raise typer.Exit(130) from None
    return display.failed


def _tune(
    tuning: Tuning,
    workers: str,
    again: str,
    cluster: Cluster | None,
    log: Sequence[str] | None,
    hung_after: float | None,
) -> None:
    from rich.console import Console

    from syngap.bench.runner.progress import Display
    from syngap.bench.tuning import chosen

    logged = _logged(tuning.plan, log)
    try:
        with (
            _alone(cluster, tuning.plan),
            tuning.begun(_say) as first,
            _terminated_like_interrupted(),
        ):
            display = Display(Console(stderr=True), tuning.to_come(), tuning.plan.steps)
            with logged, display:
                if first:
                    _do(first, workers, cluster, display, tuning.following, hung_after)
            tuned = chosen.write_chosen(tuning)
    except KeyboardInterrupt:
        typer.echo(f"Stopped. {again} goes on, in {tuning.plan.out}.", err=True)
        raise typer.Exit(130) from None
    Console().print(chosen.table(tuning))
    for note in chosen.notes(tuning):
        typer.echo(note)
    typer.echo(f"The experiment with what was chosen is {tuned}")
    if tuning.stopped:
        raise typer.Exit(1)


def _logged(plan: Plan, names: Sequence[str] | None) -> AbstractContextManager[object]:
    """Return a context in which the plan's runs are logged, having checked that they can be."""
    if not names:
        return nullcontext()
    from syngap.bench.runner.loggers import Following

    return Following(plan.out, names, _say)


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


def _holds_trials(folder: Path) -> bool:
    return (folder / "search.yaml").is_file()


def _report(
    runs: Path,
    within: Path | None = None,
    *,
    markdown: bool = False,
    figure: Path | None = None,
    figures: Path | None = None,
    figures_within: Path | None = None,
) -> None:
    """Print the table and write the page, into folders that lie in those that the user named."""
    from rich.console import Console

    from syngap.bench.reporting.figures import accuracy_figure, every_figure
    from syngap.bench.reporting.headline import headline
    from syngap.bench.reporting.page import write_page
    from syngap.bench.reporting.rows import rows
    from syngap.bench.reporting.tables import markdown as markdown_table
    from syngap.bench.reporting.tables import table
    from syngap.bench.storage import check_inside
    from syngap.bench.store.folder import read_runs
    from syngap.bench.store.surface import read_landscapes

    if figure and figure.suffix != ".svg":
        raise UserError(f'--figure: got "{figure}", expected a name that ends in .svg')
    if _holds_trials(runs):
        raise UserError(f"{runs}: holds trials of a search and no table; see trials.csv there")
    surfaces = read_landscapes(runs)
    alone = bool(surfaces) and not (runs / "experiment.yaml").is_file()
    found = [] if alone else read_runs(runs)
    gathered = rows(found)
    if markdown:
        typer.echo(markdown_table(gathered))
    elif found:
        console = Console()
        console.print(table(gathered, console.width))
        console.print(f"{headline(gathered)}\n", highlight=False, markup=False)
    page = runs / "index.html"
    title = str(found[0].config.get("experiment", runs.name)) if found else runs.name
    named = within or runs
    write_page(found, page, title, surfaces, searched=runs, within=named)
    typer.echo(f"The page is {page}", err=markdown)
    if figure:
        check_inside(figure, named if figure.is_relative_to(named) else figure.parent)
        accuracy_figure(found, figure)
        typer.echo(f"The figure is {figure}", err=markdown)
    if figures:
        theirs = figures_within or figures
        whole = named if theirs.is_relative_to(named) else theirs
        written, reasons = every_figure(found, surfaces, figures, within=whole)
        names = ", ".join(dict.fromkeys(path.stem for path in written))
        typer.echo(f"The figures are in {figures}: {names}", err=markdown)
        for reason in reasons:
            typer.echo(f"Not drawn: {reason}", err=markdown)


def _compare(recorded: Sequence[Run], folder: Path, experiment: Experiment) -> bool:
    """Print what was run again beside what is recorded; return whether any row is outside."""
    from syngap.bench.reporting.reproduction import describe, reproductions
    from syngap.bench.store.folder import read_runs

    asked = [
        run
        for run in read_runs(folder)
        if run.row in experiment.methods and run.seed in experiment.seeds
    ]
    found = reproductions(recorded, asked)
    for row in found:
        typer.echo("\n".join(describe(row)))
    return any(row.inside is False for row in found)


if __name__ == "__main__":
    sys.exit(main())
