"""The section `search` of an experiment: how hyper-parameters are chosen, for all methods alike.

search:
  trials: 12                              # of every row
  seeds: [100]                            # none of those of the table
  stream: {validation: 0.1, first: 4}     # changes to the stream while searching
  spaces:
    er: {lr: {log: [0.01, 1.0]}, momentum: {choose: [0.0, 0.9]}}
    adam: {lr: {log: [0.0001, 0.01]}}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from syngap import methods as known_methods
from syngap import streams
from syngap.errors import UserError, nearest
from syngap.experiments.given import mapping_of, options_of, seeds_in
from syngap.experiments.space import Space
from syngap.options import Count, checked, named, shown, signature

__all__ = ["Search"]

_KEYS = ("trials", "seeds", "stream", "spaces")


@dataclass(frozen=True)
class Search:
    """A checked search.

    Args:
        trials: how many values are tried for every row.
        seeds: of the runs of each trial, whose mean counts.
        changes: to the experiment's stream, as they were given.
        stream: the whole of it, with them.
        spaces: for a row, the options that are searched and what may be tried.
    """

    trials: int
    seeds: list[int]
    changes: dict[str, Any]
    stream: dict[str, Any]
    spaces: dict[str, dict[str, Space]]

    @classmethod
    def from_mapping(
        cls,
        given: Mapping[str, Any],
        *,
        stream: Mapping[str, Any],
        methods: Mapping[str, Mapping[str, Any]],
        seeds: Sequence[int],
    ) -> Search:
        """Return the search that is meant; UserError where it cannot be one.

        Args:
            given: what stands under `search`.
            stream: of the experiment, complete.
            methods: of the experiment, complete.
            seeds: of the experiment, which the search may not use.
        """
        for key in given:
            if key not in _KEYS:
                hint = nearest(str(key), _KEYS) or f"; there are {', '.join(_KEYS)}"
                raise UserError(f"search.{named(key)}: unknown option{hint}")
        for key in _KEYS:
            if given.get(key) is None:
                raise UserError(f"search.{key}: missing")
        own = seeds_in(given["seeds"], "search.seeds")
        if shared := sorted({*own} & {*seeds}):
            raise UserError(
                f"search.seeds: {', '.join(map(str, shared))} are seeds of the table; choosing by "
                "them would flatter the result, give others"
            )
        changes = dict(mapping_of(given["stream"], "search.stream"))
        before = {key: value for key, value in stream.items() if key != "name"}
        after = checked(before | changes, streams.options(stream["name"]), "search.stream")
        if not after["validation"]:
            raise UserError(
                f"search.stream.validation: got {shown(after['validation'])}, expected a share "
                "above 0 of the training samples to choose by: the test samples are for the table"
            )
        rows = mapping_of(given["spaces"], "search.spaces")
        return cls(
            trials=checked({"trials": given["trials"]}, {"trials": (Count, 1)}, "search")["trials"],
            seeds=own,
            changes={key: after[key] for key in changes},
            stream={"name": stream["name"], **after},
            spaces={row: _spaces(row, options, methods) for row, options in rows.items()},
        )

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


def _spaces(row: Any, given: Any, methods: Mapping[str, Mapping[str, Any]]) -> dict[str, Space]:
    path = f"search.spaces.{named(row)}"
    if row not in methods:
        hint = nearest(str(row), methods) or f"; there are {', '.join(methods)}"
        raise UserError(f"{path}: unknown row{hint}")
    options = options_of(given, path)
    if not options:
        raise UserError(f"{path}: missing, expected options with what to try")
    allowed = signature(known_methods.registry.get(methods[row]["name"]))
    for option in options:
        if option not in allowed:
            hint = nearest(str(option), allowed) or f"; there are {', '.join(allowed)}"
            raise UserError(f"{path}.{named(option)}: unknown option{hint}")
    return {
        option: Space.from_mapping(space, option, allowed, path)
        for option, space in options.items()
    }
