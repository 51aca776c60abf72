"""Figures for documents, drawn by matplotlib, which is imported when a figure is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from syngap.bench.errors import UserError
from syngap.bench.reporting.curves import sweeps
from syngap.bench.reporting.figures.lines import accuracy_figure, sweep_figure
from syngap.bench.reporting.figures.maps import landscape_figure, layers_figure
from syngap.bench.reporting.figures.plasticity import plasticity_figure
from syngap.bench.reporting.figures.style import FORMATS
from syngap.bench.reporting.headline import subject
from syngap.bench.reporting.rows import finished_runs, rows
from syngap.bench.reporting.series import is_weight, layers
from syngap.bench.storage import make_folder
from syngap.bench.store.folder_reader import Run
from syngap.bench.store.surface import Landscape

__all__ = [
    "accuracy_figure",
    "every_figure",
    "landscape_figure",
    "layers_figure",
    "plasticity_figure",
    "sweep_figure",
]


def every_figure(
    runs: Sequence[Run],
    landscapes: Sequence[Landscape],
    folder: Path,
    *,
    within: Path | None = None,
) -> tuple[list[Path], list[str]]:
    """Draw everything that can be drawn into `folder`, each as SVG and as PDF.

    Args:
        runs: every run of an experiment.
        landscapes: that were computed for it.
        folder: created where it does not exist.
        within: the folder that the user named, where it is one above `folder`.

    Returns:
        The files, and why others are not among them.
    """
    make_folder(folder, within=within or folder)
    written, reasons = [], []
    for name, draw in _figures(runs, landscapes).items():
        paths = [folder / f"{name}.{kind}" for kind in FORMATS]
        if reason := _try(draw, paths):
            reasons.append(f"{name}: {reason}")
        else:
            written += paths
    return written, reasons


def _try(draw: Callable[[Path], None], paths: Sequence[Path]) -> str:
    """Draw, or return the reason why there is nothing to draw."""
    try:
        for path in paths:
            draw(path)
    except UserError as error:
        return str(error)
    return ""


def _figures(
    runs: Sequence[Run], landscapes: Sequence[Landscape]
) -> dict[str, Callable[[Path], None]]:
    """Return name → the function that draws it."""
    found: dict[str, Callable[[Path], None]] = {"plasticity": plasticity_figure}
    if runs:
        found["stream"] = partial(accuracy_figure, runs)
    gathered = rows(runs)
    for sweep in sweeps(gathered):
        found[f"by-{sweep.option}"] = partial(sweep_figure, sweep)
    by_layer = [(row, own) for row in gathered if (own := layers(finished_runs(runs, row)))]
    if by_layer:  # of one row: rows hardly differ, and the page has them all
        ours = subject(gathered)
        row, own = next((pair for pair in by_layer if pair[0] is ours), by_layer[0])
        weights = [name for name in own.names if is_weight(name)]
        others = [name for name in own.names if not is_weight(name)]
        for kind, names in {"layers": weights, "layers-norms-and-biases": others}.items():
            if names:
                found[kind] = partial(layers_figure, own.only(names), row.label)
    if landscapes:
        found["landscape"] = partial(landscape_figure, landscapes)
    if any(landscape.random for landscape in landscapes):
        found["landscape-random"] = partial(landscape_figure, landscapes, random=True)
    return found
