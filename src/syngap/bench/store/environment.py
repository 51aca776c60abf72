"""What a run ran on."""

from __future__ import annotations

import math
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch

import syngap
from syngap.bench.errors import UserError
from syngap.bench.store.outcome import Environment

__all__ = [
    "arithmetic",
    "environment",
    "memory_limit",
    "now",
    "portable",
    "processor",
    "require_compiler",
    "resolve_device",
]

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_REPEATS = ":4096:8"  # one of the two values with which cuBLAS does; the other is slower
_GROUPS = ("memory.max", "memory/memory.limit_in_bytes")  # of control groups, version 2 and 1
_OURS = {
    "--data": "DATA",
    "--out": "OUT",
    "--address": "ADDRESS",
    "--from": "RECORD",
    "--results": "RESULTS",
}


def resolve_device(name: str) -> torch.device:
    """Return the device that "auto", "cpu" or "cuda" stands for here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError('training.device: got "cuda", but torch finds no GPU here; "auto" or "cpu"')
    return torch.device(name)


def require_compiler(device: torch.device) -> None:
    """Refuse, by a UserError, where torch.compile has nothing to compile with.

    On a GPU that is Triton, which compiles what starts its kernels with a C compiler.
    """
    usual = [{"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")]
    language, variable = "C++", "CXX"
    if device.type == "cuda":
        _require("the package triton", find_spec("triton") is not None)
        if sys.platform == "win32":  # where Triton brings a compiler
            return
        language, variable, usual = "C", "CC", ["gcc", "clang"]
    names = [os.environ[variable]] if os.environ.get(variable) else usual
    is_there = any(shutil.which(name) is not None for name in names)
    _require(f"a {language} compiler ({' or '.join(names)})", is_there)


def _require(needed: str, is_there: bool) -> None:
    if not is_there:
        raise UserError(
            f"training.compiled: got true, and torch.compile needs {needed}, which is not here; "
            "install it, or --set training.compiled=false"
        )


@contextmanager
def arithmetic(threads: int, deterministic: bool) -> Iterator[None]:
    """Compute within as a run's options say, and afterwards as before.

    Args:
        threads: of the CPU.
        deterministic: let torch take kernels that repeat, and refuse those that do not. cuBLAS
            looks once, when it starts: on a GPU, this process must not have used it otherwise.
    """
    before = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get(_CUBLAS),
    )
    torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault(_CUBLAS, _REPEATS)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False  # which chooses by the time that kernels take
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        if deterministic:
            torch.use_deterministic_algorithms(before[1], warn_only=before[2])
            torch.backends.cudnn.benchmark = before[3]
            if before[4] is None:
                os.environ.pop(_CUBLAS, None)


def environment(device: torch.device, at_a_time: int = 1) -> Environment:
    """Return versions, hardware, the command, and how many runs train at the same time."""
    on_gpu = device.type == "cuda"
    return Environment(
        {
            "syngap": syngap.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # a class of its own that YAML does not know
            "system": f"{platform.system()} {platform.machine()}",
            "processor": processor(),
            "cores": os.cpu_count(),
            "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
            "command": shlex.join(portable(["syngap", *sys.argv[1:]])),
            "at_a_time": at_a_time,
            "started": now(),
        }
    )


def now() -> str:
    """Return the time, to the second, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def portable(command: Sequence[str]) -> list[str]:
    """Return a command without folders and addresses of this place, so that it can be published.

    What --data, --out, --address, --from and --results name becomes DATA, OUT, ADDRESS, RECORD and
    RESULTS; of other absolute paths the last name stays.

    Examples:
        >>> portable(["syngap", "run", "/a/mine.yaml", "--data", "../b", "--out=/c/d"])
        ['syngap', 'run', 'mine.yaml', '--data', 'DATA', '--out=OUT']
        >>> portable(["syngap", "run", "digits", "--set", "stream.path=/a/images"])
        ['syngap', 'run', 'digits', '--set', 'stream.path=images']
    """
    words: list[str] = []
    for word in command:
        option, equals, value = word.rpartition("=")
        if words and words[-1] in _OURS:
            words.append(_OURS[words[-1]])
        else:
            words.append(option + equals + _OURS.get(option, _last_name(value)))
    return words


def _last_name(text: str) -> str:
    for path in (PurePosixPath(text), PureWindowsPath(text)):
        if path.is_absolute():
            return path.name
    return text


def memory_limit(groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the bytes of memory of this machine or container, ∞ where the system does not say.

    Args:
        groups: where Linux says what a container may have.
    """
    names = getattr(os, "sysconf_names", ())  # Windows has none
    known = [_text(groups / limit).strip() for limit in _GROUPS]
    found = [float(text) for text in known if text.isdecimal()]  # "max" is no limit
    if "SC_PHYS_PAGES" in names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=math.inf)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def processor() -> str:
    """Return the CPU's name as the system tells it."""
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
