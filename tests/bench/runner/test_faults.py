"""What breaks under a run is told in words and spoils no folder; when it is mended, --resume ends
the run with the bytes that it would have had. docs/faults.md is the list.
"""

from __future__ import annotations

import csv
import errno
import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from checkout import ROOT
from kill_often import METHODS as KILLED
from tiny import called, job, results, state, tiny, tree, write_arrays, written

from syngap.bench.config.experiment import Experiment
from syngap.bench.runner import local as engine
from syngap.bench.runner import run
from syngap.bench.runner.local import Event, attempt, run_here
from syngap.bench.runner.recorded import repeat_experiment
from syngap.bench.runner.run import Job
from syngap.bench.store import environment
from syngap.bench.store import folder_writer as journal
from syngap.bench.store.folder_reader import read_run
from syngap.bench.store.folder_writer import FolderJournal
from syngap.bench.store.records import write_yaml
from syngap.bench.training import loop
from syngap.bench.training.checkpoint import pack, unpack

posix = pytest.mark.skipif(os.name != "posix", reason="locks, limits and signals of POSIX")
OFTEN = "training.checkpoint_seconds=0"
NPZ = "stream={name: npz, path: data.npz, tasks: 2, batch: 10}"
Call = Callable[..., tuple[int, str, str]]


def inline(
    jobs: Sequence[Job], workers: int, on_event: Callable[[Event], None], *more: object
) -> None:
    """Stand in for `run_local`: no processes, every event."""
    for one in jobs:
        on_event(Event(one, "begun"))
        attempt(one, on_event)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an experiment of ten steps, runs done in this process, and no syncs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "run_local", inline)
    monkeypatch.setattr(journal, "_TELL_EVERY", 0.0)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    write_arrays(tmp_path / "data.npz", samples=100)
    written(tmp_path, NPZ, OFTEN)
    return tmp_path


@pytest.fixture
def call(here: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """`syngap run` of one method, with more arguments."""

    def run_one(*arguments: object) -> tuple[int, str, str]:
        return called(capsys, "run", "tiny.yaml", "--methods", "er", "--out", "out", *arguments)

    return run_one


@pytest.fixture
def whole(here: Path) -> Path:
    """The run that nothing happened to."""
    run_here(job(here / "whole/er-0", NPZ, OFTEN))
    return here / "whole/er-0"


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoint").glob("step-*"))


def stopped(task: Job, at: int) -> None:
    """Leave a run as if it had been killed after its step `at`."""

    def tell(step: int, accuracy: float | None) -> None:
        if step > at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_here(task, tell)


def interrupted(out: Path, at: int) -> None:
    """Leave an experiment as if its run had been killed after its step `at`."""
    stopped(job(out / "er-0", NPZ, OFTEN), at)
    mapping = Experiment.from_mapping(tiny(NPZ, OFTEN)).as_mapping()
    write_yaml(out / "experiment.yaml", mapping, within=out)


def flipped(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


# Checkpoints that are not what was written --------------------------------------------------------

SMALL = pack({"step": 3, 0: (torch.arange(5), None), "weights": [torch.ones(2, 2)]})


@pytest.mark.parametrize("bit", range(8))
def test_a_changed_bit_anywhere_in_a_checkpoint_is_noticed(bit: int) -> None:
    for place in range(len(SMALL)):
        changed = bytearray(SMALL)
        changed[place] ^= 1 << bit
        with pytest.raises(ValueError, match=r"\S"):
            unpack(bytes(changed))


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_taken(
    whole: Path, here: Path, call: Call
) -> None:
    interrupted(here / "out", at=6)
    older, newest = checkpoints(here / "out/er-0")
    flipped(newest, -5)  # in the numbers of a tensor, which safetensors does not check
    code, _, said = call("--resume")
    assert code == 0
    assert said.splitlines()[0] == (
        f"out/er-0/checkpoint/{newest.name} is damaged (not a checkpoint: its checksum is "
        f"another); going on from {older.name}"
    )
    assert results(here / "out/er-0") == results(whole)


def test_where_both_are_damaged_the_run_begins_again_and_says_so(
    whole: Path, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = job(here / "er-0", NPZ, OFTEN)
    stopped(task, at=6)
    for path in checkpoints(task.folder):
        flipped(path, len(path.read_bytes()) // 2)
    with caplog.at_level(logging.WARNING):
        run_here(task)
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records] == [
        "going on from step-000000005.safetensors",
        "beginning again",
    ]
    assert results(task.folder) == results(whole)


def without_checksum(path: Path) -> None:
    """Write a checkpoint as earlier versions did."""
    content = path.read_bytes()
    tensors = safetensors.torch.load(content)
    del tensors["checksum"]
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    path.write_bytes(safetensors.torch.save(tensors, header["__metadata__"]))


def test_checkpoints_of_earlier_versions_have_no_checksum_and_are_gone_on_with(
    whole: Path, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = job(here / "er-0", NPZ, OFTEN)
    stopped(task, at=6)
    for path in checkpoints(task.folder):
        without_checksum(path)
    with FolderJournal(
        task.folder, steps=10, tasks=2, checkpoint_seconds=0, tell=lambda *_: None
    ) as notes:
        kept = notes.load()
    assert kept is not None
    assert kept["step"] == 6
    run_here(task)
    assert caplog.records == []
    assert results(task.folder) == results(whole)


# Disks --------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_from_any_write_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before is whole, and the run goes on when there is room."""
    task = job(here, NPZ.replace("10}", "25}"), OFTEN)
    synced: list[int] = []
    stream = run.stream_of(task.config, None)
    monkeypatch.setattr(run, "stream_of", lambda *_: stream)  # reading it again takes longest

    def disk_of(room: int) -> None:
        synced.clear()

        def sync(handle: int) -> None:
            synced.append(handle)
            if len(synced) > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", sync)

    disk_of(room=10**6)
    whole = here / "whole"
    run_here(replace(task, folder=whole))
    writes = len(synced)
    assert writes > 30
    for room in range(writes):
        full, events = replace(task, folder=here / f"er-{room}"), list[Event]()
        disk_of(room)
        attempt(full, events.append)
        assert events[-1].kind == "failed"
        assert re.fullmatch(
            r"OSError: \[Errno 28\] No space left on device(: '.+')?; "
            "where there is room again, --resume goes on",
            events[-1].message,
        )
        assert not [name for name in tree(full.folder) if "/." in f"/{name}"], "no room is wasted"
        if (full.folder / "config.yaml").is_file():
            read_run(full.folder)
        disk_of(room=10**6)
        run_here(full)
        assert results(full.folder) == results(whole), f"full at write {room}"
        left = {*tree(full.folder)} - {*tree(whole)}
        assert not left or room == writes - 1, "the last write says that the run is done"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system end every write of this process at so many bytes, in the middle of it."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@posix
@pytest.mark.parametrize("size", [0, 100, 700, 3000])
def test_a_write_that_fails_half_way(size: int, whole: Path, here: Path) -> None:
    task, events = job(here / "er-0", NPZ, OFTEN), list[Event]()
    with largest_file(size):
        attempt(task, events.append)
    assert re.fullmatch(
        r"OSError: \[Errno 27\] File too large: '.+'; where there is room again, --resume goes on",
        events[-1].message,
    )
    assert checkpoints(task.folder) == []
    assert not [name for name in tree(task.folder) if "/." in f"/{name}"]
    run_here(task)
    assert results(task.folder) == results(whole)


@pytest.fixture
def disk(here: Path) -> Iterator[Callable[[str], None]]:
    """A disk of its own at out/ without room for a file, and how to change that; for root alone."""
    (here / "out").mkdir()

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "disk", here / "out"], check=True)

    try:
        mount("nr_inodes=1")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a disk")
    yield lambda options: mount(f"remount,{options}")
    subprocess.run(["umount", here / "out"], check=True)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a disk")
def test_a_real_disk_that_is_full(
    whole: Path, here: Path, call: Call, disk: Callable[[str], None]
) -> None:
    code, _, said = call()
    assert (code, said) == (2, "syngap: out: cannot be written (No space left on device)\n")
    disk("nr_inodes=100,size=40k")
    code, _, said = call()
    assert (
        "failed: OSError: [Errno 28] No space left on device: 'out/er-0/checkpoint/step-0" in said
    )
    disk("size=10m")
    assert call("--resume")[0] == 0
    assert results(here / "out/er-0") == results(whole)


@contextmanager
def read_only(*folders: Path) -> Iterator[None]:
    """Folders in which nobody can write; root is stopped by nothing less than a file system."""
    root = os.geteuid() == 0

    def change(flag: str, mode: int) -> None:
        for folder in folders:
            if root:
                subprocess.run(["chattr", flag, str(folder)], check=True, capture_output=True)
            else:
                folder.chmod(mode)

    try:
        change("+i", 0o555)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not make a folder read-only")
    try:
        yield
    finally:
        change("-i", 0o755)


@posix
def test_a_folder_that_is_read_only(whole: Path, here: Path, call: Call) -> None:
    (here / "out").mkdir()
    with read_only(here / "out"):
        code, _, said = call()
        assert code == 2
        assert said in (
            "syngap: out: no permission to write in out\n",
            "syngap: out: cannot be written (Operation not permitted)\n",
        )
        assert tree(here / "out") == {}
    assert call()[0] == 0
    assert results(here / "out/er-0") == results(whole)


@posix
def test_a_folder_that_becomes_read_only(whole: Path, here: Path) -> None:
    task, events = job(here / "er-0", NPZ, OFTEN), list[Event]()
    with ExitStack() as locked:

        def say(event: Event) -> None:
            if event.step == 5 and 5 not in [earlier.step for earlier in events]:
                locked.enter_context(read_only(task.folder, task.folder / "checkpoint"))
            events.append(event)

        attempt(task, say)
    assert events[-1].kind == "failed"
    assert events[-1].message.startswith("PermissionError: [Errno ")
    assert events[-1].message.endswith("; where that is allowed again, --resume goes on")
    assert read_run(task.folder).status.step == 4
    run_here(task)
    assert results(task.folder) == results(whole)


# Clocks -------------------------------------------------------------------------------------------


class Jumping(datetime):
    """A calendar that is years off, now this way, now that."""

    years = 0

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Jumping:
        cls.years = -cls.years
        return cls.fromtimestamp(1.8e9, tz) + timedelta(days=365 * cls.years)


def test_a_clock_that_jumps_by_years(
    whole: Path, here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes dates in environment.json and status.json, and nothing else."""
    decades = iter(range(10**6))

    def jumping() -> float:
        return 1.8e9 + (-1) ** next(decades) * 1e9

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * jumping()))
    monkeypatch.setattr(environment, "datetime", Jumping)
    monkeypatch.setattr(Jumping, "years", -20)  # so that the first is in the future
    saved: list[int] = []
    save = FolderJournal.save
    monkeypatch.setattr(
        FolderJournal, "save", lambda self, kept: (saved.append(kept["step"]), save(self, kept))
    )
    seldom = "training.checkpoint_seconds=3600"
    written(here, NPZ, seldom)
    assert call()[0] == 0, "the page too is made of such dates"
    assert saved == [5, 10], "the ends of tasks: no hour has passed"
    found = read_run(here / "out/er-0")
    assert found.status.ended < found.environment.started
    assert 0 < found.status.seconds < 60
    assert results(here / "out/er-0") == results(whole)


def test_dates_of_files_do_not_say_which_checkpoint_is_newer(whole: Path, here: Path) -> None:
    task = job(here / "er-0", NPZ, OFTEN)
    stopped(task, at=6)
    older, newest = checkpoints(task.folder)
    os.utime(older, (4e9, 4e9))
    os.utime(newest, (0, 0))
    steps: list[int] = []
    run_here(task, lambda step, accuracy: steps.append(step))
    assert steps[0] == 7
    assert results(task.folder) == results(whole)


# Two processes ------------------------------------------------------------------------------------

HOLDER = """
import fcntl, os, sys, time
handle = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(handle, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(30)
"""


@contextmanager
def held(folder: Path) -> Iterator[Callable[[], None]]:
    """Another process that is alone in `folder`, and how to end it."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"held\n"
    try:
        yield process.kill
    finally:
        process.kill()
        process.communicate()


@posix
def test_a_second_command_in_a_folder_is_refused(whole: Path, here: Path, call: Call) -> None:
    interrupted(here / "out", at=6)
    before = tree(here / "out")
    with held(here / "out"):
        code, _, said = call("--resume")
        assert (code, said) == (2, "syngap: out: another process is at work there\n")
        assert tree(here / "out") == before
    assert call("--resume")[0] == 0
    assert results(here / "out/er-0") == results(whole)


@posix
def test_a_run_that_a_worker_of_a_killed_command_still_has_is_waited_for(
    whole: Path, here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(here / "out", at=6)
    with held(here / "out/er-0") as end:

        class Ends(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                end()

        logger = logging.getLogger("syngap")
        logger.addHandler(handler := Ends())
        code, _, said = call("--resume")
        logger.removeHandler(handler)
    assert code == 0
    assert said.splitlines()[0] == (
        "out/er-0: another process is at work there; waiting for its end"
    )
    assert results(here / "out/er-0") == results(whole)


# Processes that hang, are killed, or want too much ------------------------------------------------

TROUBLE = '''
import os
import resource
import signal
import threading
from pathlib import Path

import torch

from syngap.bench.methods.er import ER

BYTES = 1 << 40


def hangs():
    threading.Event().wait()


def starves():
    """As in a container that has little memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    torch.ones(128 << 20)


def wants():
    bytearray(BYTES << 10)


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


class Troubled(ER):
    """Something happens at its seventh step, as long as the file `trouble` is there."""

    what = None

    def __init__(self, learner, **options):
        super().__init__(learner, **options)
        self.taken = 0

    def remember(self, batch):
        super().remember(batch)
        self.taken += 1
        if self.taken == 7 and Path(__file__).with_name("trouble").exists():
            type(self).what()


class Hangs(Troubled):
    what = staticmethod(hangs)


class Starves(Troubled):
    what = staticmethod(starves)


class Wants(Troubled):
    what = staticmethod(wants)


class Dies(Troubled):
    what = staticmethod(dies)
'''
TROUBLED = ("hangs", "starves", "wants", "dies")
HUNG_AFTER = 5  # seconds: a worker is forked from one that has all imports, in much less


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another package offers methods that get into trouble while the file exists."""
    theirs = tmp_path / "theirs"
    info = theirs / "trouble-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trouble\nVersion: 1.0\n")
    entries = "".join(f"{name} = trouble_methods:{name.title()}\n" for name in TROUBLED)
    (info / "entry_points.txt").write_text(f"[syngap.methods]\n{entries}")
    (theirs / "trouble_methods.py").write_text(TROUBLE)
    (theirs / "trouble").touch()
    monkeypatch.syspath_prepend(theirs)
    yield theirs / "trouble"
    sys.modules.pop("trouble_methods", None)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")  # imports would count as silence
@pytest.mark.skipif(sys.platform != "linux", reason="limits and signals as on Linux")
def test_runs_that_hang_die_or_want_too_much_memory_leave_the_others_alone(
    trouble: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"lr": 0.3, "buffer": 20, "replay": 10}
    rows = dict.fromkeys((*TROUBLED, "er"), options)
    write_arrays(tmp_path / "data.npz", samples=100)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**tiny(NPZ, OFTEN), "methods": rows}))
    command = ("run", "tiny.yaml", "--out", "out", "--workers", 2, "--hung-after", HUNG_AFTER)
    code, _, said = called(capsys, *command)
    assert code == 1
    failed = dict(re.findall(r"of 5  (\w+)-0 +failed: (.+?)(?:   about .*)?$", said, re.MULTILINE))
    memory = "--resume with fewer --workers goes on; a smaller stream.batch needs less memory"
    assert failed == {
        "hangs": f"it hung: it made no progress for {HUNG_AFTER} s; "
        "--resume goes on, --hung-after gives it longer",
        "starves": failed["starves"],
        "wants": f"MemoryError; {memory}",
        "dies": f"its process died (SIGKILL): if the system is out of memory, {memory}",
    }
    assert re.fullmatch(rf"RuntimeError: .*can't allocate memory.*; {memory}", failed["starves"])
    assert state(tmp_path / "out/er-0") == "done"
    for row in TROUBLED:
        status = read_run(tmp_path / f"out/{row}-0").status
        assert (status.state, status.step, status.error) == ("failed", 6, failed[row])

    trouble.unlink()
    monkeypatch.setattr(engine, "run_local", inline)
    assert called(capsys, *command[:4], "--resume")[0] == 0
    for row in TROUBLED:
        (config,) = repeat_experiment([read_run(tmp_path / f"out/{row}-0")], [row], 1).runs()
        alone = Job(tmp_path / f"whole/{row}-0", config)
        run_here(alone)
        assert results(tmp_path / f"out/{row}-0") == results(alone.folder), row


def test_a_slow_evaluation_reports_part_by_part(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it does not look like a process that hangs."""
    monkeypatch.setattr(loop, "_CHUNK", 4)
    steps: list[int] = []
    run_here(job(here / "er-0", NPZ, OFTEN), lambda step, accuracy: steps.append(step))
    parts = 40 // 4
    assert [steps.count(step) for step in (0, 4, 5, 6, 10)] == [parts, 1, 1 + parts, 1, 1 + parts]


class Silent:
    """A process that starts and never says anything."""

    exitcode = None
    kills = 0

    def __init__(self, target: Any, args: Any, daemon: bool) -> None:
        self.theirs = Connection(os.dup(args[0].fileno()))  # the worker closes the other

    def start(self) -> None: ...

    def kill(self) -> None:
        type(self).kills += 1

    def join(self) -> None: ...


def silent_worker(tmp_path: Path, hung_after: float) -> tuple[engine._Worker, list[Event]]:
    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Silent)
    worker, events = engine._Worker(context, 1, hung_after), list[Event]()
    worker.give([job(tmp_path / "er-0")], events.append)
    return worker, events


def test_what_is_heard_in_between_ends_the_silence(tmp_path: Path) -> None:
    worker, events = silent_worker(tmp_path, hung_after=10)
    assert worker.wait(9, events.append) is None
    worker._process.theirs.send(Event(events[0].job, "step", 3))  # type: ignore[attr-defined]
    assert worker.listen(events.append) is None
    assert worker.wait(9, events.append) is None
    before = Silent.kills
    ended = worker.wait(1, events.append)
    assert ended is events[-1]
    assert Silent.kills == before + 1
    worker.connection.close()


def test_a_limit_of_zero_waits_for_ever(tmp_path: Path) -> None:
    worker, events = silent_worker(tmp_path, hung_after=0)
    assert worker.wait(1e9, events.append) is None
    worker.connection.close()


def test_time_in_which_the_command_itself_was_stopped_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-Z and fg the workers have had no more time to speak than it to listen."""
    hours = iter(range(0, 10**6, 3600))
    answers = iter([[], [], []])
    silences: list[float] = []

    def listening(*_: object) -> list[Any]:
        found = next(answers, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(
        multiprocessing,
        "get_context",
        lambda method: SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Silent),
    )
    monkeypatch.setattr(engine, "wait", listening)
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: float(next(hours))))
    monkeypatch.setattr(
        engine._Worker, "wait", lambda self, seconds, on_event: silences.append(seconds)
    )
    with pytest.raises(KeyboardInterrupt):
        engine._run_pool([job(tmp_path / "er-0")], 1, lambda event: None, lambda ended: (), 10)
    assert silences == 3 * [engine._LOOK_EVERY]


def test_ray_has_its_own_ways_with_machines_that_hang(here: Path, call: Call) -> None:
    code, _, said = call("--engine", "ray", "--hung-after", 60)
    assert code == 2
    assert said.startswith("syngap: --hung-after: is for the processes of this machine")


# The page -----------------------------------------------------------------------------------------


def test_every_fault_of_the_page_has_its_test() -> None:
    root = ROOT
    named = set(re.findall(r"`(test_\w+)`", (root / "docs/faults.md").read_text(encoding="utf-8")))
    known = "\n".join(path.read_text(encoding="utf-8") for path in root.glob("tests/**/test_*.py"))
    assert named
    assert [name for name in named if f"def {name}(" not in known] == []


def test_the_kills_of_the_page_are_those_that_were_counted() -> None:
    root = ROOT
    page = " ".join((root / "docs/faults.md").read_text(encoding="utf-8").split())
    with (root / "results/safety/kills.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    kills, runs, differences = (
        sum(int(row[column]) for row in rows) for column in ("kills", "runs", "differences")
    )
    assert {row["method"] for row in rows} == {*KILLED}
    assert kills >= 500
    assert f"at {kills} random instants" in page
    assert f"All {runs} runs ended" in page
    assert (differences, "0 differences" in page) == (0, True)
