"""All runs, shared out among processes."""

from __future__ import annotations

import argparse
import itertools
import json
import time

import torch
from torch.nn.functional import cosine_similarity

from finetuning.cache import Cache
from finetuning.grids import GRIDS, scale_rate
from finetuning.model import SIZES
from finetuning.records import KEY, append, read
from finetuning.training import Run, fine_tune

__all__ = ["run_all"]


def plan(args: argparse.Namespace) -> list[Run]:
    runs = []
    for size, seed, pair in itertools.product(args.size, args.seeds, args.pairs):
        old, new = pair.split(":")
        for method, grid in ({"start": [{}]} | GRIDS[args.runs]).items():
            if method == "start" or method in args.methods:
                values = [json.dumps(scale_rate(each, size)) for each in grid]
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
