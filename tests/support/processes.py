"""Running checks in processes that talk to each other, so that a hang is a failure.

A test module keeps named checks in dictionaries, a function of the rank each. One start of the
processes runs those of all modules that are collected (starting takes longer than checking); what
they return is read by as many tests as there are promises.
"""

from __future__ import annotations

import gc
import importlib
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

Checks = dict[str, Callable[[int], Any]]
Found = dict[tuple[str, str], dict[str, tuple[bool, Any]]]  # by module and dictionary

PROCESSES = 2
MODULES = ("test_distributed", "test_protect_processes")  # that have such dictionaries, in CHECKS
LIMIT = 240.0  # seconds for all checks; on two free cores they take about 20
ABORTED = 3  # the exit status where a signal ended a process
CUT_OFF = (EOFError, pickle.UnpicklingError)  # the end, also of what a process could not end
PATIENCE = timedelta(seconds=30)  # for one message: who waits in vain fails, and says where

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()),
    reason="needs torch.distributed with the gloo backend",
)


class Results:
    """What the checks returned, in each process."""

    def __init__(self, folder: Path, module: str, dictionary: str) -> None:
        ranks = [_read(folder / str(rank)) for rank in range(PROCESSES)]
        self._ranks = [of.get((module, dictionary), {}) for of in ranks]

    def __getitem__(self, check: str) -> list[Any]:
        """The results of a check by rank; fails with what it, or the one before, failed with."""
        if all(results.get(check, (False,))[0] for results in self._ranks):
            return [results[check][1] for results in self._ranks]
        said = [
            f"check {name!r} failed in process {rank}:\n{value}"
            for rank, results in enumerate(self._ranks)
            for name, (succeeded, value) in results.items()
            if not succeeded
        ]
        said += [
            f"process {rank} finished {list(results)} of its checks"
            for rank, results in enumerate(self._ranks)
        ]
        pytest.fail("\n".join([f"no result of {check!r}", *said]), pytrace=False)


def run(module: str, factory: pytest.TempPathFactory) -> dict[str, Results]:
    """Run the checks of all modules, once even if several testers ask; return those of one."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "processes"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            if _start(folder):
                # A process that a signal ended said nothing of a check: torch or gloo aborted it.
                # Once in many runs that is chance; what is wrong with a check aborts again.
                for file in folder.iterdir():
                    file.unlink()
                print("a process was ended by a signal; all start again")
                _start(folder)
    return {name: Results(folder, module, name) for name in sys.modules[module].CHECKS}


def _start(folder: Path) -> bool:
    """Run the checks, and return whether a signal ended a process before the limit."""
    modules = [module for module in MODULES if module in sys.modules]
    done = subprocess.run(
        [sys.executable, __file__, str(folder), *modules],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=2 * LIMIT,
        check=False,
    )
    assert done.returncode in (0, ABORTED), "the processes could not be started"
    return done.returncode == ABORTED


def _main(folder: Path, modules: list[str]) -> int:
    """Import once what all processes need, which takes longer than the checks, and fork them."""
    for module in ("torch._dynamo", "torch.distributed.fsdp", *modules):
        importlib.import_module(module)
    gc.freeze()  # what is imported stays
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    processes = [
        context.Process(target=_enter, args=(rank, modules, folder), daemon=True)
        for rank in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    aborted = any(process.exitcode is not None and process.exitcode < 0 for process in processes)
    for process in processes:
        process.kill()
        process.join()
    return ABORTED if aborted else 0


def _enter(rank: int, modules: list[str], folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=PROCESSES,
        timeout=PATIENCE,
    )
    for key, checks in {
        (module, dictionary): checks
        for module in modules
        for dictionary, checks in importlib.import_module(module).CHECKS.items()
    }.items():
        for name, check in checks.items():
            try:
                passed, written = True, pickle.dumps((key, name, (True, check(rank))))
            except BaseException:
                passed, written = False, pickle.dumps((key, name, (False, traceback.format_exc())))
            # Written at once, so that a process that hangs later has told how far it came.
            with (folder / str(rank)).open("ab") as file:
                file.write(written)
            if not passed:
                os._exit(1)  # the other one may be waiting for us
    dist.destroy_process_group()


def _read(file: Path) -> Found:
    found: Found = {}
    with file.open("rb") if file.exists() else io.BytesIO() as written, suppress(*CUT_OFF):
        while True:
            key, name, outcome = pickle.load(written)
            found.setdefault(key, {})[name] = outcome
    return found


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1]), sys.argv[2:]))
