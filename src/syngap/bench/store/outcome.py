"""What is known of a run, wherever it was read from, and what may be in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from syngap.bench.config.reading import is_name
from syngap.bench.metrics import Evaluation

__all__ = [
    "LARGEST",
    "Planned",
    "Run",
    "check_accuracy",
    "check_config",
    "check_follows",
    "check_status",
    "evaluation_of",
    "summary_of",
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
    """What is known of a run.

    Args:
        path: its folder; of a packed run, the folder of the experiment and the run's name.
        config: the whole of its configuration; `config["row"]` names the row of the table
            (usually the method), `config["seed"]` the seed, `config["method"]` the method with
            its options.
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


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse, by a ValueError, a configuration that no run can have."""
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


_STATUS: dict[str, tuple[type, ...]] = {
    "state": (str,),
    "step": (int,),
    "steps": (int,),
    "seconds": (int, float),
    "error": (str, type(None)),
}


def check_status(found: Mapping[str, Any]) -> None:
    """Refuse, by a ValueError that names the entry, a status that no run can have."""
    for name, kinds in _STATUS.items():
        if name in found and (isinstance(found[name], bool) or not isinstance(found[name], kinds)):
            raise ValueError(name)
    if not 0 <= found.get("seconds", 0) < LARGEST:
        raise ValueError("seconds")


def check_accuracy(accuracy: Sequence[Sequence[Any]], tasks: int) -> None:
    """Refuse, by a ValueError, a matrix of anything but accuracies in percent on `tasks` tasks."""
    if any(len(row) != tasks or not all(map(_percent, row)) for row in accuracy):
        raise ValueError(f"a line that is not {tasks} accuracies in percent")


def check_follows(
    evaluation: Evaluation, record: Sequence[Evaluation], accuracy: Sequence[Sequence[float]]
) -> None:
    """Refuse a line that cannot come after those before it in the record of one run."""
    if record and evaluation.step <= record[-1].step:
        raise ValueError(f"step {evaluation.step} after step {record[-1].step}")
    widths = {len(each) for each in (*accuracy[:1], *(of.accuracy for of in record[-1:]))}
    if widths - {len(evaluation.accuracy)}:
        raise ValueError(f"step {evaluation.step} has {len(evaluation.accuracy)} tasks")


def summary_of(found: Any) -> dict[str, float]:
    """Return what a method said of itself; ValueError where it is not names with numbers."""
    for name, value in found.items():
        if not name.isprintable() or not (_number(value, LARGEST) or not math.isfinite(value)):
            raise ValueError("a summary that is not names with numbers")
    return {name: float(value) for name, value in found.items()}


def evaluation_of(line: dict[str, Any]) -> Evaluation:
    """Return the evaluation that a line of metrics.jsonl holds; ValueError where it is none."""
    step, task, end, newest = line["step"], line["task"], line["end"], line["newest"]
    if type(step) is not int or type(task) is not int or type(end) is not bool:
        raise ValueError("an evaluation without its step, task and end")
    if not all(map(_percent, line["accuracy"])) or not (newest is None or _percent(newest)):
        raise ValueError(f"step {step} without its accuracies")
    return Evaluation(step, task, end, tuple(map(float, line["accuracy"])), newest)


def _number(value: Any, most: float) -> bool:
    kind = isinstance(value, (int, float)) and not isinstance(value, bool)
    return kind and -most <= value <= most


def _percent(value: Any) -> bool:
    return _number(value, 100.001)  # a mean may be off in its last bits
