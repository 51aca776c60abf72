"""The loss of task 1 around what a method learned, in the plane where its path is visible.

A row of an experiment learns the first two tasks of its stream, as `syngap run` would. The plane
goes through the network at initialisation, after task 1 and after task 2; the loss is that of
task 1's training samples as they are stored, in evaluation mode, over all outputs of the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from torch import Tensor, nn

from syngap.bench import seeds
from syngap.bench.config.component import entry
from syngap.bench.config.experiment import Experiment
from syngap.bench.config.run_config import RunConfig
from syngap.bench.errors import UserError
from syngap.bench.landscapes.path import TaskEvaluator, Tell, train_with_snapshots
from syngap.bench.landscapes.plane import (
    FilterNorm,
    Flat,
    Plane,
    Weights,
    random_plane,
    through,
)
from syngap.bench.runner.run import Job, method_factory, stream_of
from syngap.bench.storage import check_inside, clean, make_folder, remove
from syngap.bench.store.environment import arithmetic, environment, resolve_device
from syngap.bench.store.layout import CONFIG, ENVIRONMENT, STATUS
from syngap.bench.store.surface import FILE, Grid, Landscape, write_landscape

__all__ = ["compute", "landscape", "make_landscape", "plan_landscapes"]

_MARGIN = 0.3  # of the drawing around the path, as a share of its extent


def plan_landscapes(
    experiment: Experiment,
    out: Path,
    *,
    data: Path | None = None,
    replaced: bool = False,
    within: Path | None = None,
) -> list[Job]:
    """Return what is to be computed, having checked what can be checked before the first step.

    Args:
        experiment: its rows and seeds; of its stream the first two tasks are learned.
        out: folder for the landscapes.
        data: where data sets are.
        replaced: whether landscapes that are there may be written over.
        within: the folder that the user named, where it is not `out` but one above it.
    """
    two = replace(experiment, stream=experiment.stream.with_options({"first": 2}))
    device = resolve_device(experiment.training.device)
    jobs = []
    for run in two.runs():
        folder = out / run.name
        check_inside(folder / FILE, within or out)
        if (folder / STATUS).exists():
            raise UserError(f"{folder}: holds a run; give another --out")
        if (folder / FILE).exists() and not replaced:
            raise UserError(f"{folder}: holds a landscape already; --fresh computes it again")
        jobs.append(Job(folder, run.on_device(device.type), data))
    stream = stream_of(jobs[0].config, data)
    for job in jobs:
        method = method_factory(job.config, stream, torch.device("cpu"))()
        if method.sees != "one task after another":
            raise UserError(
                f"methods.{job.config.row}: it sees all tasks at once, and has no path from task 1"
            )
    return jobs


def compute(
    jobs: Sequence[Job], console: Console, *, points: int, samples: int, random: bool
) -> None:
    """Compute the landscapes of `jobs` in this process and show how far they are."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        for number, job in enumerate(jobs, start=1):
            bar = bars.add_task(job.name, total=None)
            tell = partial(_show, bars, bar, job.name)
            found = make_landscape(job, points=points, samples=samples, random=random, tell=tell)
            bars.remove_task(bar)
            line = f"{number} of {len(jobs)}  {job.name:<20} {_summary(found)}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def make_landscape(
    job: Job,
    *,
    points: int,
    samples: int,
    random: bool = False,
    tell: Tell = lambda *_: None,
) -> Landscape:
    """Compute one landscape and leave it in its folder, with what it came from."""
    device = resolve_device(job.config.training.device)
    try:
        found = landscape(
            job.config, job.data, points=points, samples=samples, random=random, tell=tell
        )
    except (Flat, FloatingPointError) as error:
        raise UserError(f"{job.name}: {error}") from error
    out = job.folder.parent
    make_folder(job.folder, within=out)
    clean(job.folder, within=out)
    for beside in (CONFIG, ENVIRONMENT):  # of a landscape in format 1, whose place this one takes
        remove(job.folder / beside, within=out)
    found = replace(found, environment=environment(device))
    write_landscape(job.folder / FILE, found, within=out)
    return found


def landscape(
    config: RunConfig,
    data: Path | None,
    *,
    points: int,
    samples: int,
    random: bool = False,
    tell: Tell = lambda *_: None,
) -> Landscape:
    """Train a run of two tasks and return the landscape of the first.

    Args:
        config: of the run, complete.
        data: where data sets are.
        points: of the grid, along each axis.
        samples: at most so many of task 1.
        random: whether to compute the plane of two random directions too.
        tell: is called with what is being done, how much of it is done, and of how much.
    """
    with arithmetic(config.training.threads, config.training.deterministic):
        return _landscape(config, data, points, samples, random, tell)


def _landscape(
    config: RunConfig,
    data: Path | None,
    points: int,
    samples: int,
    random: bool,
    tell: Tell,
) -> Landscape:
    began, seed = time.monotonic(), config.seed
    device = resolve_device(config.training.device)
    stream = stream_of(config, data).to(device)
    learner, kept = train_with_snapshots(stream, method_factory(config, stream, device), tell)

    first, middle, last = kept[0], kept[stream.ends[0]], kept[stream.ends[1]]
    norm = FilterNorm(middle, [name for name, _ in learner.model.named_parameters()])
    plane = through(first, middle, last, norm, _variances(learner.model))
    epochs = entry(config.stream.options, "epochs", int) or 1
    evaluator = TaskEvaluator(learner, stream, epochs, seed, samples)
    grid = _grid(plane, kept, stream.ends, evaluator, points, lambda n, of: tell("surface", n, of))
    scattered = None
    if random:
        draw = _gaussian(seed)
        scattered = _grid(
            random_plane(middle, norm, draw),
            kept,
            stream.ends,
            evaluator,
            points,
            lambda n, of: tell("random directions", n, of),
            side=grid.x[-1] - grid.x[0],
        )
    on_path = {step: evaluator(weights) for step, weights in kept.items()}
    named = {name: on_path[step] for name, step in _named(stream.ends).items()}
    return Landscape(
        row=config.row,
        method=config.method.name,
        seed=seed,
        task=1,
        samples=len(evaluator),
        grid=grid,
        losses_at_points={name: _finite(float(pair[0])) for name, pair in named.items()},
        accuracies_at_points={name: round(float(pair[1]), 3) for name, pair in named.items()},
        path_losses=[_finite(float(pair[0])) for pair in on_path.values()],
        path_distances=[_short(plane.distance(weights)) for weights in kept.values()],
        seconds=round(time.monotonic() - began, 1),
        config=config.as_mapping(),
        random=scattered,
    )


def _grid(
    plane: Plane,
    kept: Mapping[int, Weights],
    ends: list[int],
    evaluator: TaskEvaluator,
    points: int,
    tell: Callable[[int, int], None],
    side: float | None = None,
) -> Grid:
    places = {step: plane.coordinates(weights) for step, weights in kept.items()}
    x, y = _window(places.values(), points, side)
    found = []
    for row, b in enumerate(y):
        found += [evaluator(plane.at(a, b)) for a in x]
        tell((row + 1) * points, points * points)
    values = torch.stack(found).reshape(points, points, 2).cpu()
    return Grid(
        x=x,
        y=y,
        loss=[[_finite(value) for value in row] for row in values[..., 0].tolist()],
        accuracy=[[round(value, 3) for value in row] for row in values[..., 1].tolist()],
        path=[(_short(a), _short(b), step) for step, (a, b) in places.items()],
        points={
            name: (_short(places[step][0]), _short(places[step][1]))
            for name, step in _named(ends).items()
        },
    )


def _named(ends: list[int]) -> dict[str, int]:
    return {"initialisation": 0, "task 1": ends[0], "task 2": ends[1]}


def _window(
    places: Iterable[tuple[float, float]], points: int, side: float | None
) -> tuple[list[float], list[float]]:
    """Return the places of a square grid around `places`; with a `side`, around the origin."""
    if side is not None:
        across = [_short(side * (n / (points - 1) - 0.5)) for n in range(points)]
        return across, across
    xs, ys = zip(*places, strict=True)
    widest = max(max(xs) - min(xs), max(ys) - min(ys)) * (1 + 2 * _MARGIN)
    x, y = (
        [
            _short((min(along) + max(along)) / 2 + widest * (n / (points - 1) - 0.5))
            for n in range(points)
        ]
        for along in (xs, ys)
    )
    return x, y


def _variances(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_buffers() if name.rpartition(".")[2] == "running_var"]


def _gaussian(seed: int) -> Callable[[Tensor], Tensor]:
    chance = seeds.generator(seed, "landscape/directions")
    return lambda like: torch.randn(like.shape, generator=chance).to(like.device)


def _finite(value: float) -> float | None:
    return _short(value) if abs(value) < float("inf") else None


def _short(value: float) -> float:
    """Six digits: more than a drawing shows, in half the bytes."""
    return float(f"{round(value, 12):.6g}") + 0.0  # never -0.0


def _show(bars: Progress, bar: TaskID, name: str, doing: str, done: int, total: int) -> None:
    bars.update(bar, description=f"{name}: {doing}", completed=done, total=total)


def _summary(found: Landscape) -> str:
    losses = [
        f"{name} {'–' if loss is None else f'{loss:.2f}'}"
        for name, loss in found.losses_at_points.items()
    ]
    return f"loss of task 1: {', '.join(losses)}  {found.seconds:.1f} s"
