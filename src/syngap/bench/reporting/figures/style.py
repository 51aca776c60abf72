"""Shared style of the figures: colours, fonts, and reproducible files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syngap.bench.errors import UserError
from syngap.bench.storage import write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "DASHES",
    "FORMATS",
    "INK",
    "LINE",
    "SOFT",
    "figure_file",
    "ramp",
    "remove_frame",
]

FORMATS = ("svg", "pdf")
INK, SOFT, LINE = "#0a5bb0", "#59626d", "#d8dce1"
COLOURS = ("#cf4a0a", "#00855f", "#ad3f88", "#946500", "#2489bd")
DASHES = ((0, (5, 2)), (0, (6, 2, 1.5, 2)), (0, (1.5, 1.5)), (0, (8, 3)))
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so it is there
    "font.size": 11,
    "svg.fonttype": "path",  # the same letters wherever it is shown
    "svg.hashsalt": "syngap",  # the same names of elements each time
    "pdf.fonttype": 42,  # letters that journals accept
    "text.color": SOFT,
    "axes.labelcolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}
_NO_DATE = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@contextmanager
def figure_file(
    path: Path, size: tuple[float, float], *, compressed: bool = False
) -> Iterator[Figure]:
    """Yield a figure of `size` inches, then write it to `path` in the format of its suffix.

    With `compressed`, panels of a fixed shape move together. The background is white, so that a
    figure reads the same on a light page and on a dark one. The same drawing gives the same bytes.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    kind = path.suffix[1:]
    if kind not in FORMATS:
        raise UserError(f'"{path}": expected a name that ends in .svg or .pdf')
    with matplotlib.rc_context(_STYLE):
        margins = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, compress=compressed)
        figure = Figure(figsize=size, facecolor="white", layout=margins)
        yield figure
        content = io.BytesIO()
        figure.savefig(content, format=kind, metadata=_NO_DATE[kind])
    write(path, content.getvalue(), within=path.parent)


def remove_frame(axes: Axes, grid: str = "y") -> None:
    """Remove the box around a plot and draw a faint grid."""
    if grid:
        axes.grid(axis=grid, color=LINE, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)


def ramp(*colours: str) -> Any:
    """Return a colour map that runs through `colours`."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("syngap", list(colours))
