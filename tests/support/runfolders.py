"""Run folders as `bench.store.folder_reader` reads them, made up: for tests of what reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from syngap.bench.store.folder_reader import Run, csv_of, read_runs
from syngap.bench.store.packed import write_packed
from syngap.bench.store.surface import Grid, Landscape, write_landscape

LAYERS = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")


@dataclass(frozen=True)
class Made:
    """A made-up method.

    Args:
        name: the method's name.
        learns: accuracy on a task when it was just learned.
        keeps: what share of it each later task leaves.
        seconds: training time.
        spread: how far seeds differ, in points.
        layers: tensors whose plasticity it tells of.
        options: further options in its configuration.
    """

    name: str
    learns: float = 95.0
    keeps: float = 0.5
    seconds: float = 10.0
    spread: float = 1.0
    layers: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = None


DEMO = {
    "sgd": Made("sgd", 97, 0.10, 4.1, 0.5, options={"lr": 0.1}),
    "sgdm": Made("sgdm", 98, 0.07, 4.3, 0.6, options={"lr": 0.05, "momentum": 0.9}),
    "adam": Made("adam", 98, 0.05, 4.6, 0.4, options={"lr": 0.001}),
    "ballistic": Made("ballistic", 96, 0.12, 4.5, 1.8, options={"lr": 0.001}),
    "ewcpp": Made("ewcpp", 90, 0.22, 7.9, 2.2, options={"lr": 0.1, "strength": 10.0}),
    "er": Made("er", 96, 0.86, 6.2, 2.4, options={"lr": 0.1, "buffer": 200}),
    "er_ace": Made("er_ace", 90, 0.94, 6.4, 1.2, options={"lr": 0.1, "buffer": 200}),
    "derpp": Made("derpp", 95, 0.93, 9.0, 1.0, options={"lr": 0.1, "buffer": 200}),
    "syngap": Made("syngap", 95, 0.91, 10.8, 0.8, LAYERS, {"lr": 0.3, "buffer": 200}),
    "syngap, no replay": Made("syngap", 92, 0.35, 8.1, 1.5, LAYERS, {"lr": 0.3, "buffer": 0}),
    "joint": Made("joint", 98.2, 1.0, 4.2, 0.2, options={"lr": 0.1}),
}


# The same methods at several rates, as `syngap.bench.reporting.curves.sweeps` finds them.
RATES = {
    "er": Made("er", 90, 0.80, options={"lr": 0.1, "buffer": 200}),
    "er_lr0.3": Made("er", 80, 0.80, options={"lr": 0.3, "buffer": 200}),
    "er_lr1.0": Made("er", 60, 0.80, options={"lr": 1.0, "buffer": 200}),
    "syngap": Made("syngap", 90, 0.85, 10.8, 0.8, LAYERS, {"lr": 0.3, "buffer": 200}),
    "syngap_lr0.03": Made("syngap", 70, 0.85, 10.8, 0.8, LAYERS, {"lr": 0.03, "buffer": 200}),
    "sgd": Made("sgd", 97, 0.10, options={"lr": 0.1}),
}


def change_packed(directory: Path, change: Callable[[Run], Run | None]) -> None:
    """Put what `change` makes of each packed run in its place; None leaves it out."""
    changed = (change(run) for run in read_runs(directory))
    write_packed(directory, [run for run in changed if run])


def write_made_landscape(
    directory: Path, row: str, method: str, seed: int = 0, *, points: int = 9, random: bool = True
) -> Path:
    """Write a made-up landscape: a bowl around task 1, with the path that every method takes."""
    ticks = [-1.0 + 2.0 * place / (points - 1) for place in range(points)]
    places = [(-0.6, 0.0, 0), (-0.3, -0.05, 4), (0.0, 0.0, 20), (0.05, 0.3, 24), (0.1, 0.6, 40)]
    named = {"initialisation": places[0][:2], "task 1": places[2][:2], "task 2": places[4][:2]}

    def grid(flat: float, path: list[tuple[float, float, int]]) -> Grid:
        bowl = [[0.01 + flat * 4 * (x * x + y * y) for x in ticks] for y in ticks]
        return Grid(
            x=ticks,
            y=ticks,
            loss=[[None if x == y == 1 else loss for x, loss in zip(ticks, line, strict=True)]
                  for y, line in zip(ticks, bowl, strict=True)],
            accuracy=[[100 / (1 + loss) for loss in line] for line in bowl],
            path=path,
            points={name: (x * (flat == 1), y * (flat == 1)) for name, (x, y) in named.items()},
        )  # fmt: skip

    folder = directory / f"{row}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    losses: dict[str, float] = {"initialisation": 2.3, "task 1": 0.01, "task 2": 1.5}
    made = Landscape(
        row=row,
        method=method,
        seed=seed,
        task=1,
        samples=100,
        grid=grid(1.0, places),
        losses_at_points={**losses},
        accuracies_at_points={name: 100 / (1 + loss) for name, loss in losses.items()},
        random=grid(0.01, [(0.0, 0.0, step) for *_, step in places]) if random else None,
    )
    write_landscape(folder / "landscape.json", made, within=folder)
    return folder / "landscape.json"


def write_search(directory: Path, chosen: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write a search of three trials a row, the last of which diverged; return trials.csv.

    Args:
        directory: the experiment's.
        chosen: row → what was chosen for it.
    """
    spaces = {"lr": {"log": [0.01, 1.0], "start": 0.001}, "momentum": {"choose": [0.0, 0.9]}}
    found = {
        "experiment": "made-up",
        "trials": 3,
        "seeds": [100],
        "stream": {"validation": 0.1, "first": 4},
        "spaces": dict.fromkeys(chosen, spaces),
        "sampler": {"name": "Optuna TPE", "random_first": 4},
        "chosen": {
            row: {"values": dict(values), "ACC": 50.0, "trial": 1, "trials": 3, "diverged": 1}
            for row, values in chosen.items()
        },
    }
    folder = directory / "search"
    folder.mkdir()
    (folder / "search.yaml").write_text(yaml.safe_dump(found, sort_keys=False))
    ends = ("40.0,done", "50.0,done", "0.0,diverged")
    lines = [f"{row},{n},{end}\n" for row in chosen for n, end in enumerate(ends)]
    (folder / "trials.csv").write_text("".join(["row,trial,ACC,state\n", *lines]))
    return folder / "trials.csv"


def write_experiment(
    directory: Path,
    methods: Mapping[str, Made] = DEMO,
    seeds: Sequence[int] = (0, 1, 2),
    **run: Any,
) -> Path:
    """Write a whole experiment, every run finished, and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    plan = {
        "methods": {row: {"method": made.name} for row, made in methods.items()},
        "seeds": list(seeds),
    }
    (directory / "experiment.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    for row, made in methods.items():
        for seed in seeds:
            write_run(directory, row, made, seed, **run)
    return directory


def write_run(
    directory: Path,
    row: str,
    made: Made,
    seed: int,
    *,
    tasks: int = 5,
    steps: int = 100,
    every: int = 5,
    R: Sequence[Sequence[float]] | None = None,
    state: str = "done",
    tasks_done: int | None = None,
    error: str | None = None,
    uneven: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write one run folder.

    Args:
        directory: the experiment's.
        row: the run's row in the table.
        made: the method.
        seed: of the run; it makes its small differences.
        tasks: T.
        steps: steps a task.
        every: steps between evaluations.
        R: accuracy matrix in place of a made-up one.
        state: "done", "running" or "failed".
        tasks_done: how many tasks an unfinished run has behind it.
        error: what a failed one said.
        uneven: whether the length of tasks differs by seed.
        extra: further entries of the configuration.
    """
    chance = random.Random(f"{row} {seed}")
    joint = made.name == "joint"
    R = [list(line) for line in R] if R else _matrix(made, tasks, chance)
    tasks = len(R[0])
    done = len(R) if state == "done" else tasks_done or 0
    length = random.Random(seed)  # the same for all methods, as they learn the same stream
    lengths = [steps + (length.randrange(-steps // 5, steps // 5) if uneven else 0) for _ in R]
    if joint:
        lengths = [steps * tasks]
    path = directory / f"{row}-{seed}".replace(", ", "-").replace(" ", "-").replace("/", "-")
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "row": row,
        "seed": seed,
        "stream": {"name": "digits", "tasks": tasks, "batch": 10, "epochs": 1},
        "model": {"name": "mlp", "hidden": [100, 100]},
        "device": "cpu",
        "method": {"name": made.name, **(made.options or {})},
        **(extra or {}),
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    _json(path / "environment.json", _ENVIRONMENT)
    seconds = made.seconds * done / len(R) * (1 + 0.03 * chance.uniform(-1, 1))
    status = {"state": state, "step": sum(lengths[:done]), "steps": sum(lengths)}
    _json(path / "status.json", {**status, "seconds": round(seconds, 3), "error": error})
    after = [tasks] if len(R) == 1 else range(1, done + 1)
    (path / "accuracy.csv").write_text(csv_of(zip(after, R[:done], strict=True), tasks))
    lines = _lines(made, R[:done], lengths, every, chance, joint)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


_ENVIRONMENT = {
    "command": "syngap run digits --seeds 0..2",
    "started": "2025-11-15T11:20:00+00:00",
    "versions": {"syngap": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    "hardware": {"device": "cpu", "cpu": "a made-up processor", "cores": 2},
}


def _matrix(made: Made, tasks: int, chance: random.Random) -> list[list[float]]:
    level = chance.gauss(0, made.spread)
    if made.name == "joint":
        return [[_percent(made.learns + level + chance.gauss(0, 0.5)) for _ in range(tasks)]]
    return [
        [
            _percent((made.learns + level) * made.keeps ** (i - j) + chance.gauss(0, made.spread))
            if j <= i
            else 0.0
            for j in range(tasks)
        ]
        for i in range(tasks)
    ]


def _lines(
    made: Made,
    R: Sequence[Sequence[float]],
    lengths: Sequence[int],
    every: int,
    chance: random.Random,
    joint: bool,
) -> list[dict[str, Any]]:
    tasks = len(R[0]) if R else 1
    before = [100.0 / (2 * tasks)] * tasks
    last = tasks - 1
    lines = [_line(made, 0, last if joint else 0, False, before, 0.0, len(lengths))]
    start = 0
    for task, (row, length) in enumerate(zip(R, lengths, strict=False)):
        for step in sorted({*range(every, length, every), length}):
            passed = step / length
            accuracy = [
                _percent(
                    new + (old - new) * 0.02 ** (passed * (1 if new > old else 1.5))
                    if step < length
                    else new,
                    chance.gauss(0, made.spread) if step < length and max(old, new) > 1 else 0,
                )
                for old, new in zip(before, row, strict=True)
            ]
            lines.append(
                _line(
                    made,
                    start + step,
                    last if joint else task,
                    step == length,
                    accuracy,
                    task + passed,
                    len(lengths),
                )
            )
        start, before = start + length, list(row)
    return lines


def _line(
    made: Made,
    step: int,
    task: int,
    end: bool,
    accuracy: Sequence[float],
    place: float,
    tasks: int,
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "step": step,
        "task": task,
        "end": end,
        "accuracy": list(accuracy),
        "newest": 100.0 / (task + 1),
    }
    if made.layers:
        summary = {"importance/mean": 1e-4}
        for number, layer in enumerate((*made.layers, "")):
            depth = (number + 1) / (len(made.layers) + 1)
            mean = 1 - (0.15 + 0.6 * depth) * (1 - 0.05 ** (place / tasks))
            name = f"plasticity/{layer}/".replace("//", "/")
            quantiles = {"mean": mean, "q05": mean * 0.6, "q50": mean, "q95": min(mean * 1.2, 1)}
            summary |= {name + statistic: value for statistic, value in quantiles.items()}
            if layer:
                summary[f"importance/{layer}/mean"] = 1e-5 * 10**number * (1 + place)
        line["summary"] = summary
    return line


def _percent(value: float, noise: float = 0.0) -> float:
    return round(min(max(value + noise, 0.0), 100.0), 2)


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2))
