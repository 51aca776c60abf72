"""What landscape.json says: a loss over a plane of networks, and a path in it.

DIR/METHOD-SEED/ or DIR/landscapes/METHOD-SEED/
    landscape.json       see `Landscape`

Format 1 had the configuration and the environment beside it, as config.yaml and environment.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from syngap.bench.config.component import Value
from syngap.bench.config.reading import check_format, json_in, reading
from syngap.bench.methods import registry
from syngap.bench.storage import write
from syngap.bench.store.outcome import LARGEST, Environment

__all__ = ["FILE", "Grid", "Landscape", "read_landscape", "read_landscapes", "write_landscape"]

FILE = "landscape.json"
FORMAT = 2
Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Grid:
    """A function of two coordinates, in filter norms from the network after task 1.

    Args:
        x: places along the first direction.
        y: places along the second.
        loss: cross-entropy, `loss[row][column]` at `y[row]` and `x[column]`; None is not finite.
        accuracy: in percent, in the same order.
        path: (x, y, step) of networks during training, those outside the plane by their shadow.
        points: "initialisation", "task 1" and "task 2".
    """

    x: list[float]
    y: list[float]
    loss: list[list[float | None]]
    accuracy: list[list[float]]
    path: list[tuple[float, float, int]]
    points: dict[str, Point]


@dataclass(frozen=True)
class Landscape:
    """The loss of task 1 around what a method learned.

    Args:
        row: of the experiment.
        method: its name.
        seed: of the run.
        task: whose samples the loss is of, from 1.
        samples: how many of them.
        grid: in the plane through initialisation, task 1 and task 2.
        losses_at_points: of those three networks, evaluated directly.
        accuracies_at_points: the same, in percent.
        path_losses: of the networks themselves, not of their shadows.
        path_distances: how far from the plane they are.
        seconds: it took.
        config: what was trained, complete and resolved; empty in format 1.
        environment: versions, hardware, command; empty in format 1.
        random: the same in the plane of two random directions, where it was asked for.
    """

    row: str
    method: str
    seed: int
    task: int
    samples: int
    grid: Grid
    losses_at_points: dict[str, float | None]
    accuracies_at_points: dict[str, float]
    path_losses: list[float | None] = field(default_factory=list)
    path_distances: list[float] = field(default_factory=list)
    seconds: float = 0.0
    config: dict[str, Value] = field(default_factory=dict)
    environment: Environment = field(default_factory=Environment)
    random: Grid | None = None


def write_landscape(path: Path, landscape: Landscape, *, within: Path) -> None:
    """Put a landscape at `path`: the keys of its grid stand beside the others.

    Args:
        path: of the file.
        landscape: to be written.
        within: the folder that the user named.
    """
    found = asdict(landscape)
    found["environment"] = landscape.environment.as_mapping()
    grid = found.pop("grid")
    content = {"format": FORMAT, **found, **grid}
    # Numbers in one line a row: a file that people can look at, a fifth as long as with indents.
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in content.items()]
    write(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode(), within=within)


def read_landscape(path: Path) -> Landscape:
    """Return the landscape in `path`; UserError where there is none."""
    content = json_in(path)
    check_format(content, path, FORMAT)
    with reading(path):
        del content["format"]
        random = content.pop("random", None)
        grid = _grid({key: content.pop(key) for key in Grid.__dataclass_fields__})
        content["environment"] = Environment(dict(content.get("environment", {})))
        found = Landscape(**content, grid=grid, random=None if random is None else _grid(random))
        for name in (found.row, found.method):
            if not isinstance(name, str) or not name.isprintable():
                raise ValueError(f"{name!a:.80} is the name of no row or method")
        if type(found.seed) is not int:
            raise ValueError(f"seed is {found.seed!a:.80}, expected a whole number")
        _check_numbers([*found.losses_at_points.values(), *found.path_losses], missing=True)
        _check_numbers([*found.accuracies_at_points.values(), *found.path_distances])
        return found


def read_landscapes(directory: Path) -> list[Landscape]:
    """Return the landscapes in a folder of runs, or in one of landscapes, in the methods' order."""
    paths = [*directory.glob(f"*/{FILE}"), *directory.glob(f"landscapes/*/{FILE}")]
    found = [read_landscape(path) for path in sorted(paths)]
    order = {name: place for place, name in enumerate(registry.names())}
    return sorted(found, key=lambda each: (order.get(each.method, len(order)), each.row, each.seed))


def _grid(content: Mapping[str, Any]) -> Grid:
    x, y = list(map(float, content["x"])), list(map(float, content["y"]))
    loss, accuracy = content["loss"], content["accuracy"]
    for rows in (loss, accuracy):
        if [len(row) for row in rows] != [len(x)] * len(y) or len(x) < 2 or len(y) < 2:
            raise ValueError("a grid that is not as wide and high as its axes")
    _check_numbers([value for row in loss for value in row], missing=True)
    _check_numbers([value for row in accuracy for value in row])
    _check_numbers([*x, *y, *(value for place in content["path"] for value in place)])
    path = [(float(a), float(b), int(step)) for a, b, step in content["path"]]
    points = {str(name): (float(a), float(b)) for name, (a, b) in content["points"].items()}
    return Grid(x, y, loss, accuracy, path, points)


def _check_numbers(values: Sequence[Any], *, missing: bool = False) -> None:
    for value in values:
        number = isinstance(value, (int, float)) and abs(value) < LARGEST
        if not number and not (missing and value is None):
            raise ValueError(f"{value!a:.80} in the place of a number")


def _lines(value: Any) -> str:
    if isinstance(value, dict) and "loss" in value:
        inner = ",\n ".join(f"{json.dumps(key)}: {_lines(part)}" for key, part in value.items())
        return "{\n " + inner + "}"
    if isinstance(value, list) and value and isinstance(value[0], (list, tuple)):
        return "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "]"
    return json.dumps(value, ensure_ascii=False)
