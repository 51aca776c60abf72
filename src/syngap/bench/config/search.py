"""The section `search` of an experiment: how hyper-parameters are chosen, for all methods alike.

search:
  trials: 12                              # of every row
  seeds: [100]                            # none of those of the table
  stream: {validation: 0.1, epochs: 2}    # changes to the order while searching
  spaces:
    er: {lr: {log: [0.01, 1.0]}, momentum: {choose: [0.0, 0.9]}}
    adam: {lr: {log: [0.0001, 0.01]}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

from annotated_types import Ge, Le

from syngap.bench import methods as known_methods
from syngap.bench import streams
from syngap.bench.config.component import Component, Value
from syngap.bench.config.space import Space
from syngap.bench.config.values import mapping_of, options_of, seeds_in
from syngap.bench.errors import UserError, nearest
from syngap.bench.options import Says, check_value, checked, named, shown, signature
from syngap.bench.streams import Stream

__all__ = ["Search", "Trials"]

Trials: TypeAlias = Annotated[int, Ge(1), Le(10_000), Says("a whole number from 1 to 10000")]

_KEYS = ("trials", "seeds", "stream", "spaces")


@dataclass(frozen=True)
class Search:
    """A checked search.

    Args:
        trials: how many values are tried for every row.
        seeds: of the runs of each trial, whose mean counts.
        changes: to the experiment's stream, as they were given; none to the data set itself.
        stream: the whole of it, with them.
        spaces: for a row, the options that are searched and what may be tried.
    """

    trials: int
    seeds: list[int]
    changes: dict[str, Value]
    stream: Component
    spaces: dict[str, dict[str, Space]]

    @classmethod
    def from_mapping(
        cls,
        raw: Mapping[str, Any],
        *,
        stream: Component,
        methods: Mapping[str, Component],
        seeds: Sequence[int],
    ) -> Search:
        """Return the search that is meant; UserError where it cannot be one.

        Args:
            raw: what stands under `search`.
            stream: of the experiment, complete.
            methods: of the experiment, complete.
            seeds: of the experiment, which the search may not use.
        """
        for key in raw:
            if key not in _KEYS:
                hint = nearest(str(key), _KEYS) or f"; there are {', '.join(_KEYS)}"
                raise UserError(f"search.{named(key)}: unknown option{hint}")
        for key in _KEYS:
            if raw.get(key) is None:
                raise UserError(f"search.{key}: missing; a search needs {', '.join(_KEYS)}")
        changes = mapping_of(raw["stream"], "search.stream")
        searched = _stream(stream, changes)
        rows = mapping_of(raw["spaces"], "search.spaces")
        search = cls(
            trials=check_value(raw["trials"], Trials, "search.trials"),
            seeds=seeds_in(raw["seeds"], "search.seeds"),
            changes={key: searched.options[key] for key in changes},
            stream=searched,
            spaces={row: _spaces(row, options, methods) for row, options in rows.items()},
        )
        if shared := search.shared(seeds):
            raise UserError(
                f"search.seeds: {shared} of the table, which would flatter the result; give others"
            )
        return search

    def shared(self, seeds: Iterable[int]) -> str:
        """Return which of `seeds` are those that are chosen by: "5 is a seed", "" for none."""
        found = [str(seed) for seed in sorted({*self.seeds} & {*seeds})]
        return f"{', '.join(found)} {'are seeds' if found[1:] else 'is a seed'}" if found else ""

    def of(self, rows: Iterable[str]) -> Search:
        """Return the search of these rows alone."""
        return replace(self, spaces={row: self.spaces[row] for row in rows if row in self.spaces})

    def as_mapping(self) -> dict[str, Any]:
        """Return what `from_mapping` makes the same search of."""
        return {
            "trials": self.trials,
            "seeds": self.seeds,
            "stream": self.changes,
            "spaces": {
                row: {option: space.as_mapping() for option, space in options.items()}
                for row, options in self.spaces.items()
            },
        }


def _stream(stream: Component, changes: Mapping[str, Any]) -> Component:
    """Return the stream while searching; UserError where test samples of the table could be in it.

    They are what the data set says they are, so that is the same in both.
    """
    before = stream.options
    after = checked({**before, **changes}, streams.options(stream.name), "search.stream")
    order = signature(Stream)
    for key in changes:
        if key not in order:
            raise UserError(
                f"search.stream.{key}: is of the data set, and another may have the table's test "
                f"samples to learn from; a search may change {', '.join(order)}"
            )
    if before["validation"]:
        raise UserError(
            f"stream.validation: got {shown(before['validation'])}, so the table would be made of "
            "what the search chooses by; it belongs into search.stream"
        )
    if not after["validation"]:
        raise UserError(
            f"search.stream.validation: got {shown(after['validation'])}, expected a share "
            "above 0 of the training samples to choose by: the test samples are for the table"
        )
    if "holdout_seed" in before and before["holdout_seed"] is None:
        raise UserError(
            "stream.holdout_seed: missing; every seed holds out other samples, so a search would "
            "learn from the table's test samples; a number holds out the same for all"
        )
    return Component(stream.name, after)


def _spaces(row: Any, raw: Any, methods: Mapping[str, Component]) -> dict[str, Space]:
    path = f"search.spaces.{named(row)}"
    if row not in methods:
        hint = nearest(str(row), methods) or f"; there are {', '.join(methods)}"
        raise UserError(f"{path}: unknown row{hint}")
    options = options_of(raw, path)
    if not options:
        raise UserError(f"{path}: missing, expected options with what to try")
    allowed = signature(known_methods.registry.get(methods[row].name))
    for option in options:
        if option not in allowed:
            hint = nearest(str(option), allowed) or f"; there are {', '.join(allowed)}"
            raise UserError(f"{path}.{named(option)}: unknown option{hint}")
    spaces = {
        option: Space.from_mapping(space, option, allowed, path)
        for option, space in options.items()
    }
    without = [option for option, space in spaces.items() if space.start is None]
    if without and len(without) < len(spaces):
        raise UserError(
            f"{path}.{without[0]}.start: missing; where one option of a row has a start, all have"
        )
    return spaces
