"""Lines with bands of ± sd: accuracy over the stream, and against the value of an option."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syngap.bench.errors import UserError
from syngap.bench.reporting.curves import Line, Sweep
from syngap.bench.reporting.figures.style import (
    COLOURS,
    DASHES,
    INK,
    LINE,
    SOFT,
    figure_file,
    remove_frame,
)
from syngap.bench.reporting.headline import featured, rivals, subject
from syngap.bench.reporting.rows import Row, finished_runs, rows
from syngap.bench.reporting.series import Band, accuracy_curve, boundaries, steps_of
from syngap.bench.store.folder_reader import Run
from syngap.messages import nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["accuracy_figure", "sweep_figure"]

_SUBJECT = "syngap"
_STREAM_GAP = 6.0  # between labels, in percent
_SWEEP_GAP = 0.06  # between labels, as a share of the axis


# Over the stream


@dataclass(frozen=True)
class _StreamLine:
    label: str
    places: list[float]
    band: Band
    look: dict[str, Any]

    @property
    def end(self) -> float:
        return self.band.mean[-1]


def accuracy_figure(runs: Sequence[Run], path: Path, names: Sequence[str] | None = None) -> None:
    """Draw the mean accuracy on the tasks seen so far over the stream.

    Args:
        runs: every run of the experiment.
        path: the file to write; it ends in .svg or .pdf.
        names: the rows to draw; by default SynGAP, its rivals in the headline and joint training.
    """
    chosen = _choose(rows(runs), names)
    continual = [run for row in chosen if not row.joint for run in finished_runs(runs, row)]
    if not all(run.record for run in continual):
        raise UserError("a run has no metrics.jsonl: there is no stream to draw")
    ends = boundaries(continual)
    lines = _stream_lines(chosen, runs, float(len(ends)))
    with figure_file(path, (8, 4)) as figure:
        axes = figure.add_subplot(
            xlabel="training steps", ylabel="accuracy on tasks seen so far, %"
        )
        axes.set(xlim=(0, ends[-1]), ylim=(0, 100))
        _mark_tasks(axes, ends)
        for line in reversed(lines):  # the first on top
            steps = steps_of(line.places, ends)
            _draw_band(axes, steps, line.band.mean, line.band.sd or [], line.look["color"])
            axes.plot(steps, line.band.mean, **line.look)
        _label_ends(axes, lines)


def _choose(found: Sequence[Row], names: Sequence[str] | None) -> list[Row]:
    known = {row.name: row for row in found if row.seeds}
    for name in names or ():
        if name not in known:
            hint = nearest(name, known) or f"; there are {', '.join(known) or 'none'}"
            raise UserError(f'no finished row "{name}"{hint}')
    ours = featured(found)
    usual = [*([ours] if ours else []), *rivals(found), *(row for row in found if row.joint)]
    chosen = [known[name] for name in names] if names else [row for row in usual if row.seeds]
    if not any(not row.joint for row in chosen):
        raise UserError("no method but joint training has finished: there is no stream to draw")
    return chosen


def _stream_lines(chosen: Sequence[Row], runs: Sequence[Run], tasks: float) -> list[_StreamLine]:
    looks = cycle(_looks())
    ours = subject(chosen)
    lines = []
    for row in chosen:
        if row.joint:
            level = row.spread("ACC")
            assert level is not None
            look = {"color": SOFT, "linewidth": 1.2, "linestyle": (0, (1, 2))}
            lines.append(_StreamLine(row.label, [0.0, tasks], Band([level.mean] * 2, None), look))
            continue
        colour, dash = (INK, "-") if row is ours else next(looks)
        look = {"color": colour, "linestyle": dash, "linewidth": 2.4 if row is ours else 1.5}
        curve = accuracy_curve(finished_runs(runs, row))
        assert curve is not None
        lines.append(_StreamLine(row.label, curve.places, curve.lines["seen"], look))
    return lines


def _mark_tasks(axes: Axes, ends: Sequence[float]) -> None:
    for task, (start, end) in enumerate(pairwise([0.0, *ends]), start=1):
        axes.axvline(start, color=LINE, linewidth=0.8)
        text = f"task {task}" if len(ends) <= 10 else str(task)
        axes.text((start + end) / 2, 101.5, text, ha="center", va="bottom", fontsize=10)
    remove_frame(axes)


def _label_ends(axes: Axes, lines: Sequence[_StreamLine]) -> None:
    """Write each label beside the end of its line, apart from the next."""
    height = float("inf")
    ordered = sorted(lines, key=lambda line: line.end, reverse=True)
    for below, line in zip(reversed(range(len(ordered))), ordered, strict=True):
        height = max(min(line.end, height - _STREAM_GAP), _STREAM_GAP * below)
        axes.text(
            1.015,
            height / 100,
            f"{line.label} {line.end:.0f}",
            transform=axes.transAxes,
            color=line.look["color"],
            weight=_weight(line.look["color"]),
            va="center",
        )


# Against the value of an option


def sweep_figure(sweep: Sweep, path: Path) -> None:
    """Draw ACC against the option that rows differ in, with a band of ± sd over seeds.

    A cross at the bottom is a value at which no seed has finished.

    Args:
        sweep: one of `syngap.bench.reporting.curves.sweeps`.
        path: the file to write; it ends in .svg or .pdf.
    """
    looks = _looks()
    with figure_file(path, (7, 4)) as figure:
        axes = figure.add_subplot(xlabel=sweep.name, ylabel="ACC, %")
        ends = []
        for line in sweep.lines:
            ours = line.method == _SUBJECT
            colour, dash = (INK, "-") if ours else next(looks, (SOFT, "-"))
            _draw_sweep_line(axes, sweep, line, colour, dash, 2.4 if ours else 1.7)
            ends.append((line.spreads("ACC")[-1].mean, line.label, colour))
        _scale(axes, sweep)
        remove_frame(axes)
        _draw_crosses(axes, sweep, [colour for *_, colour in ends])
        height = float("inf")
        for end, label, colour in sorted(ends, reverse=True):
            height = min(end, height - _SWEEP_GAP * axes.get_ylim()[1])
            axes.annotate(
                label, (_places(sweep)[-1], height), (10, 0), textcoords="offset points",
                color=colour, weight=_weight(colour), va="center", annotation_clip=False,
            )  # fmt: skip


def _draw_sweep_line(
    axes: Axes, sweep: Sweep, line: Line, colour: str, dash: object, width: float
) -> None:
    at = dict(zip(sweep.values, _places(sweep), strict=True))
    places = [at[value] for value in line.values]
    spreads = line.spreads("ACC")
    means = [spread.mean for spread in spreads]
    sds = [spread.sd or 0.0 for spread in spreads]
    _draw_band(axes, places, means, sds if any(sds) else [], colour)
    axes.plot(places, means, color=colour, linestyle=dash, linewidth=width)
    axes.plot(places, means, "o", color=colour, markersize=5)
    best = line.best
    axes.annotate(
        f"{means[best]:.1f}", (places[best], means[best]), (0, 7), textcoords="offset points",
        color=colour, ha="center", va="bottom", fontsize=10,
    )  # fmt: skip


def _draw_crosses(axes: Axes, sweep: Sweep, colours: Sequence[str]) -> None:
    at = dict(zip(sweep.values, _places(sweep), strict=True))
    for line, colour in zip(sweep.lines, colours, strict=True):
        for value in line.unfinished_rows:
            axes.plot([at[value]], [0.0], "x", color=colour, markersize=7, clip_on=False)


def _places(sweep: Sweep) -> list[float]:
    """Return where the values go: themselves on a log axis, else at equal distances."""
    return sweep.values if sweep.logarithmic else [float(n) for n in range(len(sweep.values))]


def _scale(axes: Axes, sweep: Sweep) -> None:
    from matplotlib.ticker import NullLocator

    places = _places(sweep)
    if sweep.logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(places, [f"{value:g}" for value in sweep.values])
    axes.set_ylim(0, 1.04 * axes.get_ylim()[1])


# Both


def _looks() -> Iterator[tuple[str, object]]:
    """Return a colour and dashes for each line but SynGAP's."""
    return iter(zip(COLOURS, DASHES * 2, strict=False))


def _weight(colour: str) -> str:
    return "bold" if colour == INK else "normal"


def _draw_band(
    axes: Axes, places: Sequence[float], means: Sequence[float], sds: Sequence[float], colour: str
) -> None:
    """Draw a band of ± sd around means; no sds, no band."""
    if sds:
        low = [mean - sd for mean, sd in zip(means, sds, strict=True)]
        high = [mean + sd for mean, sd in zip(means, sds, strict=True)]
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
