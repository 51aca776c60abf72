"""Does a long stream stay as fast and as small as it began? Task 50 against task 2.

A synthetic stream of 50 tasks of 100 steps, an MLP 192-512-100, batch 64 + 64. Two learners, one
that has learned 1 task and one that has learned 49, take the steps of their next task in turns, so
that the machine's moods fall on both alike. Memory is the process's own, after 2 and 50 tasks.
"""

from __future__ import annotations

import copy
import gc
from pathlib import Path

import torch
from measure import in_turns, progress

from syngap import methods, models
from syngap.methods import Learner, Method
from syngap.streams import Stream, arrays

TASKS, PER_TASK, CLASSES = 50, 6400, 100


def stream() -> Stream:
    chance = torch.Generator().manual_seed(0)
    y = torch.arange(TASKS * PER_TASK) % CLASSES
    x = torch.randint(256, (len(y), 3, 8, 8), generator=chance, dtype=torch.uint8)
    return Stream(arrays(x, y, x[:1000], y[:1000], tasks=TASKS), batch=64)


def learner_of(name: str, batches: Stream) -> Method:
    torch.manual_seed(0)
    network = models.mlp(batches.shape, batches.classes, hidden=[512])
    method: Method = methods.registry.get(name)(Learner(network, batches.transform))
    return method


def resident() -> float:
    """Return the memory of this process in MB."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def measure(name: str, batches: Stream) -> tuple[float, float, float, float]:
    """Return steps a second in task 2, the same in task 50 over it, and MB after both."""
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
    early, late = iter(range(*batches.ends[:2])), iter(range(*batches.ends[-2:]))
    again = copy.copy(batches)  # with a place of its own in the stream
    turns = {
        "task 2": lambda: young.step(batches[next(early)]),
        "task 50": lambda: old.step(again[next(late)]),
    }
    seconds = in_turns(turns, rounds=PER_TASK // 64 - 1)
    rate = 1 / seconds["task 2"].median()
    return rate, 1 / seconds["task 50"].over(seconds["task 2"]), memory[2], resident()


def main() -> None:
    torch.set_num_threads(1)
    print(__doc__)
    batches = stream()
    print(f"{'':8} {'task 2':>10} {'task 50':>10} {'difference':>11} {'memory 2':>10} {'50':>8}")
    for name in ("er", "derpp", "ewcpp", "syngap"):
        rate, ratio, early, late = measure(name, batches)
        print(f"{name:8} {rate:8.0f}/s {rate * ratio:8.0f}/s {ratio - 1:+11.1%}", end=" ")
        print(f"{early:7.0f} MB {late:5.0f} MB")


if __name__ == "__main__":
    main()
