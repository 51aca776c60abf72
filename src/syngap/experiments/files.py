"""Files that are whole or not there: written beside their place, synced, then renamed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from syngap.errors import UserError

__all__ = ["alone_in", "nobody_in", "strays", "sync", "write", "write_json", "write_yaml"]


_STRAY = re.compile(r"\.[\w-]+\.(?:yaml|json|csv|txt|safetensors)\.\d+")


@contextmanager
def alone_in(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes that ask the same out of `folder`, where the system knows how.

    Args:
        folder: it exists.
        wait: until the other has ended; otherwise a UserError says that it is there.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(f"{folder}: another process is at work there") from None
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
    """Put `content` at `path`: whoever reads it, and whenever, finds the old or the new whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync(path.parent)


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
