"""Names of rows for a reader: the method, and the options in which it differs from others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from syngap.bench.config.experiment import complete_method
from syngap.bench.errors import printable

__all__ = ["labels"]

_METHODS = {
    "adam": "Adam",
    "agem": "A-GEM",
    "ballistic": "Ballistic",
    "cls_er": "CLS-ER",
    "derpp": "DER++",
    "er": "ER",
    "er_ace": "ER-ACE",
    "ewcpp": "EWC++",
    "gated_derpp": "SynGAP on DER++",
    "gated_er_ace": "SynGAP on ER-ACE",
    "joint": "Joint",
    "lwf": "LwF",
    "mas": "MAS",
    "scr": "SCR",
    "sgd": "SGD",
    "sgdm": "SGDM",
    "si": "SI",
    "syngap": "SynGAP",
}
_LONGEST_LABEL = 45  # characters
_MEMORY_OPTIONS = ("buffer", "replay", "memory")


def labels(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return row → label: the method, and the options that differ from the method's own row.

    The method's own row is the one with the method's name. Without it, a label has the options in
    which the method's rows differ. A run that is older than an option has the option's default. An
    average and directions are always in the label. A label that would be too long is the row's
    name.

    Args:
        methods: row → the method's options, its name among them.

    Examples:
        >>> own, other = {"name": "er", "lr": 0.3}, {"name": "er", "lr": 0.01}
        >>> labels({"er": own, "er_slow": other})
        {'er': 'ER', 'er_slow': 'ER, lr 0.01'}
        >>> labels({"mine": {"name": "syngap", "directions": True, "average": "auto"}})
        {'mine': 'SynGAP along directions, average auto'}
    """
    found = {row: _label(row, options, methods) for row, options in methods.items()}
    often = Counter(found.values())
    return {
        row: f"{label} ({row})" if often[label] > 1 and row != methods[row]["name"] else label
        for row, label in found.items()
    }


def _label(row: str, options: Mapping[str, Any], methods: Mapping[str, Mapping[str, Any]]) -> str:
    name = options["name"]
    along = " along directions" if options.get("directions") else ""
    method = f"{_METHODS.get(name, str(name))}{along}"
    average = {"average": options["average"]} if options.get("average") else {}
    if row == name:
        return ", ".join([method, *_option_texts(average)])
    same = {other: its for other, its in methods.items() if its["name"] == name}
    others = [complete_method(its) for its in ([same[name]] if name in same else same.values())]
    differing = {
        option: value
        for option, value in complete_method(options).items()
        if option != "directions"
        and any(option in other and other[option] != value for other in others)
    }
    label = ", ".join([method, *_option_texts(differing | average)])
    return label if len(label) <= _LONGEST_LABEL else f"{method} ({row})"


def _option_texts(options: Mapping[str, Any]) -> list[str]:
    if options.get("buffer") == 0:  # then no option of the memory matters
        rest = {name: value for name, value in options.items() if name not in _MEMORY_OPTIONS}
        return ["alone", *_option_texts(rest)]
    return [_option_text(name, value) for name, value in options.items()]


def _option_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if value is None:
        return f"no {name}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(f"{name} {text}")
