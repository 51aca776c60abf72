"""The table of results: a CSV file that several processes add rows to."""

from __future__ import annotations

import csv
import fcntl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["COLUMNS", "GROUP", "HALVES", "KEY", "LOSSES", "append", "group_by", "locked", "read"]

HALVES = ("a", "b")  # of a domain's test text
LOSSES = tuple(f"{domain}_{half}" for domain in ("old", "new") for half in HALVES)
COLUMNS = ("size", "parameters", "old", "new", "seed", "pretrain", "method", "values", "steps")
COLUMNS += ("step", "old_loss", "new_loss", *LOSSES, "seconds")
KEY = ("size", "old", "new", "seed", "pretrain", "method", "values", "steps")  # of a run
GROUP = ("size", "old", "new", "pretrain", "steps")  # what seeds are repetitions of
WORDS = ("size", "old", "new", "method", "values")  # columns that hold no numbers


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time work with the file; the lock ends with its process."""
    with path.with_name(path.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a table, numbers as numbers."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v if k in WORDS else float(v) for k, v in row.items()} for row in rows]


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    with locked(path), path.open("a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        if not file.tell():
            table.writeheader()
        table.writerows(rows)


def group_by(rows: list[dict[str, Any]], names: Iterable[str]) -> dict[tuple[Any, ...], list[Any]]:
    """Return the rows by what they say in the columns `names`."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups
