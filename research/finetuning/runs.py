"""The values that each method is run with, and all runs, shared out among processes."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cosine_similarity

from finetuning.cache import Cache
from finetuning.model import SIZES
from finetuning.records import KEY, append, read
from finetuning.training import Run, fine_tune

__all__ = ["GRIDS", "run_all"]


def grid(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def rates(low: float, high: float, count: int) -> list[float]:
    return [float(f"{rate:.3g}") for rate in np.geomspace(low, high, count)]


OWN, DATA, EVEN = ["own"], ["data"], ["even"]  # where importance comes from
YES = [True]
# Keys are the numbers of runs, `--runs`. Rates are for "mini"; `scale_rate` has them for others.
# "gate_data" is a control: one value of "gate" with another importance.
# "penalty" is λ in units of importance, so that even importance (L2) has the mean of the model's.
# "rotated": AdamW works along directions, by `syngap.protect` without a teacher. "way": the model
# is evaluated after interpolation with the start, of which "way" is the share of the fine-tuned
# weights. Recorded tables hold these names.
GRIDS: dict[int, dict[str, list[dict[str, Any]]]] = {
    12: {
        "adamw": grid(lr=rates(3e-5, 3e-3, 12)),
        "gate": grid(lr=rates(3e-5, 3e-3, 4), consolidation=[0.9, 0.999, 0.999999], source=OWN),
        "ewc": grid(lr=[3e-4, 1.5e-3], penalty=[0.3, 1.0, 3.0, 10.0, 30.0, 300.0], source=OWN),
        "l2": grid(lr=[3e-4, 1.5e-3], penalty=[0.3, 1.0, 3.0, 10.0, 30.0, 300.0], source=EVEN),
        "gate_ewc": grid(
            lr=[3e-4, 1.5e-3], consolidation=[0.9, 0.999], penalty=[1.0, 10.0, 100.0], source=OWN
        ),
        "lora": grid(lr=rates(3e-4, 1e-2, 4), rank=[2, 8, 32]),
        "rotated": grid(lr=rates(3e-5, 3e-3, 12), rotated=YES),
        "rotated_gate": grid(
            lr=[3e-4, 1e-3, 3e-3], consolidation=[0.5, 0.9, 0.99, 0.9999], source=OWN, rotated=YES
        ),
        "rotated_ewc": grid(
            lr=[3e-4, 1.5e-3], penalty=[0.03, 0.1, 0.3, 1.0, 3.0, 10.0], source=OWN, rotated=YES
        ),
        "back": grid(lr=[3e-4, 1e-3, 3e-3], way=[0.25, 0.5, 0.7, 0.85]),
        "rotated_back": grid(lr=[3e-4, 1e-3, 3e-3], way=[0.25, 0.5, 0.7, 0.85], rotated=YES),
        "rotated_gate_back": grid(
            lr=[1e-3, 3e-3],
            consolidation=[0.9, 0.9999],
            way=[0.5, 0.7, 0.85],
            source=OWN,
            rotated=YES,
        ),
        "rotated_ewc_back": grid(
            lr=[1.5e-3],
            penalty=[0.1, 0.3, 1.0, 3.0],
            way=[0.5, 0.7, 0.85],
            source=OWN,
            rotated=YES,
        ),
        "gate_data": grid(lr=[rates(3e-5, 3e-3, 4)[2]], consolidation=[0.999], source=DATA),
    },
    6: {
        "adamw": grid(lr=rates(3e-5, 3e-3, 6)),
        "gate": grid(lr=rates(3e-5, 3e-3, 3), consolidation=[0.9, 0.9999], source=OWN),
        "ewc": grid(lr=[3e-4, 1.5e-3], penalty=[1.0, 10.0, 100.0], source=OWN),
        "l2": grid(lr=[3e-4, 1.5e-3], penalty=[1.0, 10.0, 100.0], source=EVEN),
        "gate_ewc": grid(
            lr=[6e-4], consolidation=[0.9, 0.999], penalty=[1.0, 10.0, 100.0], source=OWN
        ),
        "lora": grid(lr=rates(5e-4, 5e-3, 3), rank=[4, 32]),
        "rotated": grid(lr=rates(3e-5, 3e-3, 6), rotated=YES),
        "rotated_gate": grid(
            lr=[7.5e-4, 3e-3], consolidation=[0.5, 0.9, 0.9999], source=OWN, rotated=YES
        ),
        "rotated_ewc": grid(lr=[3e-4, 1.5e-3], penalty=[0.3, 1.0, 10.0], source=OWN, rotated=YES),
        "back": grid(lr=[3e-4, 1e-3, 3e-3], way=[0.5, 0.8]),
        "rotated_back": grid(lr=[3e-4, 1e-3, 3e-3], way=[0.5, 0.8], rotated=YES),
        "rotated_gate_back": grid(
            lr=[3e-3], consolidation=[0.9, 0.9999], way=[0.5, 0.7, 0.85], source=OWN, rotated=YES
        ),
        "rotated_ewc_back": grid(
            lr=[1.5e-3, 3e-3], penalty=[0.3, 1.0], way=[0.5, 0.7, 0.85], source=OWN, rotated=YES
        ),  # twice as many: the gate's rate there was chosen in a pilot
        "gate_data": grid(lr=[rates(3e-5, 3e-3, 3)[1]], consolidation=[0.9999], source=DATA),
    },
}


def scale_rate(values: dict[str, Any], size: str) -> dict[str, Any]:
    """Return values with the rate for a model of that size: lower by as much as in pre-training."""
    if "lr" not in values:
        return values
    return values | {"lr": float(f"{values['lr'] * SIZES[size].rate / SIZES['mini'].rate:.3g}")}


def plan(args: argparse.Namespace) -> list[Run]:
    runs = []
    for size, seed, pair in itertools.product(args.size, args.seeds, args.pairs):
        old, new = pair.split(":")
        for method, tried in ({"start": [{}]} | GRIDS[args.runs]).items():
            if method == "start" or method in args.methods:
                values = [json.dumps(scale_rate(each, size)) for each in tried]
                runs += [Run(size, old, new, seed, method, each) for each in values]
    return runs


def run_all(args: argparse.Namespace) -> None:
    """Make the runs of this process that are not in the table, and add them to it."""
    began, longest = time.monotonic(), 0.0
    cache = Cache(args)
    # Shared out before looking at what is done, which the others change meanwhile.
    runs = plan(args)
    done = {tuple(row[name] for name in KEY) for row in read(args.csv)}
    mine = [
        run
        for run in runs[args.job :: args.jobs]
        if tuple(run.key(args)[name] for name in KEY) not in done
    ]
    if mine:
        measure_importance(runs, cache)
    while mine:
        # One whose model is there already, if any, rather than wait for another process.
        ready = (r for r in mine if cache.path(cache.model_name(r.size, r.old, r.seed)).exists())
        run = next(ready, mine[0])
        mine.remove(run)
        start = time.monotonic()
        if start + longest - began > args.seconds:
            print(f"{len(mine) + 1} runs left for another time")
            return
        rows = fine_tune(run, cache)
        append(args.csv, rows)
        longest = max(longest, rows[-1]["seconds"])
        last = f"old {rows[-1]['old_loss']:.3f} new {rows[-1]['new_loss']:.3f}"
        print(*vars(run).values(), last, f"{time.monotonic() - start:.1f} s", flush=True)


def measure_importance(runs: list[Run], cache: Cache) -> None:
    """Make models and importance for this process's share, and print how sources compare."""
    args = cache.args
    models = list(dict.fromkeys((run.size, run.old, run.seed) for run in runs))
    models.sort(key=lambda model: -(SIZES[model[0]].width ** 2) * SIZES[model[0]].layers)
    sources = ["own", "data"] if "gate_data" in args.methods else ["own"]
    for model in models[args.job :: args.jobs]:
        by_source = [cache.importance(source, *model) for source in sources]
        flat = [torch.cat([f.flatten() for f in each.values()]) for each in by_source]
        cosine = cosine_similarity(flat[0], flat[-1], 0)
        print(*model, f"importance of {' and '.join(sources)}: cosine {cosine:.3f}", flush=True)
