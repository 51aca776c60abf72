"""Files of runs: one process at a time in a folder, and values as JSON or YAML."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from syngap.bench.errors import UserError
from syngap.bench.storage import write

__all__ = ["alone_in", "nobody_in", "write_json", "write_yaml", "yaml_of"]


_LOG = logging.getLogger(__name__)


@contextmanager
def alone_in(folder: Path, *, wait: bool = False, quiet: bool = False) -> Iterator[None]:
    """Keep other processes that ask the same out of `folder`, where the system knows how.

    Args:
        folder: it exists.
        wait: until the other has ended, having logged that it is there; otherwise a UserError
            says so. Another one says where the folder is removed meanwhile.
        quiet: log nothing: the other is expected there.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    is_ours = False
    while not is_ours:
        with _refuse_removed(folder):
            handle = os.open(folder, os.O_RDONLY)
        try:
            _lock(handle, folder, wait, quiet)
            # While this waited, the folder may have been removed, and another made in its place.
            with _refuse_removed(folder):
                is_ours = os.path.samestat(os.fstat(handle), folder.stat())
            if is_ours:
                yield
        finally:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # else a forked process would keep it
            os.close(handle)


@contextmanager
def _refuse_removed(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(
            f"{folder}: was removed meanwhile; the same command again makes it anew"
        ) from error


def _lock(handle: int, folder: Path, wait: bool, quiet: bool) -> None:
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        busy = f"{folder}: another process is at work there"
        if not wait:
            raise UserError(busy) from None
        if not quiet:
            _LOG.warning("%s; waiting for its end", busy)
        fcntl.flock(handle, fcntl.LOCK_EX)


def nobody_in(folder: Path) -> bool:
    """Return whether no process is alone in `folder`; False where the system cannot tell."""
    if os.name != "posix":
        return False
    try:
        with alone_in(folder):
            return True
    except (UserError, OSError):
        return False


def write_json(path: Path, value: Any, *, within: Path) -> None:
    """Put `value` at `path`, in the folder that the user named, as JSON for people and programs."""
    write(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(), within=within)


def write_yaml(path: Path, value: Any, *, within: Path) -> None:
    """Put `value` at `path`, in the folder that the user named, as YAML in the order it has."""
    write(path, yaml_of(value), within=within)


def yaml_of(value: Any) -> bytes:
    """Return `value` as YAML, in the order it has."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode()
