"""Does the loop cost anything? Steps of ER against the loop that a careful user writes.

One thread, in seconds of its CPU, no augmentation. "Plain PyTorch" is everything that ER needs in
thirty lines: samples in one tensor, a reservoir drawn from and written to a batch at a time, and
one forward and backward pass. Its compiled version has forward pass and loss under torch.compile.
Avalanche 0.6 needs an environment of its own; `AVALANCHE=its/python make bench` brings it into the
same turns. Its samples are scaled beforehand, which spares it that part of the work.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import torch
from loops import CASES, Case
from measure import Seconds, in_turns, progress, table
from torch import Tensor
from torch.nn.functional import cross_entropy

from syngap import methods
from syngap.methods import Learner
from syngap.streams import Stream, arrays

RATE, ROUNDS, SAMPLES = 0.05, 15, 20_000
Turn = Callable[[], None]


def plain(case: Case, compiled: bool = False) -> Turn:
    """Return a turn of the loop that needs nothing but PyTorch."""
    model = case.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = case.samples(SAMPLES)
    memory_x, memory_y = torch.empty_like(x[: case.memory]), torch.empty_like(y[: case.memory])
    seen, order = 0, torch.randperm(SAMPLES)

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(inputs.float().div_(255).sub_(0.5).div_(0.25)), targets)

    forward = torch.compile(loss_of) if compiled else loss_of

    def turn() -> None:
        nonlocal seen
        for _ in range(case.steps):
            at = seen % (SAMPLES - case.batch)
            index = order[at : at + case.batch]
            new_x, new_y = x[index], y[index]
            inputs, targets = new_x, new_y
            if seen:
                drawn = torch.randperm(min(seen, case.memory))[: case.batch]
                inputs = torch.cat([new_x, memory_x[drawn]])
                targets = torch.cat([new_y, memory_y[drawn]])
            optimizer.zero_grad()
            forward(inputs, targets).backward()
            optimizer.step()
            number = torch.arange(seen, seen + case.batch)
            slot = torch.where(
                number < case.memory, number, (torch.rand(case.batch) * (number + 1)).long()
            )
            kept = slot < case.memory
            memory_x[slot[kept]], memory_y[slot[kept]] = new_x[kept], new_y[kept]
            seen += case.batch

    return turn


def ours(case: Case, name: str) -> Turn:
    """Return a turn of what `syngap run` does between two evaluations."""
    x, y = case.samples(SAMPLES)
    stream = Stream(
        arrays(x, y, x[:100], y[:100], tasks=1), batch=case.batch, epochs=1000, augment=False
    )
    learner = Learner(case.network(), stream.transform)
    method = methods.registry.get(name)(learner, lr=RATE, buffer=case.memory, replay=case.batch)
    steps = count()

    def turn() -> None:
        for _ in range(case.steps):
            method.step(stream[next(steps)])

    return turn


def timed(turn: Callable[[], object]) -> Callable[[], float]:
    """Return a turn that returns its CPU seconds, which other programs do not lengthen much."""

    def seconds() -> float:
        start = time.process_time()
        turn()
        return time.process_time() - start

    return seconds


class Avalanche:
    """Avalanche's own replay in a process of its own interpreter, a turn whenever asked for."""

    def __init__(self, python: str, case: Case) -> None:
        script = Path(__file__).with_name("avalanche_er.py")
        self._command = [python, str(script), case.name]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a deprecation at every turn
            text=True,
        )

    def __call__(self) -> float:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"Avalanche gave up; to see why: {' '.join(self._command)}")
        return float(answer)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(case: Case, avalanche: str | None) -> dict[str, Seconds]:
    """Return the seconds of each loop's turns."""
    turns: dict[str, Callable[[], float | None]] = {
        "plain PyTorch": plain(case),
        "syngap, er": ours(case, "er"),
        "syngap, syngap": ours(case, "syngap"),
    }
    with suppress(Exception):  # no compiler here
        compiled = plain(case, compiled=True)
        compiled()
        turns["plain PyTorch, compiled"] = compiled
    process = Avalanche(avalanche, case) if avalanche else None
    if process:
        turns["Avalanche 0.6, replay"] = process
    turns = {name: turn if turn is process else timed(turn) for name, turn in turns.items()}
    try:
        return in_turns(turns, ROUNDS)
    finally:
        if process:
            process.close()


def main() -> None:
    torch.set_num_threads(1)
    print(__doc__)
    avalanche = os.environ.get("AVALANCHE")
    wanted = sys.argv[1:] or list(CASES)
    for case in (CASES[name] for name in wanted):
        progress(case.name)
        seconds = compare(case, avalanche)
        base = seconds["plain PyTorch"]
        rows = [
            [name, f"{1e3 * each.median() / case.steps:.3f}", f"{each.over(base):.3f}"]
            for name, each in seconds.items()
        ]
        table(f"{case.name}:", ["", "ms a step", "× plain PyTorch"], rows)


if __name__ == "__main__":
    main()
