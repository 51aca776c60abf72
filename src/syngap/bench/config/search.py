"""The section `search` of an experiment: how hyper-parameters are chosen, for all methods alike.

search:
  trials: 16                              # of every row, in the first step
  added: [4, 4]                           # twice so many more, around the best or beyond an edge
  rounds: [[0.33, 3], [2, 5]]             # the best third of all with 3 seeds, the best 2 with 5
  seeds: 100..104                         # none of those of the table
  stream: {validation: 0.1}               # share of the training samples that is chosen by
  spaces:
    er: {lr: {log: [0.01, 1.0]}, momentum: {choose: [0.0, 0.9]}}
    adam: {lr: {log: [0.0001, 0.01]}}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, TypeAlias

from annotated_types import Ge, Gt, Le, Lt

from syngap.bench import methods as known_methods
from syngap.bench import streams
from syngap.bench.config.component import Component
from syngap.bench.config.space import Space
from syngap.bench.config.values import mapping_of, options_of, seeds_in
from syngap.bench.errors import UserError
from syngap.bench.options import Count, Says, check_value, checked, named, shown, signature
from syngap.messages import count_of, nearest

__all__ = ["Search", "Trials"]

Trials: TypeAlias = Annotated[int, Ge(1), Le(10_000), Says("a whole number from 1 to 10000")]
_Part: TypeAlias = Annotated[float, Gt(0), Lt(1)]

_DEFAULTS: dict[str, Any] = {"trials": 16, "added": [4, 4], "rounds": [[0.33, 3], [2, 5]]}
_NEEDED = ("seeds", "stream", "spaces")
_KEYS = (*_DEFAULTS, *_NEEDED)
_ROUNDS = (
    "pairs of how many go on, a number or a share of all, and their seeds: [[0.33, 3], [2, 5]]"
)


@dataclass(frozen=True)
class Search:
    """A checked search.

    Args:
        trials: of every row in the first step, the values that it stands at among them.
        added: how many more follow, step by step, around the best so far.
        rounds: what follows the first seed: how many go on, a number or a share of all trials, and
            with how many seeds.
        seeds: of the runs of a trial, the first for all trials; their mean counts.
        validation: share of the training samples that is chosen by.
        stream: the experiment's, with it; nothing else is changed, so runs are as long.
        spaces: for a row, the options that are searched and what may be tried.
    """

    trials: int
    added: list[int]
    rounds: list[tuple[float, int]]
    seeds: list[int]
    validation: float
    stream: Component
    spaces: dict[str, dict[str, Space]]

    @classmethod
    def from_mapping(
        cls,
        raw: Any,
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
        space = "{lr: {log: [0.01, 1.0]}}"
        kept, searched = "{validation: 0.2}", f"{{{next(iter(methods), 'sgd')}: {space}}}"
        every = f"{{seeds: 100..104, stream: {kept}, spaces: {searched}}}"
        raw = mapping_of(raw, "search", every)
        for key in raw:
            if key not in _KEYS:
                hint = nearest(str(key), _KEYS) or f"; there are {', '.join(_KEYS)}"
                raise UserError(f"search.{named(key)}: unknown option{hint}")
        for key in _NEEDED:
            if raw.get(key) is None:
                raise UserError(f"search.{key}: missing; a search needs {', '.join(_NEEDED)}")
        validation = _validation(stream, mapping_of(raw["stream"], "search.stream", kept))
        rows = mapping_of(raw["spaces"], "search.spaces", searched)
        numbers = {**_DEFAULTS, **{key: raw[key] for key in _DEFAULTS if raw.get(key) is not None}}
        search = cls(
            trials=check_value(numbers["trials"], Trials, "search.trials"),
            added=check_value(numbers["added"], list[Trials], "search.added"),
            rounds=_rounds(numbers["rounds"]),
            seeds=seeds_in(raw["seeds"], "search.seeds"),
            validation=validation,
            stream=stream.with_options({"validation": validation}),
            spaces={row: _spaces(row, options, methods, space) for row, options in rows.items()},
        )
        most = max([1, *(seeds for _, seeds in search.rounds)])
        if len(search.seeds) != most:
            raise UserError(
                f"search.seeds: got {count_of(len(search.seeds), 'seed')}, and the last of "
                f"search.rounds needs {most}, such as 100..{99 + most}; or give other rounds"
            )
        if shared := search.shared(seeds):
            raise UserError(
                f"search.seeds: {shared} of the table, which would flatter the result; give others"
            )
        return search

    @property
    def counts(self) -> list[tuple[int, int]]:
        """How many trials there are with how many seeds, from the first round to the last.

        Examples:
            >>> empty = Search(16, [4, 4], [(0.33, 3), (2, 5)], [], 0.1, Component(""), {})
            >>> empty.counts, empty.runs
            ([(24, 1), (8, 3), (2, 5)], 44)
        """
        total = self.trials + sum(self.added)
        found = [(total, 1)]
        for part, seeds in self.rounds:
            number = math.ceil(part * total) if part < 1 else int(part)
            found.append((min(number, found[-1][0]), seeds))
        return found

    @property
    def runs(self) -> int:
        """How many runs every row has."""
        before = [0, *(seeds for _, seeds in self.counts)]
        return sum(
            number * (seeds - known)
            for (number, seeds), known in zip(self.counts, before, strict=False)
        )

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
            "added": self.added,
            "rounds": [list(pair) for pair in self.rounds],
            "seeds": self.seeds,
            "stream": {"validation": self.validation},
            "spaces": {
                row: {option: space.as_mapping() for option, space in options.items()}
                for row, options in self.spaces.items()
            },
        }


def _rounds(raw: Any) -> list[tuple[float, int]]:
    pairs = raw if isinstance(raw, list) else [raw]
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise UserError(f"search.rounds: got {shown(raw)}, expected {_ROUNDS}")
    found: list[tuple[float, int]] = []
    for part, seeds in pairs:
        kind = _Part if isinstance(part, float) and part < 1 else Trials
        known = check_value(part, kind, "search.rounds")
        found.append((known, check_value(seeds, Count, "search.rounds")))
    if any(one >= other for one, other in pairwise([1, *(seeds for _, seeds in found)])):
        raise UserError(f"search.rounds: got {shown(raw)}, expected more seeds in every round")
    return found


def _validation(stream: Component, changes: Mapping[str, Any]) -> float:
    """Return the share to choose by; UserError where test samples of the table could be in it.

    They are what the data set says they are, so that is the same in both. Nor is anything else
    changed: what is best for a shorter stream is not best for this one.
    """
    before = stream.options
    after = checked({**before, **changes}, streams.options(stream.name), "search.stream")
    for key in changes:
        if key != "validation":
            raise UserError(
                f"search.stream.{key}: a search runs on the table's own stream, as long as the "
                "table does; validation is all that may be set"
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
    return float(after["validation"])


def _spaces(row: Any, raw: Any, methods: Mapping[str, Component], example: str) -> dict[str, Space]:
    path = f"search.spaces.{named(row)}"
    if row not in methods:
        hint = nearest(str(row), methods) or f"; there are {', '.join(methods)}"
        raise UserError(f"{path}: unknown row{hint}")
    options = options_of(raw, path, example)
    if not options:
        raise UserError(f"{path}: missing, expected options with what to try")
    allowed = signature(known_methods.registry.get(methods[row].name))
    for option in options:
        if option not in allowed:
            hint = nearest(str(option), allowed) or f"; there are {', '.join(allowed)}"
            raise UserError(f"{path}.{named(option)}: unknown option{hint}")
    return {
        option: Space.from_mapping(space, option, allowed, path)
        for option, space in options.items()
    }
