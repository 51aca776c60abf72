"""Removing runs: the files that syngap wrote, one by one, and nothing else that lies there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from syngap.bench.errors import UserError
from syngap.bench.storage import check_inside, clean, remove, remove_empty
from syngap.bench.store.folder_reader import read_yaml
from syngap.bench.store.layout import (
    ACCURACY,
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    ERROR,
    METRICS,
    STATUS,
)

__all__ = ["is_run_of", "remove_checkpoints", "remove_run"]

_CHECKPOINTS = ("step-*.safetensors", "weights.safetensors")
_FILES = (
    *(ACCURACY, METRICS, ERROR, "landscape.json", "events.out.tfevents.*"),
    *(STATUS, ENVIRONMENT, CONFIG),  # the last: without it there is no run
)


def is_run_of(experiment: str, folder: Path) -> bool:
    """Return whether `folder` itself, and no link to it, holds a run of `experiment`.

    Its config.yaml says so: it is one that this version reads, and names the row and the seed that
    the folder is named after.
    """
    if folder.is_symlink():
        return False
    try:
        config = read_yaml(folder / CONFIG)
    except UserError:
        return False
    row, seed = config.get("row"), config.get("seed")
    if not isinstance(row, str) or type(seed) is not int:
        return False
    named = re.fullmatch(rf"{re.escape(row)}(?:-trial\d+)?-{seed}", folder.name)
    return named is not None and config.get("experiment", experiment) == experiment


def remove_checkpoints(folder: Path, *, within: Path) -> None:
    """Remove what a run in `folder` keeps in checkpoint/, and that folder where it is empty then.

    Args:
        folder: of the run.
        within: the folder that the user named.
    """
    _remove_files(folder / CHECKPOINTS, _CHECKPOINTS, within)


def remove_run(folder: Path, loggers: Iterable[str] = (), *, within: Path) -> list[Path]:
    """Remove the files of the run in `folder`, and the folder itself where it is empty then.

    Checkpoints go first: a kill may leave a run without a past, but none with another's.

    Args:
        folder: of the run.
        loggers: names of those that may have left a mark there.
        within: the folder that the user named.

    Returns:
        What else is there, which stays.
    """
    if not (folder / CHECKPOINTS).is_symlink():
        remove_checkpoints(folder, within=within)
    marks = [f".{name}" for name in loggers]
    _remove_files(folder, (*marks, *_FILES), within)
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _remove_files(folder: Path, patterns: tuple[str, ...], within: Path) -> None:
    check_inside(folder / "inside", within)
    if not folder.is_dir():
        return
    clean(folder, within=within)
    for path in _matching(folder, patterns):
        remove(path, within=within)
    remove_empty(folder, within=within)


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    """Give the files of such names in the order of the patterns; a folder is none of ours."""
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if path.is_symlink() or not path.is_dir():
                yield path
