"""Runs on a real Ray cluster: those of the local engine, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import called, job, results, state, tiny, tree, write_arrays, written

from syngap.bench.config.experiment import Experiment, Training
from syngap.bench.errors import UserError
from syngap.bench.runner import cluster as engine
from syngap.bench.runner import machines
from syngap.bench.runner.cluster import Cluster, connect
from syngap.bench.runner.local import Event, run_here
from syngap.bench.runner.plan import make_plan
from syngap.bench.runner.run import Job
from syngap.bench.storage import strays
from syngap.bench.store.records import nobody_in

pytest.importorskip("ray")
from checkout import ROOT
from ray import cluster_utils
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

pytestmark = [
    pytest.mark.xdist_group("ray"),  # one cluster for all
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for workers in /proc"),
    # Older versions of Ray leave the files of their own logs open.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
    ),
]

LONG = (
    "stream={name: npz, path: data.npz, tasks: 2, batch: 1, epochs: 40}",
    "training.checkpoint_seconds=0.3",
)
SHORT = ("stream={name: npz, path: data.npz, tasks: 2, batch: 50}",)


NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def started() -> Iterator[cluster_utils.Cluster]:
    """A cluster of two workers."""
    head = {**NODE, "include_dashboard": False}
    machines = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    yield machines
    machines.shutdown()


@pytest.fixture(scope="module")
def address(started: cluster_utils.Cluster) -> str:
    """Where it listens."""
    return str(started.address)


@pytest.fixture(scope="module")
def cluster(address: str) -> Iterator[Cluster]:
    with connect(address) as found:
        yield found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with data that are named by a relative path."""
    monkeypatch.chdir(tmp_path)
    write_arrays(tmp_path / "data.npz")
    return tmp_path


def worker(folder: Path) -> int | None:
    """The process that is alone in a run's folder, which it keeps open."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(path.readlink() == folder for path in process.glob("fd/*")):
                return int(process.name)
    return None


def saved(folder: Path) -> int:
    """The step of the newest checkpoint."""
    steps = [int(path.stem[len("step-") :]) for path in folder.glob("checkpoint/step-*")]
    return max(steps, default=0)


def same_as_here(task: Job) -> bool:
    """Whether a finished run is, byte for byte, what this process makes of the same job."""
    alone = replace(task, folder=task.folder.with_name(f"{task.name}-here"))
    run_here(alone)
    return results(task.folder) == results(alone.folder)


def kinds(events: list[Event], task: Job) -> list[str]:
    return [event.kind for event in events if event.job == task and event.kind != "step"]


# Nothing is lost ----------------------------------------------------------------------------------


def test_a_run_whose_worker_is_killed_goes_on_and_ends_as_locally(
    here: Path, cluster: Cluster
) -> None:
    jobs = [job(Path(f"out/{row}-0"), *LONG, row=row) for row in ("er", "sgd")]
    events: list[Event] = []
    kept_then: list[int] = []

    def kill(event: Event) -> None:
        events.append(event)
        if not kept_then and event.kind == "step" and saved(jobs[0].folder):
            found = worker(jobs[0].folder.absolute())
            assert found not in (None, os.getpid())
            os.kill(found or 0, signal.SIGKILL)
            kept_then.append(saved(jobs[0].folder))
            events.clear()

    jobs[0].folder.parent.mkdir()
    cluster.run(jobs, None, kill)
    assert kept_then, "the worker was killed in the middle"
    assert kinds(events, jobs[0])[-1:] == ["done"]
    assert kinds(events, jobs[1])[-1:] == ["done"]
    steps = [event.step for event in events if event.job == jobs[0] and event.step]
    assert steps, "somebody went on"
    assert min(steps) >= kept_then[0], "from the checkpoint, not from the beginning"
    assert [same_as_here(task) for task in jobs] == [True, True]


def test_a_run_that_kills_every_worker_fails_and_leaves_the_others_alone(
    here: Path, cluster: Cluster
) -> None:
    never = (*LONG, "training.checkpoint_seconds=3600", "stream.epochs=1000")
    jobs = [job(Path("out/er-0"), *never), job(Path("out/sgd-0"), *SHORT, row="sgd")]
    events: list[Event] = []
    killed: list[int] = []

    def kill(event: Event) -> None:
        events.append(event)
        if event.job == jobs[0] and event.kind == "step":
            found = worker(jobs[0].folder.absolute())
            if found and found not in killed:
                killed.append(found)
                os.kill(found, signal.SIGKILL)

    jobs[0].folder.parent.mkdir()
    cluster.run(jobs, None, kill)
    assert len(killed) == engine._ENOUGH
    assert [kinds(events, task) for task in jobs] == [["begun", "failed"], ["begun", "done"]]
    (message,) = [event.message for event in events if event.kind == "failed"]
    assert message.startswith(f"its worker died {engine._ENOUGH} times in a row at step 0")
    assert state(jobs[0].folder) == "failed"
    assert message in (jobs[0].folder / "error.txt").read_text()


def test_a_run_that_gets_further_may_lose_any_number_of_workers() -> None:
    deaths = engine._Deaths()
    at = (0, 0, 10, 10, 20, 30, 30, 30)
    assert [deaths.in_a_row("er-0", step) for step in at] == [1, 2, 1, 2, 1, 1, 2, 3]
    assert deaths.in_a_row("er-1", 30) == 1


def test_a_failure_is_told_as_locally(here: Path, cluster: Cluster) -> None:
    broken, sound = (job(Path(f"out/er-{seed}"), *SHORT, seed=seed) for seed in (0, 1))
    stream = broken.config.stream.with_options({"path": "missing.npz"})
    config = replace(broken.config, stream=stream)
    events: list[Event] = []
    Path("out").mkdir()
    cluster.run([replace(broken, config=config), sound], None, events.append)
    ended = {event.job.name: event for event in events if event.kind in ("done", "failed")}
    assert ended["er-1"].kind == "done"
    assert ended["er-0"].kind == "failed"
    assert ended["er-0"].message.startswith("UserError: stream.path: there is no ")
    assert "Traceback" in (broken.folder / "error.txt").read_text()


def test_runs_come_in_order_and_are_followed(here: Path, cluster: Cluster) -> None:
    jobs = [job(Path(f"out/er-{seed}"), *SHORT, seed=seed) for seed in (0, 1, 2)]
    events: list[Event] = []
    Path("out").mkdir()
    after = {"er-0": jobs[2:]}
    cluster.run(jobs[:2], 1, events.append, lambda ended: after.get(ended.job.name, ()))
    told = [(event.job.name, event.kind) for event in events if event.kind != "step"]
    assert told == [(name, kind) for name in ("er-0", "er-1", "er-2") for kind in ("begun", "done")]
    assert [path.name for path in Path("out").iterdir() if path.name.startswith(".")] == []


def test_a_worker_need_not_share_the_working_folder(here: Path) -> None:
    sent = engine._from_anywhere(Job(Path("out/er-0"), {}, Path("data")))
    assert (sent.folder, sent.data) == (here / "out/er-0", here / "data")


# The driver ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_ends_takes_its_workers_along_and_can_be_started_again(
    number: signal.Signals, here: Path, address: str, cluster: Cluster
) -> None:
    written(here, *LONG)
    command = ["run", "tiny.yaml", "--methods", "er", "--out", "out", "--resume"]
    command += ["--engine", "ray", "--address", address]
    folder = here / "out/er-0"

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "syngap", *command],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    first = start()
    until(lambda: saved(folder) and worker(folder))
    first.send_signal(number)
    _, said = first.communicate(timeout=60)
    if number == signal.SIGINT:
        assert first.returncode == 130
        assert said.splitlines()[-1] == "Stopped. The same command goes on, in out."
    assert state(folder) == "running"
    second = start()  # at once: it waits for what the first has left
    _, said = second.communicate(timeout=120)
    assert second.returncode == 0, said
    assert nobody_in(folder)
    assert same_as_here(job(folder, *LONG))


def test_whatever_interrupts_the_caller_ends_the_workers(here: Path, cluster: Cluster) -> None:
    tasks = [job(Path(f"out/er-{seed}"), *LONG, "stream.epochs=1000", seed=seed) for seed in (0, 1)]

    def interrupt(event: Event) -> None:
        if event.step:
            raise KeyboardInterrupt

    Path("out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        cluster.run(tasks, None, interrupt)
    until(lambda: all(nobody_in(task.folder) for task in tasks if task.folder.exists()), 20)
    assert not list(Path("out").glob(".*"))
    begun = [task.folder for task in tasks if (task.folder / "status.json").is_file()]
    assert {state(folder) for folder in begun} == {"running"}


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("option", ["--resume", "--fresh"])
def test_a_second_command_is_refused_before_it_changes_anything(
    option: str,
    here: Path,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where no lock of a folder reaches the other machine."""
    monkeypatch.setattr("syngap.bench.runner.plan.alone_in", lambda *_, **__: nullcontext())
    monkeypatch.setattr(engine, "connect", lambda *_: nullcontext(Cluster(cluster._ray)))
    monkeypatch.setattr(engine, "_PATIENCE", 1.0)
    command = ["run", written(here, *SHORT), "--out", "out", "--engine", "ray"]
    assert called(capsys, *command, "--methods", "er")[0] == 0
    (here / "out/.experiment.yaml.1").touch()  # the first is about to write it
    kept = tree(here / "out")
    with cluster.alone(here / "out"):
        code, _, said = called(capsys, *command, option)
    assert code == 2
    assert said.splitlines()[-1].endswith("out: another process is at work there")
    assert tree(here / "out") == kept
    assert called(capsys, *command, option)[0] == 0, "the name is free again"


def test_no_command_takes_the_mark_of_a_driver_for_a_stray(here: Path, cluster: Cluster) -> None:
    out, seen = here / "out", list[list[str]]()
    out.mkdir()
    (out / ".cluster-0").touch()  # of a driver that was killed

    def look(event: Event) -> None:
        assert strays(out) == []
        seen.append([path.name for path in out.glob(".*")])

    cluster.run([job(out / "er-0", *SHORT)], None, look)
    assert seen[0] == [f".cluster-{os.getpid()}"]
    assert not list(out.glob(".*"))


# Refused ------------------------------------------------------------------------------------------


def test_machines_that_do_not_share_the_folder_are_refused(
    here: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "write", lambda *_, **__: None)  # what another disk would hold
    Path("out").mkdir()
    with pytest.raises(UserError, match=r"does not see .*/out; --out must be a folder that all"):
        cluster.run([job(Path("out/er-0"))], None, lambda event: None)
    monkeypatch.setattr(engine.Machines, "check", lambda _: None)  # as if all of them came later
    with pytest.raises(UserError, match=r"no machine is left that can do a run; --resume goes on$"):
        cluster.run([job(Path("out/er-0"))], None, lambda event: None)
    assert not Path("out/er-0").exists()


@pytest.mark.parametrize(
    ("made_so", "complaint"),
    [
        ("import sys; sys.modules['syngap'] = None", "failed to import"),
        ("import syngap; syngap.__version__ = '0.0'", "has syngap 0.0, not "),
        (
            "import pathlib; is_file = pathlib.Path.is_file\n"
            "pathlib.Path.is_file = lambda path: '.cluster' not in path.name and is_file(path)",
            "does not see ",
        ),
    ],
    ids=["without syngap", "another version", "another disk"],
)
def test_a_machine_that_comes_later_and_can_do_no_run_is_left_out(
    made_so: str,
    complaint: str,
    here: Path,
    started: cluster_utils.Cluster,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine.Machines, "check", lambda _: None)
    (here / "unfit").mkdir()
    (here / "unfit/sitecustomize.py").write_text(made_so)
    paths = os.pathsep.join([str(here / "unfit"), *filter(None, sys.path)])
    joined = started.add_node(**NODE, env_vars={"PYTHONPATH": paths})
    jobs = [job(Path(f"out/er-{seed}"), *SHORT, seed=seed) for seed in range(4)]
    events: list[Event] = []
    said: list[str] = []

    def busy() -> None:
        (here / "busy").touch()
        while not (here / "free").exists():
            time.sleep(0.05)

    def say(line: str) -> None:
        said.append(line)
        (here / "free").touch()

    Path("out").mkdir()
    on_the_first = NodeAffinitySchedulingStrategy(started.head_node.node_id, soft=False)
    first = cluster._ray.remote(num_cpus=2, scheduling_strategy=on_the_first)(busy).remote()
    try:
        until((here / "busy").exists, 20)  # so all runs are given to the other
        Cluster(cluster._ray, say).run(jobs, None, events.append)
    finally:
        (here / "free").touch()
        cluster._ray.get(first)
        started.remove_node(joined)
    assert [kinds(events, task) for task in jobs] == [["begun", "done"]] * len(jobs)
    (line,) = said
    assert complaint in line
    assert line.endswith(". It gets no more runs")


def test_the_first_answer_of_a_machine_has_its_own_time(
    here: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    Path("out").mkdir()
    monkeypatch.setattr(engine, "_PATIENCE", 0.0)
    cluster.run([job(Path("out/er-0"), *SHORT)], None, events.append)
    assert events[-1].kind == "done"
    monkeypatch.setattr(machines, "_FIRST_ANSWER", 0.0)
    with pytest.raises(UserError, match=r": did not answer in 0 seconds; a worker was to start"):
        cluster.run([job(Path("out/er-1"), *SHORT, seed=1)], None, events.append)


def test_a_cluster_without_room_for_a_run_is_refused(here: Path, cluster: Cluster) -> None:
    Path("out").mkdir()
    with pytest.raises(UserError, match=r"no machine of the cluster has the 64 CPU of a run$"):
        cluster.run([job(Path("out/er-0"), "training.threads=64")], None, lambda event: None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "ray", "--address", "127.0.0.1:1"], "nobody answers there (Connection refus"),
        (["--engine", "ray", "--address", "ray://127.0.0.1:1"], "nobody answers there"),
        (["--engine", "ray", "--address", "no.such.host.invalid:1"], "nobody answers there"),
        (["--engine", "ray", "--address", "nonsense"], 'got "nonsense", expected auto'),
        (["--engine", "ray"], "--address 127.0.0.1:1: nobody answers there"),
        (["--address", "127.0.0.1:1"], "--address: is that of a Ray cluster; give --engine ray"),
        (["--engine", "slurm"], "slurm"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_cluster_that_cannot_be_reached_is_refused_soon(
    arguments: list[str],
    words: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    began = time.monotonic()
    code, _, said = called(capsys, "run", written(here), *arguments)
    assert (code, len(said.splitlines())) == (2, 1)
    assert words in said
    assert time.monotonic() - began < 20
    assert not Path("runs").exists()


def test_without_ray_there_is_a_way_to_get_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, said = called(capsys, "run", written(here), "--engine", "ray")
    assert code == 2
    assert said.endswith("pip install 'syngap[ray]' brings it\n")


# Devices ------------------------------------------------------------------------------------------


def with_gpus(count: int) -> Cluster:
    ray: Any = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0, "GPU": float(count)})
    return Cluster(ray)


@pytest.mark.parametrize(
    ("gpus", "workers", "share"), [(2, None, 1), (2, 2, 1), (2, 3, 0.5), (2, 14, 0.1428)]
)
def test_gpus_are_shared_by_as_many_runs_as_were_asked_for(
    gpus: int, workers: int | None, share: float
) -> None:
    needs = with_gpus(gpus)._needs(Training(device="cuda"), workers)
    assert needs == {"CPU": 1, "GPU": share}
    assert machines.fitting_runs({"CPU": 8, "GPU": 1}, needs) == round(1 / share)


def test_the_device_is_that_of_the_cluster_not_of_the_driver(tmp_path: Path) -> None:
    assert [with_gpus(2).device(name) for name in ("auto", "cpu", "cuda")] == [
        "cuda",
        "cpu",
        "cuda",
    ]
    assert with_gpus(0).device("auto") == "cpu"
    experiment = Experiment.from_mapping(tiny("training.device=auto"))
    for device in ("cpu", "cuda"):
        plan = make_plan(experiment, tmp_path / "out", device=device)
        assert {task.config.training.device for task in plan.jobs} == {device}


# Slurm --------------------------------------------------------------------------------------------


def test_the_script_for_slurm_does_every_run(here: Path) -> None:
    """With the executor of submitit that starts processes here, in place of Slurm's."""
    pytest.importorskip("submitit")
    page = ROOT / "docs" / "clusters.md"
    _, _, script = page.read_text(encoding="utf-8").partition("```python\n")
    script, _, _ = script.partition('if __name__ == "__main__":')
    asked = f'main("{written(here, *SHORT)}", Path("out").absolute(), "local")'
    (here / "jobs.py").write_text(f"{script}\n{asked}\n")
    for expected in (2, 0):  # started again, it has nothing to do
        done = subprocess.run(
            [sys.executable, "jobs.py"], capture_output=True, text=True, check=True, timeout=120
        )
        assert done.stdout.count(" done\n") == expected, done.stdout
    for row in ("er", "sgd"):
        assert same_as_here(job(here / f"out/{row}-0", *SHORT, row=row))
