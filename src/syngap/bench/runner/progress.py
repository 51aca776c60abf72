"""Progress of many runs: bars on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import fmean
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from syngap.bench.errors import UserError
from syngap.bench.runner.local import Event
from syngap.bench.runner.plan import AnyJob
from syngap.bench.store.folder_reader import Run, read_run
from syngap.messages import count_of

__all__ = ["Display"]


class Display:
    """Shows events as they come; used as a context.

    Args:
        console: where to.
        jobs: as many runs as are to come, of the rows that they are of.
        steps: how many a row's runs have, for the time left.
    """

    def __init__(self, console: Console, jobs: list[AnyJob], steps: Mapping[str, int]) -> None:
        self._console, self._steps = console, steps
        self._reached: dict[str, int] = {}
        self._count = len(jobs)
        self._total = sum(self._steps_of(job) for job in jobs)
        self._ended, self._started = 0, time.monotonic()
        self.failed: dict[str, str] = {}
        moves = console.is_terminal or console.is_jupyter
        self._bars: _Bars | None = _Bars(console, self._total) if moves else None

    def __enter__(self) -> Display:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars:
            self._bars.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        name, ended = event.job.name, event.kind in ("done", "failed")
        self._reached[name] = self._steps_of(event.job) if ended else event.step
        if event.kind == "failed":
            self.failed[name] = event.message
        self._ended += ended
        if self._bars:
            self._bars.show(event, self._steps_of(event.job), sum(self._reached.values()))
        if ended:
            self._console.print(self._line(event), highlight=False, markup=False, soft_wrap=True)

    def _steps_of(self, job: AnyJob) -> int:
        return self._steps[job.config.row]

    def _line(self, event: Event) -> str:
        counted = f"{self._ended:>{len(str(self._count))}} of {self._count}"
        left = "" if self._bars else self._left()
        if event.kind == "failed":
            return f"{counted}  {event.job.name:<20} failed: {event.message}{left}"
        try:
            run = read_run(event.job.folder)
        except UserError as error:  # one folder's trouble is not the others'
            return f"{counted}  {event.job.name:<20} done, but {error}{left}"
        seconds = run.status.seconds or 0.0
        if run.is_finetuning:
            return f"{counted}  {event.job.name:<28} {_losses(run)}  {seconds:6.1f} s{left}"
        accuracy = sum(run.accuracy[-1]) / len(run.accuracy[-1])
        last = run.summaries[max(run.summaries)] if run.summaries else {}
        skipped = (
            f"  {count_of(round(last['skipped']), 'step')} skipped" if last.get("skipped") else ""
        )
        found = f"ACC {accuracy:5.1f}  {seconds:6.1f} s{skipped}"
        return f"{counted}  {event.job.name:<20} {found}{left}"

    def _left(self) -> str:
        reached = sum(self._reached.values())
        seconds = (time.monotonic() - self._started) * (self._total - reached) / max(reached, 1)
        return f"   about {seconds:.0f} s left" if reached < self._total else ""


def _losses(run: Run) -> str:
    """Return the last losses of a fine-tuning run, weights as trained."""
    last = next((point for point in reversed(run.points) if point.share == 1), run.points[-1])
    old = "  ".join(f"{kind} {fmean(halves):.3f}" for kind, halves in last.old.items())
    return f"new {fmean(last.new):.3f}  {old}"


class _Bars:
    """One bar for all runs and one for each that is under way."""

    def __init__(self, console: Console, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[accuracy]}"),
            console=console,
            transient=True,
        )
        self._all = self._progress.add_task("all runs", total=total, accuracy="")
        self._runs: dict[str, TaskID] = {}
        self.start, self.stop = self._progress.start, self._progress.stop

    def show(self, event: Event, steps: int, reached: int) -> None:
        name = event.job.name
        if name not in self._runs:
            self._runs[name] = self._progress.add_task(name, total=steps, accuracy="")
        accuracy = "" if event.accuracy is None else f"{event.accuracy:.1f} % on tasks seen"
        self._progress.update(self._runs[name], completed=event.step, accuracy=accuracy)
        self._progress.update(self._all, completed=reached)
        if event.kind in ("done", "failed"):
            self._progress.remove_task(self._runs.pop(name))


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.0f} steps/s" if task.speed else "")
