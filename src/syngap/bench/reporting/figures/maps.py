"""Maps: importance and plasticity by layer and task, and landscapes of the loss of task 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syngap.bench.reporting.figures.style import COLOURS, LINE, SOFT, figure_file, ramp
from syngap.bench.reporting.landscapes import contour_levels, landscape_labels
from syngap.bench.reporting.series import Layers, tensor_title
from syngap.bench.reporting.statistics import finite
from syngap.bench.store.surface import Grid, Landscape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar

__all__ = ["landscape_figure", "layers_figure"]

_LINE_HEIGHT = 0.165  # inches
_IMPORTANCE = ("#f4f7fa", "#5b93cc", "#082f5c")  # low to high
_PLASTICITY = ("#7d1d05", "#e8b48f", "#f6f8fa")  # low to high
_PATH = COLOURS[0]
_SHADES = ("#0a3a70", "#3d7fc0", "#a9cdea", "#f0f5f9")
_POINT_LABELS = {"initialisation": "start", "task 1": "task 1", "task 2": "task 2"}


def layers_figure(layers: Layers, title: str, path: Path) -> None:
    """Draw two heat maps side by side, tensors from the input to the output.

    Args:
        layers: of `syngap.bench.reporting.series.layers`, or some of them.
        title: the row's label.
        path: the file to write; it ends in .svg or .pdf.
    """
    from matplotlib.colors import LogNorm, Normalize

    quantities: list[tuple[list[list[float]], str, Any, Any]] = [
        (layers.plasticity, "plasticity", Normalize(0, 1), ramp(*_PLASTICITY)),
    ]
    if layers.importance is not None:
        flat = [value for row in layers.importance for value in row if value > 0]
        scale = LogNorm(min(flat, default=1), max(flat, default=10))
        label = "importance, in multiples of the network's mean"
        quantities.insert(0, (layers.importance, label, scale, ramp(*_IMPORTANCE)))
    with figure_file(path, (8, 1.5 + _LINE_HEIGHT * max(len(layers.names), 10))) as figure:
        panels: Any = figure.subplots(1, len(quantities), squeeze=False, sharey=True)
        for axes, (values, label, scale, shades) in zip(panels[0], quantities, strict=True):
            image = axes.imshow(
                values, norm=scale, cmap=shades, aspect="auto", interpolation="nearest"
            )
            _label_axes(axes, layers)
            bar = figure.colorbar(
                image, ax=axes, location="bottom", aspect=30, fraction=0.05, pad=0.02
            )
            _style_bar(bar, label)
        figure.suptitle(title, fontsize=11, color=SOFT)


def _label_axes(axes: Axes, layers: Layers) -> None:
    axes.set_yticks(range(len(layers.names)), list(map(tensor_title, layers.names)), fontsize=8)
    tasks = len(layers.plasticity[0])
    axes.set_xticks(range(tasks), [str(task + 1) for task in range(tasks)], fontsize=8)
    axes.set_xlabel("after task", fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


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
    steps = contour_levels(landscapes)
    shades = ramp(*_SHADES)
    columns = min(across, len(known))
    lines = math.ceil(len(known) / columns)
    titles = landscape_labels([found for found, _ in known])
    with figure_file(path, (2.75 * columns + 1.0, 3.15 * lines), compressed=True) as figure:
        panels: Any = figure.subplots(lines, columns, squeeze=False)
        norm = BoundaryNorm(steps, shades.N)
        for place, (_, grid) in enumerate(known):
            axes = panels[place // columns][place % columns]
            filled = axes.contourf(
                grid.x, grid.y, _clip(grid, steps), levels=steps, cmap=shades, norm=norm
            )
            axes.contour(
                grid.x, grid.y, _clip(grid, steps), levels=steps, colors="#0a3a70",
                linewidths=0.4, alpha=0.5,
            )  # fmt: skip
            _draw_path(axes, grid)
            axes.set_title(titles[place], fontsize=11, color=SOFT)
            axes.set_aspect("equal")
            axes.tick_params(length=0, labelsize=8)
            axes.spines[:].set_color(LINE)
        for spare in list(panels.flat)[len(known) :]:
            spare.set_visible(False)
        bar = figure.colorbar(filled, ax=panels, ticks=steps, aspect=25, pad=0.02)
        bar.ax.set_yticklabels([f"{step:g}" for step in steps])
        _style_bar(bar, "loss of task 1")
        kind = "random directions" if random else "directions of the path"
        figure.supxlabel(f"{kind}, in filter norms", fontsize=9, color=SOFT)


def _clip(grid: Grid, steps: Sequence[float]) -> list[list[float]]:
    """Return the loss between the lowest and the highest level; where it is not finite, highest."""

    def clip(loss: float | None) -> float:
        return steps[-1] if loss is None else min(max(loss, steps[0]), steps[-1])

    return [[clip(finite(value)) for value in row] for row in grid.loss]


def _draw_path(axes: Axes, grid: Grid) -> None:
    from matplotlib.patheffects import withStroke

    around = [withStroke(linewidth=3, foreground="white")]
    x, y = [place[0] for place in grid.path], [place[1] for place in grid.path]
    axes.plot(x, y, color=_PATH, linewidth=1.6, path_effects=around)
    axes.plot(x, y, ".", color=_PATH, markersize=4)
    for names, (across, up) in _merge_points(grid).items():
        axes.plot([across], [up], "o", color=_PATH, markersize=6, markeredgecolor="white")
        below = up <= 0
        axes.annotate(
            names, (across, up), (0, -7 if below else 7), textcoords="offset points", ha="center",
            va="top" if below else "bottom", fontsize=9, color="#1a1d21", path_effects=around,
        )  # fmt: skip


def _merge_points(grid: Grid) -> dict[str, tuple[float, float]]:
    """Return label → point; points that fall on each other share a label."""
    near = 0.04 * (grid.x[-1] - grid.x[0])
    found: list[tuple[list[str], tuple[float, float]]] = []
    for name, place in grid.points.items():
        same = next((names for names, other in found if math.dist(place, other) < near), None)
        if same is None:
            same = []
            found.append((same, place))
        same.append(_POINT_LABELS.get(name, name))
    return {", ".join(names): place for names, place in found}


def _style_bar(bar: Colorbar, label: str) -> None:
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8, length=2)
    bar.outline.set_visible(False)
