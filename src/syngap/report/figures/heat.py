"""Importance and plasticity of every tensor after every task, from the input to the output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from syngap.report.figures.style import SOFT, drawn, ramp
from syngap.report.layers import Layers
from syngap.report.layers import title as titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["layers_figure"]

_LINE_HEIGHT = 0.165  # inches
_LOW_TO_HIGH = ("#f4f7fa", "#5b93cc", "#082f5c")
_CLOSED_TO_OPEN = ("#7d1d05", "#e8b48f", "#f6f8fa")


def layers_figure(layers: Layers, title: str, path: Path) -> None:
    """Draw two heat maps side by side, tensors from the input to the output.

    Args:
        layers: what `syngap.report.layers.layers` found, or some of it.
        title: whose they are.
        path: the file to write; it ends in .svg or .pdf.
    """
    from matplotlib.colors import LogNorm, Normalize

    quantities: list[tuple[list[list[float]], str, Any, Any]] = [
        (layers.plasticity, "plasticity", Normalize(0, 1), ramp(*_CLOSED_TO_OPEN)),
    ]
    if layers.importance is not None:
        flat = [value for row in layers.importance for value in row if value > 0]
        scale = LogNorm(min(flat, default=1), max(flat, default=10))
        label = "importance, in multiples of the network's mean"
        quantities.insert(0, (layers.importance, label, scale, ramp(*_LOW_TO_HIGH)))
    with drawn(path, (8, 1.5 + _LINE_HEIGHT * max(len(layers.names), 10))) as figure:
        panels: Any = figure.subplots(1, len(quantities), squeeze=False, sharey=True)
        for axes, (values, label, scale, shades) in zip(panels[0], quantities, strict=True):
            image = axes.imshow(
                values, norm=scale, cmap=shades, aspect="auto", interpolation="nearest"
            )
            _frame(axes, layers)
            _bar(figure, image, axes, label)
        figure.suptitle(title, fontsize=11, color=SOFT)


def _frame(axes: Axes, layers: Layers) -> None:
    axes.set_yticks(range(len(layers.names)), list(map(titled, layers.names)), fontsize=8)
    tasks = len(layers.plasticity[0])
    axes.set_xticks(range(tasks), [str(task + 1) for task in range(tasks)], fontsize=8)
    axes.set_xlabel("after task", fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _bar(figure: Figure, image: Any, axes: Axes, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, location="bottom", aspect=30, fraction=0.05, pad=0.02)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8, length=2)
    bar.outline.set_visible(False)
