"""A run is a folder, and everything that is ever said about the run comes from it.

DIR/experiment.yaml          what was asked for, complete
DIR/METHOD-SEED/
    config.yaml              this run, complete and resolved
    environment.json         versions, hardware, command
    status.json              running, done or failed; steps; seconds of training
    accuracy.csv             R: after each task, the accuracy on every task, in percent
    metrics.jsonl            every evaluation on the way, a line each
    checkpoint/              where to go on from: safetensors, no pickle
    error.txt                of a run that failed: where
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from syngap.errors import UserError
from syngap.metrics import Evaluation

__all__ = [
    "Planned",
    "Run",
    "csv_of",
    "evaluation_of",
    "read_environment",
    "read_run",
    "read_runs",
    "read_status",
    "read_yaml",
]


@dataclass(frozen=True)
class Planned:
    """What experiment.yaml asks for.

    Args:
        methods: row → the method's options, its name among them.
        seeds: of every row.
    """

    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """What a run folder says.

    Args:
        path: the folder.
        config: the whole of config.yaml; `config["row"]` names the row of the table (usually the
            method), `config["seed"]` the seed, `config["method"]` the method with its options.
        status: state ("running", "done" or "failed"), step, steps, seconds, error.
        environment: versions and hardware.
        accuracy: R in percent, a row after each task; a joint run has one row.
        initial: accuracy by task before the first step, None until it was measured.
        record: every evaluation after the first step, in order.
        summaries: step → what the method said of itself then (plasticity by layer, for SynGAP).
        planned: the experiment that it is part of; nothing where the run was read by itself.
    """

    path: Path
    config: dict[str, Any]
    status: dict[str, Any]
    environment: dict[str, Any]
    accuracy: list[list[float]]
    initial: tuple[float, ...] | None = None
    record: list[Evaluation] = field(default_factory=list)
    summaries: dict[int, dict[str, float]] = field(default_factory=dict)
    planned: Planned = field(default_factory=Planned)

    @property
    def row(self) -> str:
        """The row of the table that this run belongs to."""
        return str(self.config["row"])

    @property
    def seed(self) -> int:
        """The seed of this run."""
        return int(self.config["seed"])

    @property
    def done(self) -> bool:
        """Whether it ran to its end."""
        return bool(self.status.get("state") == "done")


def read_runs(directory: Path) -> list[Run]:
    """Return every run in `directory`, in the order of the experiment's methods and seeds."""
    if not directory.is_dir():
        raise UserError(f"{directory}: there is no such folder")
    plan = directory / "experiment.yaml"
    if not plan.is_file():
        raise UserError(f"{directory}: no runs there (experiment.yaml is missing)")
    planned = _planned(plan)
    found = [config.parent for config in sorted(directory.glob("*/config.yaml"))]
    runs = [replace(read_run(path), planned=planned) for path in found if not _landscape(path)]
    if not runs:
        raise UserError(f"{directory}: no run has begun there")
    place = {row: number for number, row in enumerate(planned.methods)}
    return sorted(runs, key=lambda run: (place.get(run.row, len(place)), run.row, run.seed))


def read_run(path: Path) -> Run:
    """Return what the run folder `path` says, whether the run has ended or not."""
    initial, record, summaries = None, [], {}
    for line in _lines(path / "metrics.jsonl"):
        with _reading(path / "metrics.jsonl"):
            evaluation = evaluation_of(line)
        if evaluation.step:
            record.append(evaluation)
        else:
            initial = evaluation.accuracy
        if line.get("summary"):
            summaries[evaluation.step] = line["summary"]
    config = read_yaml(path / "config.yaml")
    with _reading(path / "config.yaml"):
        _ = config["row"], int(config["seed"]), config["method"]["name"]
    return Run(
        path=path,
        config=config,
        status=read_status(path),
        environment=read_environment(path),
        accuracy=_matrix(path / "accuracy.csv"),
        initial=initial,
        record=record,
        summaries=summaries,
    )


def _planned(path: Path) -> Planned:
    found = read_yaml(path)
    with _reading(path):
        given = {str(row): dict(o or {}) for row, o in dict(found.get("methods") or {}).items()}
        methods = {row: {"name": str(o.pop("method", row)), **o} for row, o in given.items()}
        return Planned(methods, tuple(int(seed) for seed in found.get("seeds") or ()))


def _landscape(path: Path) -> bool:
    """Return whether a folder holds what `syngap landscape` wrote, and no run."""
    return (path / "landscape.json").is_file() and not (path / "status.json").is_file()


def read_status(path: Path) -> dict[str, Any]:
    """Return the state of the run in `path`; nothing where it has not begun."""
    return _json(path / "status.json")


def read_environment(path: Path) -> dict[str, Any]:
    """Return what the run in `path` ran on."""
    return _json(path / "environment.json")


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


def evaluation_of(line: dict[str, Any]) -> Evaluation:
    """Return the evaluation that a line of metrics.jsonl holds."""
    return Evaluation(
        step=line["step"],
        task=line["task"],
        end=line["end"],
        accuracy=tuple(line["accuracy"]),
        newest=line["newest"],
    )


def _matrix(path: Path) -> list[list[float]]:
    if not path.is_file():
        return []
    with _reading(path):
        lines = path.read_text(encoding="utf-8").splitlines()[1:]
        return [[float(cell) for cell in line.split(",")[1:]] for line in lines]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with _reading(path):
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.split("\n")[:-1]]  # the last may be cut off


def _json(path: Path) -> dict[str, Any]:
    with _reading(path):
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return dict(found)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in `path`, which `syngap run` wrote."""
    with _reading(path):
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not as syngap wrote it ({reason})") from error
