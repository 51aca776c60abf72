"""An input is a small tree of files, kept as what it changes in a tree that the target makes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

OUTSIDE = "{outside}"  # in a link: the folder beside the tree, which nothing may change


class Special(NamedTuple):
    """What is no plain file: a "folder", a "fifo", or a "link" to somewhere."""

    kind: str
    to: str = ""


Entry: TypeAlias = bytes | Special
Tree: TypeAlias = dict[str, Entry]


def write(tree: Tree, place: Path, outside: Path) -> None:
    """Make the folder `place` be `tree`; what no file system can hold is left out."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, entry in tree.items():
        path = place / name
        try:
            if any(parent.is_symlink() for parent in [path, *path.parents][:-1]):
                continue  # it would be written elsewhere
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(entry, bytes):
                path.write_bytes(entry)
            elif entry.kind == "folder":
                path.mkdir()
            elif entry.kind == "fifo":
                os.mkfifo(path)
            else:
                path.symlink_to(entry.to.replace(OUTSIDE, str(outside)))
        except (OSError, ValueError):
            continue


def read(place: Path) -> Tree:
    """Return the plain files beneath `place`."""
    found = sorted(path for path in place.rglob("*") if path.is_file())
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in found}


def snapshot(place: Path) -> dict[str, tuple[int, ...]]:
    """Return what tells a change of anything beneath `place`, links not followed."""
    found: dict[str, tuple[int, ...]] = {}
    waiting = [str(place)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                said = entry.stat(follow_symlinks=False)
                folder = entry.is_dir(follow_symlinks=False)
                times = (0, 0) if folder else (said.st_size, said.st_mtime_ns)
                found[entry.path] = (said.st_mode, said.st_ino, *times)
                if folder:
                    waiting.append(entry.path)
    return found


# Corpus -------------------------------------------------------------------------------------------


def corpus(path: Path, bases: Mapping[str, Tree]) -> dict[str, Tree]:
    """Return the inputs in a file of the corpus, a line each, by their names."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = {json.loads(line)["name"]: loaded(line, bases) for line in lines}
    if len(found) != len(lines):
        raise ValueError(f"{path}: two inputs have the same name")
    return found


def dumped(tree: Tree, bases: Mapping[str, Tree], name: str = "") -> str:
    """Return the line that `loaded` makes `tree` of: what it changes in the base nearest to it."""
    base = min(bases, key=lambda name: len(_changes(tree, bases[name])))
    changes = {name: _encoded(tree.get(name)) for name in sorted(_changes(tree, bases[base]))}
    return json.dumps({"name": name, "base": base, "changes": changes}, ensure_ascii=True) + "\n"


def loaded(text: str, bases: Mapping[str, Tree]) -> Tree:
    """Return the tree that `dumped` was given."""
    found = json.loads(text)
    tree = dict(bases[found["base"]])
    for name, change in found["changes"].items():
        tree.pop(name, None)
        if change is not None:
            tree[name] = _decoded(change)
    return tree


def _changes(tree: Tree, base: Tree) -> list[str]:
    return [name for name in {**base, **tree} if tree.get(name) != base.get(name)]


def _encoded(entry: Entry | None) -> Any:
    if entry is None:
        return None
    if isinstance(entry, Special):
        return {entry.kind: entry.to}
    try:
        return {"text": entry.decode()} if len(entry) < 2000 else {"zlib": _packed(entry)}
    except UnicodeDecodeError:
        return {"zlib": _packed(entry)}


def _packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 9)).decode()


def _decoded(change: Mapping[str, str]) -> Entry:
    ((kind, content),) = change.items()
    if kind == "text":
        return content.encode()
    if kind == "zlib":
        return zlib.decompress(base64.b64decode(content))
    return Special(kind, content)
