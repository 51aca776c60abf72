"""What a folder of results holds: experiments, runs, hardware and times."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from syngap.errors import UserError
from syngap.experiments.config import Experiment, read, shipped
from syngap.experiments.folder import Run
from syngap.report.results import Results
from syngap.report.rows import at_a_time

__all__ = ["counted", "overview", "wall_clock"]


def overview(results: Results) -> str:
    """Return a table of the experiments as Markdown."""
    lines = [
        "| experiment | runs | hardware | training, all runs | wall-clock |",
        "|---|---|---|---:|---:|",
    ]
    for name in results.names():
        runs = results.runs(name)
        seconds = sum(float(run.status.get("seconds") or 0) for run in runs)
        wall = wall_clock(runs)
        cells = [
            f"[{name}]({name})",
            counted(runs) + _absent(runs),
            _hardware(runs),
            _duration(seconds),
            "not recorded" if wall is None else _duration(wall),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def counted(runs: Sequence[Run]) -> str:
    """Return "70 of 90": runs that finished, of those that the experiment as it ships has."""
    done = sum(run.done for run in runs)
    whole = max(_planned(runs), len(runs))
    return str(done) if done == whole else f"{done} of {whole}"


def wall_clock(runs: Sequence[Run]) -> float | None:
    """Return for how many seconds any run was under way; None where one does not say when.

    Runs that went on at the same time count once, and pauses between them do not count.
    """
    spans = []
    for run in runs:
        if run.done:
            try:
                started = datetime.fromisoformat(run.environment["started"])
                spans.append((started, datetime.fromisoformat(run.status["ended"])))
            except (KeyError, TypeError, ValueError):
                return None
    total, until = 0.0, None
    for start, end in sorted(spans):
        begin = start if until is None else max(start, until)
        total += max((end - begin).total_seconds(), 0.0)
        until = end if until is None else max(until, end)
    return total if spans else None


def _planned(runs: Sequence[Run]) -> int:
    experiment = _as_shipped(runs)
    return len(experiment.methods) * len(experiment.seeds) if experiment else 0


def _absent(runs: Sequence[Run]) -> str:
    """Return which rows of the experiment as it ships are not there at all."""
    experiment = _as_shipped(runs)
    there = {run.row for run in runs}
    rows = [row for row in experiment.methods if row not in there] if experiment else []
    return f", without {', '.join(rows)}" if rows else ""


def _as_shipped(runs: Sequence[Run]) -> Experiment | None:
    name = str(runs[0].config.get("experiment"))
    try:
        return Experiment.from_mapping(read(name)) if name in shipped() else None
    except UserError:  # it names what is not installed here
        return None


def _hardware(runs: Sequence[Run]) -> str:
    found: dict[str, None] = {}
    for run in runs:
        told = run.environment
        device = told.get("device", "unknown")
        name = f"{told.get('processor', 'a CPU')}, {told.get('cores', '?')} cores"
        count = at_a_time(run) or 1
        beside = f", {count} runs at a time" if count > 1 else ""
        found[(name if device == "cpu" else str(device)) + beside] = None
    return "; ".join(found)


def _duration(seconds: float) -> str:
    """Return a time that people can take in.

    Examples:
        >>> _duration(42), _duration(600), _duration(9000)
        ('42 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
