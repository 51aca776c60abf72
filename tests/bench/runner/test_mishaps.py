"""What could go wrong without a word: each was possible once, none is now."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refused import refused
from runfolders import Made, write_experiment
from tiny import job, results, state, tiny, tree, write_arrays
from torch import Tensor, nn

from syngap.bench.config.experiment import Experiment, parse_yaml
from syngap.bench.errors import UserError
from syngap.bench.methods import Learner
from syngap.bench.methods.sgd import SGD
from syngap.bench.reporting.rows import rows
from syngap.bench.runner import local as engine
from syngap.bench.runner.local import run_here
from syngap.bench.runner.plan import IfThere, Plan, make_plan
from syngap.bench.runner.run import Job
from syngap.bench.store.folder_reader import read_runs
from syngap.bench.store.records import alone_in, nobody_in
from syngap.bench.streams import Batch, Split, Stream, Tasks
from syngap.bench.streams.files import ImageFiles


def images(folder: Path, count: int = 4) -> list[Path]:
    paths = [folder / f"{number}.png" for number in range(count)]
    for path in paths:
        Image.fromarray(np.full((8, 8, 3), 7, dtype=np.uint8)).save(path)
    return paths


def test_batches_from_files_come_to_the_device(tmp_path: Path) -> None:
    split = Split(
        ImageFiles(images(tmp_path), (3, 8, 8)), torch.arange(4), torch.tensor([0, 0, 1, 1])
    )
    batch = Stream(Tasks(split, split, classes=4), batch=2).to(torch.device("meta"))[0]
    assert (batch.x.device.type, batch.y.device.type) == ("meta", "meta")


@pytest.mark.parametrize(
    "pixels",
    [np.full((8, 8), 40_000, dtype=np.uint16), np.full((8, 8), 0.5, dtype=np.float32)],
)
def test_pixels_that_would_be_clipped_are_refused(
    pixels: np.ndarray[tuple[int, ...], np.dtype[np.generic]], tmp_path: Path
) -> None:
    path = tmp_path / "deep.tiff"
    Image.fromarray(pixels).save(path)
    with refused("deep.tiff", "8 bits"):
        ImageFiles([path], (3, 8, 8)).take(torch.tensor([0]))


class Holder(SGD):
    """Holds the network's own parameters, as a method may."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self.held: list[Tensor] = list(learner.parameters())
        self.pair = (1, None)


def test_what_a_method_holds_twice_it_still_holds_twice_after_a_resume() -> None:
    def fresh() -> Holder:
        return Holder(Learner(nn.Linear(2, 2), lambda x, generator: x))

    method, resumed = fresh(), fresh()
    method.step(Batch(torch.ones(3, 2), torch.tensor([0, 1, 0])))
    resumed.load_state_dict(method.state_dict())
    for held, parameter in zip(resumed.held, resumed.learner.parameters(), strict=True):
        assert held is parameter
    assert torch.equal(resumed.held[0], method.held[0])
    assert resumed.pair == (1, None)


def interrupted(here: Job, at: int) -> None:
    """Leave the run as a kill after its `at`-th report would."""
    reports = iter(range(at))

    def tell(step: int, accuracy: float | None) -> None:
        if next(reports, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_here(here, tell)


@pytest.fixture
def half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A run that was killed after its first task."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("syngap.bench.store.folder_writer._TELL_EVERY", 0.0)
    write_arrays(tmp_path / "data.npz")
    here = job(
        tmp_path / "er-0", "stream={name: npz, path: data.npz, tasks: 2, batch: 10, epochs: 4}"
    )
    interrupted(here, 60)
    assert list((here.folder / "checkpoint").glob("step-*"))
    return here


def test_a_checkpoint_without_its_configuration_is_not_gone_on_with(
    half_done: Job, tmp_path: Path
) -> None:
    """As a kill in the middle of --fresh could leave it."""
    (half_done.folder / "config.yaml").unlink()
    method = half_done.config.method.with_options({"lr": 1e-4})
    slower = replace(half_done, config=replace(half_done.config, method=method))
    run_here(slower)
    clean = replace(slower, folder=tmp_path / "clean")
    run_here(clean)
    assert results(slower.folder) == results(clean.folder)


def test_other_data_than_the_run_began_with_are_refused(half_done: Job, tmp_path: Path) -> None:
    write_arrays(tmp_path / "data.npz", samples=120)
    with pytest.raises(UserError, match=r"the data, .* are not those that the run began with"):
        run_here(half_done)


def test_a_run_that_another_worker_has_ended_meanwhile_is_left_alone(half_done: Job) -> None:
    run_here(half_done)
    before = results(half_done.folder)
    run_here(half_done)
    assert results(half_done.folder) == before
    assert state(half_done.folder) == "done"


def test_a_run_begun_with_other_options_meanwhile_is_refused(half_done: Job) -> None:
    other = replace(half_done, config=replace(half_done.config, seed=1))
    with pytest.raises(UserError, match=r"seed was 0 there and is 1 now"):
        run_here(other)


def test_lost_lines_of_the_record_are_learned_again(half_done: Job, tmp_path: Path) -> None:
    (half_done.folder / "metrics.jsonl").write_bytes(b"")
    run_here(half_done)
    clean = replace(half_done, folder=tmp_path / "clean")
    run_here(clean)
    assert results(half_done.folder) == results(clean.folder)


def test_intransigence_never_mixes_references(tmp_path: Path) -> None:
    made = {
        "sgd": Made("sgd"),
        "joint": Made("joint", learns=90.0),
        "joint_each": Made("joint", learns=50.0),
    }
    directory = write_experiment(tmp_path / "runs", made, seeds=(0, 1))
    shutil.rmtree(directory / "joint-1")
    (row,) = [row for row in rows(read_runs(directory)) if row.name == "sgd"]
    assert sorted(row.values["INT"]) == [0]


def test_an_anchor_may_be_used_where_it_is_nested_deeper() -> None:
    text = "a: {b: &b {x: 1}, c: {<<: *b, x: 2}}\nd: {<<: *b, x: 3}"
    assert parse_yaml(text, "mine.yaml")["d"] == {"x": 3}


def test_a_plan_of_a_billion_passes_is_refused() -> None:
    from syngap.bench.streams import load

    with refused("stream.epochs"):
        load("digits", epochs=1_000_000_000)


def test_an_array_file_that_claims_the_whole_memory_is_refused(tmp_path: Path) -> None:
    import zipfile

    from syngap.bench.streams.arrays import npz

    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 42,)}
    )
    path = tmp_path / "large.npz"
    with zipfile.ZipFile(path, "w") as file:
        for key in ("x_train", "y_train", "x_test", "y_test"):
            file.writestr(f"{key}.npy", header.getvalue())
    with refused("large.npz"):
        npz(0, None, path=str(path), tasks=2)


def test_a_configuration_without_its_row_is_named(tmp_path: Path) -> None:
    directory = write_experiment(tmp_path / "runs", {"sgd": Made("sgd")}, seeds=(0,))
    (directory / "sgd-0" / "config.yaml").write_text(json.dumps({"seed": 0}))
    with refused("config.yaml", "row"):
        read_runs(directory)


@pytest.mark.usefixtures("quick_workers")
def test_the_process_of_a_failed_run_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while its kernels run, it may take the other runs on a shared GPU with it."""
    codes: list[int | None] = []
    stop = engine._Worker.stop

    def note_and_stop(worker: engine._Worker) -> None:
        codes.append(worker._process.exitcode)
        stop(worker)

    monkeypatch.setattr(engine._Worker, "stop", note_and_stop)
    events: list[engine.Event] = []
    engine.run_local([job(tmp_path / "er-0", "methods.er.lr=1e30")], 1, events.append)
    assert events[-1].kind == "failed"
    assert codes[0] == 0


# Two at a time ------------------------------------------------------------------------------------

needs_locks = pytest.mark.skipif(os.name != "posix", reason="the lock needs fcntl")


def plan_of(out: Path, *settings: str, if_there: IfThere = "refuse") -> Plan:
    return make_plan(Experiment.from_mapping(tiny(*settings)), out, if_there=if_there)


@pytest.mark.parametrize("if_there", ["refuse", "resume", "replace"])
@pytest.mark.parametrize("name", ["tiny", "other"])
def test_of_two_that_looked_at_the_same_moment_one_begins(
    if_there: IfThere, name: str, tmp_path: Path
) -> None:
    """Whether the first has ended by then or not: the second knows nothing of its runs."""
    out = tmp_path / "out"
    first = plan_of(out, f"name={name}", if_there=if_there)
    second = plan_of(out, "seeds=[1]", if_there=if_there)
    with first.begin():
        before = tree(out)
        if os.name == "posix":
            with refused("out: another process is at work there"), second.begin():
                pass
    with refused("out: another process has begun runs there", "again"), second.begin():
        pass
    assert tree(out) == before
    with plan_of(out, f"name={name}", if_there="resume").begin():
        pass


@pytest.mark.parametrize("if_there", ["refuse", "resume", "replace"])
@pytest.mark.parametrize("name", ["new", "existing"])
def test_of_two_equal_commands_the_second_leaves_the_runs_of_the_first(
    if_there: IfThere, name: str, tmp_path: Path
) -> None:
    """Both write the same experiment.yaml."""
    out = tmp_path / "out"
    if name == "existing":
        with plan_of(out).begin():
            pass
        if if_there == "refuse":
            with refused("out: holds runs already"):
                plan_of(out)
            return
    first, second = (plan_of(out, if_there=if_there) for _ in range(2))
    with first.begin():
        run_here(job(out / "er-0"))
    before = tree(out)
    with refused("out: another process has begun runs there", "again"), second.begin():
        pass
    assert tree(out) == before
    (run,) = read_runs(out)
    assert run.done


@needs_locks
@pytest.mark.parametrize("fails", ["make_folder", "clean", "write_yaml"])
def test_who_fails_to_begin_leaves_no_lock(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    plan = plan_of(tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(f"syngap.bench.runner.plan.{fails}", fail)
        with refused("out: cannot be written"), plan.begin():
            pass
    with plan.begin():
        with refused("another process is at work there"), plan.begin():
            pass
        assert not nobody_in(plan.out)
    assert nobody_in(plan.out)


def until_waiting(
    thread: threading.Thread, caplog: pytest.LogCaptureFixture, times: int = 1
) -> None:
    while caplog.text.count("er-0: another process is at work there; waiting for its end") < times:
        assert thread.is_alive()
        time.sleep(0.01)


@needs_locks
def test_a_worker_of_a_killed_command_is_waited_for_before_its_run_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    with plan_of(out).begin():
        run_here(job(out / "er-0"))
    plan, order = plan_of(out, if_there="replace"), list[str]()

    def begin() -> None:
        with plan.begin():
            order.append("removed")

    with alone_in(out / "er-0"):
        thread = threading.Thread(target=begin)
        thread.start()
        until_waiting(thread, caplog)
        assert (out / "er-0" / "config.yaml").is_file()
        order.append("the worker ended")
    thread.join()
    assert order == ["the worker ended", "removed"]
    assert not (out / "er-0").exists()


@needs_locks
def test_who_waits_for_a_folder_that_is_made_anew_waits_for_the_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The lock of one that was removed keeps nobody out."""
    folder, inside = tmp_path / "er-0", list[str]()
    folder.mkdir()

    def wait() -> None:
        with alone_in(folder, wait=True):
            inside.append("second")

    thread = threading.Thread(target=wait)
    with ExitStack() as first, ExitStack() as anew:
        first.enter_context(alone_in(folder))
        thread.start()
        for times in (1, 2):
            until_waiting(thread, caplog, times)
            if times == 1:
                folder.rmdir()
                folder.mkdir()
                anew.enter_context(alone_in(folder))
                first.close()
        assert inside == []
    thread.join()
    assert inside == ["second"]


@needs_locks
def test_who_waits_for_a_folder_that_is_removed_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, found = tmp_path / "er-0", list[Exception]()
    folder.mkdir()

    def wait() -> None:
        try:
            with alone_in(folder, wait=True):
                pass
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    with alone_in(folder):
        thread.start()
        until_waiting(thread, caplog)
        folder.rmdir()
    thread.join()
    with refused("er-0: was removed meanwhile", "the same command again"):
        raise found[0]


@needs_locks
def test_what_is_missing_within_a_folder_is_no_removed_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), alone_in(tmp_path):
        (tmp_path / "missing").stat()


@needs_locks
def test_a_process_that_was_forked_meanwhile_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a second handle of what the first has opened."""
    opened, copies = os.open, list[int]()

    def open_twice(*arguments: Any) -> int:
        handle = opened(*arguments)
        copies.append(os.dup(handle))
        return handle

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_twice)
        with alone_in(tmp_path):
            pass
    assert nobody_in(tmp_path)
    for handle in copies:
        os.close(handle)
