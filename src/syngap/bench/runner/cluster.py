"""The engine of many machines: the same runs, as tasks of a Ray cluster.

A run is its folder there too, on a file system that all machines share: whoever goes on with a run
whose worker died finds what there is to go on from. Ray takes the jobs to the workers and brings
back how far they are, and nothing else.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import syngap
from syngap.bench.config.finetuning import FinetuningTraining
from syngap.bench.config.run_config import Training
from syngap.bench.errors import UserError
from syngap.bench.registry import import_extra
from syngap.bench.runner.local import Event, attempt, note_failure
from syngap.bench.runner.machines import (
    Machines,
    Request,
    complaint_of,
    first_line,
    fitting_runs,
    reason_of,
)
from syngap.bench.runner.plan import AnyJob
from syngap.bench.storage import remove, write
from syngap.bench.store.folder_reader import read_status
from syngap.bench.streams.places import VARIABLE

__all__ = ["Cluster", "connect"]

_ENOUGH = 3  # workers that died in a row at the same step: the run itself is to blame
_LOOK_EVERY = 0.5  # seconds between two looks at what runs tell
_News: TypeAlias = dict[str, tuple[int, float | None, list[str]]]  # step, accuracy, what was said
_PATIENCE = 30.0  # seconds for an answer of the cluster
_PARTS = 10_000  # Ray divides a GPU no further
_NAMESPACE = "syngap"


@contextmanager
def connect(
    address: str = "auto", say: Callable[[str], None] = lambda line: None
) -> Iterator[Cluster]:
    """Give the Ray cluster at `address`; within, this process is one of its drivers.

    Args:
        address: HOST:PORT of the head, ray://HOST:PORT from outside of the cluster, or "auto": what
            RAY_ADDRESS says, else the cluster that this machine is part of.
        say: is called with a machine that is left out.
    """
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "1")  # of 20, half a minute each
    ray = import_extra("ray", "ray")
    _check_listening(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
    try:
        ray.init(
            address=address,
            namespace=_NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        hint = "; `ray start --head` begins a cluster" if address == "auto" else ""
        raise UserError(f"--address {address}: {first_line(error)}{hint}") from error
    try:
        yield Cluster(ray, say)
    except ray.exceptions.RayError as error:  # no run's: those are its events
        raise UserError(f"--engine ray: {first_line(error)}; --resume goes on") from error
    finally:
        ray.shutdown()


def _check_listening(address: str) -> None:
    """Refuse an address where nobody listens: Ray would try for many minutes."""
    if address == "auto":
        return
    found = re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d+)", address)
    if not found:
        raise UserError(f'--address: got "{address}", expected auto, HOST:PORT or ray://HOST:PORT')
    try:
        socket.create_connection((found[1], int(found[2])), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--address {address}: nobody answers there ({reason})") from error


class Cluster:
    """A Ray cluster that this process is connected to.

    Args:
        ray: the package.
        say: is called with a machine that is left out.
    """

    def __init__(self, ray: Any, say: Callable[[str], None] = lambda line: None) -> None:
        self._ray, self._say = ray, say
        self._boards: dict[Path, Any] = {}

    def device(self, name: str) -> str:
        """Return what "auto", "cpu" or "cuda" stands for on the cluster's machines."""
        if name != "auto":
            return name
        return "cuda" if self._ray.cluster_resources().get("GPU") else "cpu"

    def run(
        self,
        jobs: Sequence[AnyJob],
        workers: int | None,
        on_event: Callable[[Event], None],
        following: Callable[[Event], Sequence[AnyJob]] = lambda ended: (),
    ) -> None:
        """Do `jobs` on the cluster, and those that come of them.

        A run that raises is reported and leaves the others alone. One whose worker dies, or its
        machine, goes on from its last checkpoint in another. A machine that comes later and can do
        no run is left out. Whatever interrupts the caller ends the workers at once: their folders
        are whole at any instant.

        Args:
            jobs: to begin with; their folders lie in one folder.
            workers: how many at a time, None for as many as fit. GPUs are shared where these are
                more than there are GPUs.
            on_event: is called with what happens.
            following: from the end of a run to the runs it is followed by, after those waiting.
        """
        if not jobs:
            return
        out = jobs[0].folder.parent.absolute()
        mark = out / f".cluster-{os.getpid()}"  # no stray: it is there while we are
        needs = self._needs(jobs[0].config.training, workers)
        data = os.environ.get(VARIABLE, "")
        request = Request(
            mark=mark,
            version=syngap.__version__,
            needs=needs,
            workers=workers,
            command=tuple(sys.argv),
            here=Path.cwd(),
            data=data and str(Path(data).expanduser().absolute()),
        )
        with self.alone(out) as board:
            for earlier in out.glob(".cluster-*"):  # of a driver that was killed
                remove(earlier, within=out)
            write(mark, b"", within=out)
            try:
                machines = Machines(self._ray, request, self._say)
                machines.check()
                self._run(jobs, request, machines, board, on_event, following)
            finally:
                remove(mark, within=out)

    def _run(
        self,
        jobs: Sequence[AnyJob],
        request: Request,
        machines: Machines,
        board: Any,
        on_event: Callable[[Event], None],
        following: Callable[[Event], Sequence[AnyJob]],
    ) -> None:
        task = self._ray.remote(
            num_cpus=request.needs["CPU"], num_gpus=request.needs.get("GPU", 0), max_retries=0
        )(_work)
        waiting, flying, begun = list(reversed(jobs)), dict[Any, tuple[AnyJob, int]](), set[str]()
        deaths = _Deaths()

        def tell(event: Event) -> None:
            if event.job.name not in begun:
                begun.add(event.job.name)
                on_event(Event(event.job, "begun"))
            on_event(event)

        try:
            while waiting or flying:
                while waiting and len(flying) < (request.workers or math.inf):
                    job = waiting.pop()
                    named = task.options(
                        name=f"syngap {job.name}", scheduling_strategy=machines.strategy()
                    )
                    flying[named.remote(_from_anywhere(job), request, board)] = (
                        job,
                        len(machines.left_out),
                    )
                ready, _ = self._ray.wait(list(flying), timeout=_LOOK_EVERY)
                for reference in ready:
                    job, known = flying.pop(reference)
                    ended = self._outcome(reference, job, deaths, machines, known)
                    if ended is None:
                        waiting.append(job)
                        continue
                    tell(ended)
                    waiting[:0] = reversed(following(ended))
                news = self._news(board)
                for job in [job for job, _ in flying.values() if job.name in news]:
                    step, accuracy, said = news[job.name]
                    for message in said:
                        tell(Event(job, "step", step, accuracy, message))
                    tell(Event(job, "step", step, accuracy))
        finally:
            for reference in flying:
                self._ray.cancel(reference, force=True)

    def _outcome(
        self, reference: Any, job: AnyJob, deaths: _Deaths, machines: Machines, known: int
    ) -> Event | None:
        """Return how a run ended; None where it did not, and another worker is to go on with it."""
        try:
            ended: Event = self._ray.get(reference)
            return replace(ended, job=job)
        except self._ray.exceptions.RayError as error:
            task_raised = isinstance(error, self._ray.exceptions.RayTaskError)  # runs never do
            if task_raised and (len(machines.left_out) > known or machines.leave_out()):
                return None
            step = read_status(job.folder).step or 0
            if deaths.in_a_row(job.name, step) < _ENOUGH:
                return None
            said = reason_of(error)
            message = f"its worker died {_ENOUGH} times in a row at step {step} ({said})"
        note_failure(job, message, message)
        return Event(job, "failed", message=message)

    def _news(self, board: Any) -> _News:
        """Return what runs have reported since the last time, by name."""
        with suppress(self._ray.exceptions.RayError):  # the board's machine died; it starts again
            news: _News = self._ray.get(board.news.remote(), timeout=_PATIENCE)
            return news
        return {}

    @contextmanager
    def alone(self, out: Path) -> Iterator[Any]:
        """Give the board of `out`. Its name is taken: no other driver of the cluster gets in.

        Locks of folders are not known to other machines on every file system, so this is to be had
        before anything there is changed. What a driver that was killed has left goes with its
        board, so the next one waits for the name. `run` is alone by itself, or within this.
        """
        out = out.absolute()
        if out in self._boards:
            yield self._boards[out]
            return
        options = {"name": f"runs in {out}", "namespace": _NAMESPACE}
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                board = self._ray.remote(num_cpus=0, max_restarts=-1)(_Board)
                board = board.options(**options).remote()
                break
            except ValueError:  # the name is taken
                if time.monotonic() > deadline:
                    raise UserError(f"{out}: another process is at work there") from None
                time.sleep(_LOOK_EVERY)
        self._boards[out] = board
        try:
            yield board
        finally:
            del self._boards[out]
            self._ray.kill(board)

    def _needs(
        self, training: Training | FinetuningTraining, workers: int | None
    ) -> dict[str, float]:
        """Return what a run takes: its threads, and a GPU or the part of one that is left to it."""
        needs = {"CPU": float(training.threads)}
        if training.device == "cuda":
            gpus = self._ray.cluster_resources().get("GPU", 0)
            beside = math.ceil(workers / gpus) if workers and gpus else 1
            needs["GPU"] = math.floor(_PARTS / beside) / _PARTS  # rounded up, the last would wait
        return needs


class _Deaths:
    """Counts the workers that a run has lost since it last got further."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}

    def in_a_row(self, name: str, step: int) -> int:
        """Note that a worker died when the last checkpoint was that of `step`; return how many."""
        before, count = self._counts.get(name, (-1, 0))
        self._counts[name] = step, count + 1 if step <= before else 1
        return self._counts[name][1]


class _Board:
    """How far runs are: workers write here, the driver reads. An actor of the cluster."""

    def __init__(self) -> None:
        self._news: _News = {}

    def tell(self, name: str, step: int, accuracy: float | None, message: str = "") -> None:
        _, _, said = self._news.get(name, (0, None, []))
        self._news[name] = step, accuracy, [*said, message] if message else said

    def news(self) -> _News:
        news, self._news = self._news, {}
        return news


def _work(job: AnyJob, request: Request, board: Any) -> Event:
    """Do one run in a worker of the cluster and return how it ended."""
    if complaint := complaint_of(request.mark, request.version):  # of a machine that came later
        raise UserError(complaint)
    sys.argv = list(request.command)
    with suppress(OSError):  # only paths in a configuration may depend on it
        os.chdir(request.here)
    if request.data:
        os.environ[VARIABLE] = request.data
    board.tell.remote(job.name, 0, None)
    ended: list[Event] = []

    def say(event: Event) -> None:
        if event.kind == "step":
            board.tell.remote(job.name, event.step, event.accuracy, event.message)
        else:
            ended.append(event)

    attempt(job, say, _at_a_time(request))
    return ended[0]


def _at_a_time(request: Request) -> int:
    """Return how many runs this machine may do at a time."""
    ray = import_extra("ray", "ray")
    here = ray.get_runtime_context().get_node_id()
    fits = [fitting_runs(n["Resources"], request.needs) for n in ray.nodes() if n["NodeID"] == here]
    return max(1, min([*fits, *([request.workers] if request.workers else [])]))


def _from_anywhere(job: AnyJob) -> AnyJob:
    data = job.data and job.data.expanduser().absolute()
    return replace(job, folder=job.folder.absolute(), data=data)
