"""Names of rows for people, read off their configuration."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from syngap.errors import printable
from syngap.experiments.config import complete_method

__all__ = ["labels"]

_METHODS = {
    "adam": "Adam",
    "ballistic": "Ballistic",
    "derpp": "DER++",
    "er": "ER",
    "er_ace": "ER-ACE",
    "ewcpp": "EWC++",
    "joint": "Joint",
    "sgd": "SGD",
    "sgdm": "SGDM",
    "syngap": "SynGAP",
}
_LONG = 100  # characters
_OF_A_MEMORY = ("buffer", "replay", "memory")


def labels(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return row → its label: the method, and what sets the row apart from the method's own row.

    A row that has its method's name is the method's own. Without one, a label says the options in
    which the method's rows differ; of one that came later than a run, the run has the default. An
    average is always said, because it changes what is judged. What would be too long is the row's
    name.

    Args:
        methods: row → the method's options, its name among them.

    Examples:
        >>> own, other = {"name": "er", "lr": 0.3}, {"name": "er", "lr": 0.01}
        >>> labels({"er": own, "er_slow": other})
        {'er': 'ER', 'er_slow': 'ER, lr 0.01'}
    """
    found = {row: _label(row, options, methods) for row, options in methods.items()}
    often = Counter(found.values())
    return {
        row: f"{label} ({row})" if often[label] > 1 and row != methods[row]["name"] else label
        for row, label in found.items()
    }


def _label(row: str, options: Mapping[str, Any], methods: Mapping[str, Mapping[str, Any]]) -> str:
    method = options["name"]
    called = _METHODS.get(method, str(method))
    averaged = {"average": options["average"]} if options.get("average") else {}
    if row == method:
        return ", ".join([called, *_said(averaged)])
    same = {name: other for name, other in methods.items() if other["name"] == method}
    others = [same[method]] if method in same else list(same.values())
    others = [complete_method(other) for other in others]
    apart = {
        option: value
        for option, value in complete_method(options).items()
        if any(option in other and other[option] != value for other in others)
    }
    label = ", ".join([called, *_said(apart | averaged)])
    return label if len(label) <= _LONG else f"{called} ({row})"


def _said(options: Mapping[str, Any]) -> list[str]:
    if options.get("buffer") == 0:  # and so nothing that is about a memory matters
        rest = {name: value for name, value in options.items() if name not in _OF_A_MEMORY}
        return ["alone", *_said(rest)]
    return [_option(name, value) for name, value in options.items()]


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if value is None:
        return f"no {name}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(f"{name} {text}")
