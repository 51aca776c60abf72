"""An experiment that takes a blink, and looking at what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import yaml

from syngap.bench import cli
from syngap.bench.config.experiment import Experiment, with_settings
from syngap.bench.config.reading import BoundedLoader
from syngap.bench.runner import local as engine
from syngap.bench.runner.local import Event
from syngap.bench.runner.run import Job

RESULTS = ("accuracy.csv", "metrics.jsonl", "checkpoint/weights.safetensors")
TINY: dict[str, Any] = {
    "name": "tiny",
    "stream": {"name": "digits", "batch": 100, "first": 2},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"device": "cpu"},
    "methods": {
        "sgd": {"lr": 0.1},
        "er": {"lr": 0.3, "buffer": 20, "replay": 10},
    },
    "seeds": [0],
}

SEARCH: dict[str, Any] = {
    "trials": 3,
    "added": [1],
    "rounds": [[2, 2]],
    "seeds": [100, 7],
    "stream": {"validation": 0.2},
    "spaces": {
        "sgd": {"lr": {"log": [0.01, 1.0]}},
        "er": {"lr": {"log": [0.01, 1]}, "replay": {"uniform": [5, 20]}},
    },
}


def tiny(*settings: str) -> dict[str, Any]:
    """The experiment, changed by "key=value"."""
    return with_settings(TINY, settings)


def written(folder: Path, *settings: str) -> str:
    """A YAML file with the experiment, changed by "key=value"."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny(*settings), sort_keys=False))
    return str(path)


def write_arrays(path: Path, samples: int = 200, values: int = 6) -> None:
    """A file of vectors for the stream `npz`, of four classes."""
    chance = np.random.default_rng(0)
    x, y = chance.standard_normal((samples, values)), np.arange(samples) % 4
    np.savez(path, x_train=x, y_train=y, x_test=x[:40], y_test=y[:40])


def job(folder: Path, *settings: str, row: str = "er", seed: int = 0) -> Job:
    """One run of the experiment, to be done in `folder`."""
    (config,) = Experiment.from_mapping(tiny(*settings)).select([row], [seed]).runs()
    return Job(folder, config)


def results(folder: Path) -> dict[str, bytes]:
    """What a finished run found."""
    return {name: (folder / name).read_bytes() for name in RESULTS}


def state(folder: Path) -> str:
    """What a run says about itself."""
    return str(json.loads((folder / "status.json").read_text())["state"])


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder: files with their content, folders with None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def run_inline(
    jobs: Sequence[Job],
    workers: int,
    on_event: Callable[[Event], None],
    following: Callable[[Event], Sequence[Job]] = lambda ended: (),
) -> None:
    """Stand in for `run_local`, without processes: starting one takes longer than all runs here."""
    waiting = list(jobs)
    while waiting:
        on_event(Event(waiting[0], "begun"))
        heard: list[Event] = []
        engine.attempt(waiting.pop(0), heard.append)
        on_event(heard[-1])
        waiting += following(heard[-1])


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The command line in this process: exit code, what it printed, what it complained about."""
    capsys.readouterr()
    code = cli.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


MANY, LONG = 500, 20_000  # texts of YAML that are kept, and letters of one


@contextmanager
def yaml_composed_once() -> Iterator[None]:
    """Let texts be read again in no time: the same few are read thousands of times.

    Each reading makes values of its own; what a text consists of is found once.
    """
    compose, known = BoundedLoader.get_single_node, dict[Any, Any]()

    def get_single_node(self: BoundedLoader) -> Any:
        # What is merged by << changes the nodes that it is found in.
        if self.stream is not None or len(self.buffer) > LONG or "<<" in self.buffer:
            return compose(self)
        key = (type(self), self.buffer)
        if key not in known:
            node = compose(self)
            if len(known) >= MANY:
                known.clear()
            known[key] = node
        return known[key]

    with patch.object(BoundedLoader, "get_single_node", get_single_node):
        yield
