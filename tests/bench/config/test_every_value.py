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
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import yaml
from fuzz.guard import Hang, limited
from PIL import Image
from tiny import TINY, called, tree, written
from typer.models import OptionInfo

from syngap.bench import cli, methods, models, registry, streams
from syngap.bench.config.experiment import Experiment, Training
from syngap.bench.errors import UserError
from syngap.bench.options import shown, signature
from syngap.bench.reporting.rows import rows
from syngap.bench.reporting.tables import markdown
from syngap.bench.runner import local as engine
from syngap.bench.runner.local import Event
from syngap.bench.runner.plan import make_plan
from syngap.bench.store.environment import memory_limit
from syngap.bench.store.folder_reader import read_runs
from syngap.bench.tuning.study import is_divergence

SECONDS = 20.0  # for one value; all that is legitimate here takes a tenth of one

NUMBERS: list[Any] = [
    *(1e308, 3e38, 10**30, 2**64, 2**63, 2**31, 1e-300),  # the largest that is taken is run
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
    "added": [1],
    "rounds": [[0.5, 2]],
    "seeds": [7, 8],
    "stream": {"validation": 0.5},
    "spaces": {
        "er": {"lr": {"log": [0.01, 1.0]}, "average": {"decay": [0.9, 0.99], "or": 0.0}},
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
SHARE = 4  # of the values, for an option that many have


def keys() -> Iterator[Any]:
    """Every key of every subject, with the values to try there.

    An option that several methods (or streams, or networks) have gets every value in the first of
    them, and in the others each time another quarter: the checks belong to the option.
    """
    tried: set[tuple[str, str]] = set()
    number = 0
    for subject, (mapping, part) in SUBJECTS.items():
        for path in paths(Experiment.from_mapping(mapping).as_mapping()):
            if part and (not ".".join(path).startswith(f"{part}.") or path[-1] in COMMON):
                continue
            option = (part, path[-1])
            values = slice(number % SHARE, None, SHARE) if part and option in tried else slice(None)
            number += option in tried
            tried.add(option)
            yield pytest.param(subject, path, values, id=f"{subject}: {'.'.join(path)}")


KEYS = list(keys())


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power is not what is tried here, and syncs take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


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


def tried(mapping: dict[str, Any], data: Path, out: Path, *, run: bool = True) -> str:
    """Run the experiment, and return the refusal; what is not refused ends, and is readable."""
    before = tree(out.parent)
    said = refusal(lambda: make_plan(Experiment.from_mapping(mapping), out, data=data))
    if said:
        assert tree(out.parent) == before, "refused, and yet something was written"
        return said
    experiment = Experiment.from_mapping(mapping)
    text = yaml.safe_dump(experiment.as_mapping(), sort_keys=False)
    assert Experiment.from_mapping(yaml.safe_load(text)) == experiment
    runs = json.dumps([run.as_mapping() for run in experiment.runs()])
    if runs in SEEN or not run:
        return ""
    SEEN.add(runs)
    plan = make_plan(experiment, out, data=data)
    ended: list[Event] = []
    with limited(SECONDS), plan.begin():
        for job in plan.jobs:
            heard: list[Event] = []
            engine.attempt(job, heard.append)
            ended.append(heard[-1])
    for event in ended:  # a learning rate of 1e30 is no mistake of form
        assert event.kind == "done" or is_divergence(event.message), event.message
    found = read_runs(out)
    assert {run.path.name for run in found} == {job.name for job in plan.jobs}
    markdown(rows(found))
    again = make_plan(experiment, out, data=data, if_there="resume")
    assert [job.name for job in again.jobs] == [e.job.name for e in ended if e.kind == "failed"]
    return ""


@pytest.mark.parametrize(("subject", "path", "values"), KEYS)
@pytest.mark.filterwarnings("ignore")
def test_a_value_is_refused_by_name_or_gives_runs_that_end(
    subject: str, path: tuple[str, ...], values: slice, data: Path, tmp_path: Path
) -> None:
    mapping, _ = SUBJECTS[subject]
    without_data = refusal(
        lambda: make_plan(Experiment.from_mapping(mapping), tmp_path / "out", data=data)
    )
    named = [".".join(path[: depth + 1]) for depth in range(len(path))]
    complete: Any = Experiment.from_mapping(mapping).as_mapping()
    for key in path:
        complete = complete[key]
    faults: list[str] = []
    large_taken = False
    for value in [*REPLACEMENTS, *(IN_LISTS if isinstance(complete, list) else ())][values]:
        large = isinstance(value, (int, float)) and value >= 2**31
        changed = put(mapping, path, value)
        with noted(faults, value):
            said = tried(changed, data, tmp_path / "out", run=not (large and large_taken))
            large_taken = large_taken or (large and not said)
            assert not said or said == without_data or any(name in said for name in named), said
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert not faults, "\n".join([".".join(path), *faults])


@contextmanager
def noted(faults: list[str], value: Any) -> Iterator[None]:
    """Add what goes wrong with `value` to `faults`, so that all values of a key are tried."""
    try:
        yield
    except (Exception, Hang) as error:
        faults.append(f"{shown(value)}: {type(error).__name__}: {error}"[:600])


# The command line ---------------------------------------------------------------------------------


def number_options() -> Iterator[tuple[str, str]]:
    """Every option that takes a number, or text that stands for some, with its command."""
    for registered in cli.app.registered_commands:
        assert registered.callback
        for kind in get_type_hints(registered.callback, include_extras=True).values():
            info = next((one for one in get_args(kind) if isinstance(one, OptionInfo)), None)
            if info:
                option = str(info.default)  # where typer keeps the name of one that is annotated
                plain_kinds = {get_args(kind)[0], *get_args(get_args(kind)[0])}
                if plain_kinds & {int, float} or option in ("--workers", "--seeds"):
                    yield registered.name or registered.callback.__name__, option


OPTIONS = list(number_options())
ARGUMENTS = {"data": ["core50"], "demo": [], "doctor": []}  # others take an experiment or a folder


def test_the_options_that_take_numbers_are_found() -> None:
    found = {option for _, option in OPTIONS}
    assert {"--workers", "--seeds", "--seed", "--trials", "--points", "--hung-after"} <= found


@pytest.mark.parametrize(("command", "option"), OPTIONS)
@pytest.mark.parametrize(
    "value", [str(10**31), "9" * 5000, "nan", "inf", "-1", "1e400", "text", ""]
)
def test_a_number_on_the_command_line_is_refused_by_its_option(
    command: str,
    option: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    before = tree(tmp_path)
    arguments = ARGUMENTS.get(command, ["tiny.yaml"])
    code, printed, said = called(capsys, command, *arguments, f"{option}={value}")
    assert (code, printed) == (2, "")
    assert len(said.splitlines()) == 1, said
    assert option.lstrip("-") in said, said
    assert len(said) < 1000, said
    assert tree(tmp_path) == before


def test_as_many_workers_as_a_file_can_record_leave_a_run_that_can_be_read(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "run_local", lambda jobs, workers, on_event, following: [
        engine.attempt(job, on_event, workers) for job in jobs
    ])  # fmt: skip
    (tmp_path / "every.yaml").write_text(yaml.safe_dump(BASE))
    command = ["run", tmp_path / "every.yaml", "--data", data, "--out", tmp_path / "out"]
    assert called(capsys, *command, "--workers", 2**63 - 1)[0] == 0
    assert called(capsys, "report", tmp_path / "out")[0] == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["run", "tiny.yaml", "--methods", "er", "sgd"], "--methods er,sgd"),
        (["run", "tiny.yaml", "--methods", "er,", "sgd", "--seeds", "0"], "--methods er,sgd"),
        (["run", "tiny.yaml", "--methods", "er", "sgd", "adam"], "--methods er,sgd,adam"),
        (["run", "--methods", "er", "sgd", "tiny.yaml"], "--methods er,sgd"),
        (["run", "tiny.yaml", "--seeds=0", "1"], "--seeds 0,1"),
        (["demo", "--seeds", "0", "1"], "--seeds 0,1"),
        (["run", "tiny.yaml", "--log", "wandb", "mlflow"], "--log wandb,mlflow"),
        (["reproduce", "digits", "--row", "er", "syngap"], "--row er,syngap"),
        (["run", "tiny.yaml", "more"], ""),
    ],
    ids=" ".join,
)
def test_a_list_with_a_space_in_place_of_a_comma_is_refused_with_the_list_as_it_should_be(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = called(capsys, *given)
    assert code == 2
    assert ("expected commas in place of spaces: " in said) == bool(words)
    assert said.endswith(f"{words}\n") or "unexpected argument: more" in said


# Reported once ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        "training.threads=1000000",
        f"methods.er.buffer={2**50}",
        f"stream.batch={2**64}",
        "methods.er.lr=1e308",
        "model.hidden=[100000000000]",
    ],
)
def test_a_mistake_in_the_configuration_is_reported_once_however_many_runs_it_concerns(
    setting: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["run", written(tmp_path), "--methods", "er", "--seeds", "0..4", "--out", "out"]
    code, _, said = called(capsys, *command, "--set", setting)
    assert (code, len(said.splitlines())) == (2, 1)
    assert said.startswith(f"syngap: {setting.partition('=')[0].partition('.hidden')[0]}")
    assert not (tmp_path / "out").exists()


# Python -------------------------------------------------------------------------------------------


def test_python_meets_the_same_door() -> None:
    experiment = Experiment.from_mapping(TINY)
    for seeds in ([2**32], [-1], [True], [0, 0], []):
        with pytest.raises(UserError, match="seeds: got"):
            experiment.select(None, seeds)
    assert experiment.select(None, [2**32 - 1]).seeds == [2**32 - 1]
    with pytest.raises(UserError, match=r"training\.threads: got 1025, expected .* from 1 to 1024"):
        Training(threads=1025)
    with pytest.raises(UserError, match="seed: got 4294967296"):
        streams.load("digits", seed=2**32)
    with pytest.raises(UserError, match=r"stream\.batch: got .*64 bits"):
        streams.load("digits", batch=2**64)


# Real causes --------------------------------------------------------------------------------------


def test_a_package_that_is_there_and_fails_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_to_start.py").write_text("raise ImportError('no thread can be started')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"--log: .* fails \(no thread can be started\)") as caught:
        registry.import_or_refuse("fails_to_start", "--log", "pip install fails_to_start")
    assert "pip install" not in str(caught.value)
    with pytest.raises(UserError, match="No module named 'not_there'; pip install not_there"):
        registry.import_or_refuse("not_there", "--log", "pip install not_there")


def test_the_digits_say_why_scikit_learn_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(name: str) -> Any:
        raise ImportError("no thread can be started")

    monkeypatch.setattr(registry, "import_module", fails)
    with pytest.raises(UserError, match="no thread can be started") as caught:
        streams.registry.get("digits")(0, None)
    assert "pip install" not in str(caught.value)


def test_arrays_that_do_not_fit_are_not_said_to_be_damaged(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    module = import_module(
        "syngap.bench.streams.arrays"
    )  # the function has its name in the package
    monkeypatch.setattr(module, "_check_sizes", fails)
    with pytest.raises(UserError, match="need more memory than there is"):
        streams.load("npz", data=data, path="data.npz", tasks=2)


def test_the_memory_of_a_container_is_that_of_the_machine_at_most(tmp_path: Path) -> None:
    whole = memory_limit(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path) == whole
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory_limit(tmp_path) == 1000
