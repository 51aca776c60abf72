"""What grows with what? Set-up and step of `protect` relative to AdamW, steps of a stream to ER.

python benchmarks/growth.py [--device cuda] [--only width,tasks]
python benchmarks/run.py cpu --only growth --keep results/speed/cpu
python benchmarks/growth.py --draw results/speed/cpu/growth.md docs/figures/growth.svg

Of `protect`: a model of an embedding, `depth` square layers and a head over `classes` tokens, 16
texts of 64 tokens a step, 128 known texts, 16 anchors at each step. One of these numbers varies at
a time. AdamW (fused) is the peer, and takes its steps in the same turns; the set-up is counted in
steps of AdamW. A ratio that does not change with size grows as AdamW's own step does. The gate's
products do not depend on the tokens of a step: with fewer its ratio is larger.

Of a stream: an MLP 192-512-1000, batch 64 + 64. Learners that have come to different places take
steps in turns; "x" is relative to the first place. Memory is the process's own. Task 2 is within
the first 200 steps, of which SynGAP refreshes importance at each; later at each 16th.

On a CPU one thread, in seconds of its CPU; on a GPU by the clock.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from measure import in_turns, progress, resident, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from syngap import protect
from syngap.bench import methods, models
from syngap.bench.methods import Learner, Method
from syngap.bench.streams import Batch, Stream, arrays

Turn = Callable[[], float]

# protect ------------------------------------------------------------------------------------------

BASE = {"width": 128, "depth": 4, "classes": 1000, "anchors": 16, "known inputs": 128}
LENGTH, TEXTS = 64, 16  # tokens of a text, and texts of a step
SWEEPS: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": {
        "width": (64, 128, 256, 512),
        "depth": (2, 4, 8, 16),
        "classes": (100, 400, 1600),
        "anchors": (4, 16, 64),
        "known inputs": (32, 128, 512),
    },
    "cuda": {
        "width": (256, 512, 1024, 2048, 4096),
        "depth": (2, 4, 8, 16, 32),
        "classes": (1000, 10_000, 50_000),
        "anchors": (4, 16, 64, 256),
        "known inputs": (64, 256, 1024, 4096),
    },
}
HEAD = ["ms, AdamW", "gate, x", "gate and teacher, x", "set-up, steps of AdamW"]
ROUNDS = 3
TURN = 0.1  # seconds of AdamW's steps at a time


class Layers(nn.Module):
    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(classes, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + gelu(layer(x))
        output: Tensor = self.head(x)
        return output


class Clock:
    """Seconds of one thread of a CPU, or of a GPU by the clock."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def now(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, step: Callable[[], object], times: int = 1) -> Turn:
        """Return what calls a step some times and returns the seconds of one."""

        def turn() -> float:
            start = self.now()
            for _ in range(times):
                step()
            return (self.now() - start) / times

        return turn


def of_protect(topic: str, size: int, clock: Clock) -> list[str]:
    """Return a row: milliseconds of AdamW, and what protection takes relative to it."""
    sizes = BASE | {topic: size}
    width, depth, classes = (sizes[name] for name in ("width", "depth", "classes"))
    torch.manual_seed(0)
    known = torch.randint(classes, (sizes["known inputs"], LENGTH), device=clock.device)
    batch = torch.randint(classes, (TEXTS, LENGTH + 1), device=clock.device)

    def make(**options: bool) -> Callable[[], object]:
        """Protect a new model, and return a training step; without options AdamW's alone."""
        torch.manual_seed(0)
        model = Layers(width, depth, classes).to(clock.device)
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
        penalty: Callable[[], Tensor | float] = lambda: 0.0  # noqa: E731
        if options:
            protection = protect(model, known, anchors=sizes["anchors"], every=1, **options)
            optimizer, penalty = protection.optimizer(optimizer), protection.loss

        def step() -> None:
            loss = penalty() + cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    steps = {
        "AdamW": make(),
        "gate": make(gate=True, teacher=False),
        "both": make(gate=True, teacher=True),
    }
    for step in steps.values():
        step()  # makes the states
    times = max(1, math.ceil(TURN / clock.timed(steps["AdamW"])()))
    turns = {name: clock.timed(step, times) for name, step in steps.items()}
    turns["set-up"] = clock.timed(lambda: make(gate=True, teacher=True))
    seconds = in_turns(turns, ROUNDS)
    adamw = seconds["AdamW"]
    return [
        f"{size}",
        f"{1e3 * adamw.median():.2f}",
        *(f"{seconds[name].over(adamw):.2f}" for name in ("gate", "both")),
        f"{seconds['set-up'].over(adamw):.0f}",
    ]


# Streams ------------------------------------------------------------------------------------------

METHODS = ("er", "derpp", "ewcpp", "syngap")
TASKS, PER_TASK, CLASSES, BATCH = 50, 1920, 1000, 64
STREAM_ROUNDS = 27
PLACES: dict[str, tuple[int, ...]] = {
    "tasks": (2, 10, 50),
    "classes seen": (10, 100, 1000),
    "size of the memory": (500, 5000, 50_000),
}


def learner_of(name: str, batches: Stream, clock: Clock, **options: int) -> Method:
    torch.manual_seed(0)
    network = models.mlp(batches.shape, CLASSES, hidden=[512])
    learner = Learner(network, batches.transform, device=clock.device)
    method: Method = methods.registry.get(name)(learner, lr=0.01, **options)
    return method


def samples(count: int, classes: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 3, 8, 8), generator=chance, dtype=torch.uint8)
    return x, torch.arange(count) % classes


def stream(classes: int, tasks: int, size: int, clock: Clock) -> Stream:
    x, y = samples(size, classes)
    made = Stream(arrays(x, y, x[:1000], y[:1000], tasks=tasks), batch=BATCH, epochs=1)
    return made.to(clock.device)


def stepping(method: Method, batches: Iterable[Batch], clock: Clock) -> Turn:
    """Return what takes one step and returns its seconds."""
    coming = iter(batches)

    def turn() -> float:
        batch = next(coming)
        return clock.timed(lambda: method.step(batch))()

    return turn


def by_tasks(name: str, clock: Clock) -> tuple[list[Turn], list[str]]:
    """Return turns in some tasks, and the MB of the process after the first and the last."""
    batches = stream(100, TASKS, TASKS * PER_TASK, clock)
    learners = {place: learner_of(name, batches, clock) for place in PLACES["tasks"]}
    memory = {}
    for step in range(batches.ends[-2]):
        task = next(number for number, end in enumerate(batches.ends, 1) if step < end)
        for place, learner in learners.items():
            if task < place:
                learner.step(batches[step])
        if step + 1 in batches.ends:
            memory[task] = resident()
            progress(f"{name}: task {task}")

    def turn(place: int) -> Turn:
        own = copy.copy(batches)  # with a place of its own in the stream
        steps = range(*batches.ends[place - 2 : place])
        return stepping(learners[place], (own[step] for step in steps), clock)

    first, last = min(memory), max(memory)
    return list(map(turn, learners)), [f"{memory[first]:.0f}", f"{memory[last]:.0f}"]


def by_classes_seen(name: str, clock: Clock) -> tuple[list[Turn], list[str]]:
    turns = []
    for classes in PLACES["classes seen"]:
        batches = stream(classes, tasks=1, size=64 * 1000, clock=clock)
        method = learner_of(name, batches, clock)
        for step in range(100):
            method.step(batches[step])
        turns.append(stepping(method, map(batches.__getitem__, count(100)), clock))
    return turns, []


def by_memory(name: str, clock: Clock) -> tuple[list[Turn], list[str]]:
    turns = []
    sizes = PLACES["size of the memory"]
    x, y = samples(sizes[-1], CLASSES)
    for size in sizes:
        batches = stream(CLASSES, tasks=1, size=64 * 1000, clock=clock)
        method = learner_of(name, batches, clock, buffer=size)
        filled = {"x": x[:size], "y": y[:size]}
        filled |= {"logits": torch.zeros(size, CLASSES)} if name == "derpp" else {}
        moved = {field: each.to(clock.device) for field, each in filled.items()}
        method.memory.add(**moved)  # type: ignore[attr-defined]
        turns.append(stepping(method, map(batches.__getitem__, count()), clock))
    return turns, []


STREAMS = {"tasks": by_tasks, "classes seen": by_classes_seen, "size of the memory": by_memory}


def of_streams(topic: str, clock: Clock) -> tuple[list[str], list[list[str]]]:
    """Return a table: steps at the first place relative to ER, and later ones to the first."""
    turns: dict[str, Turn] = {}
    further: dict[str, list[str]] = {}
    for name in METHODS:
        found, further[name] = STREAMS[topic](name, clock)
        turns |= {f"{name} {place}": turn for place, turn in enumerate(found)}
    seconds = in_turns(turns, STREAM_ROUNDS)
    rows = []
    for name in METHODS:
        first, *others = (seconds[f"{name} {place}"] for place in range(len(PLACES[topic])))
        row = [name, f"{1e3 * first.median():.2f}", f"{first.over(seconds['er 0']):.2f}"]
        rows.append([*row, *(f"{one.over(first):.3f}" for one in others), *further[name]])
    start, *others = PLACES[topic]
    head = [topic, f"ms at {start}", "x ER", *(f"{place}, x" for place in others)]
    return [*head, *(("MB, first task", "MB, last") if topic == "tasks" else ())], rows


# The figure ---------------------------------------------------------------------------------------


def tables_in(text: str) -> dict[str, list[list[str]]]:
    """Return the tables that a run printed, by what grows: header and rows."""
    found: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        head, _, *rows = ([c.strip() for c in line.split("|")[1:-1]] for line in block.splitlines())
        found[head[0]] = [head, *rows]
    return found


def curves_of(topic: str, lines: list[list[str]]) -> tuple[list[float], dict[str, list[float]]]:
    """Return sizes, and what is drawn over them."""
    head, *rows = lines
    if topic in STREAMS:
        (row,) = (row for row in rows if row[0] == "syngap")
        later = [place for place, name in enumerate(head) if name.endswith(", x")]
        ratio, sizes = float(row[2]), [head[1].split()[-1], *(head[at][:-3] for at in later)]
        return list(map(float, sizes)), {"step": [ratio, *(ratio * float(row[at]) for at in later)]}
    columns = [list(map(float, column)) for column in zip(*rows, strict=True)]
    return columns[0], {"step, gate": columns[2], "step": columns[3], "set-up": columns[4]}


def growth(sizes: list[float], values: list[float]) -> str:
    """Return in words how values grow, by the exponent over the whole range."""
    exponent = math.log(values[-1] / values[0]) / math.log(sizes[-1] / sizes[0])
    if exponent < -0.15:
        return "falls"
    words = {0.15: "flat", 0.85: "below linear", 1.15: "linear"}
    return next((word for most, word in words.items() if exponent < most), "above linear")


def draw(path: Path, to: Path) -> None:
    """Draw a panel for each of what grows, from what a run printed."""
    from syngap.bench.reporting.figures.style import COLOURS, INK, SOFT, figure_file, remove_frame

    tables = tables_in(path.read_text(encoding="utf-8"))
    topics = [*BASE, "tasks"]
    colours = {"step, gate": COLOURS[1], "step": INK, "set-up": COLOURS[0]}
    with figure_file(to, (9.0, 5.6)) as figure:
        panels = figure.subplots(2, 3, sharey=True).flatten()
        for topic, axes in zip(topics, panels, strict=True):
            sizes, curves = curves_of(topic, tables[topic])
            for name, values in curves.items():
                axes.plot(sizes, values, "o-", color=colours[name], markersize=3.5, linewidth=1.4)
                said = "step, SynGAP" if topic == "tasks" else name
                side = (0, -7) if name == "step, gate" else (0, 6)
                axes.annotate(
                    said,
                    (sizes[-1], values[-1]),
                    side,
                    textcoords="offset points",
                    ha="right",
                    va="top" if side[1] < 0 else "bottom",
                    fontsize=8,
                    color=colours[name],
                )
            first = next(iter(curves.values()))[0]
            line = [first * size / sizes[0] for size in sizes]
            axes.plot(sizes, line, color=SOFT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
            axes.annotate(
                "linear",
                (sizes[-1], line[-1]),
                (-3, 3),
                textcoords="offset points",
                ha="right",
                va="bottom",
                fontsize=8,
            )
            parts = [f"step {growth(sizes, curves['step'])}"]
            if "set-up" in curves:
                parts.append(f"set-up {growth(sizes, curves['set-up'])}")
            axes.set(xscale="log", yscale="log", xlabel=topic)
            axes.set_title(", ".join(parts), fontsize=9.5)
            axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes], fontsize=8)
            axes.minorticks_off()
            axes.set_ylim(0.8, 500)
            remove_frame(axes)
        for axes in (panels[0], panels[3]):
            axes.set_ylabel("steps of AdamW (tasks: of ER)", fontsize=9)
        found = [curves_of(topic, tables[topic]) for topic in topics]
        words = [growth(sizes, values) for sizes, curves in found for values in curves.values()]
        fastest = "faster" if "above linear" in words else "no faster"
        title = f"Relative to a plain step of the same size, costs grow {fastest} than linearly"
        figure.suptitle(title, fontsize=12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=SWEEPS, default="cpu")
    parser.add_argument("--only", help="such as width,tasks")
    parser.add_argument("--draw", type=Path, nargs=2, help="what a run printed, and a figure")
    args = parser.parse_args()
    if args.draw:
        draw(*args.draw)
        return
    torch.set_num_threads(1)
    clock, sweeps = Clock(args.device), SWEEPS[args.device]
    print(__doc__)
    for topic in args.only.split(",") if args.only else [*sweeps, *STREAMS]:
        if topic in STREAMS:
            table(f"By {topic}:", *of_streams(topic, clock))
        else:
            rows = [of_protect(topic, size, clock) for size in sweeps[topic]]
            table(f"By {topic}:", [topic, *HEAD], rows)


if __name__ == "__main__":
    main()
