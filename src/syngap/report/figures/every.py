"""All figures that a folder has the data for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from syngap.errors import UserError
from syngap.experiments.folder import Run
from syngap.experiments.landscapes.surface import Landscape
from syngap.report.figures.gate import plasticity_figure
from syngap.report.figures.heat import layers_figure
from syngap.report.figures.stream import accuracy_figure
from syngap.report.figures.style import FORMATS
from syngap.report.figures.surface import landscape_figure
from syngap.report.figures.sweep import sweep_figure
from syngap.report.headline import subject
from syngap.report.layers import is_weight, layers
from syngap.report.rows import Row, rows
from syngap.report.sweeps import sweeps
from syngap.storage import make_folder

__all__ = ["every_figure"]


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
        folder: made where it is not there.
        within: the folder that the user named, where it is one above `folder`.

    Returns:
        The files, and why others are not among them.
    """
    make_folder(folder, within=within or folder)
    written, reasons = [], []
    for name, draw in _figures(runs, landscapes).items():
        paths = [folder / f"{name}.{kind}" for kind in FORMATS]
        if reason := _attempted(draw, paths):
            reasons.append(f"{name}: {reason}")
        else:
            written += paths
    return written, reasons


def _attempted(draw: Callable[[Path], None], paths: Sequence[Path]) -> str:
    """Draw, or return why not."""
    try:
        for path in paths:
            draw(path)
    except UserError as error:
        return str(error)
    return ""


def _figures(
    runs: Sequence[Run], landscapes: Sequence[Landscape]
) -> dict[str, Callable[[Path], None]]:
    """Return name → what draws it."""
    found: dict[str, Callable[[Path], None]] = {"plasticity": plasticity_figure}
    if runs:
        found["stream"] = partial(accuracy_figure, runs)
    gathered = rows(runs)
    for sweep in sweeps(gathered):
        found[f"by-{sweep.option}"] = partial(sweep_figure, sweep)
    telling = [(row, told) for row in gathered if (told := layers(_finished(runs, row)))]
    if telling:  # one row's: they hardly differ, and the page has them all
        ours = subject(gathered)
        row, told = next((pair for pair in telling if pair[0] is ours), telling[0])
        weights = [name for name in told.names if is_weight(name)]
        others = [name for name in told.names if not is_weight(name)]
        for kind, names in {"layers": weights, "layers-norms-and-biases": others}.items():
            if names:
                found[kind] = partial(layers_figure, told.only(names), row.label)
    if landscapes:
        found["landscape"] = partial(landscape_figure, landscapes)
    if any(landscape.random for landscape in landscapes):
        found["landscape-random"] = partial(landscape_figure, landscapes, random=True)
    return found


def _finished(runs: Sequence[Run], row: Row) -> list[Run]:
    return [run for run in runs if run.row == row.name and run.done]
