"""A million steps: do memory and speed stay flat, importance finite, and the reservoir fair?

SynGAP with a memory of 1000 on an MLP 16-32-10, batches of 10 and 10 replayed, one thread. A pair
of classes at a time, for 1000 steps each, over and over. Every 10,000 steps a line: milliseconds of
CPU a step, resident MB, the range of importance, and how far the arrival times of what is kept are
from evenly spread (Kolmogorov-Smirnov; of 1000 kept, 19 lines of 20 are below 0.043).
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path
from typing import TextIO

import torch
from matplotlib import pyplot
from measure import progress, resident
from torch import Tensor, nn

from syngap.bench.methods import Learner
from syngap.bench.methods.syngap import SynGAP
from syngap.bench.streams import Batch

CLASSES, WIDTH, BATCH, KEPT, TASK = 10, 16, 10, 1000, 1000
COLUMNS = ("step", "ms", "mb", "smallest", "largest", "unevenness")


def batch(step: int, centres: Tensor, chance: torch.Generator) -> Batch:
    """Samples around their class's centre; the first number is when they arrived."""
    pair = 2 * (step // TASK % (CLASSES // 2))
    y = torch.randint(pair, pair + 2, (BATCH,), generator=chance)
    x = centres[y] + torch.randn(BATCH, WIDTH, generator=chance)
    x[:, 0] = step / 1e6
    return Batch(x, y)


def unevenness(arrived: Tensor, now: float) -> float:
    """Return the largest distance of a distribution of arrival times from an even one."""
    found = arrived.sort().values / now
    even = torch.arange(1, len(found) + 1) / len(found)
    return float((found - even).abs().max())


def soak(steps: int, every: int, out: TextIO) -> None:
    torch.manual_seed(0)
    chance = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(CLASSES, WIDTH, generator=chance)
    network = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    method = SynGAP(Learner(network, lambda x, _: x), lr=0.05, buffer=KEPT, replay=BATCH)
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(COLUMNS)
    spent = 0.0
    for step in range(steps):
        new = batch(step, centres, chance)
        start = time.process_time()
        method.step(new)
        spent += time.process_time() - start
        if (step + 1) % every == 0:
            values = method.optimizer.importance().values()
            importance = torch.cat([value.flatten() for value in values])
            if not importance.isfinite().all():
                raise SystemExit(f"importance is not finite after {step + 1} steps")
            arrived = method.memory.state_dict()["fields"]["x"][:, 0]
            uneven = unevenness(arrived, (step + 1) / 1e6)
            ends = (importance.min().item(), importance.max().item())
            found = (1e3 * spent / every, resident(), *ends, uneven)
            lines.writerow([step + 1, *(f"{value:.4g}" for value in found)])
            out.flush()
            progress(f"step {step + 1} of {steps}")
            spent = 0.0


def draw(lines: Path, to: Path) -> None:
    """Draw speed and memory over the steps that a file has lines of."""
    with lines.open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    steps = [int(line["step"]) / 1e6 for line in found]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(7.2, 2.4), layout="constrained")
    for axes, column, label in ((left, "ms", "CPU ms a step"), (right, "mb", "resident MB")):
        values = [float(line[column]) for line in found]
        axes.plot(steps, values, color="#0b5394", linewidth=1.2)
        axes.set(xlabel="million steps", ylabel=label, ylim=(0, 1.25 * max(values)))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(to, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=Path, nargs=2, help="lines of an earlier run, and a figure")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=10_000)
    parser.add_argument("--keep", type=Path, help="a file for the lines")
    args = parser.parse_args()
    if args.draw:
        draw(*args.draw)
        return
    torch.set_num_threads(1)
    if args.keep:
        args.keep.parent.mkdir(parents=True, exist_ok=True)
    with args.keep.open("w") if args.keep else open(sys.stdout.fileno(), "w", closefd=False) as out:
        soak(args.steps, args.every, out)


if __name__ == "__main__":
    main()
