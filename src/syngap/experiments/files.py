"""Files that are whole or not there: written beside their place, synced, then renamed."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from syngap.errors import UserError

__all__ = ["alone_in", "nobody_in", "strays", "sync", "write", "write_json", "write_yaml"]


_LOG = logging.getLogger(__name__)
_STRAY = re.compile(r"\.[\w-]+\.(?:yaml|json|csv|txt|safetensors)\.\d+")


@contextmanager
def alone_in(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes that ask the same out of `folder`, where the system knows how.

    Args:
        folder: it exists.
        wait: until the other has ended, having logged that it is there; otherwise a UserError
            says so.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy = f"{folder}: another process is at work there"
            if not wait:
                raise UserError(busy) from None
            _LOG.warning("%s; waiting for its end", busy)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def nobody_in(folder: Path) -> bool:
    """Return whether no process is alone in `folder`; False where the system cannot tell."""
    if os.name != "posix":
        return False
    try:
        with alone_in(folder):
            return True
    except (UserError, OSError):
        return False


def write(path: Path, content: bytes) -> None:
    """Put `content` at `path`: whoever reads it, and whenever, finds the old or the new whole.

    Where that fails, nothing is left beside it, and the error names `path`.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)  # on a full disk, room for what is smaller
        raise OSError(error.errno, error.strerror, str(path)) from error


def strays(directory: Path) -> list[Path]:
    """Return what `write` left half-written in `directory` where its process was killed."""
    found = (path for path in directory.glob(".*") if _STRAY.fullmatch(path.name))
    return sorted(path for path in found if path.is_file())


def write_json(path: Path, value: Any) -> None:
    """Put `value` at `path` as JSON for people and programs."""
    write(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_yaml(path: Path, value: Any) -> None:
    """Put `value` at `path` as YAML, in the order it has."""
    write(path, yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode())


def sync(directory: Path) -> None:
    """Make renames and new names in `directory` survive a loss of power, where one can ask."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
