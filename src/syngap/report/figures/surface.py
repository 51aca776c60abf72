"""The loss of task 1 around the path of each method, side by side on one scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syngap.experiments.landscapes.surface import Grid, Landscape
from syngap.report.figures.style import COLOURS, LINE, SOFT, drawn, ramp
from syngap.report.levels import levels
from syngap.report.surfaces import named

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["landscape_figure"]

_PATH = COLOURS[0]
_SHADES = ("#0a3a70", "#3d7fc0", "#a9cdea", "#f0f5f9")
_BESIDE = {"initialisation": "start", "task 1": "task 1", "task 2": "task 2"}


def landscape_figure(
    landscapes: Sequence[Landscape], path: Path, *, random: bool = False, across: int = 3
) -> None:
    """Draw contours of the loss, the path and its three networks for each landscape.

    Args:
        landscapes: at least one.
        path: the file to write; it ends in .svg or .pdf.
        random: whether to draw the planes of random directions instead.
        across: panels in a row.
    """
    from matplotlib.colors import BoundaryNorm

    grids = [found.random if random else found.grid for found in landscapes]
    known = [(found, grid) for found, grid in zip(landscapes, grids, strict=True) if grid]
    # Of both planes, so that a colour means the same in either figure.
    steps = levels([grid for found in landscapes for grid in (found.grid, found.random) if grid])
    shades = ramp(*_SHADES)
    columns = min(across, len(known))
    lines = math.ceil(len(known) / columns)
    titles = named([found for found, _ in known])
    with drawn(path, (2.75 * columns + 1.0, 3.15 * lines), compressed=True) as figure:
        panels: Any = figure.subplots(lines, columns, squeeze=False)
        norm = BoundaryNorm(steps, shades.N)
        for place, (_, grid) in enumerate(known):
            axes = panels[place // columns][place % columns]
            filled = axes.contourf(
                grid.x, grid.y, _bounded(grid, steps), levels=steps, cmap=shades, norm=norm
            )
            axes.contour(
                grid.x, grid.y, _bounded(grid, steps), levels=steps, colors="#0a3a70",
                linewidths=0.4, alpha=0.5,
            )  # fmt: skip
            _way(axes, grid)
            axes.set_title(titles[place], fontsize=11, color=SOFT)
            axes.set_aspect("equal")
            axes.tick_params(length=0, labelsize=8)
            axes.spines[:].set_color(LINE)
        for spare in list(panels.flat)[len(known) :]:
            spare.set_visible(False)
        bar = figure.colorbar(filled, ax=panels, ticks=steps, aspect=25, pad=0.02)
        bar.ax.set_yticklabels([f"{step:g}" for step in steps])
        bar.set_label("loss of task 1", fontsize=9)
        bar.ax.tick_params(labelsize=8, length=2)
        bar.outline.set_visible(False)
        kind = "random directions" if random else "directions of the path"
        figure.supxlabel(f"{kind}, in filter norms", fontsize=9, color=SOFT)


def _bounded(grid: Grid, steps: Sequence[float]) -> list[list[float]]:
    """Return the loss between the lowest and the highest level; what is not finite is highest."""
    return [
        [steps[-1] if v is None else min(max(v, steps[0]), steps[-1]) for v in row]
        for row in grid.loss
    ]


def _way(axes: Axes, grid: Grid) -> None:
    from matplotlib.patheffects import withStroke

    around = [withStroke(linewidth=3, foreground="white")]
    x, y = [place[0] for place in grid.path], [place[1] for place in grid.path]
    axes.plot(x, y, color=_PATH, linewidth=1.6, path_effects=around)
    axes.plot(x, y, ".", color=_PATH, markersize=4)
    for names, (across, up) in _apart(grid).items():
        axes.plot([across], [up], "o", color=_PATH, markersize=6, markeredgecolor="white")
        below = up <= 0
        axes.annotate(
            names, (across, up), (0, -7 if below else 7), textcoords="offset points", ha="center",
            va="top" if below else "bottom", fontsize=9, color="#1a1d21", path_effects=around,
        )  # fmt: skip


def _apart(grid: Grid) -> dict[str, tuple[float, float]]:
    """Return the points with their names, those that fall on each other with all of theirs."""
    near = 0.04 * (grid.x[-1] - grid.x[0])
    found: list[tuple[list[str], tuple[float, float]]] = []
    for name, place in grid.points.items():
        same = next((names for names, other in found if math.dist(place, other) < near), None)
        if same is None:
            same = []
            found.append((same, place))
        same.append(_BESIDE.get(name, name))
    return {", ".join(names): place for names, place in found}
