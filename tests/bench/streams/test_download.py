import hashlib
import io
import re
import stat
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from refused import refused
from tars import MEMBERS, NOISE, tar

from syngap.bench.streams import archives
from syngap.bench.streams.download import ARCHIVES, Archive, fetch


@dataclass
class Server:
    """What the publisher's server does, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    closes_after: int | None = None
    status: int | None = None
    length: str | None = None
    asked: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append(wanted)
            if state.status or self.path not in state.files:
                return self.send_error(state.status or 404)
            body, total = state.files[self.path], len(state.files[self.path])
            start = int(re.findall(r"\d+", wanted)[0]) if wanted and state.ranges else 0
            if start >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.end_headers()
                return None
            self.send_response(206 if wanted and state.ranges else 200)
            if wanted and state.ranges:
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            self.send_header("Content-Length", state.length or str(total - start))
            self.end_headers()
            self.wfile.write(body[start : start + (state.closes_after or total)])
            return None

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        state.url = f"http://127.0.0.1:{listening.server_port}"
        yield state
        listening.shutdown()
        thread.join()


def zipped(members: dict[str, bytes], mode: int = stat.S_IFREG) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, contents in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (mode | 0o644) << 16
            archive.writestr(info, contents)
    return packed.getvalue()


SMALL = tar(MEMBERS)


def published(server: Server, contents: bytes, known: str = "cifar100") -> dict[str, Archive]:
    """Put a small archive on the server, known like the real one by its address and sum."""
    real = ARCHIVES[known]
    server.files[f"/{real.name}"] = contents
    here = replace(real, url=f"{server.url}/{real.name}", md5=hashlib.md5(contents).hexdigest())
    return {known: here}


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_data_set_is_there_and_nothing_else(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    folder = fetch(
        "cifar100",
        tmp_path / "new",
        sources=published(server, SMALL),
        progress=lambda here, total: seen.append((here, total)),
    )
    assert folder == tmp_path / "new" / "cifar-100-binary"
    assert names(tmp_path / "new") == {"cifar-100-binary/train.bin", "cifar-100-binary/test.bin"}
    assert (folder / "train.bin").read_bytes() == NOISE
    assert [here for here, _ in seen] == sorted(here for here, _ in seen)
    assert seen[-1] == (len(SMALL), len(SMALL))


def test_what_is_there_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    known = published(server, SMALL)
    assert fetch("cifar100", tmp_path, sources=known) == fetch("cifar100", tmp_path, sources=known)
    assert len(server.asked) == 1


@pytest.mark.parametrize("length", ["abc", "-5", "1e9", "9" * 5000])
def test_a_length_that_is_no_number_is_said_to_be_that(
    length: str, server: Server, tmp_path: Path
) -> None:
    server.length = length
    with refused("Content-Length", length[:3], "expected a number of bytes"):
        fetch("cifar100", tmp_path, sources=published(server, SMALL))
    assert names(tmp_path) == set()


def test_a_folder_that_is_not_complete_is_said_and_left_alone(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "cifar-100-binary").mkdir()
    (tmp_path / "cifar-100-binary" / "test.bin").write_bytes(b"mine")
    with refused("cifar-100-binary", "1 of 2 files"):
        fetch("cifar100", tmp_path, sources=published(server, SMALL))
    assert names(tmp_path) == {"cifar-100-binary/test.bin"}
    assert server.asked == []


def test_the_default_is_the_variables_folder(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNGAP_DATA", str(tmp_path / "mine"))
    folder = fetch("cifar100", sources=published(server, SMALL))
    assert folder.parent == tmp_path / "mine"


# On the way --------------------------------------------------------------------------------------


def test_a_download_that_stopped_goes_on(server: Server, tmp_path: Path) -> None:
    known = published(server, SMALL)
    server.closes_after = 100_000
    with refused("stopped at ", "again"):
        fetch("cifar100", tmp_path, sources=known)
    assert names(tmp_path) == {"cifar-100-binary.tar.gz.part"}
    here = (tmp_path / "cifar-100-binary.tar.gz.part").stat().st_size
    assert 0 < here <= 100_000
    server.closes_after = None
    folder = fetch("cifar100", tmp_path, sources=known)
    assert server.asked == [None, f"bytes={here}-"]
    assert (folder / "train.bin").read_bytes() == NOISE
    assert names(tmp_path) == {"cifar-100-binary/train.bin", "cifar-100-binary/test.bin"}


def test_a_server_without_ranges_sends_all_of_it(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "cifar-100-binary.tar.gz.part").write_bytes(SMALL[:5000])
    folder = fetch("cifar100", tmp_path, sources=published(server, SMALL))
    assert server.asked == ["bytes=5000-"]
    assert (folder / "train.bin").read_bytes() == NOISE


def test_a_part_that_is_all_of_it_is_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary.tar.gz.part").write_bytes(SMALL)
    folder = fetch("cifar100", tmp_path, sources=published(server, SMALL))
    assert (folder / "train.bin").read_bytes() == NOISE


def test_a_part_that_is_more_than_all_is_dropped(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary.tar.gz.part").write_bytes(SMALL + b"more")
    folder = fetch("cifar100", tmp_path, sources=published(server, SMALL))
    assert (folder / "train.bin").read_bytes() == NOISE


def test_other_contents_are_refused_before_they_are_unpacked(
    server: Server, tmp_path: Path
) -> None:
    known = published(server, SMALL)
    server.files["/cifar-100-binary.tar.gz"] = tar({"cifar-100-binary/train.bin": b"other"})
    with refused(server.url, "MD5", known["cifar100"].md5):
        fetch("cifar100", tmp_path, sources=known)
    assert names(tmp_path) == set()


def test_a_part_of_other_contents_does_not_spoil_the_next_try(
    server: Server, tmp_path: Path
) -> None:
    known = published(server, SMALL)
    (tmp_path / "cifar-100-binary.tar.gz.part").write_bytes(b"other" * 1000)
    with refused("MD5", "try again"):
        fetch("cifar100", tmp_path, sources=known)
    assert (fetch("cifar100", tmp_path, sources=known) / "train.bin").read_bytes() == NOISE


def test_a_server_that_says_no_is_quoted(server: Server, tmp_path: Path) -> None:
    known = published(server, SMALL)
    server.status = 503
    with refused(server.url, "503"):
        fetch("cifar100", tmp_path, sources=known)
    gone = {"cifar100": replace(known["cifar100"], url="http://127.0.0.1:9/x.tar.gz")}
    with refused("127.0.0.1", "stopped at 0 bytes"):
        fetch("cifar100", tmp_path, sources=gone)


def test_more_than_expected_is_not_taken(server: Server, tmp_path: Path) -> None:
    known = published(server, SMALL)
    small = {"cifar100": replace(known["cifar100"], limit=200_000)}
    with refused("more than the expected 200000 bytes"):
        fetch("cifar100", tmp_path, sources=small)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) <= 200_000


def test_an_archive_that_was_brought_is_used_and_kept(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(SMALL)
    fetch("cifar100", tmp_path, sources=published(server, SMALL))
    assert server.asked == []
    assert "cifar-100-binary.tar.gz" in names(tmp_path)


# Out of the archive ------------------------------------------------------------------------------


FRAME = "s1/o1/C_01_01_000.png"


def link(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("cifar-100-binary/link")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    "contents",
    [
        tar(MEMBERS | {"../train.bin": b"x"}),
        tar(MEMBERS | {"cifar-100-binary/../../train.bin": b"x"}),
        tar(MEMBERS | {"/train.bin": b"x"}),
        tar(MEMBERS, link(tarfile.SYMTYPE)),
        tar(MEMBERS, link(tarfile.LNKTYPE)),
        tar(MEMBERS, link(tarfile.CHRTYPE)),
        tar({"cifar-100-binary/test.bin": b"x"}),
        SMALL[:-5000],
        b"no archive",
    ],
    ids=["up", "inside up", "root", "symlink", "link", "device", "few", "cut", "none"],
)
def test_archives_that_are_not_the_data_set_leave_nothing_behind(
    contents: bytes, server: Server, tmp_path: Path
) -> None:
    with refused("cifar-100-binary.tar.gz"):
        fetch("cifar100", tmp_path / "to", sources=published(server, contents))
    assert names(tmp_path) <= {"to/cifar-100-binary.tar.gz"}


def test_contents_larger_than_expected_are_not_unpacked(server: Server, tmp_path: Path) -> None:
    members = {"cifar-100-binary/test.bin": b"x", "cifar-100-binary/train.bin": bytes(2_000_000)}
    known = published(server, tar(members))
    known = {name: replace(archive, limit=1_000_000) for name, archive in known.items()}
    with refused("cifar-100-binary.tar.gz", "larger than expected"):
        fetch("cifar100", tmp_path, sources=known)
    assert names(tmp_path) == {"cifar-100-binary.tar.gz"}


def test_headers_that_would_fill_the_memory_are_not_read(tmp_path: Path) -> None:
    long = tmp_path / "long.tar.gz"
    long.write_bytes(tar({"a" * 5000: b"x"}))
    assert archives.read(long, re.compile("(a+)"), 6000) == {"a" * 5000: b"x"}
    with refused("long.tar.gz", "header is too long"):
        archives.read(long, re.compile("(a+)"), 4000)


@pytest.mark.parametrize("top", ["core50_32x32/", ""])
def test_core50_is_unpacked_with_or_without_its_top_folder(
    top: str, server: Server, tmp_path: Path
) -> None:
    frames = {f"s1/o{n}/C_01_{n:02d}_000.png": b"%d" % n for n in (1, 2)}
    contents = zipped({top + name: data for name, data in frames.items()} | {top + "s1/x.db": b""})
    known = published(server, contents, "core50/32")
    known = {name: replace(archive, count=2) for name, archive in known.items()}
    folder = fetch("core50", tmp_path, size=32, sources=known)
    assert folder.name == "core50_32x32"
    assert names(folder) == set(frames)
    assert fetch("core50", tmp_path, size=32, sources=known) == folder
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "contents",
    [
        zipped({FRAME: b"x", f"../{FRAME}": b"x"}),
        zipped({FRAME: b"x", "s1\\..\\..\\C.png": b"x"}),
        zipped({FRAME: b"x", f"C:/{FRAME}": b"x"}),
        zipped({FRAME: b"/etc/passwd"}, stat.S_IFLNK),
        zipped({FRAME: b"contents"}).replace(b"contents", b"CONTENTS"),
        zipped({FRAME: b"x"})[:-10],
    ],
    ids=["up", "backslash", "drive", "symlink", "checksum", "cut"],
)
def test_zip_archives_are_held_to_the_same(contents: bytes, server: Server, tmp_path: Path) -> None:
    known = {"core50/32": replace(published(server, contents, "core50/32")["core50/32"], count=1)}
    with refused("core50_32x32.zip"):
        fetch("core50", tmp_path / "to", size=32, sources=known)
    assert names(tmp_path) <= {"to/core50_32x32.zip"}


def test_a_killed_unpacking_does_not_stand_in_the_way(server: Server, tmp_path: Path) -> None:
    rest = tmp_path / ".cifar-100-binary.unpacking"
    rest.mkdir()
    (rest / "train.bin").write_bytes(b"half")
    folder = fetch("cifar100", tmp_path, sources=published(server, SMALL))
    assert (folder / "train.bin").read_bytes() == NOISE
    assert not rest.exists()


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with refused('"cifar10"', 'did you mean "cifar100"?'):
        fetch("cifar10", tmp_path)
    with refused('"digits"', "cifar100, core50"):
        fetch("digits", tmp_path)
    with refused("size", "64", "128 and 32"):
        fetch("core50", tmp_path, size=64)


def test_a_folder_that_cannot_be_written_is_said(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(str(tmp_path / "file")):
        fetch("cifar100", tmp_path / "file", sources=published(server, SMALL))
