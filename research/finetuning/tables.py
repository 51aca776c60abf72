"""Tables in Markdown of what methods learn and forget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from finetuning.analysis import (
    BEST,
    LEVELS,
    Comparison,
    compare,
    curves,
    end_points,
    forgetting_ratio,
    groups_in,
    levels_reached,
    whole_seeds,
)
from syngap.bench.intervals import half_interval

__all__ = ["plain_label", "print_recipe", "print_summary", "print_table", "two_digits"]

SUMMARY_LEVELS = (0.5, 0.8, 0.95)  # those of `LEVELS` that the summary shows
LABELS = {
    "adamw": "AdamW",
    "gate": "gate on AdamW's update",
    "ewc": "EWC with the same importance",
    "l2": "L2 to the start",
    "gate_ewc": "gate and EWC",
    "rotated": "rotated",
    "rotated_gate": "rotated, gate",
    "rotated_ewc": "rotated, EWC",
    "back": "interpolated",
    "rotated_back": "rotated, interpolated",
    "rotated_gate_back": "**rotated, gate, interpolated**",
    "rotated_ewc_back": "rotated, EWC, interpolated",
}
GATE = {"rotated": True, "consolidation": 0.9999, "source": "own"}
RECIPES: dict[str, dict[str, Any]] = {
    "AdamW, keeping 80 %": {"way": 0.8},
    "rotated": {"rotated": True},
    "rotated, keeping 80 %": {"rotated": True, "way": 0.8},
    "rotated, gate": GATE,
    "**rotated, gate, keeping 85 %**": GATE | {"way": 0.85},
    "rotated, gate, keeping 70 %": GATE | {"way": 0.7},
}


def plain_label(method: str) -> str:
    return LABELS.get(method, method).strip("*")


def two_digits(number: float) -> str:
    return f"{float(f'{number:.2g}'):g}"


def print_head(title: str, columns: list[str]) -> None:
    print(f"| {title} | {' | '.join(columns)} |")
    print("|---|" + "---:|" * len(columns))


def print_row(label: str, cells: Iterable[str]) -> None:
    print(f"| {label} | {' | '.join(cells)} |")


def with_interval(values: Iterable[float]) -> str:
    """Return mean and 95 % interval of the values that are numbers."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ""
    interval = f" ± {half_interval(stdev(known), len(known)):.2f}" if len(known) > 1 else ""
    return f"{fmean(known):.2f}{interval}"


def print_summary(path: Path) -> None:
    """Print a table for every size and pair: forgetting by method, and relative to rivals."""
    for (size, old, new, *_), rows in groups_in([path]):
        seeds = whole_seeds(rows)
        by_seed = [curves(part, LEVELS) for part in seeds.values()]
        starts = [row for part in seeds.values() for row in part if row["method"] == "start"]
        before = [fmean(row[name] for row in starts) for name in ("old_loss", "new_loss")]
        names = ", ".join(f"{seed:g}" for seed in seeds)
        count = starts[0]["parameters"] / 1e6
        print(f"\n### {size} ({count:.3g} M parameters), {old} to {new}, seeds {names}\n")
        print(f"Before fine-tuning: old {before[0]:.3f}, new {before[1]:.3f}.\n")
        levels = [f"forgotten at {share:.0%}" for share in SUMMARY_LEVELS]
        print_head("method", ["runs", "levels reached", *levels, "of AdamW's", "of EWC's"])
        for method in by_seed[0]:
            own = [curve[method] for curve in by_seed]
            runs = {r["values"] for part in seeds.values() for r in part if r["method"] == method}
            cells = [f"{len(runs)}", f"{levels_reached(own):.3g} of {len(LEVELS)}"]
            for share in SUMMARY_LEVELS:
                forgotten = [curve[2][LEVELS.index(share)] for curve in own]
                whole = all(map(math.isfinite, forgotten))
                cells.append(f"{fmean(forgotten):.3f}" if whole else "")
            cells += [
                with_interval(forgetting_ratio(c[method], c[rival]) for c in by_seed if rival in c)
                for rival in ("adamw", "ewc")
            ]
            print_row(method, cells)


def print_table(paths: Iterable[Path]) -> None:
    """Print one table of all sizes and pairs: forgetting relative to AdamW by method."""
    columns = compare(paths)
    heads = [f"{c.old} to {c.new}, {two_digits(c.millions)} M" for c in columns]
    print_head("forgetting relative to AdamW", heads)
    methods = dict.fromkeys([*LABELS, *(method for c in columns for method in c.ratios)])
    for method in methods:
        if method != "adamw" and any(method in c.ratios for c in columns):
            print_row(LABELS.get(method, method), [ratio_cell(c, method) for c in columns])
    print_row("seeds", [str(len(c.ratios["adamw"])) for c in columns])
    for head, column in zip(heads, columns, strict=True):
        if notes := run_notes(column):
            print(f"\n{head}: {', '.join(notes)}.")


def ratio_cell(column: Comparison, method: str) -> str:
    """Return the ratio of a method, and how many levels it reaches where these are not all."""
    if method not in column.ratios:
        return ""
    reached = column.reached[method]
    note = f" ({two_digits(reached)} of {len(LEVELS)})" if reached < len(LEVELS) else ""
    return with_interval(column.ratios[method]) + note


def run_notes(column: Comparison) -> list[str]:
    """Return which methods have fewer runs than AdamW, or more."""
    return [
        f"{count} runs of *{plain_label(method)}* (AdamW has {column.runs['adamw']})"
        for method, count in column.runs.items()
        if count != column.runs["adamw"]
    ]


def print_recipe(paths: Iterable[Path]) -> None:
    """Print what one setting does at the end of a run, at the highest rate and τ = 0.9999.

    Both numbers are means over seeds: what was learned, as a share of what AdamW learns at its
    best, and what was forgotten, in nats per byte; nothing where a setting was not run.
    """
    heads = []
    lines: dict[str, list[str]] = {name: [] for name in (BEST, *RECIPES)}
    groups = sorted(groups_in(paths), key=lambda group: group[1][0]["parameters"])
    for (_, old, new, *_), rows in groups:
        rate, points = end_points(rows, RECIPES)
        for name, pairs in points.items():
            means = [fmean(each) for each in zip(*pairs, strict=True)]
            lines[name].append(", ".join(f"{mean:.2f}" for mean in means))
        millions = two_digits(rows[0]["parameters"] / 1e6)
        heads.append(f"{old} to {new}, {millions} M, at {rate:.2g}")
    print_head("learned, forgotten", heads)
    for name, cells in lines.items():
        print_row(name, cells)
