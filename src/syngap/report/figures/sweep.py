"""Accuracy against the value of an option: the learning rate above all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from syngap.report.figures.style import COLOURS, DASHES, INK, SOFT, bare, drawn
from syngap.report.sweeps import Line, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["sweep_figure"]

_SUBJECT = "syngap"
_ROOM = 0.06  # between labels, as a share of the axis


def sweep_figure(sweep: Sweep, path: Path) -> None:
    """Draw ACC against the option that rows differ in, with a band of ± sd over seeds.

    A cross at the bottom is a value at which no seed has finished.

    Args:
        sweep: what `syngap.report.sweeps.sweeps` found.
        path: the file to write; it ends in .svg or .pdf.
    """
    looks = iter(zip(COLOURS, DASHES * 2, strict=False))
    with drawn(path, (7, 4)) as figure:
        axes = figure.add_subplot(xlabel=sweep.name, ylabel="ACC, %")
        ends = []
        for line in sweep.lines:
            ours = line.method == _SUBJECT
            colour, dash = (INK, "-") if ours else next(looks, (SOFT, "-"))
            _draw(axes, sweep, line, colour, dash, 2.4 if ours else 1.7)
            ends.append((line.spreads("ACC")[-1].mean, line.label, colour))
        _scale(axes, sweep)
        bare(axes)
        _crosses(axes, sweep, [colour for *_, colour in ends])
        height = float("inf")
        for end, label, colour in sorted(ends, reverse=True):
            height = min(end, height - _ROOM * axes.get_ylim()[1])
            weight = "bold" if colour == INK else "normal"
            place = (_places(sweep)[-1], height)
            axes.annotate(
                label, place, (10, 0), textcoords="offset points", color=colour, weight=weight,
                va="center", annotation_clip=False,
            )  # fmt: skip


def _draw(axes: Axes, sweep: Sweep, line: Line, colour: str, dash: object, width: float) -> None:
    at = dict(zip(sweep.values, _places(sweep), strict=True))
    places = [at[value] for value in line.values]
    spreads = line.spreads("ACC")
    means = [spread.mean for spread in spreads]
    around = [spread.sd or 0.0 for spread in spreads]
    if any(around):
        low = [mean - sd for mean, sd in zip(means, around, strict=True)]
        high = [mean + sd for mean, sd in zip(means, around, strict=True)]
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(places, means, color=colour, linestyle=dash, linewidth=width)
    axes.plot(places, means, "o", color=colour, markersize=5)
    best = line.best
    axes.annotate(
        f"{means[best]:.1f}", (places[best], means[best]), (0, 7), textcoords="offset points",
        color=colour, ha="center", va="bottom", fontsize=10,
    )  # fmt: skip


def _crosses(axes: Axes, sweep: Sweep, colours: Sequence[str]) -> None:
    at = dict(zip(sweep.values, _places(sweep), strict=True))
    for line, colour in zip(sweep.lines, colours, strict=True):
        for value in line.lost:
            axes.plot([at[value]], [0.0], "x", color=colour, markersize=7, clip_on=False)


def _places(sweep: Sweep) -> list[float]:
    """Return where the values go: themselves on a log axis, else side by side as tried."""
    return sweep.values if sweep.logarithmic else [float(n) for n in range(len(sweep.values))]


def _scale(axes: Axes, sweep: Sweep) -> None:
    from matplotlib.ticker import NullLocator

    places = _places(sweep)
    if sweep.logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(places, [f"{value:g}" for value in sweep.values])
    axes.set_ylim(0, 1.04 * axes.get_ylim()[1])
