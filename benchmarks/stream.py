"""Does a long stream stay as fast and as small as it began? Steps a second and memory, by task.

A synthetic stream of 50 tasks, an MLP of CIFAR's size, batch 64 + 64. The time of a step is the
median over a task, so that a busy machine's hiccups do not count; memory is the process's own. The
last column is the promise: task 50 against task 2.
"""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path

import torch

from syngap import methods, models
from syngap.methods import Learner
from syngap.streams import Stream, arrays

TASKS, PER_TASK, CLASSES = 50, 6400, 100
SHOWN = (2, 10, 25, 50)


def resident() -> float:
    """Return the memory of this process in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return float("nan")


def stream() -> Stream:
    chance = torch.Generator().manual_seed(0)
    y = torch.arange(TASKS * PER_TASK) % CLASSES
    x = torch.randint(256, (len(y), 3, 8, 8), generator=chance, dtype=torch.uint8)
    return Stream(arrays(x, y, x[:1000], y[:1000], tasks=TASKS), batch=64)


def measure(name: str, batches: Stream) -> tuple[dict[int, float], dict[int, float]]:
    """Return the median seconds of a step and the memory, both by number of tasks learned."""
    torch.manual_seed(0)
    learner = Learner(models.mlp(batches.shape, batches.classes, hidden=[512]), batches.transform)
    method = methods.registry.get(name)(learner)
    seconds, memory, times = {}, {}, []
    for step in range(len(batches)):
        start = time.perf_counter()
        method.step(batches[step])
        times.append(time.perf_counter() - start)
        if step + 1 in batches.ends:
            task = batches.ends.index(step + 1) + 1
            gc.collect()
            seconds[task], memory[task], times = statistics.median(times), resident(), []
    return seconds, memory


def main() -> None:
    torch.set_num_threads(1)
    print(__doc__)
    batches = stream()
    print(f"{'':8}", *(f"{f'task {task}':>20}" for task in SHOWN), f"{'50 : 2':>16}")
    for name in ("er", "derpp", "ewcpp", "syngap"):
        seconds, memory = measure(name, batches)
        cells = [f"{1 / seconds[task]:8.0f}/s {memory[task]:6.0f} MB" for task in SHOWN]
        speed, grown = seconds[2] / seconds[50] - 1, memory[50] - memory[2]
        print(f"{name:8}", *(f"{c:>20}" for c in cells), f"{speed:+8.1%} {grown:+4.1f} MB")


if __name__ == "__main__":
    main()
