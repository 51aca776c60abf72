"""The plasticity g(F): the share of an update that a parameter of importance F takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from syngap.bench.reporting.figures.style import COLOURS, INK, SOFT, figure_file, remove_frame
from syngap.optim.plasticity import plasticity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plasticity_figure"]

_MEANS = {0.1: COLOURS[1], 1.0: INK, 10.0: COLOURS[2]}
_CONSOLIDATIONS = {0.03: COLOURS[1], 0.1: INK, 0.5: COLOURS[3], 0.9: COLOURS[0]}
_USUAL = 0.1
_LOW, _HIGH = 1e-2, 1e3


def plasticity_figure(path: Path) -> None:
    """Draw g(F) for several means of F, and for several τ; no data are needed.

    Args:
        path: the file to write; it ends in .svg or .pdf.
    """
    with figure_file(path, (8, 3.6)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for mean, colour in _MEANS.items():
            _curve(left, mean, _USUAL, colour, f"μ = {mean:g}")
        for consolidation, colour in _CONSOLIDATIONS.items():
            _curve(right, 1.0, consolidation, colour, f"τ = {consolidation:g}")
        left.set_title(f"as the mean importance μ moves, τ = {_USUAL:g}", fontsize=10, color=SOFT)
        right.set_title("as τ moves, μ = 1", fontsize=10, color=SOFT)
        left.set_ylabel("plasticity g(F)")
        for axes in (left, right):
            axes.set(
                xscale="log",
                xlim=(_LOW, _HIGH),
                ylim=(0, 1.05),
                xlabel="importance F (dots: F = μ)",
            )
            remove_frame(axes)
            axes.legend(frameon=False, fontsize=10, labelcolor="linecolor", loc="upper right")


def _curve(axes: Axes, mean: float, consolidation: float, colour: str, label: str) -> None:
    places = _linspace(_LOW, _HIGH, 400)
    shares = plasticity(_tensor(places), mean, consolidation=consolidation).tolist()
    axes.plot(places, shares, color=colour, linewidth=2.0, label=label)
    at_mean = plasticity(_tensor([mean]), mean, consolidation=consolidation).tolist()
    axes.plot([mean], at_mean, "o", color=colour, markersize=5)  # F = μ


def _tensor(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _linspace(low: float, high: float, count: int) -> list[float]:
    """Return values between two others, equal ratios apart."""
    ratio = math.log(high / low) / (count - 1)
    return [low * math.exp(ratio * place) for place in range(count)]
