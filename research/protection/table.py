"""Forgetting relative to AdamW at equal new loss, from the rows of compare.py, as Markdown.

table.py FILE.jsonl ... [--new german] [--families]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

__all__ = ["best_gain", "forgetting", "markdown", "relative_forgetting"]

LEVELS = (0.7, 0.8, 0.9, 0.95)  # of AdamW's best gain
Row = dict[str, Any]


def best_gain(points: Sequence[Row], start: Row, new: str, half: int) -> float:
    """Return by how much the new loss falls at the point where it is lowest, on one half."""
    return float(start["losses"][new][half] - min(row["losses"][new][half] for row in points))


def held_out_gain(points: Sequence[Row], start: Row, new: str) -> float:
    """Return the best gain: chosen on one half, evaluated on the other; the mean of both ways."""
    gains = []
    for half in (0, 1):
        point = min(points, key=lambda row: row["losses"][new][half])
        gains.append(start["losses"][new][1 - half] - point["losses"][new][1 - half])
    return fmean(gains)


def forgetting(
    points: Sequence[Row], adamw: Sequence[Row], start: Row, old: str, new: str, level: float
) -> float | None:
    """Return the rise of the old loss at a level of AdamW's best gain.

    Among the points that reach the level, the one with the lowest old loss is chosen on one half of
    the test text and evaluated on the other; the mean of both ways. None: a half has no such point.
    """
    rises = []
    for half in (0, 1):
        target = start["losses"][new][half] - level * best_gain(adamw, start, new, half)
        reached = [row for row in points if row["losses"][new][half] <= target]
        if not reached:
            return None
        point = min(reached, key=lambda row: row["losses"][old][half])
        rises.append(point["losses"][old][1 - half] - start["losses"][old][1 - half])
    return fmean(rises)


def relative_forgetting(
    points: Sequence[Row],
    adamw: Sequence[Row],
    start: Row,
    old: str,
    new: str,
    levels: Sequence[float] = LEVELS,
) -> float | None:
    """Return forgetting relative to AdamW as trained, mean over the levels.

    None: the points do not reach each level, or AdamW forgets nothing there.
    """
    ratios = []
    for level in levels:
        ours = forgetting(points, adamw, start, old, new, level)
        theirs = forgetting(adamw, adamw, start, old, new, level)
        if ours is None or theirs is None or theirs <= 0:
            return None
        ratios.append(ours / theirs)
    return fmean(ratios)


def summary(values: Sequence[float | None], digits: int = 2) -> str:
    """Return the mean over seeds and the range; a dash where a seed has no value."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return f"- ({len(numbers)} of {len(values)})" if len(values) > 1 else "-"
    text = f"{fmean(numbers):.{digits}f}"
    if len(numbers) > 1:
        text += f" ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"
    return text


def finite(row: Row) -> bool:
    return all(abs(loss) < float("inf") for pair in row["losses"].values() for loss in pair)


def markdown(rows: Sequence[Row], new: str = "german", families: bool = False) -> str:
    """Return a table of one model's methods; with `families`, variants count as their method."""
    seeds = sorted({row["seed"] for row in rows})
    starts = {row["seed"]: row for row in rows if row["method"] == "start"}
    old = [domain for domain in starts[seeds[0]]["losses"] if domain != new]
    points: dict[str, dict[int, list[Row]]] = {}
    for row in filter(finite, rows):
        if row["method"] != "start":
            name = row["method"].partition("+")[0] if families else row["method"]
            points.setdefault(name, {}).setdefault(row["seed"], []).append(row)
    missing = [seed for seed in seeds if seed not in starts or seed not in points["adamw"]]
    if missing:
        raise SystemExit(f"seeds {missing} have no start or no AdamW to compare with")

    def trained(name: str, seed: int) -> list[Row]:
        return [row for row in points[name][seed] if row["share"] == 1]

    def ratios(name: str, domain: str, pick: Callable[[str, int], list[Row]]) -> str:
        values = [
            relative_forgetting(pick(name, seed), trained("adamw", seed), starts[seed], domain, new)
            for seed in points[name]
        ]
        return summary(values)

    def ends(name: str) -> list[Row]:
        last = [row for pick in points[name].values() for row in pick if row["share"] == 1]
        return [row for row in last if row["step"] == row["steps"]]

    head = ["method", "rates × variants", "seeds", "best gain (nats)", "relative to AdamW"]
    head += [f"{domain}, as trained" for domain in old]
    head += [f"{domain}, interpolated" for domain in old]
    head += ["s per run", "GiB"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, by_seed in points.items():
        gains = {seed: held_out_gain(trained(name, seed), starts[seed], new) for seed in by_seed}
        shares = [
            gain / held_out_gain(trained("adamw", seed), starts[seed], new)
            for seed, gain in gains.items()
        ]
        settings = {(row["method"], row["lr"]) for pick in by_seed.values() for row in pick}
        cells = [name, str(len(settings)), str(len(by_seed))]
        cells += [summary(list(gains.values()), 3), summary(shares)]
        cells += [ratios(name, domain, trained) for domain in old]
        cells += [ratios(name, domain, lambda n, s: points[n][s]) for domain in old]
        cells.append(f"{median(row['seconds'] for row in ends(name)):.1f}")
        cells.append(f"{max(row['memory'] for row in ends(name)) / 2**30:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """Return the rows of all files; of rows that are there twice, the last."""
    keys = ("model", "seed", "method", "lr", "steps", "batch", "step", "share")
    rows = {}
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[tuple(row[key] for key in keys)] = row
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--new", default="german", help="the domain that is learned")
    parser.add_argument("--families", action="store_true", help="pool the variants of a method")
    args = parser.parse_args()
    rows = read_rows(args.files)
    for model, steps, batch in sorted({(row["model"], row["steps"], row["batch"]) for row in rows}):
        same = (model, steps, batch)
        group = [row for row in rows if (row["model"], row["steps"], row["batch"]) == same]
        print(f"## {model}, {steps} steps of {batch} windows\n")
        print(markdown(group, args.new, args.families) + "\n")
    print("Forgetting relative to AdamW as trained, at equal new loss: mean over 70, 80, 90 and")
    print("95 % of AdamW's best gain, then over seeds (range). A dash: a level is not reached.")


if __name__ == "__main__":
    main()
