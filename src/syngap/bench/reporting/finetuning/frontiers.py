"""The figure of a fine-tuning experiment: forgetting against learning, a line for each method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from syngap.bench.finetuning.frontier import frontier
from syngap.bench.reporting.figures.style import (
    COLOURS,
    DASHES,
    FORMATS,
    INK,
    SOFT,
    figure_file,
    remove_frame,
)
from syngap.bench.reporting.finetuning.comparison import Comparison
from syngap.bench.reporting.finetuning.comparison_table import headline
from syngap.bench.storage import make_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["frontier_figure", "frontier_figures"]

_WIDTH = 5.2  # inches of a panel
_HEIGHT = 0.04  # of a name, as a share of a panel
_POINTS = 240.0  # of a panel's height, about


class _End(NamedTuple):
    """Where a line ends, and its name."""

    name: str
    gain: float
    forgot: float
    colour: str


def frontier_figure(found: Comparison, path: Path) -> None:
    """Draw the frontier of each method, a panel for each kind of old text, the lowest seed's.

    Args:
        found: the comparison.
        path: of the file, .svg or .pdf.
    """
    with figure_file(path, (_WIDTH * len(found.old), 4.6)) as figure:
        panels = figure.subplots(1, len(found.old), squeeze=False)[0]
        for axes, kind in zip(panels, found.old, strict=True):
            ends: list[_End] = []
            for place, outcome in enumerate(found.outcomes):
                one = found.tried[outcome.family][outcome.seeds[0]]
                line = frontier(one.points, one.start, kind)
                colour, dash = _look(place, outcome.method)
                axes.plot(
                    *zip(*line, strict=True), color=colour, linestyle=dash, marker="o", markersize=3
                )
                ends.append(_End(outcome.family, *line[-1], colour))
            _label(axes, ends)
            axes.set_title(f"{found.task.old}: {kind}", fontsize=10)
            axes.set_xlabel(f"gain on {found.new}, {found.task.gain_unit} →")
            axes.margins(x=0.15)
            remove_frame(axes)
        panels[0].set_ylabel(f"forgetting, {found.task.forgetting_unit} (less is better)")
        figure.suptitle(fill(headline(found), 90), fontsize=11)


def frontier_figures(
    found: Comparison, folder: Path, *, within: Path
) -> tuple[list[Path], list[str]]:
    """Draw the figure into a folder, as SVG and as PDF; return the files, as `every_figure`."""
    make_folder(folder, within=within)
    paths = [folder / f"frontiers.{kind}" for kind in FORMATS]
    for path in paths:
        frontier_figure(found, path)
    return paths, []


def _look(place: int, method: str) -> tuple[str, object]:
    if method == "protect":
        return INK, "-"
    if method == "adamw":
        return SOFT, "-"
    return COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]


def _label(axes: Axes, ends: Sequence[_End]) -> None:
    """Name each line at its end, names no closer to each other than they are high."""
    low, high = axes.get_ylim()
    lowest = low
    for end in sorted(ends, key=lambda end: end.forgot):
        place = max(end.forgot, lowest)
        lowest = place + _HEIGHT * (high - low)
        axes.annotate(
            end.name,
            (end.gain, end.forgot),
            (6, (place - end.forgot) / (high - low) * _POINTS),
            textcoords="offset points",
            fontsize=8,
            color=end.colour,
            va="center",
        )
