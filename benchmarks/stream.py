"""Does a step cost more the longer a stream was? By tasks, by classes seen, by size of the memory.

An MLP 192-512-1000, batch 64 + 64, one thread. Learners that have come to different places take
steps in turns, so that the machine's moods fall on all alike; seconds are those of the CPU. Memory
is the process's own, after 2 and 50 tasks.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import torch
from measure import in_turns, progress, table
from torch import Tensor

from syngap.bench import methods, models
from syngap.bench.methods import Learner, Method
from syngap.bench.streams import Batch, Stream, arrays

METHODS = ("er", "derpp", "ewcpp", "syngap")
TASKS, PER_TASK, HEAD, BATCH, ROUNDS = 50, 6400, 1000, 64, 99


def learner_of(name: str, batches: Stream, **options: int) -> Method:
    torch.manual_seed(0)
    network = models.mlp(batches.shape, HEAD, hidden=[512])
    kind = methods.registry.get(name)
    method: Method = kind(Learner(network, batches.transform), lr=0.01, **options)
    return method


def samples(count: int, classes: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 3, 8, 8), generator=chance, dtype=torch.uint8)
    return x, torch.arange(count) % classes


def stream(classes: int, tasks: int, size: int) -> Stream:
    x, y = samples(size, classes)
    return Stream(arrays(x, y, x[:1000], y[:1000], tasks=tasks), batch=BATCH, epochs=1)


def stepping(method: Method, batches: Iterator[Batch]) -> Callable[[], float]:
    """Return what takes one step and returns its CPU seconds."""

    def turn() -> float:
        batch = next(batches)
        start = time.process_time()
        method.step(batch)
        return time.process_time() - start

    return turn


def resident() -> float:
    """Return the memory of this process in MB."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def by_tasks(name: str, batches: Stream) -> list[str]:
    """Return a row: milliseconds in task 2, those in task 50 over them, and MB after both."""
    memory = {}
    young, old = learner_of(name, batches), learner_of(name, batches)
    for step in range(batches.ends[-2]):
        if step < batches.ends[0]:
            young.step(batches[step])
        old.step(batches[step])
        if step + 1 in batches.ends:
            task = batches.ends.index(step + 1) + 1
            memory[task] = resident()
            progress(f"{name}: task {task}")
    again = copy.copy(batches)  # with a place of its own in the stream
    early = (batches[step] for step in range(*batches.ends[:2]))
    late = (again[step] for step in range(*batches.ends[-2:]))
    turns = {"2": stepping(young, early), "50": stepping(old, late)}
    seconds = in_turns(turns, ROUNDS)
    return [
        name,
        f"{1e3 * seconds['2'].median():.2f}",
        f"{seconds['50'].over(seconds['2']):.3f}",
        f"{memory[2]:.0f}",
        f"{resident():.0f}",
    ]


def by_classes(name: str, seen: tuple[int, ...] = (10, 100, 1000)) -> list[str]:
    """Return a row: milliseconds with the first number of classes seen, the others over them."""
    turns = {}
    for classes in seen:
        batches = stream(classes, tasks=1, size=64 * 1000)
        method = learner_of(name, batches)
        for step in range(100):
            method.step(batches[step])
        turns[str(classes)] = stepping(method, map(batches.__getitem__, count(100)))
    return relative(name, turns)


def by_memory(name: str, sizes: tuple[int, ...] = (500, 5000, 50_000)) -> list[str]:
    """Return a row: milliseconds with the smallest memory, full, and the others over them."""
    turns = {}
    x, y = samples(sizes[-1], HEAD)
    for size in sizes:
        batches = stream(HEAD, tasks=1, size=64 * 1000)
        method = learner_of(name, batches, buffer=size)
        extra = {"logits": torch.zeros(size, HEAD)} if name == "derpp" else {}
        method.memory.add(x=x[:size], y=y[:size], **extra)  # type: ignore[attr-defined]
        turns[str(size)] = stepping(method, map(batches.__getitem__, count()))
    return relative(name, turns)


def relative(name: str, turns: dict[str, Callable[[], float]]) -> list[str]:
    first, *others = in_turns(turns, ROUNDS).values()
    return [name, f"{1e3 * first.median():.2f}", *(f"{one.over(first):.3f}" for one in others)]


def main() -> None:
    torch.set_num_threads(1)
    print(__doc__)
    batches = stream(100, TASKS, TASKS * PER_TASK)
    rows = [by_tasks(name, batches) for name in METHODS]
    table("By tasks:", ["", "ms, task 2", "task 50, ×", "MB, task 2", "MB, task 50"], rows)
    rows = [by_classes(name) for name in METHODS]
    table("By classes seen:", ["", "ms, 10 classes", "100, ×", "1000, ×"], rows)
    rows = [by_memory(name) for name in METHODS]
    table("By size of the memory:", ["", "ms, 500 samples", "5000, ×", "50000, ×"], rows)


if __name__ == "__main__":
    main()
