"""Figures for documents, drawn by matplotlib, which is imported when one is asked for."""

from syngap.report.figures.every import every_figure
from syngap.report.figures.gate import plasticity_figure
from syngap.report.figures.heat import layers_figure
from syngap.report.figures.stream import accuracy_figure
from syngap.report.figures.surface import landscape_figure
from syngap.report.figures.sweep import sweep_figure

__all__ = [
    "accuracy_figure",
    "every_figure",
    "landscape_figure",
    "layers_figure",
    "plasticity_figure",
    "sweep_figure",
]
