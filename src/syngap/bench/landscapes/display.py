"""Landscapes one after another, with bars on a terminal and a line for each that is done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from syngap.bench.landscapes.landscape import make_landscape
from syngap.bench.runner.run import Job
from syngap.bench.store.surface import Landscape

__all__ = ["compute"]


def compute(
    jobs: Sequence[Job], console: Console, *, points: int, samples: int, random: bool
) -> None:
    """Compute the landscapes of `jobs` in this process and show how far they are."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        for number, job in enumerate(jobs, start=1):
            bar = bars.add_task(job.name, total=None)
            tell = partial(_show, bars, bar, job.name)
            found = make_landscape(job, points=points, samples=samples, random=random, tell=tell)
            bars.remove_task(bar)
            line = f"{number} of {len(jobs)}  {job.name:<20} {_summary(found)}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _show(bars: Progress, bar: TaskID, name: str, doing: str, done: int, total: int) -> None:
    bars.update(bar, description=f"{name}: {doing}", completed=done, total=total)


def _summary(found: Landscape) -> str:
    losses = [
        f"{name} {'–' if loss is None else f'{loss:.2f}'}"
        for name, loss in found.losses_at_points.items()
    ]
    return f"loss of task 1: {', '.join(losses)}  {found.seconds:.1f} s"
