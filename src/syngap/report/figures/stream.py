"""Accuracy over the stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syngap.errors import UserError, nearest
from syngap.experiments.folder import Run
from syngap.report.figures.style import COLOURS, DASHES, INK, LINE, SOFT, bare, drawn
from syngap.report.headline import rivals, subject
from syngap.report.rows import Row, rows
from syngap.report.series import Band, accuracy_curve, boundaries, steps_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["accuracy_figure"]


@dataclass(frozen=True)
class _Line:
    label: str
    places: list[float]
    band: Band
    look: dict[str, Any]


def accuracy_figure(runs: Sequence[Run], path: Path, names: Sequence[str] | None = None) -> None:
    """Draw the mean accuracy on the tasks seen so far over the stream.

    Args:
        runs: every run of the experiment.
        path: the file to write; it ends in .svg or .pdf.
        names: the rows to draw; SynGAP, what the headline compares it with and the upper bound
            unless said.
    """
    chosen = _chosen(rows(runs), names)
    finished = {row.name: [r for r in runs if r.row == row.name and r.done] for row in chosen}
    continual = [run for row in chosen if not row.joint for run in finished[row.name]]
    if not all(run.record for run in continual):
        raise UserError("a run has no metrics.jsonl: there is no stream to draw")
    ends = boundaries(continual)
    lines = _lines(chosen, finished, float(len(ends)))
    with drawn(path, (8, 4)) as figure:
        axes = figure.add_subplot(
            xlabel="training steps", ylabel="accuracy on tasks seen so far, %"
        )
        axes.set(xlim=(0, ends[-1]), ylim=(0, 100))
        _frame(axes, ends)
        for line in reversed(lines):  # the first on top
            _draw(axes, line, steps_of(line.places, ends))
        _name(axes, lines)


def _chosen(found: Sequence[Row], names: Sequence[str] | None) -> list[Row]:
    known = {row.name: row for row in found if row.seeds}
    for name in names or ():
        if name not in known:
            hint = nearest(name, known) or f"; there are {', '.join(known) or 'none'}"
            raise UserError(f'no finished row "{name}"{hint}')
    ours = subject(found)
    usual = [*([ours] if ours else []), *rivals(found), *(row for row in found if row.joint)]
    chosen = [known[name] for name in names] if names else [row for row in usual if row.seeds]
    if not any(not row.joint for row in chosen):
        raise UserError("no method but joint training has finished: there is no stream to draw")
    return chosen


def _lines(chosen: Sequence[Row], finished: dict[str, list[Run]], tasks: float) -> list[_Line]:
    looks = cycle(zip(COLOURS, DASHES * 2, strict=False))
    ours = subject(chosen)
    lines = []
    for row in chosen:
        if row.joint:
            level = row.spread("ACC")
            assert level is not None
            look = {"color": SOFT, "linewidth": 1.2, "linestyle": (0, (1, 2))}
            lines.append(_Line(row.label, [0.0, tasks], Band([level.mean] * 2, None), look))
            continue
        colour, dash = (INK, "-") if row is ours else next(looks)
        look = {"color": colour, "linestyle": dash, "linewidth": 2.4 if row is ours else 1.5}
        curve = accuracy_curve(finished[row.name])
        assert curve is not None
        lines.append(_Line(row.label, curve.places, curve.lines["seen"], look))
    return lines


def _frame(axes: Axes, ends: Sequence[float]) -> None:
    for task, (start, end) in enumerate(pairwise([0.0, *ends]), start=1):
        axes.axvline(start, color=LINE, linewidth=0.8)
        text = f"task {task}" if len(ends) <= 10 else str(task)
        axes.text((start + end) / 2, 101.5, text, ha="center", va="bottom", fontsize=10)
    bare(axes)


def _draw(axes: Axes, line: _Line, steps: Sequence[float]) -> None:
    band = line.band
    if band.sd:
        low = [mean - sd for mean, sd in zip(band.mean, band.sd, strict=True)]
        high = [mean + sd for mean, sd in zip(band.mean, band.sd, strict=True)]
        axes.fill_between(steps, low, high, color=line.look["color"], alpha=0.15, linewidth=0)
    axes.plot(steps, band.mean, **line.look)


def _name(axes: Axes, lines: Sequence[_Line], least: float = 6.0) -> None:
    """Write each label beside the end of its line, at least `least` percent from the next."""
    height = float("inf")
    ordered = sorted(lines, key=lambda line: line.band.mean[-1], reverse=True)
    lowest = [least * place for place in reversed(range(len(ordered)))]
    for line, bottom in zip(ordered, lowest, strict=True):
        end = line.band.mean[-1]
        height = max(min(end, height - least), bottom)
        axes.text(
            1.015,
            height / 100,
            f"{line.label} {end:.0f}",
            transform=axes.transAxes,
            color=line.look["color"],
            weight="bold" if line.look["color"] == INK else "normal",
            va="center",
        )
