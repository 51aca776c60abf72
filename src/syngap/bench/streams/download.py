"""Fetch a data set from its publisher: resumes, checks the sum, and never leaves half a folder."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from syngap.bench.errors import UserError
from syngap.bench.options import shown
from syngap.bench.storage import append, make_folder, move, remove, remove_tree
from syngap.bench.streams import archives, places
from syngap.messages import count_of, nearest

if TYPE_CHECKING:
    import requests

__all__ = ["ARCHIVES", "Archive", "Progress", "fetch"]

Progress: TypeAlias = Callable[[int, int | None], None]
"""Called with the bytes downloaded and the bytes in all, if known."""

PIECE = 1 << 16  # bytes; a broken connection loses at most so many


@dataclass(frozen=True)
class Archive:
    """A file to download and what to take out of it.

    Args:
        url: where it is; its last part is the archive's name.
        md5: of the archive.
        folder: what the unpacked data set is called.
        pattern: members to unpack; the pattern's group is their place in the folder.
        count: how many those are.
        limit: of bytes, for the archive and for what is in it.
    """

    url: str
    md5: str
    folder: str
    pattern: str
    count: int
    limit: int

    @property
    def name(self) -> str:
        """What the archive's file is called."""
        return self.url.rpartition("/")[2]


def _core50(size: int, url: str, md5: str, limit: int) -> Archive:
    folder = f"core50_{size}x{size}"
    pattern = rf"(?:{folder}/)?(s\d{{1,2}}/o\d{{1,2}}/C_\d\d_\d\d_\d{{3}}\.png)"
    return Archive(f"{url}/{folder}.zip", md5, folder, pattern, count=164_866, limit=limit)


# Addresses and sums are the publishers': CIFAR-100's stand on its own page,
# https://www.cs.toronto.edu/~kriz/cifar.html. CORe50's authors give the address of the larger, and
# ContinualAI, their association, that of the smaller; the sums are those of their Avalanche.
ARCHIVES: Mapping[str, Archive] = {
    "cifar100": Archive(
        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        folder="cifar-100-binary",
        pattern=r"cifar-100-binary/((?:train|test)\.bin)",
        count=2,
        limit=1 << 28,
    ),
    "core50/128": _core50(
        128,
        "http://bias.csr.unibo.it/maltoni/download/core50",
        "745f3373fed08d69343f1058ee559e13",
        limit=1 << 34,
    ),
    "core50/32": _core50(
        32,
        "http://vps.continualai.org/data",
        "d89d34cdc0281fa84074430e9a22b728",
        limit=1 << 32,
    ),
}


def fetch(
    name: str,
    to: Path | None = None,
    *,
    size: int = 128,
    progress: Progress | None = None,
    sources: Mapping[str, Archive] = ARCHIVES,
) -> Path:
    """Return the folder of the data set `name`, downloaded and unpacked unless it is there.

    A download that stopped goes on where it was. Nothing is unpacked before its sum was checked,
    and the folder appears only when it is complete.

    Args:
        name: "cifar100" or "core50".
        to: the folder to put it in; None is SYNGAP_DATA, else the default cache.
        size: of CORe50's images, 128 or 32.
        progress: called with the bytes so far and in all.
        sources: the archives that can be fetched.
    """
    archive = _find_archive(name, size, sources)
    to = (to or places.home()).expanduser()
    folder = to / archive.folder
    if folder.exists():
        _check_complete(folder, archive)
        return folder
    try:
        make_folder(to, within=to)
        is_users = (to / archive.name).exists()  # then it is not ours to remove
        packed = _download(archive, to, progress)
        _unpack(packed, archive, folder)
        if not is_users:
            remove(packed, within=to)
    except OSError as error:  # no room, no permission
        raise UserError(f"{to}: {error}") from error
    return folder


def _find_archive(name: str, size: int, sources: Mapping[str, Archive]) -> Archive:
    for key in (name, f"{name}/{size}"):
        if key in sources:
            return sources[key]
    names = list(dict.fromkeys(key.partition("/")[0] for key in sources))
    if name in names:
        sizes = " and ".join(key.partition("/")[2] for key in sources if key.startswith(f"{name}/"))
        raise UserError(f"size: got {size}, but {name} is published in {sizes}")
    raise UserError(
        f'cannot fetch "{name}"{nearest(name, names)}; there are {", ".join(names)}; '
        "other streams need no download"
    )


def _check_complete(folder: Path, archive: Archive) -> None:
    pattern = re.compile(archive.pattern)
    present = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    count = sum(
        bool(pattern.fullmatch(name) or pattern.fullmatch(f"{folder.name}/{name}"))
        for name in present
    )
    if count < archive.count:
        raise UserError(
            f"{folder} is there, but has {count} of {count_of(archive.count, 'file')}; move it "
            "away, then fetch it again"
        )


def _download(archive: Archive, to: Path, progress: Progress | None) -> Path:
    packed, part = to / archive.name, to / f"{archive.name}.part"
    if packed.is_file() and _md5(packed) == archive.md5:
        return packed
    try:
        _resume(archive.url, part, archive.limit, progress)
    except UserError:
        raise
    except ValueError as error:  # an address that is none
        raise UserError(f"{archive.url}: the download failed ({error})") from error
    if _md5(part) != archive.md5:
        remove(part, within=to)
        raise UserError(
            f"{archive.url}: the file is not the published one (its MD5 is not {archive.md5}); "
            "nothing was kept, try again"
        )
    move(part, packed, within=to)
    return packed


def _md5(path: Path) -> str:
    """Return the sum by which publishers know a file; it guards against no forgery."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _resume(url: str, part: Path, limit: int, progress: Progress | None) -> None:
    """Download `url` to the end of `part`, which is left for the next try where that fails."""
    import requests  # heavy, and most runs fetch nothing

    start = part.stat().st_size if part.exists() else 0
    # Compressed in transit, the bytes would not be those that the range counts.
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        with requests.get(url, headers=headers, stream=True, timeout=60) as response:
            if start and response.status_code == 416:  # nothing is left, or the part is not of it
                complete = response.headers.get("Content-Range") == f"bytes */{start}"
                if not complete:
                    remove(part, within=part.parent)
                    _resume(url, part, limit, progress)
                return
            response.raise_for_status()
            if start and not _continues(response, start):
                start = 0  # the server sends all of it again
            length = _length(response, url)
            total, here = start + length if length else None, start
            with append(part, within=part.parent) as file:
                file.truncate(start)
                for piece in response.iter_content(PIECE):
                    here += len(piece)
                    if max(here, total or 0) > limit:
                        raise UserError(f"{url}: more than the expected {count_of(limit, 'byte')}")
                    file.write(piece)
                    if progress:
                        progress(here, total)
            if total is not None and here < total:
                raise requests.ConnectionError("the connection was closed")
    except requests.RequestException as error:
        here = part.stat().st_size if part.exists() else 0
        reason = _innermost(error)
        raise UserError(
            f"{url}: the download stopped at {count_of(here, 'byte')} ({reason}); "
            "run the same command again to go on from there"
        ) from error


def _length(response: requests.Response, url: str) -> int:
    """Return how many bytes the server says that it sends; 0 where it does not say."""
    length = response.headers.get("Content-Length", "0")
    if not re.fullmatch(r"[0-9]{1,18}", length):
        raise UserError(
            f"{url}: the server's Content-Length is {shown(length)}, expected a number of bytes; "
            "nothing was downloaded, try again later or from another network"
        )
    return int(length)


def _innermost(error: BaseException) -> str:
    """Return the reason that requests wraps in exceptions of its own."""
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    return " ".join(str(error.args[0] if error.args else type(error).__name__).split())


def _continues(response: requests.Response, start: int) -> bool:
    sent = response.headers.get("Content-Range", "")
    return response.status_code == 206 and sent.startswith(f"bytes {start}-")


def _unpack(packed: Path, archive: Archive, folder: Path) -> None:
    fresh, to = folder.with_name(f".{folder.name}.unpacking"), folder.parent
    remove_tree(fresh, within=to)  # what a killed run left
    try:
        count = archives.unpack(packed, re.compile(archive.pattern), archive.limit, fresh)
        if count != archive.count:
            files = count_of(archive.count, "file")
            raise UserError(f"{packed} holds {count} of {files}; it was not unpacked")
        move(fresh, folder, within=to)
    finally:
        remove_tree(fresh, within=to)
