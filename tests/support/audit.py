"""Every command of syngap in one process, watched: what it opens for writing, renames, removes.

Started by test_confinement.py, because an audit hook cannot be taken away again. It says in JSON,
for each command, what was changed outside of the folders that it was given, what it said, and how
it ended.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(sys.argv[1] if __name__ == "__main__" else ".").resolve()
HERE, OUTSIDE = ROOT / "here", ROOT / "outside"
# Besides the folder that a command names, it may write here.
ALWAYS = [ROOT / "cache", ROOT / "tmp", Path(os.devnull)]
allowed = [HERE]
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SECONDS = 60.0
PIDS = 20  # on either side of ours
changes: list[str] = []


def real(path: Any, folder: Any = None, *, follow: bool = False) -> Path:
    """Where a path leads now; its last part is followed where the call would follow it."""
    place = Path(os.fsdecode(path))
    if isinstance(folder, int) and folder >= 0 and not place.is_absolute():
        place = Path(os.readlink(f"/proc/self/fd/{folder}")) / place
    resolved = os.path.realpath(place if follow else place.parent)
    return Path(resolved) if follow else Path(resolved, place.name)


def places(event: str, given: tuple[Any, ...]) -> Iterator[Path]:
    """What an operation would change."""
    if event == "open":
        path, mode, flags = given
        writes = flags & WRITING or any(letter in (mode or "") for letter in "wax+")
        if writes and not isinstance(path, int):
            yield real(path, follow=not flags & (os.O_NOFOLLOW | os.O_EXCL))
    elif event == "os.rename":
        yield real(given[0], given[2])
        yield real(given[1], given[3])
    elif event in ("os.remove", "os.rmdir", "shutil.rmtree"):
        yield real(given[0], given[1] if len(given) > 1 else None)
    elif event == "os.mkdir":
        yield real(given[0], given[2])
    elif event in ("os.link", "os.symlink"):
        yield real(given[1], given[-1])
    elif event in ("os.chmod", "os.chown", "os.truncate", "os.utime", "os.setxattr"):
        if not isinstance(given[0], int):
            yield real(given[0], follow=True)
    elif event in ("shutil.copyfile", "shutil.copytree", "shutil.move", "shutil.unpack_archive"):
        yield real(given[1], follow=True)
    elif event == "sqlite3.connect" and given[0] != ":memory:":
        yield real(given[0], follow=True)


def watch(event: str, given: tuple[Any, ...]) -> None:
    """Note every change outside of the allowed folders."""
    if event != "open" and not event.startswith(("os.", "shutil.", "sqlite3.")):
        return
    changes.extend(
        f"{event} {place}"
        for place in places(event, given)
        if not any(place.is_relative_to(folder) for folder in (*ALWAYS, *allowed))
    )


if __name__ == "__main__":
    sys.addaudithook(watch)

import yaml  # noqa: E402  # after the hook: what imports write counts too
from fuzz.guard import Hang, limited  # noqa: E402
from fuzz.trees import snapshot  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from tars import MEMBERS, tar  # noqa: E402
from tiny import run_inline, tiny, write_arrays, yaml_composed_once  # noqa: E402

from syngap.bench import cli  # noqa: E402
from syngap.bench.runner import local as engine  # noqa: E402
from syngap.bench.storage import append  # noqa: E402
from syngap.bench.store.packed import FILES  # noqa: E402
from syngap.bench.streams import download  # noqa: E402

NPZ = "stream={name: npz, path: data.npz, tasks: 2, batch: 50}"
SEARCH = (
    "search={trials: 1, added: [], rounds: [], seeds: [100], stream: {validation: 0.2}, "
    "spaces: {er: {lr: {log: [0.1, 1.0]}}}}"
)
RUN = ("run", "tiny.yaml", "--methods", "er", "--out", "out")


@dataclass(frozen=True)
class Command:
    """A command line to try.

    Args:
        arguments: of `syngap`.
        folder: that it writes into.
        names: files and folders that it knows there; anything may be planted in their place.
        base: the folder to begin with; nothing where there is none yet.
        named: the folder that it may write into, where that is not `folder`.
    """

    arguments: tuple[str, ...]
    folder: str
    names: tuple[str, ...]
    base: str = ""
    named: str = ""


SAVE = "er-0/checkpoint/step-000000003.safetensors"
IN_RUN = tuple(
    f"er-0/{name}"
    for name in (
        *("config.yaml", "environment.json", "status.json", "accuracy.csv", "metrics.jsonl"),
        *("error.txt", "checkpoint", "checkpoint/weights.safetensors", ".tensorboard"),
    )
)
RUNS = ("experiment.yaml", "index.html", "er-0", SAVE, *IN_RUN)
FIGURES = ("figures", "figures/stream.svg")
LANDSCAPE = ("er-0/landscape.json", "er-0/config.yaml", "er-0/environment.json")
KEPT = ("experiment.yaml", *FILES)
DATA = (
    *("cifar-100-binary", "cifar-100-binary.tar.gz", "cifar-100-binary.tar.gz.part"),
    ".cifar-100-binary.unpacking",
)

# A command of the command line that is missing here fails the test.
COMMANDS: dict[str, list[Command]] = {
    "run": [
        Command((*RUN, "--resume"), "out", RUNS, "stopped"),
        Command((*RUN, "--fresh"), "out", RUNS, "done"),
        Command(RUN, "out", ("er-0", "experiment.yaml")),
    ],
    "demo": [
        Command(
            ("demo", "--methods", "sgd", "--seeds", "0", "--out", "out"),
            "out",
            ("sgd-0",),
        )
    ],
    "tune": [
        Command(
            ("tune", "tiny.yaml", "--methods", "er", "--out", "out", how),
            "out",
            (
                "search.yaml",
                "trials.csv",
                "tuned.yaml",
                "er-trial0-100",
                "er-trial0-100/checkpoint",
            ),
            "search",
        )
        for how in ("--resume", "--fresh")
    ],
    "report": [
        Command(("report", "out"), "out", RUNS, "done"),
        Command(("report", "out", "--figures", "out/figures"), "out", FIGURES, "done"),
        Command(
            ("report", "out", "--figure", "out/er-0/one.svg"), "out", ("er-0/one.svg",), "done"
        ),
        Command(("report", "."), "out", ("index.html",), "done", named="."),
    ],
    "keep": [Command(("keep", "done", "out", "--replace"), "out", KEPT, "packed")],
    "fill": [Command(("fill", "out/page.md", "--results", "."), "out", ("page.md",), "pages")],
    "reproduce": [
        Command(
            ("reproduce", "done", "--results", ".", "--out", "out"), "out", ("er-0",), "stopped"
        )
    ],
    "landscape": [
        Command(
            ("landscape", "tiny.yaml", "--methods", "er", "--out", "out", "--points", "2"),
            "out",
            LANDSCAPE,
        ),
        Command(
            ("landscape", "tiny.yaml", "--methods", "er", "--points", "2"),
            "runs/tiny",
            ("landscapes", "landscapes/er-0"),
            named="runs",
        ),
    ],
    "data": [Command(("data", "cifar100", "--to", "out"), "out", DATA)],
    "doctor": [Command(("doctor",), "out", ())],
}


def plant_link_to_file(path: Path) -> None:
    path.symlink_to(OUTSIDE / "file")


def plant_link_to_folder(path: Path) -> None:
    path.symlink_to(OUTSIDE / "folder")


def plant_dangling_link(path: Path) -> None:
    path.symlink_to(OUTSIDE / "nothing")


def plant_pipe(path: Path) -> None:
    os.mkfifo(path)


PLANTS: list[Callable[[Path], None]] = [
    plant_link_to_file,
    plant_link_to_folder,
    plant_dangling_link,
    plant_pipe,
]


def plants_of(name: str, number: int) -> list[Callable[[Path], None]]:
    """What to plant in the place of a command's file or folder number `number`.

    A pipe, which a reader of its own may wait for, and a link: all writing is by one module, to
    which every kind of link is the same wherever it stands.
    """
    to_file = (plant_link_to_file, plant_dangling_link)[number % 2]
    return [plant_pipe, to_file if Path(name).suffix else plant_link_to_folder]


def temporary_names(name: str) -> Iterator[str]:
    """Every name under which a version of syngap wrote the file `name` before it was whole."""
    folder, _, last = name.rpartition("/")
    if not Path(last).suffix or last.endswith(".jsonl"):
        return  # a folder, or what is appended to
    for pid in range(os.getpid() - PIDS, os.getpid() + PIDS + 1):
        yield f"{folder}/.{last}.{pid}".lstrip("/")
    yield f"{folder}/.{last}.syngap-{'0' * 16}".lstrip("/")


# What commands begin with -------------------------------------------------------------------------


def silently(*arguments: str) -> None:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        cli.main(arguments)


@cache
def done() -> Path:
    """An experiment that ended."""
    silently(*RUN[:-1], "done")
    return HERE / "done"


@cache
def stopped() -> Path:
    """An experiment whose run was killed."""
    folder = HERE / "stopped"
    shutil.copytree(done(), folder)
    status = folder / "er-0/status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "state": "running"}))
    return folder


@cache
def packed() -> Path:
    """Recorded results."""
    silently("keep", str(done()), "packed")
    return HERE / "packed"


@cache
def search() -> Path:
    """A search for hyper-parameters that ended."""
    silently("tune", "tiny.yaml", "--methods", "er", "--out", "search")
    return HERE / "search"


@cache
def pages() -> Path:
    """A page that quotes a result."""
    done()
    (HERE / "pages").mkdir()
    page = "Ends at <!-- results: value done er ACC --><!-- end -->.\n"
    (HERE / "pages/page.md").write_text(page)
    return HERE / "pages"


BASES: dict[str, Callable[[], Path]] = {
    made.__name__: made for made in (done, stopped, packed, search, pages)
}


# Attempts -----------------------------------------------------------------------------------------


def prepared(command: Command) -> Path:
    """The folder of a command as it is before anything is planted."""
    for name in ("out", "runs"):
        shutil.rmtree(HERE / name, ignore_errors=True)
    folder = HERE / command.folder
    if command.base:
        shutil.copytree(BASES[command.base](), folder)
    return folder


def planted(folder: Path, name: str, plant: Callable[[Path], None]) -> None:
    """Put something hostile in the place of a file or folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    plant(path)


def outcome(command: Command, planting: str) -> dict[str, Any]:
    """Call the command line and say how it ended, and what it changed where it may not."""
    changes.clear()
    allowed[:] = [HERE / (command.named or command.folder)]
    before, out, err, code = snapshot(OUTSIDE), io.StringIO(), io.StringIO(), -1
    try:
        with redirect_stdout(out), redirect_stderr(err), limited(SECONDS):
            code = cli.main(command.arguments)
        said = err.getvalue()
    except Hang:
        said = "it hangs"
    except Exception as error:  # a traceback is no refusal
        said = f"{type(error).__name__}: {error}"
    allowed[:] = [HERE]
    found = [*changes, *(["another file outside"] if snapshot(OUTSIDE) != before else [])]
    return {
        "command": " ".join(command.arguments),
        "planted": planting,
        "code": code,
        "said": said,
        "outside": found,
        "strays": [path.name for path in (HERE / command.folder).glob(".index.html.*")],
    }


def attempts(name: str) -> Iterator[dict[str, Any]]:
    """Try a command with nothing planted, with temporary names taken, and with each known name."""
    for command in COMMANDS[name]:
        prepared(command)
        yield outcome(command, "nothing")
        folder = prepared(command)
        kinds = cycle(PLANTS)
        for known in command.names:
            if (folder / known).parent.is_dir():
                for temporary in temporary_names(known):
                    planted(folder, temporary, next(kinds))
        yield outcome(command, "temporary names")
        for number, known in enumerate(command.names):
            for plant in plants_of(known, number):
                folder = prepared(command)
                planted(folder, known, plant)
                yield outcome(command, f"{known}: {plant.__name__}")


def write_inputs() -> None:
    """Write what every command may read, and serve the archive that `data` downloads."""
    write_arrays(HERE / "data.npz", samples=100)
    (HERE / "tiny.yaml").write_text(yaml.safe_dump(tiny(NPZ, SEARCH), sort_keys=False))
    contents = tar(MEMBERS)
    archive = download.ARCHIVES["cifar100"]
    known = {"cifar100": replace(archive, md5=hashlib.md5(contents).hexdigest())}

    def without_network(url: str, part: Path, *_: object) -> None:
        with append(part, within=part.parent) as file:
            file.truncate(0)
            file.write(contents)

    patch.object(download, "_resume", without_network).start()
    patch.object(download, "fetch", partial(download.fetch, sources=known)).start()


def main() -> None:
    """Say what came of every command."""
    for folder in (HERE, OUTSIDE / "folder", ROOT / "cache", ROOT / "tmp"):
        folder.mkdir(parents=True, exist_ok=True)
    (OUTSIDE / "file").write_text("mine")
    os.chdir(HERE)
    patch.object(engine, "run_local", run_inline).start()
    patch.object(os, "fsync", lambda handle: None).start()
    # What a figure looks like does not matter here, and to draw it takes most of the time.
    patch.object(Figure, "savefig", lambda self, file, **_: file.write(b"drawn")).start()
    write_inputs()
    with yaml_composed_once():
        print(json.dumps({name: [*attempts(name)] for name in COMMANDS}))


if __name__ == "__main__":
    main()
