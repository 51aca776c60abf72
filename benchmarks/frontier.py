"""Draw what a seldom refresh of importance saves against what it costs in accuracy.

    python benchmarks/frontier.py docs/figures/frontier.svg

Accuracy is that of results/importance-cifar100. Cost is a step's, over ER's in the same run of
`benchmarks/loop.py` on a GPU: a refresh at each k-th step costs its k-th part.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from syngap.bench.reporting.figures.style import COLOURS, INK, SOFT, figure_file, remove_frame
from syngap.bench.reporting.rows import Row, rows
from syngap.bench.store.folder_reader import read_runs

RESULTS = Path(__file__).parents[1] / "results"


def milliseconds(text: str) -> dict[str, float]:
    """Return the milliseconds a step of the first table that has a name: others are older."""
    lines = re.findall(r"^\| (\S.*?) +\| +([\d.]+) \|", text, re.MULTILINE)
    return {name: float(value) for name, value in reversed(lines)}


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
    with figure_file(Path(sys.argv[1]), (6.4, 3.4)) as figure:
        axes = figure.subplots()
        for name, row in found.items():
            spread = row.spread("ACC")
            if name == "joint" or spread is None:
                continue
            at, every = cost(row, measured), row.options.get("every")
            cold = every and not row.options["warmup"]
            colour = SOFT if name == "er" else COLOURS[0] if cold else INK
            axes.errorbar(at, spread.mean, spread.sd, fmt="o", color=colour, capsize=3)
            said = "ER" if name == "er" else f"{every}, cold" if cold else str(every)
            end, side = (-spread.sd, -1) if cold or name == "er" else (spread.sd, 1)
            axes.annotate(
                said,
                (at, spread.mean + end),
                (0, 6 * side),
                textcoords="offset points",
                ha="center",
                va="bottom" if side > 0 else "top",
                fontsize=9,
                color=colour,
            )
        axes.set_title("importance refreshed at each k-th step", fontsize=10)
        axes.margins(y=0.15)
        axes.set(xlabel="time of a step over ER's, captured", ylabel="ACC ↑, mean ± sd")
        remove_frame(axes)


if __name__ == "__main__":
    main()
