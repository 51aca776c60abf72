"""Tensors and folders that several runs of an experiment use: the first to need them makes them.

OUT/shared/NAME-DIGEST/tensors.safetensors   DIGEST is of all that the tensors depend on
OUT/shared/NAME-DIGEST/folder
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from syngap.bench.config.component import Options, Value
from syngap.bench.errors import UserError
from syngap.bench.finetuning.models.language_model import Share, Shared, ShareFolder
from syngap.bench.storage import make_folder, move, remove_tree, write
from syngap.bench.store.records import alone_in
from syngap.bench.training.checkpoint import pack, read_state

__all__ = ["digests", "share_folder_in", "share_in"]

_CHUNK = 1 << 20  # bytes


def share_in(
    out: Path, depends_on: Mapping[str, Value], any_seed_on: Mapping[str, Value] | None = None
) -> Share:
    """Return what keeps tensors for all runs in `out`.

    Args:
        out: the folder of the experiment.
        depends_on: what tensors of other values may not be taken for.
        any_seed_on: likewise for tensors that are the same for all seeds.
    """

    def share(
        name: str, make: Callable[[], Mapping[str, Tensor]], *, any_seed: bool = False
    ) -> Shared:
        folder = _place(out, name, (any_seed_on or {}) if any_seed else depends_on)
        path = folder / "tensors.safetensors"
        with alone_in(folder, wait=True, quiet=True):
            if not path.is_file():
                began = time.monotonic()
                tensors = {key: tensor.detach().cpu() for key, tensor in make().items()}
                seconds = time.monotonic() - began
                write(path, pack({"tensors": tensors, "seconds": seconds}), within=out)
        try:
            found = read_state(path)
            return Shared(found["tensors"], float(found["seconds"]))
        except UserError:
            raise
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}: damaged ({error}); remove it to make it again") from error

    return share


def share_folder_in(out: Path, depends_on: Mapping[str, Value]) -> ShareFolder:
    """Return what keeps folders for all runs in `out`.

    Args:
        out: the folder of the experiment.
        depends_on: what folders of other values may not be taken for.
    """

    def share(name: str, make: Callable[[Path], None]) -> Path:
        place = _place(out, name, depends_on)
        folder, partial = place / "folder", place / "partial"
        with alone_in(place, wait=True, quiet=True):
            if not folder.is_dir():
                remove_tree(partial, within=out)  # of a process that was killed
                make_folder(partial, within=out)
                make(partial)
                move(partial, folder, within=out)
        return folder

    return share


def digests(options: Options, data: Path | None) -> dict[str, Value]:
    """Return a digest of each file that options name in the folder of data.

    Of a folder all files in it count, with the tokenizer's: what is made from a model depends on
    every one. Hidden files and folders within do not.
    """
    found: dict[str, Value] = {}
    for name in options.values():
        for path in _files((data or Path()) / name) if isinstance(name, str) and name else ():
            state = path.stat()
            found[f"{name}/{path.name}"] = _digest(path, state.st_size, state.st_mtime_ns)
    return found


def _files(place: Path) -> list[Path]:
    try:
        if not place.is_dir():
            return [place] if place.is_file() else []
        inside = sorted(place.iterdir())
        return [path for path in inside if path.is_file() and not path.name.startswith(".")]
    except OSError:  # a text that is no path
        return []


@lru_cache(maxsize=1024)  # runs of one process read each file once, as long as it is the same
def _digest(path: Path, size: int, changed: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()[:12]


def _place(out: Path, name: str, depends_on: Mapping[str, Value]) -> Path:
    """Return the folder of what has this name and depends on these values."""
    text = json.dumps({"name": name, **depends_on}, sort_keys=True)
    place = out / "shared" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    make_folder(place, within=out)
    return place
