"""What is fuzzed: for each target valid trees to begin with, and what is done with a tree."""

from __future__ import annotations

import copy
import gzip
import io
import json
import os
import pickle
import random
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from PIL import Image
from runfolders import Made, write_experiment, write_made_landscape, write_search
from tiny import TINY, run_inline

from fuzz.guard import Broken, Step, called
from fuzz.trees import Tree, read
from syngap.bench.config import experiment as config
from syngap.bench.config.experiment import Experiment, shipped, with_settings
from syngap.bench.reporting.page import page
from syngap.bench.runner import local as engine
from syngap.bench.runner.local import run_here
from syngap.bench.runner.plan import jobs_of, make_plan
from syngap.bench.store.folder_reader import read_runs
from syngap.bench.store.folder_writer import FolderJournal
from syngap.bench.store.keep import keep
from syngap.bench.streams import load
from syngap.bench.streams.core50 import parse_frames
from syngap.bench.training.checkpoint import unpack


@contextmanager
def hurried() -> Iterator[None]:
    """Do without what would take nearly all of the time: processes, waiting for disks."""
    with (
        patch.object(engine, "run_local", run_inline),
        patch.object(os, "fsync", lambda handle: None),
    ):
        yield


@dataclass(frozen=True)
class Target:
    """One of the things that are fuzzed.

    Args:
        bases: valid trees, by name.
        steps: what to do with a tree.
        shape: the share of changes to what kind a file is: a pipe, a link, a folder, nothing.
    """

    bases: Callable[[], dict[str, Tree]]
    steps: list[Step]
    shape: float = 0.15


# Configurations -----------------------------------------------------------------------------------


@cache
def _experiments() -> dict[str, Any]:
    tiny = {**TINY, "methods": dict.fromkeys(("sgd", "er", "syngap", "ewcpp", "joint"))}
    search = {
        "trials": 2,
        "added": [1],
        "rounds": [[0.5, 2]],
        "seeds": [100, 101],
        "stream": {"validation": 0.1},
        "spaces": {
            "sgd": {"lr": {"log": [0.01, 1.0]}},
            "er": {"buffer": {"choose": [1, 9]}, "average": {"decay": [0.9, 0.99], "or": 0.0}},
        },
    }
    arrays = {"name": "npz", "path": "data.npz", "tasks": 2, "batch": 10}
    images = {"name": "folder", "path": "images", "tasks": 2, "batch": 4}
    return {
        **{name: config.read(name) for name in shipped()},
        "tiny": tiny,
        "search_folder": {**TINY, "search": search},
        "arrays": {**TINY, "stream": arrays, "seeds": "0..2"},
        "images": {**TINY, "stream": images, "model": "mlp"},
    }


def _beside() -> Tree:
    """Return what paths in a configuration may lead to."""
    return {"data.npz": _npz(), **{f"images/{c}/{n}.png": _png(n) for c in "ab" for n in range(2)}}


def _configurations() -> dict[str, Tree]:
    return {
        name: {"mine.yaml": yaml.safe_dump(given, sort_keys=False).encode(), **_beside()}
        for name, given in _experiments().items()
    }


def _configured(place: Path) -> None:
    _planned(Experiment.from_mapping(config.read("mine.yaml")), place)


def _settings() -> dict[str, Tree]:
    said = {
        "digits": ["stream.epochs=2", "methods.er.lr=0.3", "seeds=[0, 1]"],
        "tiny": ["model={name: mlp, hidden: [4]}", "training.threads=2", "methods.a={method: er}"],
        "search_folder": ["search.trials=3", "search.spaces.sgd.lr.log=[0.1, 1]"],
        "arrays": ["stream.path=data.npz", "stream.tasks=4", "name=x", "training=null"],
    }
    return {
        name: {"settings.json": json.dumps({"of": name, "set": of}).encode(), **_beside()}
        for name, of in said.items()
    }


def _set(place: Path) -> None:
    if not Path("settings.json").is_file():
        return
    try:
        given = json.loads(Path("settings.json").read_bytes())
        experiment, settings = (
            copy.deepcopy(_experiments()[given["of"]]),
            [str(s)[:2000] for s in given["set"]],
        )
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return  # no settings are left
    _planned(Experiment.from_mapping(with_settings(experiment, settings)), place)


def _planned(experiment: Experiment, place: Path) -> None:
    if Experiment.from_mapping(experiment.as_mapping()) != experiment:
        raise Broken("an experiment does not read back as itself")
    hidden: Any = experiment.model.options.get("hidden", [10**9])
    small = max([1, *hidden]) <= 512 and len(hidden) <= 8 and len(experiment.methods) <= 20
    if small and len(experiment.seeds) <= 100 and experiment.training.device != "cuda":
        buffers: list[Any] = [m.options.get("buffer") or 0 for m in experiment.methods.values()]
        if max(buffers) <= 10_000:
            make_plan(experiment, place / "out", data=place)


# Run folders --------------------------------------------------------------------------------------

DRAWN_EVERY = 50  # inputs: figures take a hundred times as long as all else
_SMALL = {
    "name": "tiny",
    "stream": {"name": "npz", "path": "data.npz", "tasks": 2, "batch": 4},
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"device": "cpu", "evaluate_every": 5, "checkpoint_seconds": 0.0},
    "methods": {"sgd": {"lr": 0.1}, "syngap": {"lr": 0.1, "buffer": 10, "replay": 5}},
    "seeds": [0],
}


def _made(place: Path) -> None:
    """Write an experiment with rows to compare, a landscape and a search."""
    methods = {
        "er": Made("er", options={"lr": 0.1, "buffer": 20}),
        "er_slow": Made("er", options={"lr": 0.01, "buffer": 20}),
        "syngap": Made("syngap", 95, 0.9, layers=("0.weight", "0.bias"), options={"lr": 0.3}),
        "joint": Made("joint"),
    }
    write_experiment(place, methods, seeds=(0, 1), tasks=2, steps=10)
    rows = {row: {"method": made.name, **(made.options or {})} for row, made in methods.items()}
    asked = {"name": "made", "stream": "digits", "model": "mlp", "methods": rows, "seeds": [0, 1]}
    (place / "experiment.yaml").write_text(yaml.safe_dump(asked, sort_keys=False))
    write_made_landscape(place / "landscapes", "syngap", "syngap", points=3)
    write_search(place, {"er": {"lr": 0.1}})


def _packed(place: Path) -> None:
    """Write the same, packed."""
    with tempfile.TemporaryDirectory() as folder:
        _made(Path(folder))
        keep(Path(folder), place)


def _run(place: Path) -> None:
    """Do a small experiment, and leave one of its runs on the way."""
    (place.parent / "data.npz").write_bytes(_npz())
    experiment = Experiment.from_mapping(_SMALL)
    plan = make_plan(experiment, place, data=place.parent)
    with plan.begin():
        for job in plan.jobs:
            _stopped(job) if job.config.row == "syngap" else run_here(job)


class _Stop(Exception):
    pass


def _stopped(job: Any, after: int = 12) -> None:
    steps = iter(range(after))
    reached = FolderJournal.advance

    def counted(self: FolderJournal, step: int) -> bool:
        if next(steps, None) is None:
            raise _Stop
        return reached(self, step)

    FolderJournal.advance = counted  # type: ignore[method-assign]
    try:
        run_here(job)
    except _Stop:
        pass
    finally:
        FolderJournal.advance = reached  # type: ignore[method-assign]


def _runfolders() -> dict[str, Tree]:
    data = {"tiny.yaml": yaml.safe_dump(_SMALL, sort_keys=False).encode(), "data.npz": _npz()}
    found = {}
    for name, make in {"made": _made, "packed": _packed, "run": _run}.items():
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "runs"
            place.mkdir()
            make(place)
            found[name] = {**data, **{f"runs/{path}": held for path, held in read(place).items()}}
    return found


def _read_and_shown(place: Path) -> None:
    runs = read_runs(Path("runs"))
    page(runs, runs[0].row, search_folder=Path("runs"))


def _reported(place: Path) -> None:
    called("report", "runs")


def _drawn(place: Path) -> None:
    if sum(path.lstat().st_size for path in place.rglob("*")) % DRAWN_EVERY == 0:
        called("report", "runs", "--markdown", "--figures", "figures")


def _kept(place: Path) -> None:
    called("keep", "runs", "kept", "--unfinished")
    called("keep", "runs", "--unfinished")
    written = [path for path in Path("kept").rglob("*") if path.is_file()]
    if any(b"secret" in path.read_bytes() for path in written):
        raise Broken("what lies outside of the folder was copied")


def _resumed(place: Path) -> None:
    called("run", "tiny.yaml", "--data", ".", "--out", "runs", "--resume")


# Checkpoints --------------------------------------------------------------------------------------


def _checkpoints() -> dict[str, Tree]:
    (folder,) = [tree for name, tree in _runfolders().items() if name == "run"]
    run = {
        name.removeprefix("runs/"): held
        for name, held in folder.items()
        if name.startswith("runs/syngap-0/")
    }
    return {"stopped": {**run, "data.npz": folder["data.npz"]}}


def _unpacked(place: Path) -> None:
    for path in sorted(place.glob("syngap-0/checkpoint/*")):
        if path.is_file():
            unpack(path.read_bytes())


def _journal(place: Path) -> None:
    folder = place / "syngap-0"
    if folder.is_symlink() or not folder.is_dir() or (folder / "checkpoint").is_symlink():
        return
    shutil.copytree(folder, place / "copy", ignore=_links, copy_function=_plain)
    with FolderJournal(
        place / "copy", steps=20, tasks=2, checkpoint_seconds=1, tell=lambda *_: None
    ) as journal:
        journal.load()


def _links(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_symlink()]


def _plain(source: str, target: str) -> None:
    if Path(source).is_file():
        shutil.copyfile(source, target)


def _continued(place: Path) -> None:
    job = jobs_of(Experiment.from_mapping(_SMALL), place, place)[1]
    if (place / "syngap-0").is_dir() and not (place / "syngap-0").is_symlink():
        engine.attempt(job, lambda event: None)  # which never raises


# Data sets ----------------------------------------------------------------------------------------


def _npz() -> bytes:
    x, y = np.arange(240, dtype=np.float32).reshape(60, 4) / 240, np.arange(60) % 4
    file = io.BytesIO()
    np.savez(file, x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    return file.getvalue()


def _png(shade: int, size: int = 32, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (shade, 2 * shade % 256, 7)).save(file, kind)
    return file.getvalue()


def _archive(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(packed.getvalue(), 1, mtime=0)


def _cifar() -> dict[str, Tree]:
    rows = np.zeros((100, 3074), np.uint8)
    rows[:, 1] = np.arange(100)
    rows[:, 0] = rows[:, 1] % 20
    said = {
        b"filenames": [b"a.png"] * 3,
        b"fine_labels": rows[:, 1].tolist(),
        b"coarse_labels": rows[:, 0].tolist(),
        b"data": rows[:, 2:].copy(),
    }
    binary = {f"cifar-100-binary/{name}.bin": rows.tobytes() for name in ("train", "test")}
    python = {
        f"{protocol}": {
            f"cifar-100-python/{name}": pickle.dumps(said, protocol) for name in ("train", "test")
        }
        for protocol in (2, 4)
    }
    return {
        "binary": dict(binary),
        "python-2": dict(python["2"]),
        "python-4": dict(python["4"]),
        "binary-archive": {"cifar-100-binary.tar.gz": _archive(binary)},
        "python-archive": {"cifar-100-python.tar.gz": _archive(python["2"])},
        "arrays": {"data.npz": _npz()},
    }


def _cifar_read(place: Path) -> None:
    if (place / "data.npz").exists() or (place / "data.npz").is_symlink():
        _streamed("npz", place, path="data.npz", tasks=2)
        return
    _streamed("cifar100", place)
    _streamed("cifar100", place, labels="superclasses")


def _core() -> dict[str, Tree]:
    objects = [1, *range(2, 6), *range(27, 31)]
    frames = [(s, o) for s in (1, 3) for o in objects]
    tree = {f"core50_32x32/s{s}/o{o}/C_{s:02d}_{o:02d}_000.png": _png(o) for s, o in frames}
    lists = "".join(f"s{s}/o{o}/C_{s:02d}_{o:02d}_000.png {o - 1}\n" for s, o in frames).encode()
    kinds = {"webp": "WEBP", "jpg": "JPEG", "bmp": "BMP", "ppm": "PPM", "tif": "TIFF", "png": "PNG"}
    images = {
        f"images/{c}/{n}.{suffix}": _png(9 * n, 8, kind)
        for c in ("a", "b")
        for n, (suffix, kind) in enumerate(kinds.items())
    }
    return {"core50": {**tree, "filelist.txt": lists}, "images": {**images}}


def _core_read(place: Path) -> None:
    if (place / "filelist.txt").is_file():
        lines = (place / "filelist.txt").read_text(encoding="utf-8", errors="surrogateescape")
        parse_frames(lines.splitlines()[:1000], 0)
    if (place / "images").exists():
        _streamed("folder", place, path="images", tasks=1, size=8)
        _streamed("folder", place, path="images", tasks=2)
        return
    _streamed("core50", place, size=32)


def _streamed(name: str, place: Path, **options: Any) -> None:
    stream = load(name, data=place, batch=8, **options)
    for number in random.Random(len(stream)).sample(range(len(stream)), min(3, len(stream))):
        batch = stream[number]
        if not (len(batch.x) == len(batch.y) and batch.x.isfinite().all()):
            raise Broken("a batch that makes no sense")
    stream.test.samples.take(torch.arange(len(stream.test.labels)))


def _below(*folders: str) -> Callable[[str], bool]:
    return lambda path: path.startswith(tuple(f"input/{folder}" for folder in folders))


TARGETS = {
    "configuration": Target(_configurations, [Step("configure", _configured)], shape=0.05),
    "settings": Target(_settings, [Step("set", _set)], shape=0.03),
    "runfolder": Target(
        _runfolders,
        [
            Step("read", _read_and_shown),
            Step("report", _reported, _below("runs/index.html")),
            Step("figures", _drawn, _below("runs/index.html", "figures"), seconds=90.0),
            Step("keep", _kept, _below("kept", "results")),
            Step("resume", _resumed, _below("runs")),
        ],
    ),
    "checkpoint": Target(
        _checkpoints,
        [
            Step("unpack", _unpacked, raises=(ValueError,)),
            Step("load", _journal, _below("copy"), raises=(OSError,)),
            Step("go on", _continued, _below("syngap-0")),
        ],
        shape=0.05,
    ),
    "cifar100": Target(_cifar, [Step("read", _cifar_read)], shape=0.08),
    "core50": Target(_core, [Step("read", _core_read)]),
}
