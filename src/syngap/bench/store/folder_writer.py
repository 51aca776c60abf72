"""The journal of a run: writes what the training loop reports into the run's folder."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from syngap.bench.config.finetuning import AnyRunConfig
from syngap.bench.errors import UserError
from syngap.bench.finetuning.point import Point
from syngap.bench.metrics import Evaluation
from syngap.bench.storage import append, clean, make_folder, move, remove, write
from syngap.bench.store.environment import now
from syngap.bench.store.folder_reader import Run, csv_of, read_status
from syngap.bench.store.layout import (
    ACCURACY,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    ERROR,
    METRICS,
    STATUS,
)
from syngap.bench.store.outcome import Environment, Status
from syngap.bench.store.records import write_json, write_yaml
from syngap.bench.store.removal import remove_checkpoints
from syngap.bench.training.checkpoint import pack, read_state

__all__ = ["FolderJournal", "begin_folder", "restore", "write_failure"]

_LOG = logging.getLogger(__name__)
_TELL_EVERY = 0.25  # seconds
_KEPT = 2  # a checkpoint and the one before it

Tell = Callable[[int, float | None], None]


def _numbers(summary: Mapping[str, float]) -> dict[str, float]:
    for key, value in summary.items():
        if not isinstance(key, str) or not isinstance(value, (int, float)):
            raise TypeError(f"a method's summary is names with numbers, got {key!r}: {value!r}")
    return {key: float(value) for key, value in summary.items()}


def _whole(saved: Any) -> dict[str, Any]:
    """Return what `save` packed; ValueError where it is something else."""
    try:
        found: dict[str, Any] = saved
        size, numbers = found["metrics_bytes"], [found["state"]["step"], found["state"]["seconds"]]
        numbers += [number for after, row in found["rows"] for number in (after, *row)]
    except (LookupError, TypeError) as error:
        raise ValueError("not a checkpoint of a run") from error
    right = all(isinstance(number, (int, float)) for number in numbers)
    if not right or type(size) is not int or size < 0:
        raise ValueError("not a checkpoint of a run")
    if not isinstance(found.get("fingerprint", ""), str):
        raise ValueError("not a checkpoint of a run")
    return found


def begin_folder(folder: Path, config: AnyRunConfig, found: Environment) -> None:
    """Write what a run begins with, unless it is there from an earlier try.

    Args:
        folder: of the run; it exists, and nobody else is at work in it.
        config: of the run.
        found: what it runs on.
    """
    home = folder.parent
    if not (folder / CONFIG).is_file():
        # Which configuration the checkpoints that may lie there belong to is not known.
        remove_checkpoints(folder, within=home)
        write_json(folder / ENVIRONMENT, found.as_mapping(), within=home)
        write_yaml(folder / CONFIG, config.as_mapping(), within=home)
    remove(folder / ERROR, within=home)  # of a try before this one


def write_failure(folder: Path, message: str, trace: str) -> None:
    """Write why the run in `folder` failed, and where."""
    home = folder.parent
    try:
        status = read_status(folder)
    except UserError:  # damaged: what it said is lost
        status = Status()
    write_json(folder / STATUS, status.with_failure(message).as_mapping(), within=home)
    write(folder / ERROR, f"{trace.rstrip()}\n".encode(), within=home)


class FolderJournal:
    """Keeps a run in `folder`; a kill at any instant loses at most the time since a checkpoint.

    A checkpoint holds the loop's state and how much of metrics.jsonl belongs to it; going on cuts
    off what was written later, so that nothing is there twice. One that is damaged is removed,
    which is logged as a warning, and the one before it is taken. Used as a context, which closes
    that file whatever happens.

    Args:
        folder: of the run; it exists.
        steps: how many there will be.
        tasks: columns of R; 0 for a run that has none.
        checkpoint_seconds: at least so long between checkpoints within a task.
        fingerprint: of the stream, or of a tuned model's files and of what it is tuned on; going on
            with another one is refused. Empty is unknown.
        tell: is called with the step and the latest mean accuracy, now and then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        tasks: int,
        checkpoint_seconds: float,
        fingerprint: str = "",
        tell: Tell,
    ) -> None:
        self._folder, self._steps, self._tasks = folder, steps, tasks
        self._pause, self._fingerprint, self._tell = checkpoint_seconds, fingerprint, tell
        self._checkpoints = folder / CHECKPOINTS
        self._home = folder.parent
        make_folder(self._checkpoints, within=self._home)
        self._metrics = append(folder / METRICS, within=self._home)
        self._rows: list[tuple[int, list[float]]] = []
        self._step = 0
        self._seen: float | None = None
        self._seconds = 0.0
        self._saved = self._reported = time.monotonic()

    def __enter__(self) -> FolderJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()

    def load(self) -> dict[str, Any] | None:
        """Return the state of the newest whole checkpoint and forget what came after it."""
        for folder in (self._folder, self._checkpoints):
            clean(folder, within=self._home)
        for path in reversed(self._named_as_saves()):
            try:
                saved = _whole(read_state(path))
            except UserError as error:  # whole, and not for us
                raise UserError(f"{path}: {error}") from error
            except ValueError as error:
                self._drop(path, f"damaged ({error})")
                continue
            if saved["metrics_bytes"] > os.fstat(self._metrics.fileno()).st_size:
                self._drop(path, "without its lines of metrics.jsonl, which are lost")
                continue
            if len({saved.get("fingerprint", ""), self._fingerprint} - {""}) > 1:
                raise UserError(
                    f"{self._folder}: the data, or the files of the model, are not those that the "
                    "run began with"
                )
            self._rows = [(after, row) for after, row in saved["rows"]]
            self._cut(saved["metrics_bytes"])
            self._write_accuracy()
            state: dict[str, Any] = saved["state"]
            self._step = state["step"]
            self._status("running", state)
            return state
        self._cut(0)
        self._write_accuracy()
        self._status("running", {"step": 0, "seconds": 0.0})
        return None

    def record(self, evaluation: Evaluation, summary: Mapping[str, float]) -> None:
        """Add a line to metrics.jsonl and, at the end of a task, one to accuracy.csv."""
        self._write_line({**asdict(evaluation), "summary": _numbers(summary)})
        learned = evaluation.accuracy[: evaluation.task + 1]
        self._seen = sum(learned) / len(learned)
        if evaluation.end:
            self._rows.append((evaluation.task + 1, list(evaluation.accuracy)))
            self._write_accuracy()

    def record_point(self, point: Point) -> None:
        """Add an evaluation of a fine-tuning run to metrics.jsonl."""
        self._write_line(point.as_mapping())

    def _write_line(self, line: Mapping[str, Any]) -> None:
        self._metrics.write(json.dumps(line).encode() + b"\n")

    def advance(self, step: int) -> bool:
        """Tell the step now and then; return whether the last checkpoint is long ago."""
        self._step = step
        self.alive()
        return time.monotonic() - self._saved >= self._pause

    def alive(self) -> None:
        """Tell now and then that the run goes on, wherever it is."""
        moment = time.monotonic()
        if moment - self._reported >= _TELL_EVERY:
            self._reported = moment
            self._tell(self._step, self._seen)

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint, then drop the one before the last."""
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        whole = {
            "state": state,
            "rows": self._rows,
            "metrics_bytes": self._metrics.tell(),
            "fingerprint": self._fingerprint,
        }
        path = self._checkpoints / f"step-{state['step']:09d}.safetensors"
        write(path, pack(whole), within=self._home)
        for old in self._saves()[:-_KEPT]:
            remove(old, within=self._home)
        self._status("running", state)
        self._saved = time.monotonic()

    def close(self, model: nn.Module | None, seconds: float | None = None) -> None:
        """Leave the network alone in checkpoint/ and say that the run is done.

        Args:
            model: the network; None keeps none, which may be large.
            seconds: of training; None is those of the last checkpoint.
        """
        self._metrics.close()
        if model is not None:
            weights = {  # copies, because tensors that share memory cannot be saved as they are
                name: value.clone(memory_format=torch.contiguous_format)
                for name, value in model.state_dict().items()
            }
            path = self._checkpoints / "weights.safetensors"
            write(path, safetensors.torch.save(weights), within=self._home)
        seconds = self._seconds if seconds is None else seconds
        self._status("done", {"step": self._steps, "seconds": seconds}, ended=now())
        for save in self._saves():
            remove(save, within=self._home)

    def _drop(self, path: Path, why: str) -> None:
        """Remove a checkpoint: it would outlive whole ones of earlier steps.

        A folder in its place is not ours to remove, and gets another name.
        """
        if path.is_dir() and not path.is_symlink():
            aside = path.with_name(f"{secrets.token_hex(4)}-{path.name}")
            move(path, aside, within=self._home)
        else:
            remove(path, within=self._home)
        earlier = self._saves()
        then = f"going on from {earlier[-1].name}" if earlier else "beginning again"
        _LOG.warning("%s is %s; %s", path, why, then)

    def _saves(self) -> list[Path]:
        return [path for path in self._named_as_saves() if not path.is_dir()]

    def _named_as_saves(self) -> list[Path]:
        return sorted(self._checkpoints.glob("step-*.safetensors"))

    def _cut(self, size: int) -> None:
        self._metrics.truncate(size)
        self._metrics.seek(size)  # tell() would count from the former end until something is added

    def _write_accuracy(self) -> None:
        if self._tasks:
            content = csv_of(self._rows, self._tasks).encode()
            write(self._folder / ACCURACY, content, within=self._home)

    def _status(self, state: str, progress: Mapping[str, Any], **more: str) -> None:
        self._seconds = progress["seconds"]
        status = Status(
            {
                "state": state,
                "step": progress["step"],
                "steps": self._steps,
                "seconds": round(progress["seconds"], 3),
                **more,
            }
        )
        write_json(self._folder / STATUS, status.as_mapping(), within=self._home)


def restore(run: Run, folder: Path) -> None:
    """Write an ended run to its folder, without checkpoints; `read_run` gives the same run again.

    Args:
        run: that was kept packed.
        folder: of the run, in the folder of its experiment; no other run is in it.
    """
    home = folder.parent
    make_folder(folder, within=home)
    write_json(folder / ENVIRONMENT, run.environment.as_mapping(), within=home)
    lines = "".join(f"{json.dumps(line)}\n" for line in _metrics_of(run))
    write(folder / METRICS, lines.encode(), within=home)
    if run.accuracy:
        ends = [evaluation.task + 1 for evaluation in run.record if evaluation.end]
        # The last line of the record may be lost where the process of a failed run was killed.
        is_whole = len(ends) == len(run.accuracy)
        learned = ends if is_whole else range(1, len(run.accuracy) + 1)
        rows = zip(learned, run.accuracy, strict=True)
        write(folder / ACCURACY, csv_of(rows, len(run.accuracy[0])).encode(), within=home)
    write_json(folder / STATUS, run.status.as_mapping(), within=home)
    write_yaml(folder / CONFIG, run.config.as_mapping(), within=home)  # last: now it is a run


def _metrics_of(run: Run) -> Iterator[dict[str, Any]]:
    for point in run.points:
        yield point.as_mapping()
    first = [] if run.initial is None else [Evaluation(0, 0, False, run.initial)]
    for evaluation in (*first, *run.record):
        yield {**asdict(evaluation), "summary": run.summaries.get(evaluation.step, {})}
