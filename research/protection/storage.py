"""What a teacher forgets that stores a few classes: the others as one class, or some drawn.

storage.py --data FOLDER --seed 0 --out rows.jsonl
The tiny byte model of compare.py learns German on a CPU, in about ten minutes a seed. Its 257
classes are few enough to store them all; of those, 4 and 4 stand for the 128 of 49,152 that a
language model's teacher stores: about as much of the probability is in the others (0.2 to 0.3).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from compare import append_rows, fine_tune, load_task, read_rows
from torch import Tensor

from syngap.protection import protection, teacher

RATES = (3e-3, 1e-2)


def others_as_one(likeliest: int) -> tuple[Any, Any]:
    """Return how to take answers of the likeliest classes and of all others together."""

    def with_rest(logs: Tensor, classes: Tensor) -> Tensor:
        kept = logs.gather(-1, classes)
        rest = (1.0 - kept.exp().sum(-1, keepdim=True)).clamp(min=1e-7).log()
        return torch.cat([kept, rest], -1)

    def take(prediction: Tensor, mask: Tensor | None, *, seed: int) -> teacher.Answers:
        logs = prediction.detach().log_softmax(-1)
        classes = logs.topk(likeliest, dim=-1).indices
        return teacher.Answers(with_rest(logs, classes), classes, None, mask)

    def divergence(answers: teacher.Answers, prediction: Tensor, **_: Any) -> Tensor:
        before, classes = answers.logs, answers.classes
        assert before is not None
        assert classes is not None
        now = with_rest(prediction.log_softmax(-1), classes)
        return (before.exp() * (before - now)).sum(-1).mean()

    return take, divergence


def run(way: str, lr: float, task: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tune a copy of the model with answers that are stored in one of the ways."""
    own = teacher.take_answers, teacher.divergence
    sizes = {"all": (1024, 4, 4), "drawn": (0, 4, 4), "one drawn": (0, 4, 1), "others as one": ()}
    if sizes.get(way):
        teacher.WHOLE, teacher.LIKELIEST, teacher.DRAWN = sizes[way]
    taken = others_as_one(4) if way == "others as one" else own
    protection.take_answers, protection.divergence = taken
    rows = fine_tune(task, "adamw" if way == "no teacher" else "distil", lr, args)
    return [row | {"stored": way} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="rows are added to this file")
    parser.add_argument("--data", type=Path, required=True, help="what fetch.py wrote")
    args = parser.parse_args()
    fixed = {"model": "tiny", "device": "cpu", "pretrain": 4000, "windows": 64, "samples": 256}
    fixed |= {"steps": 200, "batch": 16, "cache": args.data / "cache"}
    args = argparse.Namespace(**vars(args), **fixed)
    torch.set_num_threads(1)
    task = load_task(args)
    done = {(row["stored"], row["lr"], row["seed"]) for row in read_rows(args.out)}
    start = task.evaluate(task.model)
    for lr in RATES:
        for way in ("no teacher", "all", "drawn", "one drawn", "others as one"):
            if (way, lr, args.seed) in done:
                continue
            rows = [row | {"start": start} for row in run(way, lr, task, args)]
            append_rows(args.out, [row for row in rows if row["step"] == args.steps])
            last = next(row for row in rows if row["step"] == args.steps and row["share"] == 1)
            changes = {name: (sum(last["losses"][name]) - sum(start[name])) / 2 for name in start}
            said = ", ".join(f"{name} {change:+.3f}" for name, change in changes.items())
            print(f"seed {args.seed}, rate {lr:g}, {way}: {said}", flush=True)


if __name__ == "__main__":
    main()
