"""Rows that `--set methods.ROW.option=value` adds: which there may be, and their other options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from syngap.bench.errors import UserError
from syngap.bench.options import named, shown
from syngap.messages import nearest

__all__ = ["check_rows", "complete_rows"]

_MEMORY = ("buffer", "replay")  # options that a fair comparison gives all rows alike


def check_rows(rows: Mapping[Any, Any], before: Any, names: Sequence[str]) -> None:
    """Refuse rows that a setting added by mistyping one that was there.

    Args:
        rows: with the settings put in.
        before: what stood under `methods` without them.
        names: of all methods.
    """
    known = [str(row) for row in before] if isinstance(before, dict) else []
    for row, options in rows.items():
        new = isinstance(options, dict) and "method" in options
        if not new and str(row) not in (*known, *names):
            hint = nearest(str(row), known) or (
                f"; expected methods.ROW.lr, rows are {', '.join(map(named, known))}. To add a "
                f"row, name its method: --set methods.{named(row)}.method=METHOD"
            )
            raise UserError(f"methods.{named(row)}: unknown{hint}")


def complete_rows(
    rows: Mapping[str, Any],
    before: Any,
    changed: Sequence[str],
    say: Callable[[str], None],
    options_of: Callable[[str], Collection[str]],
) -> dict[str, Any]:
    """Return the rows, where a new one has the missing options of the row of its method.

    So `--set methods.er_slow.method=er --set methods.er_slow.lr=0.03` differs from the row `er` in
    its rate alone. Where the experiment has no such row, the defaults of the method are used.

    Args:
        rows: with the settings put in.
        before: what stood under `methods` without them.
        changed: the rows that settings name.
        say: gets a line for every new row: where its options come from.
        options_of: returns the names of the options that a method has.

    Examples:
        >>> rows = {"er": {"buffer": 50}, "er_slow": {"method": "er", "lr": 0.03}}
        >>> before = {"er": {"buffer": 50}}
        >>> complete_rows(rows, before, ["er_slow"], print, lambda method: ())["er_slow"]
        methods.er_slow: new row, method er. It takes from the row er: buffer=50.
        {'buffer': 50, 'method': 'er', 'lr': 0.03}
    """
    known = before if isinstance(before, dict) else {}
    complete = dict(rows)
    for row in dict.fromkeys(changed):
        options = rows.get(row)
        if row in known or row not in rows or not isinstance(options, dict | None):
            continue
        options = options or {}
        method = options.get("method", row)
        like = known.get(method) if isinstance(method, str) and method != row else None
        if not isinstance(like, dict) or like.get("method", method) != method:
            like = {}
        taken = {name: value for name, value in like.items() if name not in options}
        complete[row] = {**like, **options}
        source = "Options that are not set have the method's defaults."
        missing = {*options_of(str(method))} - complete[row].keys()
        if others := _of_memories(known, missing):
            source += f" Other rows have {_listed(others)}."
        if taken := {name: value for name, value in taken.items() if name != "method"}:
            source = f"It takes from the row {named(method)}: {_listed(taken)}."
        say(f"methods.{named(row)}: new row, method {named(method)}. {source}")
    return complete


def _of_memories(rows: Mapping[Any, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the options of memories, of these names, that all rows which have them share."""
    shared = {}
    for name in (name for name in _MEMORY if name in names):
        values = [row[name] for row in rows.values() if isinstance(row, dict) and name in row]
        if values and all(value == values[0] for value in values):
            shared[name] = values[0]
    return shared


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{named(name)}={shown(value)}" for name, value in options.items())
