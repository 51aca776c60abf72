"""Extract known files from a .tar.gz or .zip that need not be trusted."""

from __future__ import annotations

import gzip
import re
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from syngap.bench.errors import UserError
from syngap.bench.storage import create, make_folder

__all__ = ["read", "unpack"]


def read(archive: Path, pattern: re.Pattern[str], limit: int) -> dict[str, bytes]:
    """Return the contents of the members that match `pattern`, by the pattern's first group.

    Args:
        archive: whose name ends in .tar.gz or .zip.
        pattern: matches whole names; its group is what the member is called by.
        limit: of bytes in all.
    """
    with _refuse_damaged(archive):
        return {m.name: m.stream.read(m.size) for m in _members(archive, pattern, limit)}


def unpack(archive: Path, pattern: re.Pattern[str], limit: int, into: Path) -> int:
    """Write the same members beneath the folder `into`; return how many there were."""
    count = 0
    with _refuse_damaged(archive):
        for member in _members(archive, pattern, limit):
            target = into / member.name
            make_folder(target.parent, within=into)
            with create(target, within=into) as file:
                shutil.copyfileobj(member.stream, file)
            count += 1
    return count


class _Member(NamedTuple):
    name: str
    size: int
    stream: IO[bytes]


def _members(archive: Path, pattern: re.Pattern[str], limit: int) -> Iterator[_Member]:
    walk = _zip_members if archive.suffix == ".zip" else _tar_members
    for member in walk(archive, limit):
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or set(member.name) & set("\\:\0"):
            raise UserError(f"{archive}: refused, {member.name!a} would leave the folder")
        limit -= member.size  # wanted or not: what is passed over is unpacked as well
        if limit < 0:
            raise UserError(f"{archive}: refused, its contents are larger than expected")
        if match := pattern.fullmatch(member.name):
            yield member._replace(name=match[1])


def _tar_members(archive: Path, limit: int) -> Iterator[_Member]:
    with _LimitedGzip(archive, limit) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
        for entry in tar:
            if entry.isdir():
                continue
            content = tar.extractfile(entry) if entry.isreg() else None
            if content is None:
                raise UserError(f"{archive}: refused, {entry.name!a} is no plain file")
            yield _Member(entry.name, entry.size, content)


class _LimitedGzip(gzip.GzipFile):
    """A gzip stream that reads at most `limit` bytes at once and twice that in all.

    tarfile reads the headers of long names in one piece, as long as the archive says they are, and
    passes over members by unpacking them.
    """

    def __init__(self, archive: Path, limit: int) -> None:
        super().__init__(archive)
        self._limit = limit

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= self._limit:
            raise tarfile.ReadError("a header is too long")
        return super().read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        if offset > 2 * self._limit:
            raise tarfile.ReadError("it is too long")
        return super().seek(offset, whence)


def _zip_members(archive: Path, limit: int) -> Iterator[_Member]:
    with zipfile.ZipFile(archive) as zipped:
        for entry in zipped.infolist():
            if entry.is_dir():
                continue
            if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
                raise UserError(f"{archive}: refused, {entry.filename!a} is no plain file")
            with zipped.open(entry) as stream:
                yield _Member(entry.filename, entry.file_size, stream)


@contextmanager
def _refuse_damaged(archive: Path) -> Iterator[None]:
    damaged = (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        gzip.BadGzipFile,
        FileExistsError,  # two members of one name
        RuntimeError,  # an encrypted member, or a compression that zipfile does not know
        ValueError,  # a place before the beginning
        OverflowError,  # or beyond all ends
    )
    try:
        yield
    except UserError:
        raise
    except damaged as error:
        raise UserError(f"{archive}: damaged, it cannot be unpacked ({error})") from error
