"""Loggers tell each step of a run once, whatever happened to it, and no run notices them."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from tiny import called, job, results, run_inline, tree, write_arrays, written

from syngap.bench.runner import local as engine
from syngap.bench.runner import loggers
from syngap.bench.runner.local import run_here
from syngap.bench.runner.loggers import Following
from syngap.bench.runner.run import Job
from syngap.bench.store.environment import now

# Of MLflow's own models, under SQLAlchemy 2.1.
pytestmark = pytest.mark.filterwarnings("ignore:The ..noload.. loader:DeprecationWarning")

QUANTILE = "plasticity/hidden1.weight/q50"
Told = dict[str, list[tuple[int, float]]]  # number → its steps and values, in the order they came


# Stores, and reading them back --------------------------------------------------------------------


def tensorboard_has(run: Path) -> Told:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    told: Told = {}
    for file in sorted(run.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if "/" in value.tag and not value.tag.startswith("config"):
                    number = float(make_ndarray(value.tensor))
                    told.setdefault(value.tag, []).append((event.step, number))
    return told


def tensorboard_config(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run)).Reload()
    (text,) = accumulator.Tensors("config/text_summary")
    fenced = text.tensor_proto.string_val[0].decode()
    return yaml.safe_load(fenced.removeprefix("```yaml\n").removesuffix("```"))


def mlflow_runs(run: Path) -> list[Any]:
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("tiny")
    return [
        found
        for found in (client.search_runs([experiment.experiment_id]) if experiment else [])
        if found.info.run_name == run.name
    ]


def mlflow_has(run: Path) -> Told:
    import mlflow

    client, told = mlflow.MlflowClient(), Told()
    for found in mlflow_runs(run):
        for key in found.data.metrics:
            history = client.get_metric_history(found.info.run_id, key)
            told.setdefault(key, []).extend((metric.step, metric.value) for metric in history)
    return {key: sorted(history) for key, history in told.items()}


def mlflow_config(run: Path) -> Any:
    (found,) = mlflow_runs(run)
    return found.data.params


def wandb_records(run: Path) -> list[Any]:
    """All records of a run, once its end is there: another process writes them."""
    from wandb.proto.wandb_internal_pb2 import Record

    identity, deadline = loggers._logged_run(run).identity, time.monotonic() + 30
    while time.monotonic() < deadline:
        files = sorted(Path("wandb").glob(f"offline-run-*-{identity}*/*.wandb"))
        logged = [data for file in files for data in logged_in(file.read_bytes())]
        records = [Record.FromString(data) for data in logged]
        if records and records[-1].HasField("exit"):
            return records
        time.sleep(0.1)
    pytest.fail("wandb did not end its file")


def logged_in(content: bytes) -> Iterator[bytes]:
    """What a log of LevelDB's format holds: pieces of records in blocks, a header before each."""
    block, header, last_pieces = 2**15, 7, (1, 4)  # a piece is whole, first, middle or last
    at, record = header, b""  # the file has a header of the same size
    while at + header <= len(content):
        if at % block > block - header:
            at += block - at % block
            continue
        size, kind = struct.unpack("<HB", content[at + 4 : at + header])
        record += content[at + header : at + header + size]
        at += header + size
        if kind in last_pieces:
            yield record
            record = b""


def wandb_has(run: Path) -> Told:
    told: Told = {}
    for record in wandb_records(run):
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for key in items:
            if not key.startswith("_"):
                told.setdefault(key, []).append((items["_step"], items[key]))
    return told


def wandb_config(run: Path) -> Any:
    return {
        update.key: json.loads(update.value_json)
        for record in wandb_records(run)
        for update in record.run.config.update
    }


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


each_store = pytest.mark.parametrize(
    ("name", "has"),
    [
        pytest.param("tensorboard", tensorboard_has, marks=needs("tensorboard")),
        pytest.param("mlflow", mlflow_has, marks=needs("mlflow")),
        pytest.param("wandb", wandb_has, marks=needs("wandb")),
    ],
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, with a logger of another package and the stores of the three in it."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[syngap.loggers]\nrecorder = test_loggers:Recorder\nbroken = test_loggers:Broken\n"
        "hanging = test_loggers:Hanging\nslow = test_loggers:Slow\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    for variable in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(engine, "run_local", run_inline)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    Recorder.told.clear()
    write_arrays(tmp_path / "data.npz")
    return tmp_path


class Recorder:
    """A logger of another package."""

    told: ClassVar[list[tuple[str, str, Any]]] = []

    def begin(self, run: loggers.LoggedRun) -> float:
        self.told.append((run.name, "begin", run.config["row"]))
        return -1

    def log(self, run: loggers.LoggedRun, step: int, values: Any) -> None:
        self.told.append((run.name, "log", (step, dict(values))))

    def end(self, run: loggers.LoggedRun, state: str) -> None:
        self.told.append((run.name, "end", state))


class Broken(Recorder):
    """Loses its store after the third step."""

    def log(self, run: loggers.LoggedRun, step: int, values: Any) -> None:
        if step >= 3:
            raise ConnectionError("the store\nis gone")


class Hanging(Recorder):
    """Its store does not answer before the test has ended."""

    released: ClassVar[threading.Event] = threading.Event()

    def log(self, run: loggers.LoggedRun, step: int, values: Any) -> None:
        assert self.released.wait(60)
        super().log(run, step, values)


class Slow(Recorder):
    """Takes its time, but answers."""

    seconds = 0.05

    def log(self, run: loggers.LoggedRun, step: int, values: Any) -> None:
        time.sleep(self.seconds)
        super().log(run, step, values)


# Each step once -----------------------------------------------------------------------------------


def begun(row: str = "syngap") -> Job:
    """A run that evaluates every second step and keeps no checkpoint but those of task ends."""
    settings = (
        "stream={name: npz, path: data.npz, tasks: 2, batch: 10, epochs: 2}",
        "methods.syngap={lr: 0.3, buffer: 20, replay: 10}",
        "training.evaluate_every=2",
    )
    return job(Path(f"out/{row}-0"), *settings, row=row)


def interrupted(task: Job, at: int) -> None:
    """Leave the run as a kill at that step would."""

    def tell(step: int, accuracy: float | None) -> None:
        if step == at:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syngap.bench.store.folder_writer._TELL_EVERY", 0.0)
        with pytest.raises(KeyboardInterrupt):
            run_here(task, tell)


def written_down(run: Path) -> Told:
    told: Told = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        found = json.loads(line)
        for key, value in loggers.values(found).items():
            told.setdefault(key, []).append((found["step"], value))
    return told


def close(told: Told) -> dict[str, list[tuple[int, Any]]]:
    """The same, to be compared with what a store kept in fewer bits."""
    return {
        key: [(step, pytest.approx(value, rel=1e-6)) for step, value in history]
        for key, history in told.items()
    }


def following(name: str) -> Following:
    return Following(Path("out"), [name], say=pytest.fail)


def first_try(name: str, *, killed: bool) -> None:
    """Log a run up to step 34 of 40; its last checkpoint was that of step 20, a task's end."""
    (logger,) = following(name)._followers
    interrupted(begun(), 35)
    logger.look(last=not killed)
    assert not logger.failed
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)


@each_store
@pytest.mark.parametrize("how", ["undisturbed", "resumed", "killed", "retried"])
def test_every_step_is_logged_once(how: str, name: str, has: Callable[[Path], Told]) -> None:
    task = begun()
    if how in ("resumed", "killed"):
        script = f"import test_loggers as t; t.first_try({name!r}, killed={how == 'killed'})"
        others = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
        tried = subprocess.run(
            [sys.executable, "-c", script],
            env={**others, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
        assert tried.returncode == (-signal.SIGKILL if how == "killed" else 0)
        assert 34 in [step for step, _ in written_down(task.folder)["accuracy/seen"]]
    logger = following(name)
    if how == "retried":  # a worker dies and another goes on
        interrupted(task, 35)
        for follower in logger._followers:
            follower.look()
    run_here(task)
    with logger:
        pass
    expected = written_down(task.folder)
    assert [step for step, _ in expected["accuracy/seen"]] == list(range(0, 41, 2))
    assert QUANTILE in expected
    assert has(task.folder) == close(expected)


def content(name: str) -> Any:
    """All that is there; of MLflow's store, which rearranges itself, what it says of the run."""
    if name != "mlflow":
        return tree(Path())
    return [found.to_dictionary() for found in mlflow_runs(begun().folder)]


@each_store
def test_what_is_whole_is_left_alone(name: str, has: Callable[[Path], Told]) -> None:
    run_here(begun())
    with following(name):
        pass
    before = has(begun().folder)
    assert before == close(written_down(begun().folder)), "also of a run that was done before"
    kept = content(name)
    with following(name):
        pass
    assert content(name) == kept


@needs("tensorboard")
def test_tensorboard_has_the_configuration() -> None:
    run_here(begun())
    with following("tensorboard"):
        pass
    assert tensorboard_config(begun().folder) == begun().config.as_mapping()


@needs("mlflow")
def test_mlflow_has_configuration_and_state() -> None:
    interrupted(begun("er"), 35)
    with following("mlflow"):
        pass
    assert [found.info.status for found in mlflow_runs(begun("er").folder)] == ["KILLED"]
    with following("mlflow"):
        run_here(begun("er"))
    (found,) = mlflow_runs(begun("er").folder)
    assert found.info.status == "FINISHED"
    assert found.data.params["method.name"] == "er"
    assert found.data.params["stream.batch"] == "10"
    assert found.data.params["model.hidden"] == "[8]"


@needs("wandb")
def test_wandb_has_the_configuration() -> None:
    run_here(begun())
    with following("wandb"):
        pass
    config = wandb_config(begun().folder)
    expected = begun().config.as_mapping()
    assert {key: config[key] for key in expected} == expected


# No run notices -----------------------------------------------------------------------------------


def test_a_logger_of_another_package_is_told_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert called(capsys, "run", written(Path()), "--out", "out", "--log", "recorder")[0] == 0
    for row in ("sgd", "er"):
        told = [(kind, what) for name, kind, what in Recorder.told if name == f"{row}-0"]
        assert [told[0], told[-1]] == [("begin", row), ("end", "done")]
        steps = [what[0] for kind, what in told if kind == "log"]
        lines = (Path("out") / f"{row}-0" / "metrics.jsonl").read_text().splitlines()
        assert steps == [json.loads(line)["step"] for line in lines]


def test_a_logger_that_fails_is_told_of_and_changes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["run", written(Path()), "--out"]
    assert called(capsys, *arguments, "plain")[0] == 0
    code, _, said = called(capsys, *arguments, "out", "--log", "broken,recorder")
    assert code == 0
    assert said.splitlines()[-1] == (
        "logger broken: stopped (ConnectionError: the store is gone); with --resume it catches up"
    )
    for run in ("sgd-0", "er-0"):
        assert results(Path("out") / run) == results(Path("plain") / run)
        assert (run, "end", "done") in Recorder.told, "the other goes on"


def test_a_logger_that_hangs_holds_neither_the_command_nor_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loggers, "_PATIENCE", 1.0)
    Hanging.released.clear()
    arguments = ["run", written(Path()), "--out", "out", "--log", "hanging,recorder"]
    before = {*threading.enumerate()}
    code, table, said = called(capsys, *arguments)
    told = list(Recorder.told)
    Hanging.released.set()
    for thread in {*threading.enumerate()} - before:
        thread.join()
    assert code == 0
    assert "The page is" in table
    assert said.splitlines()[-1] == (
        "logger hanging: stopped (no answer in 1 seconds); with --resume it catches up"
    )
    for run in ("sgd-0", "er-0"):
        assert (run, "end", "done") in told, "the other goes on"


def test_a_logger_that_is_slow_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patience = 1.0
    monkeypatch.setattr(loggers, "_PATIENCE", patience)
    run_here(begun())
    steps = len(written_down(begun().folder)["accuracy/seen"])
    monkeypatch.setattr(Slow, "seconds", 1.5 * patience / steps)
    with following("slow"):
        pass
    assert Recorder.told[-1] == ("syngap-0", "end", "done")


def test_runs_that_were_done_before_can_be_logged(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", written(Path()), "--out", "out", "--resume"]
    assert called(capsys, *arguments)[0] == 0
    kept = tree(Path("out"))
    assert called(capsys, *arguments, "--log", "recorder")[0] == 0
    assert [what for _, kind, what in Recorder.told if kind == "end"] == ["done", "done"]
    assert tree(Path("out")) == kept


def test_a_run_is_another_with_fresh_and_the_same_with_resume(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["run", written(Path()), "--out", "out", "--log", "recorder"]
    assert called(capsys, *arguments)[0] == 0
    first = {run: loggers._logged_run(Path("out") / run).identity for run in ("sgd-0", "er-0")}
    began = now()
    while now() == began:  # runs that began within the same second are told apart by nothing else
        time.sleep(0.05)
    for option, same in (("--resume", True), ("--fresh", False)):
        assert called(capsys, *arguments, option)[0] == 0
        for run, identity in first.items():
            assert (loggers._logged_run(Path("out") / run).identity == identity) == same


@needs("mlflow")
def test_a_folder_that_was_moved_is_not_logged_again(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", written(Path()), "--resume", "--log", "mlflow"]
    assert called(capsys, *arguments, "--out", "out")[0] == 0
    (logged,) = mlflow_runs(Path("out/er-0"))
    Path("out").rename("elsewhere")
    assert called(capsys, *arguments, "--out", "elsewhere")[0] == 0
    (found,) = mlflow_runs(Path("elsewhere/er-0"))
    assert found.to_dictionary() == logged.to_dictionary()


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("tensorboard", "torch.utils.tensorboard", "pip install 'syngap[tensorboard]' brings it"),
        ("mlflow", "mlflow", "pip install 'syngap[mlflow]' brings it"),
        ("wandb", "wandb", "pip install 'syngap[wandb]' brings it"),
        ("tensorbaord", "unheard.of", 'unknown logger "tensorbaord"; did you mean "tensorboard"?'),
    ],
)
def test_a_logger_that_is_not_there_is_refused_before_anything_is_written(
    name: str,
    module: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    code, _, said = called(capsys, "run", written(Path()), "--out", "out", "--log", name)
    assert (code, len(said.splitlines())) == (2, 1)
    assert words in said
    assert not Path("out").exists()
