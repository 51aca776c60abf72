"""Draw what a seldom refresh of importance saves against what it costs in accuracy.

    python benchmarks/frontier.py docs/figures/frontier.svg

Accuracy is that of results/importance-cifar100. Cost is a step's, over ER's in the same run of
`benchmarks/loop.py` on a GPU: a refresh at each k-th step costs its k-th part.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from syngap.experiments.folder import read_runs
from syngap.report.figures.style import COLOURS, INK, SOFT, bare, drawn
from syngap.report.rows import Row, rows

RESULTS = Path(__file__).parents[1] / "results"


def milliseconds(text: str) -> dict[str, float]:
    """Return the milliseconds a step that a table of `loop.py` has, by name."""
    lines = re.findall(r"^\| (\S.*?) +\| +([\d.]+) \|", text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


def cost(row: Row, measured: dict[str, float]) -> float:
    """Return what a step costs over ER's."""
    er, whole = measured["syngap, er"], measured["syngap, syngap"]
    seldom = measured["syngap, syngap, every=16"]
    refresh = (whole - seldom) * 16 / 15
    if row.method == "er":
        return 1.0
    return (whole - refresh * (1 - 1 / row.options["every"])) / er


def main() -> None:
    measured = milliseconds((RESULTS / "speed/cuda/loop.md").read_text(encoding="utf-8"))
    found = {row.name: row for row in rows(read_runs(RESULTS / "importance-cifar100"))}
    with drawn(Path(sys.argv[1]), (6.4, 3.4)) as figure:
        axes = figure.subplots()
        for name, row in found.items():
            spread = row.spread("ACC")
            if name == "joint" or spread is None:
                continue
            method = row.options
            colour = SOFT if name == "er" else COLOURS[0] if not method["warmup"] else INK
            at = cost(row, measured)
            axes.errorbar(at, spread.mean, spread.sd, fmt="o", color=colour, capsize=3)
            said = "ER" if name == "er" else f"every {method['every']}"
            said += "" if name == "er" or method["warmup"] else ", from the first step on"
            axes.annotate(said, (at, spread.mean), (6, 4), textcoords="offset points", fontsize=9)
        axes.set(xlabel="time of a step over ER's, captured", ylabel="ACC ↑, mean ± sd")
        bare(axes)


if __name__ == "__main__":
    main()
