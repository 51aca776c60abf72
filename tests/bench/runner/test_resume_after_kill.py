"""A run killed at any instant and resumed ends with the same R and weights, bit for bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkout import ROOT
from filelock import FileLock
from kill_often import command, members
from tiny import RESULTS, called, job, results, run_inline, state, tree, write_arrays, written
from torch import nn

import syngap.bench.store.folder_writer
from syngap.bench.metrics import Evaluation
from syngap.bench.runner import local as engine
from syngap.bench.runner import run
from syngap.bench.runner.local import run_here
from syngap.bench.storage import strays
from syngap.bench.store.folder_reader import read_run
from syngap.bench.store.folder_writer import FolderJournal

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"
)
OFTEN = "training.checkpoint_seconds=0"


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power is not what is tried here, and syncs take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


# Killed by a signal -------------------------------------------------------------------------------

KILLS = 1  # of each method and pause; results/safety holds many
# They differ in what they keep: logits in a balanced memory, anchors, a memory and importance, and
# a network begun anew. That the state of every method goes on bit for bit: test_methods.py.
ROWS = ("derpp", "ewcpp", "syngap", "joint")
SCRIPT = ROOT / "tests/support/kill_often.py"


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What became of experiments that were killed with all their processes, and resumed.

    They run once, even if several testers ask.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    found = folder / "kill_often.json"
    with FileLock(f"{found}.lock"):
        if not found.exists():
            command = ["--kills", KILLS, "--pause", 0.05, "--json"]
            command += [word for row in ROWS for word in ("--method", row)]
            done = subprocess.run(
                [sys.executable, SCRIPT, *map(str, command)],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.stdout, done.stderr
            found.write_text(done.stdout)
    return json.loads(found.read_text())


@pytest.mark.slow
@needs_proc
@pytest.mark.xdist_group("kill_often")
@pytest.mark.parametrize("row", ROWS)
def test_killed_at_random_instants_it_ends_as_if_nothing_had_been(row: str, attacked: Any) -> None:
    for pause, outcome in attacked[row].items():
        assert outcome["differences"] == [], f"checkpoints every {pause} s"
        assert outcome["kills"] >= KILLS


# Killed between any two operations on files -------------------------------------------------------


class Killed(BaseException):
    """No handler of the package catches it, as none catches SIGKILL."""


@contextmanager
def killed(monkeypatch: pytest.MonkeyPatch, at: int, *, late: bool) -> Iterator[list[str]]:
    """Die at the operation number `at`, before it or after; names the operations that were begun.

    Those are all that change which files are there.
    """
    begun: list[str] = []

    def dying(operation: Any) -> Any:
        def replaced(path: Any, *arguments: Any, **options: Any) -> None:
            begun.append(f"{operation.__name__} {Path(path).name}")
            if len(begun) == at + 1 and not late:
                raise Killed
            operation(path, *arguments, **options)
            if len(begun) == at + 1:
                raise Killed

        return replaced

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying(os.replace))
        patch.setattr(Path, "unlink", dying(Path.unlink))
        patch.setattr(Path, "mkdir", dying(Path.mkdir))
        with suppress(Killed):
            yield begun


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "er-0"
    run_here(job(folder, OFTEN))
    return folder


@pytest.fixture
def operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What such a run does with files, in order."""
    with killed(monkeypatch, 10**6, late=False) as begun:
        run_here(job(tmp_path / "counted", OFTEN))
    assert len(begun) > 20
    return begun


@pytest.mark.parametrize("late", [False, True])
def test_killed_between_any_two_file_operations_it_ends_as_if_nothing_had_been(
    late: bool,
    whole: Path,
    operations: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = job(tmp_path, OFTEN)
    stream = run.stream_of(task.config, None)
    monkeypatch.setattr(run, "stream_of", lambda *_: stream)  # reading it again takes longest
    for at, operation in enumerate(operations):
        task = replace(task, folder=tmp_path / f"er-{at}")
        with killed(monkeypatch, at, late=late) as begun:
            run_here(task)
        assert len(begun) == at + 1
        if (task.folder / "config.yaml").is_file() and read_run(task.folder).done:
            continue  # whoever resumes leaves it alone
        run_here(task)
        assert results(task.folder) == results(whole), operation
        assert sorted(tree(task.folder)) == sorted(tree(whole)), operation


def test_a_run_is_done_only_when_its_weights_are_there_and_keeps_its_checkpoints_until_then(
    operations: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [name.rpartition(".")[0] for name in operations[-4:]] == [
        "replace .weights.safetensors",
        "replace .status.json",
        f"unlink step-{5:09d}",
        f"unlink step-{6:09d}",
    ]
    for before_the_end, said in ((4, "running"), (3, "running"), (2, "done")):
        folder = tmp_path / f"er-{before_the_end}"
        with killed(monkeypatch, len(operations) - before_the_end, late=False):
            run_here(job(folder, OFTEN))
        assert state(folder) == said
        assert len(list((folder / "checkpoint").glob("step-*"))) == 2
    assert results(folder) == results(whole)


# Files that were cut off --------------------------------------------------------------------------


@pytest.fixture
def interrupted(operations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that died while it wrote the checkpoint of its fifth step."""
    saves = [at for at, name in enumerate(operations) if name.startswith("replace .step-")]
    with killed(monkeypatch, saves[4], late=False):
        run_here(job(tmp_path / "er-0", OFTEN))
    return tmp_path / "er-0"


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoint").glob("step-*"))


def loaded(folder: Path) -> tuple[int, list[int]]:
    """The step from which a run would go on, and those of the evaluations that it keeps."""
    with FolderJournal(
        folder, steps=6, tasks=2, checkpoint_seconds=0, tell=lambda *_: None
    ) as journal:
        kept = journal.load()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return kept["step"] if kept else 0, [json.loads(line)["step"] for line in lines]


def test_there_is_always_a_checkpoint_before_the_newest(interrupted: Path) -> None:
    assert [path.name for path in checkpoints(interrupted)] == [
        f"step-{step:09d}.safetensors" for step in (3, 4)
    ]
    assert loaded(interrupted) == (4, [0, 3])


@pytest.mark.parametrize("left", [0, 1, 8, 100, 5000, -1])
def test_a_checkpoint_that_was_cut_off_falls_back_to_the_one_before(
    left: int, interrupted: Path, whole: Path
) -> None:
    older, newest = checkpoints(interrupted)
    newest.write_bytes(newest.read_bytes()[:left])
    assert loaded(interrupted) == (3, [0, 3])
    assert checkpoints(interrupted) == [older], "it must not outlive whole ones of earlier steps"
    run_here(job(interrupted, OFTEN))
    assert results(interrupted) == results(whole)
    assert checkpoints(interrupted) == []


def test_where_no_checkpoint_is_whole_it_begins_again(interrupted: Path, whole: Path) -> None:
    for path in checkpoints(interrupted):
        path.write_bytes(path.read_bytes()[:50])
    assert loaded(interrupted) == (0, [])
    run_here(job(interrupted, OFTEN))
    assert results(interrupted) == results(whole)


def test_half_written_files_are_removed_and_no_others(interrupted: Path, whole: Path) -> None:
    folder = interrupted
    planted = [folder / ".status.json.123", folder / "checkpoint/.step-000000003.safetensors.7"]
    assert strays(folder / "checkpoint"), "that of the fifth step"
    others = [folder / ".nfs0001", folder / "notes.txt", folder / ".notes/mine.txt"]
    (folder / ".notes").mkdir()
    for path in planted + others:
        path.write_text("x")
    run_here(job(folder, OFTEN))
    assert results(folder) == results(whole)
    assert [*strays(folder), *strays(folder / "checkpoint")] == []
    assert [path for path in others if not path.exists()] == []


def test_a_half_written_experiment_hinders_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed before the first file of all was whole."""
    monkeypatch.setattr(engine, "run_local", run_inline)
    command = ["run", written(tmp_path), "--out", tmp_path / "out", "--methods", "sgd"]
    with killed(monkeypatch, 1, late=False) as begun, pytest.raises(Killed):
        called(capsys, *command)
    assert begun[-1].startswith("replace .experiment.yaml.")
    assert [name[:16] for name in tree(tmp_path / "out")] == [".experiment.yaml"]
    assert called(capsys, *command)[0] == 0
    assert not strays(tmp_path / "out")


def evaluation(step: int) -> Evaluation:
    return Evaluation(step, 0, False, (50.0, 50.0), 100.0)


def test_lines_after_the_last_checkpoint_are_there_once(tmp_path: Path) -> None:
    """Also where the next checkpoint comes before the next line."""

    def opened() -> FolderJournal:
        return FolderJournal(tmp_path, steps=9, tasks=2, checkpoint_seconds=0, tell=lambda *_: None)

    def steps() -> list[int]:
        lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
        return [json.loads(line)["step"] for line in lines]

    with opened() as journal:
        assert journal.load() is None
        for step in (0, 1, 2):
            journal.record(evaluation(step), {})
            if step == 1:
                journal.save({"step": 1, "seconds": 1.0})
    assert steps() == [0, 1, 2]
    with opened() as journal:
        state = journal.load()
        assert state is not None
        assert state["step"] == 1
        assert steps() == [0, 1]
        journal.save({"step": 2, "seconds": 2.0})
        journal.record(evaluation(3), {})
    with opened() as journal:
        state = journal.load()
        assert state is not None
        assert state["step"] == 2
        assert steps() == [0, 1]


def test_weights_that_share_memory_are_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with FolderJournal(
        tmp_path, steps=0, tasks=1, checkpoint_seconds=0, tell=lambda *_: None
    ) as journal:
        journal.load()
        journal.close(model)
    from safetensors.torch import load_file

    kept = load_file(tmp_path / "checkpoint/weights.safetensors")
    assert torch.equal(kept["1.weight"], model[0].weight)


# Ctrl-C -------------------------------------------------------------------------------------------

LONG = (OFTEN, "seeds=[0, 1]", "stream={name: npz, path: data.npz, tasks: 2, batch: 1}")


STOPPED = ["Stopped. The same command with --resume goes on, in out."]


def prepared(folder: Path, workers: int) -> list[str]:
    """The arguments of a command that takes long enough to be stopped."""
    write_arrays(folder / "data.npz")  # read without scikit-learn, which takes long to import
    command = ["run", written(folder, *LONG), "--methods", "er", "--out", "out"]
    return [*map(str, command), "--workers", str(workers)]


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@contextmanager
def ending(group: int | None) -> Iterator[int]:
    """See that nothing is left of a process group that was stopped."""
    assert group
    try:
        yield group
        until(lambda: not members(group), seconds=20)
    finally:
        if members(group):
            os.killpg(group, signal.SIGKILL)


def command_in(folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command(arguments, folder / "log")


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize(("stopped_by", "workers"), [("Ctrl-C", 2), ("a batch system", 1)])
def test_ctrl_c_leaves_what_can_be_resumed_and_says_how(
    stopped_by: str,
    workers: int,
    quick_workers: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its processes are forked; the next test starts them from nothing."""
    arguments = prepared(tmp_path, workers)
    process = multiprocessing.get_context().Process(target=command_in, args=(tmp_path, arguments))
    process.start()
    with ending(process.pid) as group:
        until(lambda: list((tmp_path / "out/er-0/checkpoint").glob("step-*")))
        if stopped_by == "Ctrl-C":
            os.killpg(group, signal.SIGINT)
        else:
            os.kill(group, signal.SIGTERM)
        process.join(60)
        assert process.exitcode == 130
    assert (tmp_path / "log").read_text().splitlines() == STOPPED
    assert state(tmp_path / "out/er-0") == "running"

    monkeypatch.setattr(engine, "run_local", run_inline)
    monkeypatch.chdir(tmp_path)
    resumed = ["run", "tiny.yaml", "--methods", "er", "--out", "out", "--resume"]
    assert called(capsys, *resumed, "--seeds", 0)[0] == 0
    run_here(job(tmp_path / "whole", *LONG))
    assert results(tmp_path / "out/er-0") == results(tmp_path / "whole")


@pytest.mark.slow
@needs_proc
def test_ctrl_c_while_workers_start_is_as_quiet(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "syngap", *prepared(tmp_path, workers=2)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a shell would start it
        # A job in the background of a script ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process, ending(process.pid) as group:
        until(lambda: len(members(group)) >= 4)  # itself, a tracker, two workers
        time.sleep(0.3)  # they import torch
        for worker in set(members(group)) - {group}:
            os.kill(worker, signal.SIGINT)  # before their parent, or it might be the faster
        time.sleep(0.3)
        os.killpg(group, signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130
    assert said.splitlines() == STOPPED


def test_a_worker_ends_with_the_process_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not say that its run failed, which nobody could have told."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process still listens to Ctrl-C
    monkeypatch.setattr(syngap.bench.store.folder_writer, "_TELL_EVERY", 0)
    ours, theirs = multiprocessing.Pipe()
    ours.send(job(tmp_path / "er-0", OFTEN))
    ours.close()
    with theirs, pytest.raises(SystemExit) as ended:
        engine._work(theirs)
    assert not ended.value.code
    assert state(tmp_path / "er-0") == "running"
    assert not (tmp_path / "er-0/error.txt").exists()


def test_a_worker_that_died_between_two_runs_fails_the_second_alone(tmp_path: Path) -> None:
    """As where the system is out of memory: the one who gives out runs must not die of it."""
    starts: list[str] = []

    class Dead:
        """A process that is killed before it hears of anything."""

        exitcode = -signal.SIGKILL

        def __init__(self, target: Any, args: Any, daemon: bool) -> None:
            self.theirs = args[0]

        def start(self) -> None:
            starts.append("started")
            self.theirs.close()

        def join(self) -> None: ...

    worker = engine._Worker(SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Dead))
    task, events = job(tmp_path / "er-0"), list[engine.Event]()
    worker.give([task], events.append)
    assert worker.listen(events.append)
    assert [(event.kind, event.message) for event in events] == [
        ("begun", ""),
        ("failed", events[-1].message),
    ]
    assert events[-1].message.startswith("its process died (SIGKILL): if the system is out of")
    assert len(starts) == 2, "another takes its place"
    worker.connection.close()


def test_the_results_are_what_is_compared(whole: Path) -> None:
    assert sorted(RESULTS) == sorted(name for name in tree(whole) if name in RESULTS)
    assert sorted(tree(whole)) == sorted(
        [*RESULTS, "checkpoint", "config.yaml", "environment.json", "status.json"]
    )
