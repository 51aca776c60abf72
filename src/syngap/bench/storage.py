"""Every file that syngap writes, renames or removes: one rule for all of them.

The caller names the folder that the user chose, `within`. That folder may be a link: it is the
user's choice. Below it no link is followed, because a folder that came from elsewhere may hold
links to anywhere. Files are written under a random name that did not exist before, synced, and
renamed, so a reader finds the old file or the new one, and each is whole.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from syngap.bench.errors import UserError

__all__ = [
    "append",
    "check_inside",
    "clean",
    "create",
    "make_folder",
    "move",
    "read",
    "remove",
    "remove_empty",
    "remove_tree",
    "strays",
    "sync",
    "write",
]

_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # for the other end of a pipe
_TRIES = 5  # another process may take a file that is being written for a stray
# The second form is that of versions which named such files by their process.
_STRAY = re.compile(
    r"\.(?P<name>.+)\.syngap-[0-9a-f]{16}"
    r"|\.(?P<former>[\w-]+\.(?:yaml|json|csv|txt|safetensors|html|md))\.\d+"
)


def check_inside(path: Path, within: Path) -> None:
    """Refuse a `path` whose folders below `within` are links, or no folders.

    Args:
        path: lies below `within`; what is there itself is not looked at.
        within: the folder that the user named.

    Raises:
        UserError: where a folder between the two is a link or another thing.
        ValueError: where `path` does not lie below `within`.
    """
    inner = path.relative_to(within)
    if ".." in inner.parts:
        raise ValueError(f"{path} does not lie below {within}")
    for parent in reversed(inner.parents[:-1]):
        folder = within / parent
        if folder.is_symlink():
            raise UserError(
                f"{folder}: is a link, and nothing is written through links; "
                "put the folder itself there"
            )
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: is not a folder; move it away")


def write(path: Path, content: bytes, *, within: Path) -> None:
    """Put `content` at `path`: whoever reads it, and whenever, finds the old or the new whole.

    A link at `path` is replaced, not followed. What earlier writes of this file left half-written
    is removed. Where writing fails, nothing is left beside it, and the error names `path`.
    """
    check_inside(path, within)
    for left in reversed(range(_TRIES)):
        beside = path.with_name(f".{path.name}.syngap-{secrets.token_hex(8)}")
        try:
            for stray in _found(path.parent, path.name):
                stray.unlink(missing_ok=True)  # first: a disk may be full of them
            with create(beside, within=within) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
            sync(path.parent)
            return
        except FileNotFoundError as error:
            if not left or not path.parent.is_dir():
                raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
        except OSError as error:
            with suppress(OSError):
                beside.unlink(missing_ok=True)  # on a full disk, room for what is smaller
            raise OSError(error.errno, error.strerror, str(path)) from error


def create(path: Path, *, within: Path) -> BinaryIO:
    """Open a new file; FileExistsError where anything is there, also a link that leads nowhere."""
    check_inside(path, within)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
    return os.fdopen(handle, "wb")


def append(path: Path, *, within: Path) -> BinaryIO:
    """Open a plain file, made where there is none, to write at its end."""
    check_inside(path, within)
    with suppress(FileNotFoundError):
        found = path.lstat()
        _check_plain(path, found.st_mode)
        if found.st_nlink > 1:
            raise UserError(
                f"{path}: has a second name (a hard link), and the file there would change too; "
                "put a copy here"
            )
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _NO_LINK | _NO_WAIT, 0o666)
    return os.fdopen(handle, "ab")


def read(path: Path, most: int) -> bytes:
    """Return the content of a plain file; UserError where it is no such, or larger than `most`.

    Raises:
        OSError: where it cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | _NO_WAIT)
    try:
        found = os.fstat(handle)
        _check_plain(path, found.st_mode)
        if found.st_size > most:
            raise UserError(f"{path}: refused, it has {found.st_size} bytes; up to {most} are read")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(found.st_size)
    finally:
        os.close(handle)


def make_folder(path: Path, *, within: Path) -> None:
    """Make a folder and those above it, unless they are there."""
    check_inside(path / "inside", within)
    path.mkdir(parents=True, exist_ok=True)


def remove(path: Path, *, within: Path) -> None:
    """Remove a file if it is there; of a link the link, and never what it leads to."""
    check_inside(path, within)
    path.unlink(missing_ok=True)


def remove_empty(path: Path, *, within: Path) -> None:
    """Remove a folder unless something is in it."""
    check_inside(path, within)
    if not any(path.iterdir()):
        path.rmdir()


def remove_tree(path: Path, *, within: Path) -> None:
    """Remove a folder of temporary files with all that is in it; of a link the link alone."""
    check_inside(path, within)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move(path: Path, to: Path, *, within: Path) -> None:
    """Rename `path` to `to`, in the place of a file that is there."""
    for place in (path, to):
        check_inside(place, within)
    os.replace(path, to)


def strays(folder: Path) -> list[Path]:
    """Return what `write` left half-written in `folder` where its process was killed.

    Whatever has such a name counts, also a link or a pipe, but no folder.
    """
    return sorted(_found(folder))


def clean(folder: Path, *, within: Path) -> None:
    """Remove the strays in `folder`, if there is such a folder."""
    if folder.is_dir():
        for stray in strays(folder):
            remove(stray, within=within)


def sync(folder: Path) -> None:
    """Make renames and new names in `folder` survive a loss of power, where one can ask."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _found(folder: Path, name: str = "") -> Iterator[Path]:
    """Give the strays in `folder`: all of them, or those of the file `name`."""
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _STRAY.fullmatch(entry.name)
            if match and (not name or name in match.group("name", "former")):
                if entry.is_dir(follow_symlinks=False):
                    continue  # of another maker
                yield folder / entry.name


def _check_plain(path: Path, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise UserError(
            f"{path}: is a link, and nothing is written through links; put a file there"
        )
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: is not a plain file")
