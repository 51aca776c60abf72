"""The figure of a fine-tuning experiment: forgetting against learning, a line for each method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

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


def frontier_figure(found: Comparison, path: Path) -> None:
    """Draw the frontier of each method, a panel for each kind of old text, the lowest seed's.

    Args:
        found: the comparison.
        path: of the file, .svg or .pdf.
    """
    with figure_file(path, (_WIDTH * len(found.old), 4.6)) as figure:
        panels = figure.subplots(1, len(found.old), squeeze=False)[0]
        for axes, kind in zip(panels, found.old, strict=True):
            for place, outcome in enumerate(found.outcomes):
                one = found.tried[outcome.family][outcome.seeds[0]]
                line = frontier(one.points, one.start, kind)
                colour, dash = _look(place, outcome.method)
                axes.plot(
                    *zip(*line, strict=True), color=colour, linestyle=dash, marker="o", markersize=3
                )
                _label(axes, outcome.family, line, colour)
            axes.set_title(f"old text: {kind}", fontsize=10)
            axes.set_xlabel(f"gain on {found.new}, nats a token →")
            axes.margins(x=0.15)
            remove_frame(axes)
        panels[0].set_ylabel("forgetting, nats a token (less is better)")
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


def _label(axes: Axes, text: str, line: Sequence[tuple[float, float]], colour: str) -> None:
    axes.annotate(
        text,
        line[-1],
        (4, 0),
        textcoords="offset points",
        fontsize=8,
        color=colour,
        va="center",
    )
