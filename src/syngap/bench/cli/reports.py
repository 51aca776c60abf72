"""Commands that read what runs have written: report, fill, keep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from syngap.bench.cli.arguments import Against, Results
from syngap.bench.errors import UserError
from syngap.messages import count_of

if TYPE_CHECKING:
    from syngap.bench.runs import Runs

__all__ = ["fill", "keep", "print_report", "report"]


def report(
    runs: Annotated[
        Path, typer.Argument(help="folder that `syngap run` wrote, or a folder of such folders")
    ],
    markdown: Annotated[
        bool, typer.Option("--markdown", help="print the table as Markdown")
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure",
            help="also draw the main figure into this .svg file",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", help="also draw all figures into this folder (SVG and PDF)"),
    ] = None,
    against: Against = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="write nothing; exit code 1 if tuning made a row less accurate"
        ),
    ] = False,
) -> None:
    """Print the table of runs and write their HTML page."""
    from syngap.bench.reporting.results import Results, holds_experiments

    if check:
        _check_tuned(runs, against)
        return
    if not holds_experiments(runs):
        print_report(runs, markdown=markdown, figure=figure, figures=figures, against=against)
        return
    if against:
        raise UserError(f"--against: {runs} holds several experiments; name the folder of one")
    if figure:
        raise UserError(f"--figure: {runs} holds several experiments; name the folder of one")
    for name in Results(runs).names():
        if _holds_trials(runs / name):
            typer.echo(f"{runs / name}: holds trials of a search; left out", err=True)
            continue
        typer.echo(f"## {name}\n" if markdown else name)
        own = figures / name if figures else None
        print_report(runs / name, runs, markdown=markdown, figures=own, figures_within=figures)


def fill(
    documents: Annotated[list[Path], typer.Argument(help="Markdown files")],
    results: Results = Path("results"),
    check: Annotated[
        bool, typer.Option("--check", help="change nothing; exit code 1 if a number is out of date")
    ] = False,
) -> None:
    """Update the numbers in documents.

    Numbers and tables between `results:` comments are replaced by those of the recorded results.
    """
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


def keep(
    runs: Annotated[Path, typer.Argument(help="folder that `syngap run` or `syngap tune` wrote")],
    to: Annotated[
        Path | None,
        typer.Argument(help="folder to write to; default: results/NAME or results/NAME/search"),
    ] = None,
    unfinished: Annotated[
        bool,
        typer.Option(
            "--unfinished", help="also record failed runs, or a search that has not ended"
        ),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="replace recorded files that are different")
    ] = False,
    against: Against = None,
) -> None:
    """Copy runs to the folder of recorded results.

    Checkpoints and the paths of this machine are left out.
    """
    from syngap.bench.runs import Runs
    from syngap.bench.store.folder_reader import read_runs
    from syngap.bench.store.keep import keep as keep_runs
    from syngap.bench.store.keep import keep_search, search_of

    if searched := search_of(runs):
        place = to or Path("results") / searched / "search"
        search = keep_search(runs, place, unfinished=unfinished, replaced=replace)
        typer.echo(f"The search is in {place}; files written: {search.written}")
        if not search.ended:
            count = count_of(search.runs or 0, "run")
            typer.echo(
                f"It has not ended and has {count} so far; syngap tune --from {place} goes on "
                "with it, also on another machine",
                err=True,
            )
        return
    place = to or Path("results") / (read_runs(runs)[0].config.experiment or runs.name)
    kept = keep_runs(runs, place, unfinished=unfinished, replaced=replace)
    for name in kept.left_out:
        typer.echo(f"{name} has not ended and is left out", err=True)
    typer.echo(f"{place} has {count_of(kept.total, 'run')}; files written: {kept.written}")
    _warn_untuned(Runs(place), against)


def print_report(
    folder: Path,
    within: Path | None = None,
    *,
    markdown: bool = False,
    figure: Path | None = None,
    figures: Path | None = None,
    figures_within: Path | None = None,
    against: Path | None = None,
    opening: Runs | None = None,
) -> None:
    """Print the table and write the page, into folders that lie in those that the user named."""
    from rich.console import Console

    from syngap.bench import api
    from syngap.bench.reporting.figures import accuracy_figure, every_figure
    from syngap.bench.reporting.finetuning.frontiers import frontier_figure, frontier_figures
    from syngap.bench.storage import check_inside

    if figure and figure.suffix != ".svg":
        raise UserError(f'--figure: got "{figure}", expected a name that ends in .svg')
    if _holds_trials(folder):
        raise UserError(f"{folder}: holds trials of a search and no table; see trials.csv there")
    runs, named = api.Runs(folder), within or folder
    if markdown:
        typer.echo(runs.markdown())
    elif runs.runs:
        console = Console()
        console.print(runs.table(console.width))
        console.print(f"{runs.headline()}\n", highlight=False, markup=False)
    _warn_untuned(runs, against)
    typer.echo(f"The page is {runs.report(opening=opening, within=named)}", err=markdown)
    if figure:
        check_inside(figure, named if figure.is_relative_to(named) else figure.parent)
        if runs.is_finetuning:
            frontier_figure(runs.comparison, figure)
        else:
            accuracy_figure(runs.runs, figure)
        typer.echo(f"The figure is {figure}", err=markdown)
    if figures:
        theirs = figures_within or figures
        whole = named if theirs.is_relative_to(named) else theirs
        if runs.is_finetuning:
            written, reasons = frontier_figures(runs.comparison, figures, within=whole)
        else:
            written, reasons = every_figure(runs.runs, runs.surfaces, figures, within=whole)
        names = ", ".join(dict.fromkeys(path.stem for path in written))
        typer.echo(f"The figures are in {figures}: {names}", err=markdown)
        for reason in reasons:
            typer.echo(f"Not drawn: {reason}", err=markdown)


def _warn_untuned(runs: Runs, against: Path | None) -> None:
    """Say in a line where a tuned row ends below an untuned one."""
    if warning := runs.below_untuned(against):
        typer.echo(warning, err=True)


def _check_tuned(folder: Path, against: Path | None) -> None:
    """Say of tuned rows whether they end below untuned ones; exit code 1 where one does."""
    from syngap.bench.reporting.results import holds_experiments
    from syngap.bench.runs import Runs, check_results

    if holds_experiments(folder):
        if against:
            raise UserError(
                f"--against: {folder} holds several experiments; name the folder of one"
            )
        found = check_results(folder)
    else:
        others = [Runs(against)] if against else []
        found = [Runs(folder).check_tuned(others, named=against is not None)]
    for each in found:
        typer.echo("\n".join(each.describe()))
    if not all(each.passed for each in found):
        raise typer.Exit(1)


def _holds_trials(folder: Path) -> bool:
    return (folder / "search.yaml").is_file()
