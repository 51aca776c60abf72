"""Frontiers of old against new loss, and how much methods forget relative to AdamW."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from finetuning.records import GROUP, HALVES, group_by, read

__all__ = [
    "BEST",
    "LEVELS",
    "Comparison",
    "compare",
    "curves",
    "end_points",
    "forgetting_ratio",
    "frontier",
    "groups_in",
    "levels_reached",
    "whole_seeds",
]

Rows = list[dict[str, Any]]

LEVELS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of new loss, as shares: see `curves`
BEST = "AdamW at its best"


def groups_in(paths: Iterable[Path]) -> list[tuple[tuple[Any, ...], Rows]]:
    """Return the rows of tables by what seeds are repetitions of."""
    return [group for path in paths for group in group_by(read(path), GROUP).items()]


def whole_seeds(rows: Rows) -> dict[float, Rows]:
    """Return the rows of each seed, of those seeds alone whose runs are all there."""
    seeds = {seed: part for (seed,), part in group_by(rows, ["seed"]).items()}
    runs = {seed: {(r["method"], r["values"]) for r in part} for seed, part in seeds.items()}
    most = max(runs.values(), key=len)
    if not {"start", "adamw"} <= {method for method, _ in most}:
        raise SystemExit("nothing to compare with: runs of adamw are missing; add --methods adamw")
    return {seed: part for seed, part in sorted(seeds.items()) if runs[seed] == most}


def frontier(rows: Rows, half: str) -> Rows:
    """Return the rows that no other beats in both losses on `half`, from low new loss to high."""
    new, old = f"new_{half}", f"old_{half}"
    best: Rows = []
    for row in sorted((r for r in rows if math.isfinite(r[old])), key=lambda r: (r[new], r[old])):
        if not best or row[old] < best[-1][old]:
            best.append(row)
    return best


def curves(rows: Rows, shares: Iterable[float]) -> dict[str, np.ndarray]:
    """Return for each method new loss, old loss and forgetting at levels of new loss, of one seed.

    A level is a share of the gain from the start to the lowest new loss that AdamW reaches. Each
    half of the test text chooses the points that are evaluated on the other; the mean of both is
    returned, and NaN where a method does not reach a level.
    """
    shares = np.array(list(shares))
    methods = {method: part for (method,), part in group_by(rows, ["method"]).items()}
    start = methods.pop("start")
    by_half: dict[str, list[np.ndarray]] = {method: [] for method in methods}
    for chosen_on, evaluated_on in itertools.permutations(HALVES):
        new, old = f"new_{evaluated_on}", f"old_{evaluated_on}"
        fronts = {name: frontier(part + start, chosen_on) for name, part in methods.items()}
        lowest = min(row[new] for row in fronts["adamw"])
        levels = start[0][new] - shares * (start[0][new] - lowest)
        for method, front in fronts.items():
            points = sorted((row[new], row[old]) for row in front)
            losses = np.interp(levels, *zip(*points, strict=True), left=np.nan)
            by_half[method].append(np.stack([levels, losses, losses - start[0][old]]))
    return {method: np.mean(both, 0) for method, both in by_half.items()}


def forgetting_ratio(curve: np.ndarray, to: np.ndarray) -> float:
    """Return the quotient of mean forgetting, over the levels that both reach."""
    both = np.isfinite(curve[2]) & np.isfinite(to[2])
    return float(curve[2][both].mean() / to[2][both].mean()) if both.any() else math.nan


def levels_reached(curves_of_seeds: Iterable[np.ndarray]) -> float:
    """Return how many levels a method reaches, a mean over seeds."""
    return fmean(int(np.isfinite(curve[2]).sum()) for curve in curves_of_seeds)


@dataclass(frozen=True)
class Comparison:
    """Methods against AdamW, for one size and pair of domains.

    Args:
        millions: of parameters.
        old: domain.
        new: domain.
        ratios: forgetting relative to AdamW by method, a number for each seed.
        reached: how many of the levels each method reaches, a mean over seeds.
        runs: how many runs of each method a seed has.
    """

    millions: float
    old: str
    new: str
    ratios: dict[str, list[float]]
    reached: dict[str, float]
    runs: dict[str, int]


def compare(paths: Iterable[Path]) -> list[Comparison]:
    """Return comparisons for every size and pair in the tables, the smallest model first."""
    comparisons = []
    for (_, old, new, *_), rows in groups_in(paths):
        seeds = whole_seeds(rows)
        by_seed = [curves(part, LEVELS) for part in seeds.values()]
        ratios = {m: [forgetting_ratio(c[m], c["adamw"]) for c in by_seed] for m in by_seed[0]}
        reached = {method: levels_reached(c[method] for c in by_seed) for method in ratios}
        tried = {(r["method"], r["values"]) for part in seeds.values() for r in part}
        runs = {method: sum(m == method for m, _ in tried) for method in ratios}
        millions = rows[0]["parameters"] / 1e6
        comparisons.append(Comparison(millions, old, new, ratios, reached, runs))
    return sorted(comparisons, key=lambda each: each.millions)


def end_points(
    rows: Rows, settings: Mapping[str, Mapping[str, Any]]
) -> tuple[float, dict[str, list[tuple[float, float]]]]:
    """Return the highest rate that was run, and what runs learn and forget with it.

    The first of the names is `BEST`: AdamW where its new loss is lowest. Learned is a share of what
    that learns; forgotten is in nats per byte. There is a pair for each seed, and none where a
    setting was not run.

    Args:
        rows: of one size and pair.
        settings: values other than the rate, by name.
    """
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in (BEST, *settings)}
    for part in whole_seeds(rows).values():
        start = next(row for row in part if row["method"] == "start")
        best = min((r for r in part if r["method"] == "adamw"), key=lambda r: r["new_loss"])
        ends = [(json.loads(r["values"]), r) for r in part if r["step"] == r["steps"]]
        rate = max(values["lr"] for values, _ in ends)
        chosen = {BEST: best}
        for name, setting in settings.items():
            same = [row for values, row in ends if values == {**setting, "lr": rate}]
            chosen |= {name: same[0]} if same else {}
        whole = start["new_loss"] - best["new_loss"]
        for name, row in chosen.items():
            learned = (start["new_loss"] - row["new_loss"]) / whole
            points[name].append((learned, row["old_loss"] - start["old_loss"]))
    return rate, points
