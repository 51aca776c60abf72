"""Loggers: what runs write into their folders, brought to where people already look.

They read config.yaml, metrics.jsonl and status.json, in the process that asked for the runs, each
in a thread of its own. So a logger may be slow, fail or hang, and neither a run nor another logger
notices; and one that was killed catches up later.

Another package adds one by an entry point of the group "syngap.loggers": a `Logger`, made without
arguments.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml

from syngap.bench.config.component import Options, Value
from syngap.bench.config.reading import LARGE
from syngap.bench.registry import Registry, import_extra
from syngap.bench.storage import check_inside, read, remove, remove_tree, write
from syngap.bench.store.folder_reader import read_environment, read_status, read_yaml
from syngap.bench.store.layout import CONFIG, METRICS, STATUS

__all__ = [
    "Following",
    "LoggedRun",
    "Logger",
    "MLflow",
    "TensorBoard",
    "WandB",
    "registry",
    "values",
]

_LOOK_EVERY = 2.0  # seconds
_PATIENCE = 30.0  # seconds for an answer, once the runs have ended
_SEEN = "accuracy/seen"
_PARAMETERS, _METRICS = 100, 1000  # that MLflow takes at a time

_Value = TypeVar("_Value")

registry = Registry(
    "logger",
    "syngap.loggers",
    {
        "tensorboard": "syngap.bench.runner.loggers:TensorBoard",
        "mlflow": "syngap.bench.runner.loggers:MLflow",
        "wandb": "syngap.bench.runner.loggers:WandB",
    },
)


@dataclass(frozen=True)
class LoggedRun:
    """A run that has begun.

    Args:
        folder: of the run.
        config: the whole of its config.yaml.
        identity: 16 letters and digits; the same however often the run is resumed and wherever its
            folder is moved, another with --fresh.
    """

    folder: Path
    config: Options
    identity: str

    @property
    def name(self) -> str:
        """METHOD-SEED."""
        return self.folder.name

    @property
    def experiment(self) -> str:
        """The name of the experiment that the run is part of."""
        return str(self.config["experiment"])

    def mark(self, logger: str) -> Path:
        """Return the file by which `logger` may note that it has everything of this run."""
        return self.folder / f".{logger}"

    def note_complete(self, logger: str) -> None:
        """Leave that file: `logger` has everything of this run."""
        write(self.mark(logger), b"", within=self.folder.parent)


class Logger(Protocol):
    """Takes runs as they go on. An exception ends it, and nothing else.

    Its constructor has no arguments, and raises a `UserError` where it cannot work at all.
    """

    def begin(self, run: LoggedRun) -> float:
        """Take up a run; return the last step that is logged, -1 for none, infinity for all."""
        ...

    def log(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step; steps come in order, each once."""
        ...

    def end(self, run: LoggedRun, state: str) -> None:
        """Let go of a run that is "done", has "failed", or is still "running" as we stop."""
        ...


class TensorBoard:
    """Event files in the folders of runs: `tensorboard --logdir OUT` shows all of them."""

    def __init__(self) -> None:
        self._make = import_extra("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writers: dict[str, Any] = {}

    def begin(self, run: LoggedRun) -> float:
        """Begin the file of a run anew, unless it is whole."""
        if run.mark("tensorboard").exists():
            return math.inf
        for earlier in run.folder.glob("events.out.tfevents.*"):
            remove(earlier, within=run.folder.parent)
        check_inside(run.folder / "events", run.folder.parent)
        unguessable = f".{secrets.token_hex(8)}"  # no link can wait under the file's name
        writer = self._make(str(run.folder), filename_suffix=unguessable)
        self._writers[run.identity] = writer
        config = yaml.safe_dump(dict(run.config), sort_keys=False)
        writer.add_text("config", f"```yaml\n{config}```")
        return -1

    def log(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        """Write a scalar for each number."""
        for name, value in values.items():
            self._writers[run.identity].add_scalar(name, value, step)

    def end(self, run: LoggedRun, state: str) -> None:
        """Close the file."""
        self._writers.pop(run.identity).close()
        if state == "done":
            run.note_complete("tensorboard")


class MLflow:
    """Runs of the MLflow experiment of the same name, in the store that MLFLOW_TRACKING_URI names.

    The store itself tells what it has: its run is found by the tag "syngap.run".
    """

    def __init__(self) -> None:
        mlflow = import_extra("mlflow", "mlflow")
        self._entities, self._client = mlflow.entities, mlflow.MlflowClient()
        self._ids: dict[str, str] = {}

    def begin(self, run: LoggedRun) -> float:
        """Find the run in the store, or create it with its configuration as parameters."""
        client, there = self._client, self._client.get_experiment_by_name(run.experiment)
        home = there.experiment_id if there else client.create_experiment(run.experiment)
        mine = client.search_runs([home], f"tags.`syngap.run` = '{run.identity}'", max_results=1)
        if mine and mine[0].info.status == "FINISHED":
            return math.inf
        tags = {"syngap.run": run.identity, "syngap.row": str(run.config["row"])}
        info = (mine[0] if mine else client.create_run(home, tags=tags, run_name=run.name)).info
        self._ids[run.identity] = info.run_id
        client.update_run(info.run_id, status="RUNNING")
        for some in _parts(_flat(run.config).items(), _PARAMETERS):
            batch = [self._entities.Param(name, str(value)) for name, value in some]
            client.log_batch(info.run_id, params=batch)
        return max((m.step for m in client.get_metric_history(info.run_id, _SEEN)), default=-1)

    def log(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        """Log a metric for each number, that by which a step is known to be there last."""
        now = time.time_ns() // 10**6
        ordered = sorted(values.items(), key=lambda pair: pair[0] == _SEEN)
        for some in _parts(ordered, _METRICS):
            metrics = [self._entities.Metric(name, value, now, step) for name, value in some]
            self._client.log_batch(self._ids[run.identity], metrics=metrics)

    def end(self, run: LoggedRun, state: str) -> None:
        """Say how the run ended."""
        status = {"done": "FINISHED", "failed": "FAILED"}.get(state, "KILLED")
        self._client.set_terminated(self._ids.pop(run.identity), status)


class WandB:
    """Runs of the Weights & Biases project of the experiment's name.

    Offline, in the folder `wandb`, unless WANDB_MODE says otherwise. A run that was not whole is
    written anew under the same id, so that it is there once however often it is synced.
    """

    def __init__(self) -> None:
        self._wandb = import_extra("wandb", "wandb")
        self._runs: dict[str, Any] = {}

    def begin(self, run: LoggedRun) -> float:
        """Begin the run, in place of what is there of it."""
        if run.mark("wandb").exists():
            return math.inf
        made = self._runs[run.identity] = self._wandb.init(
            project=run.experiment,
            name=run.name,
            group=str(run.config["row"]),
            id=run.identity,
            config=dict(run.config),
            dir=os.environ.get("WANDB_DIR", Path.cwd()),
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="allow",
            reinit="create_new",
            settings=self._wandb.Settings(console="off", silent=True),
        )
        # wandb adds a number to the name of a folder that begins in the same second as another.
        for folder in Path(made.settings.wandb_dir).glob(f"offline-run-*-{run.identity}*"):
            if folder != Path(made.settings.sync_dir):
                remove_tree(folder, within=folder.parent)
        return -1

    def log(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._runs[run.identity].log(dict(values), step=step)

    def end(self, run: LoggedRun, state: str) -> None:
        """Finish the run."""
        self._runs.pop(run.identity).finish(exit_code=int(state != "done"))
        if state == "done":
            run.note_complete("wandb")


class Following:
    """Loggers at work on the runs of a folder, while the context lasts.

    Args:
        out: the folder; runs may come to it at any time.
        names: of loggers.
        say: is called with a logger that failed.
    """

    def __init__(self, out: Path, names: Sequence[str], say: Callable[[str], None]) -> None:
        self._say = say
        self._stop = threading.Event()
        self._followers = [_Follower(name, out, self._stop) for name in names]

    def __enter__(self) -> Following:
        for follower in self._followers:
            follower.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        stopped = time.monotonic()
        for follower in self._followers:
            follower.join(stopped)
            if follower.failed:
                reason = f"stopped ({follower.failed}); with --resume it catches up"
                self._say(f"logger {follower.name}: {reason}")


class _Follower:
    """A logger at work in its own thread, until `stop` is set and all is logged.

    Args:
        name: of the logger.
        out: the folder of the runs.
        stop: is set once they have ended.
    """

    def __init__(self, name: str, out: Path, stop: threading.Event) -> None:
        self.name, self.failed = name, ""
        self._out, self._stop = out, stop
        self._logger: Logger = registry.get(name)()
        self._followed: dict[Path, _Followed] = {}
        self._answered = 0.0
        self._thread = threading.Thread(target=self._follow, name=f"logger {name}", daemon=True)
        self.start = self._thread.start

    def join(self, stopped: float) -> None:
        """Wait for its end as long as it answers: there may be much to catch up with."""
        while self._thread.is_alive():
            left = max(stopped, self._answered) + _PATIENCE - time.monotonic()
            if left <= 0:
                self.failed = f"no answer in {_PATIENCE:g} seconds"
                return
            self._thread.join(left)

    def look(self, *, last: bool = False) -> None:
        """Log what is new."""
        for status in sorted(self._out.glob(f"*/{STATUS}")):  # the last of what a run begins with
            if not self.failed:
                self._look_at(status.parent, last)

    def _follow(self) -> None:
        while not self._stop.wait(_LOOK_EVERY):
            self.look()
        self.look(last=True)

    def _look_at(self, folder: Path, last: bool) -> None:
        try:
            if folder not in self._followed:
                run = _logged_run(folder)
                self._followed[folder] = _Followed(self._logger, run, self._note_answer)
            self._followed[folder].look(last=last)
        except Exception as error:  # whatever it is, the runs are worth more
            self.failed = " ".join(f"{type(error).__name__}: {error}".split())

    def _note_answer(self) -> None:
        self._answered = time.monotonic()


class _Followed:
    """A run that a logger follows: each line of metrics.jsonl is logged once.

    Args:
        logger: takes it.
        run: that it is.
        answered: is called whenever the logger has taken something.
    """

    def __init__(self, logger: Logger, run: LoggedRun, answered: Callable[[], None]) -> None:
        self._logger, self._run, self._answered, self._offset = logger, run, answered, 0
        self._reached = logger.begin(run)
        answered()

    def look(self, *, last: bool) -> None:
        if self._reached == math.inf:
            return
        state = read_status(self._run.folder).state  # first: "done" comes last
        for line in self._lines():
            if line["step"] > self._reached:  # else written again after a resume
                self._logger.log(self._run, line["step"], values(line))
                self._reached = line["step"]
                self._answered()
        if state == "done" or last:
            self._logger.end(self._run, state)
            self._reached = math.inf
            self._answered()

    def _lines(self) -> list[dict[str, Any]]:
        """Return the lines since the last time, or all of them where some were cut off."""
        try:
            content = read(self._run.folder / METRICS, LARGE)
        except FileNotFoundError:
            return []
        since = content[self._offset :] if len(content) >= self._offset else content
        whole = since[: since.rfind(b"\n") + 1]
        try:
            found = [json.loads(line) for line in whole.splitlines()]
        except ValueError:  # cut back and longer again meanwhile: we are within a line
            self._offset = 0
            return []
        self._offset = len(content) - len(since) + len(whole)
        return found


def values(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that a line of metrics.jsonl holds, by the names they are logged under.

    Examples:
        >>> line = {"task": 0, "accuracy": [90.0, 0.0], "newest": 100.0, "summary": {}}
        >>> values(line)["accuracy/task_1"], values(line)["accuracy/seen"]
        (90.0, 90.0)
    """
    accuracy = line["accuracy"]
    learned = accuracy[: line["task"] + 1]
    return {
        _SEEN: sum(learned) / len(learned),
        **{f"accuracy/task_{number}": value for number, value in enumerate(accuracy, start=1)},
        "predictions/newest": line["newest"],
        **line["summary"],
    }


def _logged_run(folder: Path) -> LoggedRun:
    config = read_yaml(folder / CONFIG)
    what = json.dumps([folder.name, config, read_environment(folder).as_mapping()], sort_keys=True)
    return LoggedRun(folder, config, hashlib.sha256(what.encode()).hexdigest()[:16])


def _flat(config: Options, before: str = "") -> dict[str, Value]:
    """Return a configuration as names with values: {"stream": {"batch": 10}} is stream.batch."""
    flat: dict[str, Value] = {}
    for name, value in config.items():
        path = before + name
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat


def _parts(values: Iterable[_Value], size: int) -> Iterator[list[_Value]]:
    rest = iter(values)
    while part := list(islice(rest, size)):
        yield part
