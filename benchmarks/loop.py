"""Does the loop cost anything? Steps of ER against the loop that a careful user writes.

No augmentation. On a CPU one thread, in seconds of its CPU; with `cuda` as argument on a GPU, in
bfloat16 and channels last, by the clock. "Plain PyTorch" is everything that ER needs in thirty
lines: samples in one tensor (on the GPU, where there is one), a reservoir drawn from and written to
a batch at a time, one forward and backward pass. Its compiled version has forward pass and loss
under torch.compile; "syngap, er, compiled" is `compiled: true`. Avalanche 0.6 needs an environment
of its own: `AVALANCHE=python make bench` has it in the same turns, in float32 also on a GPU, as its
users have it. Its samples are scaled beforehand, which spares it part of the work. "syngap, syngap"
refreshes importance at every step, as the paper has it; each 16th is the default, and that of
"directions" too. A second argument is a regular expression: other rows are left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from cases import CASES, Case
from measure import Seconds, in_turns, machine, progress, table
from torch import Tensor
from torch.nn.functional import cross_entropy

from syngap.bench import methods
from syngap.bench.methods import Learner
from syngap.bench.streams import Batch, Stream, arrays
from syngap.bench.training.loop import step_function

RATE, SAMPLES = 0.05, 20_000
DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
GPU = DEVICE.type == "cuda"
ROUNDS = 5 if GPU else 15
BASES = ("plain PyTorch", "syngap, er")  # of the ratios
Turn = Callable[[], object]


def plain(case: Case, compiled: bool = False, channels_last: bool = GPU) -> Turn:
    """Return a turn of the loop that needs nothing but PyTorch."""
    model = case.network().to(DEVICE)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = (part.to(DEVICE) for part in case.samples(SAMPLES))
    memory_x, memory_y = torch.empty_like(x[: case.memory]), torch.empty_like(y[: case.memory])
    seen, order = 0, torch.randperm(SAMPLES, device=DEVICE)

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        scaled = inputs.float().div_(255).sub_(0.5).div_(0.25)
        if channels_last:
            scaled = scaled.contiguous(memory_format=torch.channels_last)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU):
            logits = model(scaled)
        return cross_entropy(logits.float(), targets)

    forward = torch.compile(loss_of) if compiled else loss_of

    def turn() -> None:
        nonlocal seen
        for _ in range(case.steps):
            at = seen % (SAMPLES - case.batch)
            index = order[at : at + case.batch]
            new_x, new_y = x[index], y[index]
            inputs, targets = new_x, new_y
            if seen:
                drawn = torch.randperm(min(seen, case.memory), device=DEVICE)[: case.batch]
                inputs = torch.cat([new_x, memory_x[drawn]])
                targets = torch.cat([new_y, memory_y[drawn]])
            optimizer.zero_grad()
            forward(inputs, targets).backward()
            optimizer.step()
            number = torch.arange(seen, seen + case.batch)
            drawn = (torch.rand(case.batch) * (number + 1)).long()
            slot = torch.where(number < case.memory, number, drawn)
            kept = slot < case.memory
            to, rows = slot[kept].to(DEVICE), kept.nonzero().flatten().to(DEVICE)
            memory_x[to], memory_y[to] = new_x[rows], new_y[rows]
            seen += case.batch

    return turn


@dataclass
class Ours:
    """What `syngap run` does between two evaluations, a turn a call.

    The first turn goes on until all is compiled.
    """

    learner: Learner
    stream: Stream
    take: Callable[[Batch], None]
    turn: int
    compiled: bool
    steps: Iterator[int] = field(default_factory=count)

    def __call__(self) -> None:
        taken = 0
        while taken < self.turn or (self.compiled and not self.learner.compiling):
            self.take(self.stream[next(self.steps)])
            taken += 1


def ours(
    case: Case,
    name: str,
    captured: bool = True,
    channels_last: bool = GPU,
    compiled: bool = False,
    **options: Any,
) -> Ours:
    """Return a loop of `syngap run` over the case's samples."""
    x, y = case.samples(SAMPLES - SAMPLES % case.batch)  # so that all batches have one size
    tasks = arrays(x, y, x[:100], y[:100], tasks=1)
    stream = Stream(tasks, batch=case.batch, epochs=1000, augment=False).to(DEVICE)
    learner = Learner(
        case.network(),
        stream.transform,
        device=DEVICE,
        precision="bf16" if GPU else "fp32",
        captured=captured and GPU,
        channels_last=channels_last,
        compiled=compiled,
    )
    kind = methods.registry.get(name)
    method = kind(learner, lr=RATE, buffer=case.memory, replay=case.batch, **options)
    return Ours(learner, stream, step_function(method), case.steps, compiled)


def timed(turn: Turn) -> Callable[[], float]:
    """Return a turn that returns its seconds; those of the CPU other programs lengthen little."""
    clock = time.perf_counter if GPU else time.process_time

    def seconds() -> float:
        start = clock()
        turn()
        if GPU:
            torch.cuda.synchronize()
        return clock() - start

    return seconds


class Avalanche:
    """Avalanche's own replay in a process of its own interpreter, a turn whenever asked for."""

    def __init__(self, python: str, case: Case) -> None:
        script = Path(__file__).with_name("avalanche_er.py")
        self._command = [python, str(script), DEVICE.type, case.name]
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


def compare(case: Case, wanted: str, avalanche: str | None) -> dict[str, Seconds]:
    """Return the seconds of each loop's turns, of those whose name has a regular expression."""
    er, syngap = partial(ours, case, "er"), partial(ours, case, "syngap")
    loops: dict[str, Callable[[], Turn]] = {
        "plain PyTorch": partial(plain, case),
        "syngap, er": er,
        "syngap, syngap": partial(syngap, every=1),
        "syngap, syngap, every=16": partial(syngap, every=16, warmup=0),
        "syngap, syngap, directions": partial(syngap, every=16, warmup=0, directions=True),
        "syngap, er, average": partial(er, average=0.99),
        "syngap, er, average, teacher": partial(er, average=0.99, teacher=0.3),
        "plain PyTorch, compiled": partial(plain, case, compiled=True),
        "syngap, er, compiled": partial(er, compiled=True),
    }
    if GPU:
        loops["syngap, er, not captured"] = partial(er, captured=False)
        loops["syngap, syngap, not captured"] = partial(syngap, captured=False, every=1)
    cases = {}
    for name, make in loops.items():
        if name in BASES or re.search(wanted, name):
            try:
                turn = make()
                turn()
            except Exception as error:
                if "compiled" not in name:
                    raise
                print(f"\nLeft out: {name}: {str(error).splitlines()[0]}")  # no compiler here
            else:
                cases[name] = timed(turn)
    if not avalanche:
        return in_turns(cases, ROUNDS)
    process = Avalanche(avalanche, case)
    try:
        return in_turns({**cases, "Avalanche 0.6, replay": process}, ROUNDS)
    finally:
        process.close()


def main() -> None:
    torch.set_num_threads(1)
    print(f"{__doc__}\n{torch.cuda.get_device_name() if GPU else machine()}")
    for case in CASES[DEVICE.type].values():
        progress(case.name)
        seconds = compare(case, sys.argv[2] if sys.argv[2:] else "", os.environ.get("AVALANCHE"))
        rows = []
        for name, each in seconds.items():
            ratios = [each.over(seconds[base]) for base in BASES]
            rows.append([name, f"{1e3 * each.median() / case.steps:.3f}"])
            rows[-1] += [f"{ratio:.3f}" for ratio in ratios]
        table(f"{case.name}:", ["", "ms a step", "× plain PyTorch", "× syngap, er"], rows)


if __name__ == "__main__":
    main()
