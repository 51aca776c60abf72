"""Options are the keyword-only arguments of whatever is configured, checked against their types.

A method, stream or network is a callable; its keyword-only arguments with their annotations and
defaults are all there is to say about its options, so adding one touches one file. The names below
are annotations whose violation reads well: `lr: Positive` answers `got "fast", expected a positive
number`.

Whatever its type, a value must be one that a file can hold (`plain`), since it is recorded, and a
number must be one that a network can compute with.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from syngap.bench.errors import UserError
from syngap.messages import nearest

__all__ = [
    "Count",
    "Natural",
    "NonNegative",
    "Positive",
    "Proportion",
    "Retention",
    "Seed",
    "Share",
    "check_value",
    "checked",
    "defaults",
    "plain",
    "signature",
]

LARGEST_INTEGER = 1 << 63  # whole numbers, either way
SMALLEST, LARGEST = 1e-30, 1e30  # of numbers: 32 bits, with room for products of two or three
LARGEST_SEED = (1 << 32) - 1  # which every random number generator takes; torch's takes more
DEEPEST = 64  # values within values


@dataclass(frozen=True)
class Says:
    """How a message names what a type allows."""

    text: str


Count: TypeAlias = Annotated[int, Ge(1), Says("a whole number ≥ 1")]
Natural: TypeAlias = Annotated[int, Ge(0), Says("a whole number ≥ 0")]
Seed: TypeAlias = Annotated[
    int, Ge(0), Le(LARGEST_SEED), Says(f"a whole number from 0 to {LARGEST_SEED}")
]
Positive: TypeAlias = Annotated[float, Gt(0), Says("a positive number")]
NonNegative: TypeAlias = Annotated[float, Ge(0), Says("a number ≥ 0")]
Share: TypeAlias = Annotated[float, Ge(0), Le(1), Says("a number between 0 and 1")]
Proportion: TypeAlias = Annotated[float, Gt(0), Lt(1), Says("a number above 0 and below 1")]
Retention: TypeAlias = Annotated[float, Ge(0), Lt(1), Says("a number from 0 to below 1")]

_SAYS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def signature(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return name → (type, default) of the keyword-only arguments of `function`.

    A class whose constructor also takes **others passes them on to its parent's, so it has the
    parent's options too, unless it has its own of that name.

    Examples:
        >>> class Parent:
        ...     def __init__(self, model, *, lr: Positive = 0.1, buffer: Natural = 50): ...
        >>> class Child(Parent):
        ...     def __init__(self, model, *, buffer: Natural = 0, **others): ...
        >>> {name: default for name, (_, default) in signature(Child).items()}
        {'lr': 0.1, 'buffer': 0}
    """
    if not inspect.isclass(function):
        return dict(_keyword_only(function)[0])
    options: dict[str, tuple[Any, Any]] = {}
    for kind in function.__mro__:
        if "__init__" in vars(kind):
            own, passes_on = _keyword_only(vars(kind)["__init__"])
            options = {**own, **options}
            if not passes_on:
                break
    return options


@cache
def _keyword_only(function: Callable[..., Any]) -> tuple[Mapping[str, tuple[Any, Any]], bool]:
    """Return the keyword-only arguments, and whether there are **others."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    own = {
        parameter.name: (hints.get(parameter.name, Any), parameter.default)
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return own, any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of `function` that have a default, with it."""
    return {
        name: default
        for name, (_, default) in signature(function).items()
        if default is not inspect.Parameter.empty
    }


def checked(
    raw: Mapping[str, Any], allowed: Mapping[str, tuple[Any, Any]], path: str
) -> dict[str, Any]:
    """Return `raw`, completed by the defaults, with every value of its type.

    Raises a UserError that names the option by `path`, says what was given and what is expected.

    Examples:
        >>> def method(model, *, lr: Positive = 0.1): ...
        >>> checked({}, signature(method), "methods.er")
        {'lr': 0.1}
        >>> checked({"lr": "fast"}, signature(method), "methods.er")
        Traceback (most recent call last):
        syngap.bench.errors.UserError: methods.er.lr: got "fast", expected a positive number
    """
    for name in raw:
        if name not in allowed:
            hint = nearest(str(name), allowed) or f"; there are {', '.join(allowed) or 'none'}"
            raise UserError(f"{path}.{named(name)}: unknown option{hint}")
    complete = {}
    for name, (kind, default) in allowed.items():
        if name in raw:
            complete[name] = check_value(raw[name], kind, f"{path}.{name}")
        elif default is inspect.Parameter.empty:
            raise UserError(f"{path}.{name}: missing, expected {expected(kind)}")
        else:
            complete[name] = copy.deepcopy(default)
    return complete


def expected(kind: Any) -> str:
    """Return in words what a value of the type `kind` is.

    Examples:
        >>> expected(Literal["network", "tensor"])
        'one of "network", "tensor"'
        >>> expected(list[Count])
        'a list, each a whole number ≥ 1'
    """
    if get_origin(kind) is Annotated:
        said = [part.text for part in get_args(kind) if isinstance(part, Says)]
        return said[0] if said else expected(get_args(kind)[0])
    if get_origin(kind) is Literal:
        values = [json.dumps(value) for value in get_args(kind)]
        return f"one of {', '.join(values)}" if values[1:] else values[0]
    if get_origin(kind) in (Union, types.UnionType):
        parts = [
            "nothing (null)" if part is type(None) else expected(part) for part in get_args(kind)
        ]
        return " or ".join(parts)
    if get_origin(kind) in (list, tuple):
        inner = [part for part in get_args(kind) if part is not ...]
        return f"a list, each {expected(inner[0])}" if inner else "a list"
    return _SAYS.get(kind, f"a {getattr(kind, '__name__', kind)}")


def shown(value: Any) -> str:
    """Return `value` as it would stand in a configuration, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # dates as keys, a YAML alias of itself
        try:
            text = repr(value)
        except ValueError:  # Python writes no number of more than 4300 digits
            text = "a value too long to write"
    return _line(text)


def named(key: Any) -> str:
    """Return `key` as a message can name it, cut where it is long."""
    return _line(str(key))


def _line(text: str) -> str:
    text = text if len(text) <= 80 else text[:77] + "..."
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)


def check_value(raw: Any, kind: Any, path: str) -> Any:
    """Return `raw` as a value of the type `kind`; UserError where it is none.

    Args:
        raw: from a file, the command line or Python.
        kind: a type, such as `Count`.
        path: what a message calls it, such as "stream.batch" or "--workers".

    Examples:
        >>> check_value("8", Count, "--workers")
        8
        >>> check_value(2**64, Count, "--workers")
        Traceback (most recent call last):
        syngap.bench.errors.UserError: --workers: got 18446744073709551616, expected ...
    """

    def refused(reason: str = "") -> UserError:
        return UserError(f"{path}: got {shown(raw)}, expected {expected(kind)}{reason}")

    parts = raw if isinstance(raw, list) else [raw]
    if any(isinstance(part, bool) for part in parts) and not _takes_bool(kind):
        raise refused()  # pydantic would read true as 1.0
    try:
        value = _adapter_of(kind).validate_python(raw)
    except ValidationError:  # says in Python's words what the message says in the user's
        raise refused() from None
    try:
        plain(value)
        _check_floats(value)
    except ValueError as error:
        raise refused(f"; {error}") from error
    return value


def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    try:
        return _adapter(kind)
    except TypeError:  # annotated with something that has no hash
        return _adapter.__wrapped__(kind)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


def plain(value: Any, depth: int = 0) -> Any:
    """Return `value` where it is made of what both YAML and JSON know; ValueError otherwise.

    That is mappings from text, lists, text, true and false, nothing, and numbers: finite ones, and
    whole ones of 64 bits. It is the one rule for what is written and for what is read back.
    """
    if depth > DEEPEST:
        raise ValueError(f"values within values, more than {DEEPEST} deep")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{key!a:.80} is no name")
            key.encode()
        return {key: plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, depth + 1) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    if isinstance(value, int) and not -LARGEST_INTEGER <= value < LARGEST_INTEGER:
        raise ValueError("a whole number has at most 64 bits")
    if isinstance(value, str):
        value.encode()  # which half a character cannot be
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"a {type(value).__name__} is no plain value")


def _check_floats(value: Any) -> None:
    """Refuse numbers that overflow, or vanish, in the 32 bits that networks compute in."""
    for leaf in _leaves(value):
        if isinstance(leaf, float) and leaf and not SMALLEST <= abs(leaf) <= LARGEST:
            raise ValueError(f"a number is 0, or between {SMALLEST} and {LARGEST} in size")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _takes_bool(kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(isinstance(value, bool) for value in get_args(kind))
    return kind in (bool, Any) or any(_takes_bool(part) for part in get_args(kind))
