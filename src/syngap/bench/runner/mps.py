"""Several runs on one GPU: how many, and how they come to work at the same time.

Without help a GPU gives its processes turns. Under NVIDIA's multi-process service (MPS) their
kernels run side by side, which fills what one run of a small network leaves idle. A daemon of our
own serves the processes that we start, and ends with them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["mps_daemon", "runs_per_gpu"]

# Seven runs of ER finish 1.36 times as many steps an hour as one on an H200, fifteen no more.
_ENOUGH = 7
_MEMORY = 3 * 1024  # MiB that a run may take: ResNet-18 and its graphs need half of that
_CONTROL = "nvidia-cuda-mps-control"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_LOGS = "CUDA_MPS_LOG_DIRECTORY"
_USUAL = Path("/tmp", "nvidia-mps")


def runs_per_gpu(cores: int) -> int:
    """Return how many runs at a time suit the GPU: one, where they would have to take turns."""
    if not (_has_daemon() or shutil.which(_CONTROL)):
        return 1
    return max(1, min(_ENOUGH, cores // 2, _memory() // _MEMORY))


@contextmanager
def mps_daemon() -> Iterator[bool]:
    """Run an MPS daemon for the processes that are started meanwhile; yield whether one runs."""
    control = shutil.which(_CONTROL)
    if _has_daemon() or control is None:
        yield _has_daemon()
        return
    with tempfile.TemporaryDirectory(prefix="syngap-mps-") as folder:
        ours = {_PIPES: folder, _LOGS: folder}
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        started = _control_mps([control, "-d"])
        try:
            yield started
        finally:
            if started:
                _control_mps([control], "quit\n")
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _has_daemon() -> bool:
    """Return whether a daemon runs that we did not start."""
    return Path(os.environ.get(_PIPES, _USUAL), "control").exists()


def _control_mps(command: list[str], words: str = "") -> bool:
    try:
        done = subprocess.run(command, input=words, text=True, capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _memory() -> int:
    """Return the MiB of the smallest GPU, without touching it: MPS refuses a process that did."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, text=True, capture_output=True, timeout=30, check=True).stdout
        return min(int(line) for line in said.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return _ENOUGH * _MEMORY
