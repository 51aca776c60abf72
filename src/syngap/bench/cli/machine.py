"""Commands about this machine: data, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from syngap.bench.cli.arguments import DataSet, checked
from syngap.bench.options import Count

__all__ = ["data", "doctor"]


def data(
    name: Annotated[DataSet, typer.Argument(help="data set to download")],
    to: Annotated[
        Path | None,
        typer.Option("--to", help="write to this folder; default: the cache folder of syngap"),
    ] = None,
    size: Annotated[
        int,
        typer.Option(
            "--size", callback=checked(Count), help="image size of CORe50 in pixels: 128 or 32"
        ),
    ] = 128,
) -> None:
    """Download a data set and check it."""
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


def doctor() -> None:
    """Show what is installed and what is missing.

    Versions, devices, data sets, free disk space, experiments, methods, and optional packages.
    """
    from syngap.bench.doctor import findings

    for line in findings():
        typer.echo(line)
