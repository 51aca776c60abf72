"""Run the comparison of `finetuning/`, or print and draw what it found: see README.md."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import finetuning
import torch
from finetuning.cache import Cache
from finetuning.checks import check
from finetuning.data import DOMAINS
from finetuning.figures import draw_frontiers, draw_sizes
from finetuning.model import SIZES
from finetuning.runs import GRIDS, run_all
from finetuning.tables import print_recipe, print_summary, print_table

__all__ = ["main"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(finetuning.__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--size", nargs="+", choices=SIZES, default=["small"])
    add("--pairs", nargs="+", default=["python:english", "english:cpp"], metavar="OLD:NEW")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--methods", nargs="+", choices=GRIDS[12], default=list(GRIDS[12]))
    add("--runs", type=int, choices=GRIDS, default=12, help="of each method")
    add("--steps", type=int, default=300, help="of fine-tuning")
    add("--pretrain", type=int, default=2000, help="steps of training on the old domain")
    add("--batch", type=int, default=32, help="texts in a batch")
    add("--looks", type=int, default=12, help="evaluations of a run, ever further apart")
    add("--windows", type=int, default=64, help="texts in each half of a domain's test")
    add("--samples", type=int, default=256, help="texts that importance is measured on")
    add("--megabytes", type=float, default=30.0, help="of text, at most, in a domain")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", action="store_true", help="compile the model")
    add("--cache", type=Path, default=Path("runs/finetune"), help="folder of what runs share")
    add("--csv", type=Path, default=Path("runs/finetune.csv"), help="table to add to")
    add("--jobs", type=int, default=1, help="processes that share the work")
    add("--job", type=int, default=0, help="which of them this is, from 0")
    add("--seconds", type=float, default=math.inf, help="begin no run that would end later")
    add("--check", action="store_true", help="compare the methods with their definitions")
    add("--text", action="store_true", help="make the text of all domains, and no more")
    add("--summary", type=Path, metavar="CSV", help="print tables")
    add("--table", type=Path, nargs="+", metavar="CSV", help="print one table of several sizes")
    add("--recipe", type=Path, nargs="+", metavar="CSV", help="print what one setting does")
    add("--sizes", type=Path, nargs="+", metavar="CSV", help="draw sizes; the last is the SVG")
    add("--draw", type=Path, nargs=2, metavar=("CSV", "SVG"), help="draw frontiers")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_float32_matmul_precision("high")  # rotations are rounded to bfloat16 anyway
    if args.check:
        check()
    elif args.summary:
        print_summary(args.summary)
    elif args.table:
        print_table(args.table)
    elif args.recipe:
        print_recipe(args.recipe)
    elif args.sizes:
        draw_sizes(args.sizes[:-1], args.sizes[-1])
    elif args.draw:
        draw_frontiers(*args.draw)
    elif args.text:
        cache = Cache(args)
        for domain in DOMAINS:
            cache.text(domain)
    else:
        run_all(args)


if __name__ == "__main__":
    main()
