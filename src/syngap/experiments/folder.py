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
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from syngap.errors import UserError
from syngap.experiments.formats import check_format
from syngap.experiments.reading import LARGE, is_name, json_in, reading, text_in, yaml_in
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

LARGEST = 1e40  # of any number that is averaged: float32 ends before


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
    runs = [replace(read_run(path), planned=planned) for path in found if _holds_run(path)]
    if not runs:
        raise UserError(f"{directory}: no run has begun there")
    _check_alike([run for run in runs if run.done])
    place = {row: number for number, row in enumerate(planned.methods)}
    return sorted(runs, key=lambda run: (place.get(run.row, len(place)), run.row, run.seed))


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
    config = read_yaml(path / "config.yaml")
    with reading(path / "config.yaml"):
        _check_config(config)
    accuracy = _matrix(path / "accuracy.csv")
    initial: tuple[float, ...] | None = None
    record: list[Evaluation] = []
    summaries: dict[int, dict[str, float]] = {}
    with reading(path / "metrics.jsonl"):
        for line in _lines(path / "metrics.jsonl"):
            evaluation = evaluation_of(line)
            _check_follows(evaluation, record, accuracy)
            if evaluation.step:
                record.append(evaluation)
            else:
                initial = evaluation.accuracy
            if summary := line.get("summary"):
                summaries[evaluation.step] = _summary(summary)
    return Run(
        path=path,
        config=config,
        status=read_status(path),
        environment=read_environment(path),
        accuracy=accuracy,
        initial=initial,
        record=record,
        summaries=summaries,
    )


def _check_config(config: Mapping[str, Any]) -> None:
    row, seed, method = config["row"], config["seed"], config["method"]
    if not isinstance(row, str) or not row.isprintable() or not row.strip():
        raise ValueError(f"row is {row!a:.80}, expected a name")
    if type(seed) is not int or seed < 0:
        raise ValueError(f"seed is {seed!a:.80}, expected a whole number")
    if not isinstance(method["name"], str) or not method["name"].isprintable():
        raise ValueError(f"method.name is {method['name']!a:.80}, expected a name")
    for option, value in method.items():
        if not option.isidentifier() or (isinstance(value, str) and not value.isprintable()):
            raise ValueError(f"method.{option!a:.80} is no option, or has no value for one")
    if not is_name(config.get("experiment", "experiment")):
        raise ValueError(f"experiment is {config['experiment']!a:.80}, expected a name")


def _check_follows(
    evaluation: Evaluation, record: Sequence[Evaluation], accuracy: Sequence[Sequence[float]]
) -> None:
    """Refuse a line that cannot come after those before it in the record of one run."""
    if record and evaluation.step <= record[-1].step:
        raise ValueError(f"step {evaluation.step} after step {record[-1].step}")
    widths = {len(each) for each in (*accuracy[:1], *(of.accuracy for of in record[-1:]))}
    if widths - {len(evaluation.accuracy)}:
        raise ValueError(f"step {evaluation.step} has {len(evaluation.accuracy)} tasks")


def _summary(found: Any) -> dict[str, float]:
    for name, value in found.items():
        if not name.isprintable() or not (_number(value, LARGEST) or not math.isfinite(value)):
            raise ValueError("a summary that is not names with numbers")
    return {name: float(value) for name, value in found.items()}


def _number(value: Any, most: float) -> bool:
    kind = isinstance(value, (int, float)) and not isinstance(value, bool)
    return kind and -most <= value <= most


def _percent(value: Any) -> bool:
    return _number(value, 100.001)  # a mean may be off in its last bits


def _planned(path: Path) -> Planned:
    found = read_yaml(path)
    with reading(path):
        given = {row: dict(o or {}) for row, o in dict(found.get("methods") or {}).items()}
        methods = {row: {"name": str(o.pop("method", row)), **o} for row, o in given.items()}
        for row, options in methods.items():
            _check_config({"row": row, "seed": 0, "method": options})
        return Planned(methods, tuple(int(seed) for seed in found.get("seeds") or ()))


def _holds_run(path: Path) -> bool:
    """Return whether a folder with a config.yaml holds a run, not a landscape or other things."""
    status = (path / "status.json").exists()
    begun = (path / "environment.json").exists() and not (path / "landscape.json").is_file()
    return status or begun


_STATUS: dict[str, tuple[type, ...]] = {
    "state": (str,),
    "step": (int,),
    "steps": (int,),
    "seconds": (int, float),
    "error": (str, type(None)),
}


def read_status(path: Path) -> dict[str, Any]:
    """Return the state of the run in `path`; nothing where it has not begun."""
    found = _json(path / "status.json")
    for name, kinds in _STATUS.items():
        if name in found and (isinstance(found[name], bool) or not isinstance(found[name], kinds)):
            raise UserError(f"{path / 'status.json'}: not as syngap wrote it ({name})")
    if not 0 <= found.get("seconds", 0) < LARGEST:
        raise UserError(f"{path / 'status.json'}: not as syngap wrote it (seconds)")
    return found


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
    """Return the evaluation that a line of metrics.jsonl holds; ValueError where it is none."""
    step, task, end, newest = line["step"], line["task"], line["end"], line["newest"]
    if type(step) is not int or type(task) is not int or type(end) is not bool:
        raise ValueError("an evaluation without its step, task and end")
    if not all(map(_percent, line["accuracy"])) or not (newest is None or _percent(newest)):
        raise ValueError(f"step {step} without its accuracies")
    return Evaluation(step, task, end, tuple(map(float, line["accuracy"])), newest)


def _matrix(path: Path) -> list[list[float]]:
    if not path.exists():
        return []
    with reading(path):
        head, *lines = text_in(path).splitlines() or [""]
        found = [[float(cell) for cell in line.split(",")[1:]] for line in lines]
        tasks = len(head.split(",")) - 1
        if any(len(row) != tasks or not all(map(_percent, row)) for row in found):
            raise ValueError(f"a line that is not {tasks} accuracies in percent")
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
