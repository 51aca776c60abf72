"""One run: fine-tune by one method and its values, and evaluate along the way."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import nn

from finetuning.cache import Cache
from finetuning.methods import (
    QuadraticPenalty,
    adamw,
    add_adapters,
    gated_adamw,
    interpolated,
    protection_along_directions,
)
from finetuning.model import loss_of
from finetuning.records import LOSSES

__all__ = ["Run", "fine_tune"]


@dataclass(frozen=True)
class Run:
    """A model, the domain it learns, and how."""

    size: str
    old: str
    new: str
    seed: int
    method: str
    values: str  # JSON, as in the table

    def key(self, args: argparse.Namespace) -> dict[str, Any]:
        return {**vars(self), "pretrain": args.pretrain, "steps": args.steps}


def fine_tune(run: Run, cache: Cache) -> list[dict[str, Any]]:
    """Fine-tune by one method and its values; return a row for every evaluation."""
    args, values, which = cache.args, json.loads(run.values), (run.size, run.old, run.seed)
    model = cache.model(*which)
    shared = run.key(args) | {"parameters": sum(param.numel() for param in model.parameters())}
    if run.method == "start":
        return [shared | {"step": 0, "seconds": 0.0} | evaluate(model, run, cache)]
    protection, bases = None, None
    if values.get("rotated", False):
        text = cache.own_text(*which)
        protection = protection_along_directions(model, text, values.get("consolidation"), run.seed)
        known = {name: protection.known[param] for name, param in model.named_parameters()}
        importance = {name: one.importance for name, one in known.items()}
        bases = {name: one.basis for name, one in known.items()}
    else:
        importance = cache.importance(values["source"], *which) if "source" in values else {}
    penalty = None
    if "penalty" in values:
        penalty = QuadraticPenalty(model, values["penalty"], importance, bases)
    if protection is not None:
        optimizer = protection.optimizer(adamw(model.parameters(), values["lr"]))
    elif "consolidation" in values:
        optimizer = gated_adamw(model, values["lr"], values["consolidation"], importance)
    elif "rank" in values:
        torch.manual_seed(run.seed)
        optimizer = adamw(add_adapters(model, values["rank"]), values["lr"])
    else:
        optimizer = adamw(model.parameters(), values["lr"])
    if args.compile:
        model.compile()
    params = list(model.parameters())
    start = [param.detach().clone() for param in params]
    looks = {round(step) for step in np.geomspace(min(4, args.steps), args.steps, args.looks)}
    rows, began = [], time.monotonic()
    # All methods see the same batches.
    batches = cache.batches(run.new, run.size, args.steps, 1000 + run.seed)
    for step, text in enumerate(batches, start=1):
        optimizer.zero_grad()
        loss_of(model, text).backward()
        if penalty is not None:
            penalty.add_gradient()
        optimizer.step()
        if step in looks:
            with interpolated(params, start, values.get("way", 1.0)):
                losses = evaluate(model, run, cache)
            seconds = round(time.monotonic() - began, 2)
            rows.append(shared | {"step": step, "seconds": seconds} | losses)
            if not all(map(math.isfinite, losses.values())):
                break
    return rows


@torch.no_grad()
def evaluate(model: nn.Module, run: Run, cache: Cache) -> dict[str, float]:
    """Return the loss on each half of each domain's test text, and the mean of both halves."""
    losses = [
        torch.stack([loss_of(model, part) for part in half.split(64)]).mean()
        for domain in (run.old, run.new)
        for half in cache.test_halves(domain, run.size)
    ]
    numbers = torch.stack(losses).tolist()
    by_half = dict(zip(LOSSES, numbers, strict=True))
    return {"old_loss": fmean(numbers[:2]), "new_loss": fmean(numbers[2:])} | by_half
