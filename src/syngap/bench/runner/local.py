"""The local engine: runs in worker processes, each failure its own."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from syngap.bench.runner.finetuning_run import FinetuningJob, execute_finetuning
from syngap.bench.runner.mps import mps_daemon, runs_per_gpu
from syngap.bench.runner.plan import AnyJob, is_done
from syngap.bench.runner.run import execute
from syngap.bench.storage import make_folder
from syngap.bench.store.environment import environment, resolve_device
from syngap.bench.store.folder_writer import begin_folder, write_failure
from syngap.bench.store.records import alone_in

__all__ = [
    "HUNG_AFTER",
    "Event",
    "attempt",
    "default_workers",
    "note_failure",
    "run_here",
    "run_local",
]

HUNG_AFTER = 1800.0  # seconds: longer than any step, and short of a night
_LOOK_EVERY = 1.0  # seconds
_RETIRES_WITHIN = 20.0  # seconds for a process to end by itself
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_MEMORY = ("MemoryError", "OutOfMemoryError", "can't allocate memory", "bad_alloc")
_LESS_MEMORY = "--resume with fewer --workers goes on; a smaller stream.batch needs less memory"


@dataclass(frozen=True)
class Event:
    """What happened to a run: it began, got to a step, is done, or failed with a message.

    A step may come with a message too: what the user should know.
    """

    job: AnyJob
    kind: str
    step: int = 0
    accuracy: float | None = None
    message: str = ""


def run_local(
    jobs: Sequence[AnyJob],
    workers: int,
    on_event: Callable[[Event], None],
    following: Callable[[Event], Sequence[AnyJob]] = lambda ended: (),
    hung_after: float = HUNG_AFTER,
) -> None:
    """Do `jobs` in `workers` processes at a time, and those that come of them.

    A run that raises, whose process dies, or that makes no progress for long, is reported and
    leaves the others alone. Whatever interrupts the caller ends the processes at once: their
    folders are whole at any instant.

    Args:
        jobs: to begin with.
        workers: how many at a time.
        on_event: is called with what happens.
        following: from the end of a run to the runs that it is followed by, after those waiting.
        hung_after: seconds without a step or a part of an evaluation after which a run has failed;
            0 is never. Time in which this process itself is stopped does not count.
    """
    on_gpu = bool(jobs) and resolve_device(jobs[0].config.training.device).type == "cuda"
    with mps_daemon() if on_gpu and workers > 1 else nullcontext():
        _run_pool(jobs, workers, on_event, following, hung_after)


def _run_pool(
    jobs: Sequence[AnyJob],
    workers: int,
    on_event: Callable[[Event], None],
    following: Callable[[Event], Sequence[AnyJob]],
    hung_after: float,
) -> None:
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(jobs))
    pool: list[_Worker] = []
    looked = time.monotonic()
    try:
        while True:
            free = [worker for worker in pool if not worker.job]
            while waiting and (free or len(pool) < workers):
                if not free:
                    pool.append(_Worker(context, workers, hung_after))
                    free.append(pool[-1])
                free.pop().give(waiting, on_event)
            busy = [worker for worker in pool if worker.job]
            if not busy:
                return
            ready = wait([worker.connection for worker in busy], _LOOK_EVERY)
            passed, looked = time.monotonic() - looked, time.monotonic()
            for worker in busy:
                if worker.connection in ready:
                    ended = worker.listen(on_event)
                else:
                    ended = worker.wait(min(passed, _LOOK_EVERY), on_event)
                if ended:
                    worker.job = None
                    waiting[:0] = reversed(following(ended))
    finally:
        for worker in pool:
            worker.stop()


def run_here(
    job: AnyJob, tell: Callable[[int, float | None], None] = lambda *_: None, at_a_time: int = 1
) -> None:
    """Do one run in this process and leave its folder complete, whatever happens."""
    device = resolve_device(job.config.training.device)
    home = job.folder.parent
    make_folder(job.folder, within=home)
    with alone_in(job.folder, wait=True):  # a worker of a killed command may still be in it
        if is_done(job):
            return
        begin_folder(job.folder, job.config, environment(device, at_a_time))
        if isinstance(job, FinetuningJob):
            execute_finetuning(job, tell)
        else:
            execute(job, tell)


def default_workers(jobs: Sequence[AnyJob]) -> int:
    """Return how many runs fit at a time: one a core and its threads, or what suits a GPU."""
    training = jobs[0].config.training
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if resolve_device(training.device).type == "cuda":
        return runs_per_gpu(ours or 1)
    return max(1, (ours or 1) // training.threads)


class _Worker:
    """A process that does one run after another, and starts again where it died."""

    def __init__(self, context: Any, at_a_time: int = 1, hung_after: float = HUNG_AFTER) -> None:
        self._context, self._at_a_time, self._hung_after = context, at_a_time, hung_after
        self.job: AnyJob | None = None
        self._silent = 0.0
        self._start()

    def _start(self) -> None:
        self.connection, theirs = self._context.Pipe()
        self._process: BaseProcess = self._context.Process(
            target=_work, args=(theirs, self._at_a_time), daemon=True
        )
        with _deaf_to_interrupts():
            self._process.start()
        theirs.close()  # so that its death reads as the end of the connection

    def give(self, waiting: list[AnyJob], on_event: Callable[[Event], None]) -> None:
        self.job = waiting.pop() if waiting else None
        self._silent = 0.0
        if self.job:
            with suppress(OSError):  # it has died; that is what `listen` will hear
                self.connection.send(self.job)
            on_event(Event(self.job, "begun"))

    def listen(self, on_event: Callable[[Event], None]) -> Event | None:
        """Pass on what the process says, and return it where its run has ended."""
        assert self.job
        self._silent = 0.0
        try:
            event: Event = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            named = {-number: number.name for number in signal.Signals}
            why = named.get(code, f"exit code {code}")
            hint = f": if the system is out of memory, {_LESS_MEMORY}" if why == "SIGKILL" else ""
            event = self._failed(f"its process died ({why})", hint)
        else:
            if event.kind == "failed":  # it may be unfit for more: an error of CUDA stays
                self.retire()
                self._start()
        on_event(event)
        return event if event.kind in ("done", "failed") else None

    def wait(self, seconds: float, on_event: Callable[[Event], None]) -> Event | None:
        """Note that the process was silent for so long; return the end of its run if that is it."""
        assert self.job
        self._silent += seconds
        if not 0 < self._hung_after <= self._silent:
            return None
        if self.connection.poll():  # it spoke at the last instant
            return self.listen(on_event)
        self.stop()
        event = self._failed(
            f"it hung: it made no progress for {self._hung_after:g} s",
            "; --resume goes on, --hung-after gives it longer",
        )
        on_event(event)
        return event

    def _failed(self, why: str, hint: str) -> Event:
        """Note that the process is gone, start another, and return the end of its run."""
        assert self.job
        note_failure(self.job, why + hint, why)
        self._start()
        return Event(self.job, "failed", message=why + hint)

    def retire(self) -> None:
        """Let the process end by itself: killed, it may take others on the same GPU with it."""
        self.connection.close()
        self._process.join(_RETIRES_WITHIN)
        self.stop()

    def stop(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.join()
        self.connection.close()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: it is for this one to answer."""
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def _work(connection: Connection, at_a_time: int = 1) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def say(event: Event) -> None:
        try:
            connection.send(event)
        except OSError:  # the parent is gone: no failure of the run
            raise SystemExit from None

    with suppress(EOFError, OSError):  # the parent is gone
        while True:
            attempt(connection.recv(), say, at_a_time)


def attempt(job: AnyJob, say: Callable[[Event], None], at_a_time: int = 1) -> None:
    """Do one run, and say how far it is and how it ended; it never raises."""
    try:
        with _warnings_said(job, say):
            run_here(job, lambda step, accuracy: say(Event(job, "step", step, accuracy)), at_a_time)
        say(Event(job, "done"))
    except Exception as error:
        message = _message(error)
        note_failure(job, message, traceback.format_exc())
        say(Event(job, "failed", message=message))


@contextmanager
def _warnings_said(job: AnyJob, say: Callable[[Event], None]) -> Iterator[None]:
    """Pass on what is logged about a run."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(Event(job, "step", message=record.getMessage()))

    handler, log = Handler(logging.WARNING), logging.getLogger("syngap.bench")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def _message(error: Exception) -> str:
    """Return what went wrong in a line, with what can be done about it where that is known."""
    line = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return f"{line}; where there is room again, --resume goes on"
    if isinstance(error, OSError) and error.errno in _FORBIDDEN:
        return f"{line}; where that is allowed again, --resume goes on"
    if any(sign in line for sign in _NO_MEMORY):
        return f"{line}; {_LESS_MEMORY}"
    return line


def note_failure(job: AnyJob, message: str, trace: str) -> None:
    """Write why a run failed into its folder, if that can be."""
    with suppress(OSError, ValueError):  # the message says it, and the disk may be what failed
        write_failure(job.folder, message, trace)
