"""Tensors and folders that several runs of an experiment use: the first to need them makes them.

OUT/shared/NAME-DIGEST/tensors.safetensors   DIGEST is of all that the tensors depend on
OUT/shared/NAME-DIGEST/folder
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from syngap.bench.config.component import Options, Value, entry
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
    """Return a digest of each file that a model is read from.

    These are its option `file`, and the files in its option `folder`: the tokenizer's too, because
    what is made from a model depends on them. Folders within, hidden files and descriptions (*.md)
    do not count. Where the option `gguf` names a file in the folder, other *.gguf do not either.

    Args:
        options: of the model.
        data: the folder that models are in; None is the current one.
    """
    home, found = data or Path(), dict[str, Value]()
    for name in sorted(_names(options, home)):
        path = home / name
        if os.path.isfile(path):  # False too for a text that is no path
            state = path.stat()
            found[name] = _digest(path, state.st_size, state.st_mtime_ns)
    return found


def _names(options: Options, home: Path) -> set[str]:
    """Return the names of what a model may be read from, files and folders."""
    file, folder, gguf = (entry(options, name, str) for name in ("file", "folder", "gguf"))
    found = {file} if file else set()
    if folder is not None:
        left_out = {".md", ".gguf"} if gguf else {".md"}
        inside = os.listdir(home / folder) if os.path.isdir(home / folder) else []
        kept = {
            name
            for name in inside
            if not name.startswith(".") and Path(name).suffix.lower() not in left_out
        }
        found |= {str(Path(folder, name)) for name in kept | ({gguf} if gguf else set())}
    return found


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
