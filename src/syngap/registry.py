"""Names to things: what ships with the package, and what other packages add by entry points.

Another package offers a method, a stream or a network in its own pyproject.toml:

    [project.entry-points."syngap.methods"]
    mine = "my_package.mine:Mine"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from syngap.errors import UserError, nearest

__all__ = ["Registry"]


class Registry:
    """A kind of thing ("method"), where others may add to it, and the built-in ones.

    Things are imported when they are asked for, so a name costs nothing and a broken plug-in hurts
    nobody who does not use it.

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
            where = entries[name].value
            raise UserError(
                f'{self.kind} "{name}" cannot be imported from {where}: {error}'
            ) from error
        return found

    def _entries(self) -> dict[str, EntryPoint]:
        added = {entry.name: entry for entry in entry_points(group=self.group)}
        return {**self._builtin, **{n: e for n, e in added.items() if n not in self._builtin}}
