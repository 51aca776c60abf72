"""A stream, a network or a method of an experiment: its name and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

__all__ = ["Component", "Options", "Value", "entry"]

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"
"""What both YAML and JSON know."""

Options: TypeAlias = Mapping[str, Value]
"""Names with values: which there are depends on the plug-in that they configure."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Component:
    """A stream, a network or a method.

    Args:
        name: in its registry.
        options: its keyword-only arguments.

    Examples:
        >>> er = Component("er", {"lr": 0.1})
        >>> er.with_options({"lr": 0.3}).as_mapping()
        {'name': 'er', 'lr': 0.3}
    """

    name: str
    options: Options = field(default_factory=dict)

    @classmethod
    def from_mapping(cls, found: Mapping[str, Any]) -> Component:
        """Return the component that a file describes: its name among its options."""
        return cls(found["name"], {key: value for key, value in found.items() if key != "name"})

    def as_mapping(self) -> dict[str, Value]:
        """Return the options, with the name first, as files hold them."""
        return {"name": self.name, **self.options}

    def with_options(self, changes: Options) -> Component:
        """Return the same component with some of its options changed."""
        return replace(self, options={**self.options, **changes})


def entry(entries: Options, name: str, *kinds: type[_T]) -> _T | None:
    """Return the value of that name where it is of one of these types, else None.

    Examples:
        >>> entry({"cores": 2, "device": "cpu"}, "cores", int)
        2
    """
    value = entries.get(name)
    return value if isinstance(value, kinds) else None
