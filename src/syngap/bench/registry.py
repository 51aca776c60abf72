"""Registries of names: what ships with the package, and what others add by entry points.

Another package offers a method, a stream or a network in its own pyproject.toml:

    [project.entry-points."syngap.methods"]
    mine = "my_package.mine:Mine"
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from syngap.bench.errors import UserError
from syngap.messages import nearest

__all__ = ["Registry", "import_extra", "import_or_refuse"]


class Registry:
    """The entries of one kind ("method"): built-in ones and those of plug-ins.

    Entries are imported on use, so a name costs nothing and a broken plug-in fails only for those
    who use it.

    Args:
        kind: what messages call it.
        group: the entry point group.
        builtin: name to "module:attribute".
    """

    def __init__(self, kind: str, group: str, builtin: Mapping[str, str]) -> None:
        self.kind, self.group = kind, group
        self._builtin = {name: EntryPoint(name, at, group) for name, at in builtin.items()}

    def names(self) -> list[str]:
        """Return every name that `get` knows, those of this package first."""
        return list(self._entries())

    def get(self, name: str) -> Callable[..., Any]:
        """Import and return what `name` stands for; UserError where nothing does."""
        entries = self._builtin if name in self._builtin else self._entries()
        if name not in entries:
            hint = nearest(name, entries) or f"; there are {', '.join(entries)}"
            raise UserError(f'unknown {self.kind} "{name}"{hint}')
        try:
            found: Callable[..., Any] = entries[name].load()
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise UserError(
                f'{self.kind} "{name}" cannot be imported from {entries[name].value}: {reason}'
            ) from error
        return found

    def _entries(self) -> dict[str, EntryPoint]:
        added = _added(self.group, tuple(sys.path))
        return {**self._builtin, **{n: e for n, e in added.items() if n not in self._builtin}}


@cache  # it reads a file of every installed package
def _added(group: str, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=group)}


def import_or_refuse(module: str, needed_by: str, install: str) -> Any:
    """Import and return `module`; UserError with the reason where that fails.

    Only where a module is missing does the message say how to install it: one that is there and
    fails (no memory for its threads, a library of another version) is not mended by that.

    Args:
        module: with its package, "sklearn.datasets".
        needed_by: what needs it, such as an option; the message begins with it.
        install: the command that brings it.

    Examples:
        >>> import_or_refuse("nowhere", "--log", "pip install nowhere")
        Traceback (most recent call last):
        syngap.bench.errors.UserError: --log: No module named 'nowhere'; ...
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{needed_by}: {error}; {install} brings it") from error
    except Exception as error:  # a broken package raises anything
        reason = str(error) or type(error).__name__
        raise UserError(
            f"{needed_by}: {module} is installed, but importing it fails ({reason})"
        ) from error


def import_extra(module: str, extra: str) -> Any:
    """Import and return `module`; UserError with the extra to install, or why it fails.

    Examples:
        >>> import_extra("json.decoder", "ray").__name__
        'json.decoder'
    """
    return import_or_refuse(module, extra, f"pip install 'syngap[{extra}]'")
