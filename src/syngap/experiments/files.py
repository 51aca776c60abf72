"""Files that are whole or not there: written beside their place, synced, then renamed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

__all__ = ["sync", "write", "write_json", "write_yaml"]


def write(path: Path, content: bytes) -> None:
    """Put `content` at `path`: whoever reads it, and whenever, finds the old or the new whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Put `value` at `path` as JSON for people and programs."""
    write(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_yaml(path: Path, value: Any) -> None:
    """Put `value` at `path` as YAML, in the order it has."""
    write(path, yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode())


def sync(directory: Path) -> None:
    """Make renames and new names in `directory` survive a loss of power, where that can be asked."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
