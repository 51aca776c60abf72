"""How much of the package a reader has to open to follow one training step.

Prints the files of `syngap` that run, and their functions, in a step of SynGAP that refreshes
importance (default estimator, CPU, eager) and in a step of experience replay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import syngap
from syngap import SynGAP
from syngap.bench.methods import registry
from syngap.bench.methods.learner import Learner
from syngap.bench.streams.stream import Batch

PACKAGE = Path(syngap.__file__).parent
BEFORE = 2  # steps that make states and fill the memory


def functions_of(step: Callable[[], object]) -> dict[str, set[str]]:
    """Return the functions that a call enters, by file of the package."""
    found: dict[str, set[str]] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # from 3.11 on
            functions = found.setdefault(path.relative_to(PACKAGE).as_posix(), set())
            if not name.endswith(">"):  # a comprehension, or a lambda
                functions.add(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return found


def refreshing_step() -> Callable[[], object]:
    """Return a step of SynGAP in a loop of the user's own."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = SynGAP(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 4), torch.randint(3, (8,))

    def step() -> None:
        logits = model(x)
        optimizer.zero_grad()
        optimizer.observe(logits)
        cross_entropy(logits, y).backward()
        optimizer.step()

    return step


def replay_step() -> Callable[[], object]:
    """Return a step of experience replay, which draws from its memory."""
    learner = Learner(nn.Linear(4, 3), lambda x, generator: x)
    method = registry.get("er")(learner, buffer=16, replay=4)
    batch = Batch(torch.randn(8, 4), torch.randint(3, (8,)))
    return lambda: method.step(batch)


STEPS = {"SynGAP, importance refreshed": refreshing_step, "ER": replay_step}


def functions_by_file(name: str) -> dict[str, set[str]]:
    """Return the functions, by file, of one of `STEPS` once it is under way."""
    step = STEPS[name]()
    for _ in range(BEFORE):
        step()
    return functions_of(step)


def main() -> None:
    for name in STEPS:
        found = functions_by_file(name)
        count = sum(map(len, found.values()))
        print(f"{name}: {len(found)} files, {count} functions")
        for file, functions in sorted(found.items()):
            print(f"  {file}: {', '.join(sorted(functions))}")


if __name__ == "__main__":
    main()
