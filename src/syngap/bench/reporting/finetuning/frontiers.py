"""The figure of a fine-tuning experiment: forgetting against learning, a line for each method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from syngap.bench.finetuning.frontier import as_trained, frontier
from syngap.bench.reporting.figures.style import (
    COLOURS,
    DASHES,
    FORMATS,
    INK,
    SOFT,
    figure_file,
    remove_frame,
)
from syngap.bench.reporting.finetuning.comparison import BASELINE, Comparison, Outcome
from syngap.bench.reporting.finetuning.comparison_table import headline
from syngap.bench.storage import make_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MOST", "drawn_outcomes", "frontier_figure", "frontier_figures"]

MOST = 8  # methods in a figure: more lines are too many to follow
_WIDTH = 3.4  # inches of a panel
_LEAST = 4.4  # inches of a figure
_LETTERS = 7.8  # of the title, an inch
_ROOM = 1.25  # times what AdamW forgets where it learns most: the rest is left out
_FIRST = 0.65  # of what AdamW learns at its best: less is left out
_NAMES = 0.22  # of a panel's width, for names beside the ends of lines
_HEIGHT = 0.04  # of a name, as a share of a panel
_POINTS = 240.0  # of a panel's height, about


class _End(NamedTuple):
    """Where a line ends, and its name."""

    name: str
    gain: float
    forgot: float
    colour: str


def frontier_figure(found: Comparison, path: Path, kind: str | None = None) -> None:
    """Draw the frontier of the first methods, a panel for each kind of old text, the lowest seed's.

    Of several rows of one method the first has a name, and the others are thin lines.

    Args:
        found: the comparison.
        path: of the file, .svg or .pdf.
        kind: draw this one alone, without the headline; None draws all.
    """
    kinds = found.old if kind is None else [kind]
    width = max(_LEAST, _WIDTH * len(kinds))
    with figure_file(path, (width, 4.2 if kind is None else 3.6)) as figure:
        panels = figure.subplots(1, len(kinds), squeeze=False)[0]
        for axes, each in zip(panels, kinds, strict=True):
            _panel(axes, found, each)
        panels[0].set_ylabel(f"forgetting, {found.task.forgetting_unit} (less is better)")
        if kind is None:
            figure.suptitle(fill(headline(found), int(_LETTERS * width)), fontsize=12)


def drawn_outcomes(found: Comparison) -> list[Outcome]:
    """Return the rows with all seeds, of AdamW, `protect` and the experiment's first methods."""
    base = found.baseline
    seeds = {outcome.family: len(outcome.seeds) for outcome in found.outcomes}
    complete = min(seeds[base], max((seeds[row] for row in seeds if row != base), default=0))
    whole = [one for one in found.outcomes if one.family == base or seeds[one.family] >= complete]
    methods = list(dict.fromkeys(outcome.method for outcome in whole))
    first = sorted(methods, key=lambda method: method not in (BASELINE, "protect"))[:MOST]
    return [outcome for outcome in whole if outcome.method in first]


def _panel(axes: Axes, found: Comparison, kind: str) -> None:
    ends: list[_End] = []
    looks: dict[str, tuple[str, object]] = {}
    for outcome in drawn_outcomes(found):
        one = found.tried[outcome.family][outcome.seeds[0]]
        line = frontier(one.points, one.start, kind)
        gains, forgot = zip(*line, strict=True)
        if outcome.method in looks:  # the same method with other options
            colour, dash = looks[outcome.method]
            axes.plot(gains, forgot, color=colour, linestyle=dash, linewidth=0.5, alpha=0.6)
            continue
        colour, dash = looks[outcome.method] = _look(len(looks), outcome.method)
        axes.plot(gains, forgot, color=colour, linestyle=dash, marker="o", markersize=3)
        ends.append(_End(outcome.label, *line[-1], colour))
    _label(axes, _leave_out_the_rest(axes, found, kind, ends))
    axes.set_title(f"{found.task.old}: {kind}", fontsize=11)
    axes.set_xlabel(f"gain on {found.new}, {found.task.gain_unit} →")
    remove_frame(axes)


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


def _leave_out_the_rest(
    axes: Axes, found: Comparison, kind: str, ends: Sequence[_End]
) -> list[_End]:
    """Mark where AdamW learns most, show what is near it, and return where lines then end.

    Rates that are too high forget several times as much, and would leave no room for the others.
    """
    one = found.tried[found.baseline][min(found.tried[found.baseline])]
    gain, forgot = frontier(as_trained(one.points), one.start, kind)[-1]
    axes.plot(gain, forgot, marker="o", markersize=9, markerfacecolor="none", color=SOFT)
    axes.annotate(
        "AdamW as trained",
        (gain, forgot),
        (-9, 0),
        textcoords="offset points",
        fontsize=9,
        ha="right",
        va="center",
    )
    first = min(_FIRST * gain, *(end.gain for end in ends)) if gain > 0 else None
    if first is not None:
        last = max(gain, *(end.gain for end in ends))
        axes.set_xlim(first - 0.02 * (last - first), last + _NAMES / (1 - _NAMES) * (last - first))
    top = _ROOM * forgot
    if forgot <= 0 or all(end.forgot <= top for end in ends):
        return list(ends)
    axes.set_ylim(top=top)
    return [end if end.forgot <= top else end._replace(forgot=top) for end in ends]


def _label(axes: Axes, ends: Sequence[_End]) -> None:
    """Name each line at its end, names no closer to each other than they are high."""
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end.forgot)
    places = _spread([(end.forgot - low) / (high - low) for end in ends], _HEIGHT)
    for end, place in zip(ends, places, strict=True):
        axes.annotate(
            end.name,
            (end.gain, end.forgot),
            (6, (place - (end.forgot - low) / (high - low)) * _POINTS),
            textcoords="offset points",
            fontsize=10,
            color=end.colour,
            va="center",
        )


def _spread(places: Sequence[float], gap: float) -> list[float]:
    """Return ascending places with a gap between them, the last at most at 1.

    Examples:
        >>> _spread([0.25, 0.25, 1.0, 1.0], 0.25)
        [0.25, 0.5, 0.75, 1.0]
    """
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + gap) if found else place)
    highest = 1.0
    for number in range(len(found) - 1, -1, -1):
        found[number] = min(found[number], highest)
        highest = found[number] - gap
    return found
