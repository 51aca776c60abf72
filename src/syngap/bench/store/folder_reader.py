"""Reads the folder of a run, or packed runs; `folder_writer` writes one, `layout` has the names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from syngap.bench.config.reading import LARGE, check_format, json_in, reading, text_in, yaml_in
from syngap.bench.errors import UserError
from syngap.bench.finetuning.point import Point
from syngap.bench.metrics import Evaluation
from syngap.bench.store.layout import (
    ACCURACY,
    CONFIG,
    ENVIRONMENT,
    EXPERIMENT,
    METRICS,
    STATUS,
    run_folders,
)
from syngap.bench.store.outcome import (
    Environment,
    Planned,
    RecordedConfig,
    Run,
    Status,
    check_accuracy,
    check_follows,
    check_point,
    evaluation_of,
    summary_of,
)
from syngap.bench.store.packed import is_packed, read_packed

__all__ = [
    "Planned",
    "Run",
    "csv_of",
    "evaluation_of",
    "read_config",
    "read_environment",
    "read_run",
    "read_runs",
    "read_status",
    "read_yaml",
]


def read_runs(directory: Path) -> list[Run]:
    """Return every run in `directory`, in the order of the experiment's methods and seeds.

    Args:
        directory: what `syngap run` wrote, with a folder a run, or `syngap keep`, packed.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: there is no such folder")
    plan = directory / EXPERIMENT
    if not plan.is_file():
        raise UserError(f"{directory}: no runs there (experiment.yaml is missing)")
    planned = _planned(plan)
    folders = [folder for folder in run_folders(directory) if _holds_run(folder)]
    if folders and is_packed(directory):
        raise UserError(
            f"{directory}: holds packed runs and run folders ({folders[0].name}); move the run "
            f"folders elsewhere with experiment.yaml, and `syngap keep` adds them"
        )
    found = read_packed(directory) if is_packed(directory) else map(read_run, folders)
    runs = [replace(run, planned=planned) for run in found]
    if not runs:
        raise UserError(f"{directory}: no run has begun there")
    _check_alike([run for run in runs if run.done])
    place = {row: number for number, row in enumerate(planned.methods)}
    return sorted(runs, key=lambda run: (place.get(run.family, len(place)), run.row, run.seed))


def _check_alike(done: Sequence[Run]) -> None:
    """Refuse finished runs that no mean over seeds, and no table of rows, can be made of."""
    shapes: dict[str, tuple[Run, tuple[int, ...]]] = {}
    for run in done:
        ends = sum(evaluation.end for evaluation in run.record)
        shape = (len(run.accuracy), *map(len, run.accuracy[:1]), *([ends] if run.record else []))
        other, expected = shapes.setdefault(run.row, (run, shape))
        if any(one != each for one, each in zip(shape, expected, strict=False)):
            raise UserError(f"{run.path}: not of as many tasks as {other.path.name}")


def read_run(path: Path) -> Run:
    """Return what the run folder `path` says, whether the run has ended or not."""
    config = read_config(path)
    accuracy = _matrix(path / ACCURACY)
    initial: tuple[float, ...] | None = None
    record: list[Evaluation] = []
    summaries: dict[int, dict[str, float]] = {}
    points: list[Point] = []
    with reading(path / METRICS):
        for line in _lines(path / METRICS):
            if "share" in line:
                point = Point.from_mapping(line)
                check_point(point, points)
                points.append(point)
                continue
            evaluation = evaluation_of(line)
            check_follows(evaluation, record, accuracy)
            if evaluation.step:
                record.append(evaluation)
            else:
                initial = evaluation.accuracy
            if summary := line.get("summary"):
                summaries[evaluation.step] = summary_of(summary)
    return Run(
        path=path,
        config=config,
        status=read_status(path),
        environment=read_environment(path),
        accuracy=accuracy,
        initial=initial,
        record=record,
        summaries=summaries,
        points=points,
    )


def _planned(path: Path) -> Planned:
    found = read_yaml(path)
    with reading(path):
        rows = {row: dict(o or {}) for row, o in dict(found.get("methods") or {}).items()}
        methods = {row: {"name": str(o.pop("method", row)), **o} for row, o in rows.items()}
        configs = [
            RecordedConfig.from_mapping({"row": row, "seed": 0, "method": options})
            for row, options in methods.items()
        ]
        seeds = tuple(int(seed) for seed in found.get("seeds") or ())
        return Planned({config.row: config.method for config in configs}, seeds)


def _holds_run(path: Path) -> bool:
    """Return whether a folder with a config.yaml holds a run, not a landscape or other things."""
    status = (path / STATUS).exists()
    begun = (path / ENVIRONMENT).exists() and not (path / "landscape.json").is_file()
    return status or begun


def read_config(path: Path) -> RecordedConfig:
    """Return the configuration of the run in `path`."""
    found = read_yaml(path / CONFIG)
    with reading(path / CONFIG):
        return RecordedConfig.from_mapping(found)


def read_status(path: Path) -> Status:
    """Return the status of the run in `path`; an empty one where it has not begun."""
    found = _json(path / STATUS)
    with reading(path / STATUS):
        return Status.from_mapping(found)


def read_environment(path: Path) -> Environment:
    """Return what the run in `path` ran on."""
    return Environment(_json(path / ENVIRONMENT))


def csv_of(rows: Iterable[tuple[int, Sequence[float]]], tasks: int) -> str:
    """Return accuracy.csv: (number of tasks learned, accuracy by task) a line.

    Examples:
        >>> print(csv_of([(1, [98.5, 0.0])], tasks=2), end="")
        after,task_1,task_2
        1,98.5,0.0
    """
    lines = [",".join(["after", *(f"task_{task + 1}" for task in range(tasks))])]
    lines += [",".join([str(after), *map(repr, row)]) for after, row in rows]
    return "\n".join(lines) + "\n"


def _matrix(path: Path) -> list[list[float]]:
    if not path.exists():
        return []
    with reading(path):
        head, *lines = text_in(path).splitlines() or [""]
        found = [[float(cell) for cell in line.split(",")[1:]] for line in lines]
        check_accuracy(found, len(head.split(",")) - 1)
        return found


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = text_in(path, LARGE)
    return [json.loads(line) for line in text.split("\n")[:-1]]  # the last may be cut off


def _json(path: Path) -> dict[str, Any]:
    return json_in(path) if path.exists() else {}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in `path`, which `syngap run` wrote."""
    found = yaml_in(path)
    check_format(found, path)
    return found
