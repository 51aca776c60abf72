"""Every value of a configuration is refused before anything is written, or gives runs that end.

The values are found, not listed: all of a complete experiment, and every option of every stream,
network and method that is registered. An option that is added tomorrow is tried too.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import typer
import yaml
from fuzz.guard import Hang, limited
from PIL import Image
from tiny import TINY, called, tree, written

from syngap import cli, methods, models, registry, streams
from syngap.errors import UserError
from syngap.experiments import engine
from syngap.experiments.config import Experiment, Training
from syngap.experiments.engine import Event
from syngap.experiments.folder import read_runs
from syngap.experiments.plan import make_plan
from syngap.experiments.tuning.trials import diverged
from syngap.options import shown, signature
from syngap.report import table
from syngap.report.rows import rows

SECONDS = 20.0  # for one value; all that is legitimate here takes a tenth of one

NUMBERS: list[Any] = [
    *(2**31, 2**63, 2**64, 10**30, 1e308, 3e38, 1e-300),
    *(-1, -(2**63), -(2**64), -0.5, 0, 1, 0.5, 1.5),
    *(math.nan, math.inf, -math.inf, True, False),
]
REPLACEMENTS: list[Any] = [
    *NUMBERS,
    *("", "text", "1e400", "9" * 5000, "\x1b[2J", 1 << 20_000, None),
    *([], {}, {"a": 1}, {1: 2}, [1], [[]], [{}]),
]
IN_LISTS: list[Any] = [[number] for number in NUMBERS]  # where a list may stand

BASE: dict[str, Any] = {
    "name": "every",
    "stream": {"name": "npz", "path": "data.npz", "tasks": 2, "batch": 8},
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"device": "cpu"},
    "methods": {"er": {"buffer": 4, "replay": 2}},
    "seeds": [0],
}
SEARCH: dict[str, Any] = {
    "trials": 2,
    "seeds": [7],
    "stream": {"validation": 0.5},
    "spaces": {
        "er": {"lr": {"log": [0.01, 1.0], "start": 0.1}, "replay": {"choose": [1, 2], "start": 1}}
    },
}
REQUIRED = {"npz": {"path": "data.npz", "tasks": 2}, "folder": {"path": "images", "tasks": 2}}


def subjects() -> dict[str, tuple[dict[str, Any], str]]:
    """Experiments, each with the part of it whose values are tried; "" is all."""
    found = {"experiment": ({**BASE, "search": SEARCH}, "")}
    for name in streams.registry.names():
        stream = {"name": name, "batch": 8, **REQUIRED.get(name, {})}
        found[f"stream {name}"] = ({**BASE, "stream": stream}, "stream")
    del found["stream npz"]  # which the experiment has
    for name in models.registry.names():
        options = {"width": 4} if "width" in signature(models.registry.get(name)) else {}
        found[f"model {name}"] = ({**BASE, "model": {"name": name, **options}}, "model")
    for name in methods.registry.names():
        found[f"method {name}"] = ({**BASE, "methods": {"row": {"method": name}}}, "methods.row")
    return found


def paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where anything stands in nested mappings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from paths(inner, (*path, key))


SUBJECTS = subjects()
COMMON = {"name", "method", *signature(streams.Stream)}  # the experiment has them
KEYS = [
    pytest.param(subject, path, id=f"{subject}: {'.'.join(path)}")
    for subject, (mapping, part) in SUBJECTS.items()
    for path in paths(Experiment.from_mapping(mapping).as_mapping())
    if not part or (".".join(path).startswith(f"{part}.") and path[-1] not in COMMON)
]


@pytest.fixture(autouse=True, scope="module")
def no_plug_ins() -> Iterator[None]:
    """Looking for other packages' entry points takes longer than all else here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", lambda group: ())
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen small images of four classes: a stream of two tasks with a step each."""
    folder = tmp_path_factory.mktemp("data")
    x, y = np.arange(16 * 64, dtype=np.uint8).reshape(16, 1, 8, 8), np.arange(16) % 4
    np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    for number in range(8):
        place = folder / f"images/{number % 4}/{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (30 * number, 0, 0)).save(place)
    return folder


def put(mapping: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy of `mapping` with `value` at `path`."""
    changed = copy.deepcopy(mapping)
    place = changed
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = value
    return changed


def refusal(act: Callable[[], Any]) -> str:
    """The line by which something is refused, "" where it is done; other exceptions are faults."""
    try:
        with limited(SECONDS):
            act()
    except UserError as error:
        message = str(error)
        assert message.isprintable(), message
        assert len(message) < 1000, message
        assert "Traceback" not in message, message
        return message
    return ""


SEEN: set[str] = set()


def tried(mapping: dict[str, Any], data: Path, out: Path) -> str:
    """Run the experiment, and return the refusal; what is not refused ends, and is readable."""
    before = tree(out.parent)
    said = refusal(lambda: make_plan(Experiment.from_mapping(mapping), out, data=data))
    if said:
        assert tree(out.parent) == before, "refused, and yet something was written"
        return said
    experiment = Experiment.from_mapping(mapping)
    text = yaml.safe_dump(experiment.as_mapping(), sort_keys=False)
    assert Experiment.from_mapping(yaml.safe_load(text)) == experiment
    runs = json.dumps(experiment.runs())
    if runs in SEEN:
        return ""
    SEEN.add(runs)
    plan = make_plan(experiment, out, data=data)
    ended: list[Event] = []
    with limited(SECONDS), plan.begun():
        for job in plan.jobs:
            heard: list[Event] = []
            engine.attempt(job, heard.append)
            ended.append(heard[-1])
    for event in ended:  # a learning rate of 1e38 is no mistake of form
        assert event.kind == "done" or diverged(event.message), event.message
    found = read_runs(out)
    assert {run.path.name for run in found} == {job.name for job in plan.jobs}
    table.markdown(rows(found))
    again = make_plan(experiment, out, data=data, if_there="resume")
    assert [job.name for job in again.jobs] == [e.job.name for e in ended if e.kind == "failed"]
    shutil.rmtree(out)
    return ""


@pytest.mark.parametrize(("subject", "path"), KEYS)
@pytest.mark.filterwarnings("ignore")
def test_a_value_is_refused_by_name_or_gives_runs_that_end(
    subject: str, path: tuple[str, ...], data: Path, tmp_path: Path
) -> None:
    mapping, _ = SUBJECTS[subject]
    without_data = refusal(
        lambda: make_plan(Experiment.from_mapping(mapping), tmp_path / "out", data=data)
    )
    named = [".".join(path[: depth + 1]) for depth in range(len(path))]
    faults = []
    complete: Any = Experiment.from_mapping(mapping).as_mapping()
    for key in path:
        complete = complete[key]
    for value in [*REPLACEMENTS, *(IN_LISTS if isinstance(complete, list) else ())]:
        try:
            said = tried(put(mapping, path, value), data, tmp_path / "out")
            assert not said or said == without_data or any(name in said for name in named), said
        except (Exception, Hang) as error:
            faults.append(f"{shown(value)}: {type(error).__name__}: {error}"[:600])
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert not faults, "\n".join([".".join(path), *faults])
