"""Figures of what methods forget: along the frontiers, and against the size of the model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from finetuning.analysis import compare, curves, groups_in, whole_seeds
from finetuning.tables import plain_label, two_digits
from syngap.bench.intervals import half_interval
from syngap.bench.reporting.figures.style import COLOURS, INK, SOFT, figure_file, remove_frame

__all__ = ["draw_frontiers", "draw_sizes"]

SIZE_STYLES = {  # colour and dashes of the methods that `draw_sizes` shows
    "ewc": (COLOURS[1], ":"),
    "rotated": (COLOURS[0], "--"),
    "rotated_gate": (INK, "--"),
    "rotated_back": (COLOURS[0], "-"),
    "rotated_gate_back": (INK, "-"),
}
RULE_COLOURS = {"adamw": COLOURS[0], "gate": INK, "ewc": COLOURS[1]}
# Of plain weights, rotated ones, and interpolation with the start, without and with rotation.
DASHES = (":", "--", "-", "-")


def draw_sizes(paths: Iterable[Path], picture: Path) -> None:
    """Draw forgetting relative to AdamW against the model's size, a line for each method."""
    every = compare(paths)
    first = (every[0].old, every[0].new)
    columns = [column for column in every if (column.old, column.new) == first]
    with figure_file(picture, (7, 4)) as figure:
        axes = figure.subplots()
        axes.axhline(1, color=COLOURS[0], linestyle=":", label="AdamW")
        for index, (method, (colour, dashes)) in enumerate(SIZE_STYLES.items()):
            known = [c for c in columns if method in c.ratios]
            places = [c.millions * 1.08 ** (index - 2) for c in known]  # beside each other
            means = [fmean(c.ratios[method]) for c in known]
            label = plain_label(method)
            axes.plot(places, means, "o", linestyle=dashes, color=colour, label=label)
            for place, mean, column in zip(places, means, known, strict=True):
                if len(each := column.ratios[method]) > 1:
                    interval = half_interval(stdev(each), len(each))
                    axes.plot([place] * 2, [mean - interval, mean + interval], color=colour)
        axes.set(xscale="log", xlabel="million parameters", ylabel="forgetting relative to AdamW")
        axes.set_xticks([c.millions for c in columns], [two_digits(c.millions) for c in columns])
        axes.set_xticks([], minor=True)
        remove_frame(axes, "both")
        figure.legend(loc="outside right upper", frameon=False)


def draw_frontiers(path: Path, picture: Path) -> None:
    """Draw old against new loss along the frontiers, a mean over seeds at each level."""
    groups = groups_in([path])
    sizes, pairs = (
        list(dict.fromkeys(group[part] for group, _ in groups)) for part in (slice(1), slice(1, 3))
    )
    with figure_file(picture, (5 * len(pairs) + 2.5, 4 * len(sizes))) as figure:
        lines: dict[str, Any] = {}
        for group, rows in groups:
            place = sizes.index(group[:1]) * len(pairs) + pairs.index(group[1:3]) + 1
            axes = figure.add_subplot(len(sizes), len(pairs), place)
            axes.set_title(f"{group[0]}: {group[1]} to {group[2]}")
            axes.set(xlabel=f"loss on {group[2]}, nats a byte", ylabel=f"loss on {group[1]}")
            by_seed = [curves(part, np.linspace(0, 1, 41)) for part in whole_seeds(rows).values()]
            for method in by_seed[0]:
                new, old, _ = np.mean([curve[method] for curve in by_seed], 0)
                (line,) = axes.plot(new, old, **line_style(method))
                lines.setdefault(method, line)
            remove_frame(axes, "both")
        labels = [plain_label(method) for method in lines]
        figure.legend(lines.values(), labels, loc="outside right upper", frameon=False)


def line_style(method: str) -> dict[str, Any]:
    """Return a colour for the rule, and dashes for rotation and interpolation."""
    words = method.split("_")
    rule = "_".join(word for word in words if word not in ("rotated", "back")) or "adamw"
    look = ("rotated" in words) + 2 * ("back" in words)
    return {
        "color": RULE_COLOURS.get(rule, SOFT),
        "linestyle": DASHES[look],
        "linewidth": 2.6 if look == 3 else 1.4,
    }
