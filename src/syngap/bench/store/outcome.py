"""What is known of a run, wherever it was read from, and what may be in it.

Files of a run may be of an earlier version of syngap, or of a later one: they may lack entries, or
have others. So `RecordedConfig`, `Status` and `Environment` keep all entries as they were read, in
their order, and give those that this version knows by name and type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from syngap.bench.config.component import Component, Options, Value, entry
from syngap.bench.config.reading import is_name
from syngap.bench.finetuning.model_tasks import task_in
from syngap.bench.finetuning.point import Point
from syngap.bench.metrics import Evaluation
from syngap.messages import count_of

__all__ = [
    "LARGEST",
    "Environment",
    "Planned",
    "RecordedConfig",
    "Run",
    "Status",
    "check_accuracy",
    "check_follows",
    "check_point",
    "evaluation_of",
    "summary_of",
]

LARGEST = 1e40  # of any number that is averaged: float32 ends before


@dataclass(frozen=True)
class Planned:
    """What experiment.yaml asks for.

    Args:
        methods: by row.
        seeds: of every row.
    """

    methods: dict[str, Component] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class RecordedConfig:
    """What config.yaml says of a run.

    Args:
        row: of the table, usually the method's name.
        seed: of the run.
        method: with its options.
        entries: all that the file holds, these three among it.
    """

    row: str
    seed: int
    method: Component
    entries: Options

    @classmethod
    def from_mapping(cls, found: Mapping[str, Any]) -> RecordedConfig:
        """Return the configuration in a file; ValueError where no run can have it."""
        row, seed, method = found["row"], found["seed"], found["method"]
        if not isinstance(row, str) or not row.isprintable() or not row.strip():
            raise ValueError(f"row is {row!a:.80}, expected a name")
        if type(seed) is not int or seed < 0:
            raise ValueError(f"seed is {seed!a:.80}, expected a whole number")
        if not isinstance(method["name"], str) or not method["name"].isprintable():
            raise ValueError(f"method.name is {method['name']!a:.80}, expected a name")
        for option, value in method.items():
            if not option.isidentifier() or (isinstance(value, str) and not value.isprintable()):
                raise ValueError(f"method.{option!a:.80} is no option, or has no value for one")
        if not is_name(found.get("experiment", "experiment")):
            raise ValueError(f"experiment is {found['experiment']!a:.80}, expected a name")
        return cls(row, seed, Component.from_mapping(method), found)

    @property
    def experiment(self) -> str | None:
        """The experiment that the run is part of; None where it is not recorded."""
        return entry(self.entries, "experiment", str)

    def as_mapping(self) -> dict[str, Value]:
        """Return what the file holds."""
        return dict(self.entries)


_STATUS: dict[str, tuple[type, ...]] = {
    "state": (str,),
    "step": (int,),
    "steps": (int,),
    "seconds": (int, float),
    "error": (str, type(None)),
}


@dataclass(frozen=True)
class Status:
    """What status.json says of a run; nothing where it has not begun.

    Args:
        entries: all that the file holds.
    """

    entries: Options = field(default_factory=dict)

    @classmethod
    def from_mapping(cls, found: Mapping[str, Any]) -> Status:
        """Return the status in a file; ValueError, which names the entry, where it is none."""
        for name, kinds in _STATUS.items():
            right = isinstance(found.get(name), kinds) and not isinstance(found.get(name), bool)
            if name in found and not right:
                raise ValueError(name)
        if not 0 <= found.get("seconds", 0) < LARGEST:
            raise ValueError("seconds")
        return cls(found)

    @property
    def state(self) -> str:
        """One of "running", "done" and "failed"; "" of a run that has not begun."""
        return entry(self.entries, "state", str) or ""

    @property
    def step(self) -> int | None:
        """The step of the last checkpoint."""
        return entry(self.entries, "step", int)

    @property
    def steps(self) -> int | None:
        """How many steps the run has."""
        return entry(self.entries, "steps", int)

    @property
    def seconds(self) -> float | None:
        """Seconds of training until the last checkpoint."""
        return entry(self.entries, "seconds", float, int)

    @property
    def error(self) -> str:
        """Why the run failed; "" where it did not."""
        return entry(self.entries, "error", str) or ""

    @property
    def ended(self) -> str | None:
        """When the run was done."""
        return entry(self.entries, "ended", str)

    def with_failure(self, message: str) -> Status:
        """Return the status of the same run, failed for this reason."""
        return Status({**self.entries, "state": "failed", "error": message})

    def as_mapping(self) -> dict[str, Value]:
        """Return what the file holds."""
        return dict(self.entries)


@dataclass(frozen=True)
class Environment:
    """What environment.json says a run ran on: versions, hardware, the command.

    Args:
        entries: all that the file holds.
    """

    entries: Options = field(default_factory=dict)

    @property
    def device(self) -> str | None:
        """The name of the GPU, or "cpu"."""
        return entry(self.entries, "device", str)

    @property
    def processor(self) -> str | None:
        """The name of the CPU."""
        return entry(self.entries, "processor", str)

    @property
    def cores(self) -> int | None:
        """How many cores the machine has."""
        return entry(self.entries, "cores", int)

    @property
    def command(self) -> str | None:
        """The command line that the run is of."""
        return entry(self.entries, "command", str)

    @property
    def at_a_time(self) -> int | None:
        """How many runs trained at the same time."""
        return entry(self.entries, "at_a_time", int)

    @property
    def started(self) -> str | None:
        """When the run began."""
        return entry(self.entries, "started", str)

    def with_command(self, command: str) -> Environment:
        """Return the same environment with another command line."""
        return Environment({**self.entries, "command": command})

    def as_mapping(self) -> dict[str, Value]:
        """Return what the file holds."""
        return dict(self.entries)


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Args:
        path: its folder; of a packed run, the folder of the experiment and the run's name.
        config: the whole of its configuration.
        status: how far it is.
        environment: versions and hardware.
        accuracy: R in percent, a row after each task; a joint run has one row.
        initial: accuracy by task before the first step, None until it was measured.
        record: every evaluation after the first step, in order.
        summaries: step → what the method said of itself then (plasticity by layer, for SynGAP).
        points: of a fine-tuning run, every evaluation, that of the start first.
        planned: the experiment that it is part of; nothing where the run was read by itself.
    """

    path: Path
    config: RecordedConfig
    status: Status
    environment: Environment
    accuracy: list[list[float]]
    initial: tuple[float, ...] | None = None
    record: list[Evaluation] = field(default_factory=list)
    summaries: dict[int, dict[str, float]] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    planned: Planned = field(default_factory=Planned)

    @property
    def row(self) -> str:
        """The row of the table that this run belongs to."""
        return self.config.row

    @property
    def seed(self) -> int:
        """The seed of this run."""
        return self.config.seed

    @property
    def family(self) -> str:
        """The row of the table that a fine-tuning trial belongs to; of other runs, the row."""
        return entry(self.config.entries, "family", str) or self.row

    @property
    def is_finetuning(self) -> bool:
        """Whether it is a run of a fine-tuning experiment."""
        return task_in(self.config.entries) is not None

    @property
    def done(self) -> bool:
        """Whether it ran to its end."""
        return self.status.state == "done"


def check_accuracy(accuracy: Sequence[Sequence[Any]], tasks: int) -> None:
    """Refuse, by a ValueError, a matrix of anything but accuracies in percent on `tasks` tasks."""
    if any(len(row) != tasks or not all(map(_percent, row)) for row in accuracy):
        raise ValueError(f"a line that is not {count_of(tasks, 'accuracy')} in percent")


def check_follows(
    evaluation: Evaluation, record: Sequence[Evaluation], accuracy: Sequence[Sequence[float]]
) -> None:
    """Refuse a line that cannot come after those before it in the record of one run."""
    if record and evaluation.step <= record[-1].step:
        raise ValueError(f"step {evaluation.step} after step {record[-1].step}")
    widths = {len(each) for each in (*accuracy[:1], *(of.accuracy for of in record[-1:]))}
    if widths - {len(evaluation.accuracy)}:
        found = count_of(len(evaluation.accuracy), "task")
        raise ValueError(f"step {evaluation.step} has {found}")


def summary_of(found: Any) -> dict[str, float]:
    """Return what a method said of itself; ValueError where it is not names with numbers."""
    for name, value in found.items():
        if not name.isprintable() or not (_number(value, LARGEST) or not math.isfinite(value)):
            raise ValueError("a summary that is not names with numbers")
    return {name: float(value) for name, value in found.items()}


def check_point(point: Point, points: Sequence[Point]) -> None:
    """Refuse a point that cannot come after those before it in one run."""
    if points and (point.step, -point.share) <= (points[-1].step, -points[-1].share):
        raise ValueError(f"step {point.step}, share {point.share} after step {points[-1].step}")
    if points and list(point.old) != list(points[0].old):
        raise ValueError(f"step {point.step} has other old data than step {points[0].step}")


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
