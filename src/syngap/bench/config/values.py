"""The parts of a configuration as they are given: what each may be, with errors that name it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from syngap.bench import methods
from syngap.bench.config.component import Component
from syngap.bench.config.reading import is_name
from syngap.bench.errors import UserError
from syngap.bench.options import LARGEST_SEED, checked, shown, signature
from syngap.bench.registry import Registry

__all__ = [
    "EXPERIMENT",
    "METHODS",
    "mapping_of",
    "method_and_options",
    "method_of",
    "name_of",
    "options_of",
    "part_of",
    "seeds_in",
    "seeds_of",
]

# What messages show as an example. Experiments of either kind take these methods.
METHODS = "{sgd: {lr: 0.1}}"
EXPERIMENT = f"{{stream: digits, model: mlp, methods: {METHODS}}}"


def part_of(raw: Any, path: str, names: Sequence[str], options: Any) -> Component:
    """Return the stream or network that is meant, complete.

    Args:
        raw: its name, or its name and options.
        path: what messages call it.
        names: those it may have.
        options: from a name to the options that go with it.
    """
    raw = (
        {"name": raw}
        if isinstance(raw, str)
        else dict(mapping_of(raw, path, f"{{name: {names[0]}}}"))
    )
    name = raw.pop("name", None)
    if not isinstance(name, str) or not name.isprintable():
        raise UserError(f"{path}.name: got {shown(name)}, expected one of {', '.join(names)}")
    try:
        allowed = options(name)
    except UserError as error:
        raise UserError(f"{path}.name: {error}") from error
    return Component(name, checked(raw, allowed, path))


def method_of(row: Any, raw: Any) -> Component:
    """Return the method of a row with all of its options."""
    name, kind, raw = method_and_options(row, raw, methods.registry)
    return Component(name, checked(raw, signature(kind), f"methods.{row}"))


def method_and_options(row: Any, raw: Any, known: Registry) -> tuple[str, Any, dict[str, Any]]:
    """Return the name of a row's method, the method, and the options that it is given."""
    raw = dict(options_of(raw, f"methods.{row}", "{lr: 0.1}"))
    name = raw.pop("method", row)
    if not isinstance(name, str) or not name.isprintable():
        raise UserError(f"methods.{row}.method: got {shown(name)}, expected a method's name")
    try:
        return name, known.get(name), raw
    except UserError as error:
        raise UserError(f"methods.{row}: {error}") from error


def seeds_in(raw: Any, path: str = "seeds") -> list[int]:
    """Return the seeds that a list, a number or text such as "0..4" means."""
    if isinstance(raw, str):
        return seeds_of(raw, path)
    raw = [raw] if isinstance(raw, int) else raw
    right = (
        isinstance(raw, list)
        and raw
        and all(
            isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed <= LARGEST_SEED
            for seed in raw
        )
    )
    if not right or len(set(raw)) != len(raw):
        raise UserError(
            f"{path}: got {shown(raw)}, expected different whole numbers ≥ 0 and "
            f"≤ {LARGEST_SEED}, such as [0, 1, 2]"
        )
    return list(raw)


def seeds_of(text: str, path: str = "seeds") -> list[int]:
    """Return the seeds that "0..4" or "0,3,7" means.

    Examples:
        >>> seeds_of("0..4"), seeds_of("3")
        ([0, 1, 2, 3, 4], [3])
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,10})(?:\.\.([0-9]{1,10}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first >= 10_000:
            raise UserError(f"{path}: got {shown(text)}, expected numbers such as 0..4 or 0,1,2")
        seeds += range(first, last + 1)
    return seeds_in(seeds, path)


def options_of(raw: Any, path: str, example: str) -> dict[str, Any]:
    """Return a mapping that may be left empty."""
    return {} if raw is None else mapping_of(raw, path, example)


def mapping_of(raw: Any, path: str, example: str) -> dict[str, Any]:
    """Return `raw` where it is a mapping; UserError, which shows the example, otherwise."""
    if not isinstance(raw, dict):
        got = "nothing" if raw is None else shown(raw)
        raise UserError(f"{path}: got {got}, expected names with values, such as {example}")
    return raw


def name_of(raw: Any, path: str) -> str:
    """Return `raw` where it can name a folder; UserError otherwise."""
    if not is_name(raw):
        raise UserError(f"{path}: got {shown(raw)}, expected a name of letters, digits and _ . + -")
    return str(raw)
