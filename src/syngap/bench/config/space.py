"""The values of one option that a search may try.

    lr: {log: [0.01, 1.0]}            any between the two, small and large ones equally likely
    alpha: {uniform: [0.1, 1.0]}      any between the two
    retention: {choose: [0.9, 0.99]}  one of these

Where the option is a whole number, so are all values between the two. With `start: 0.1` beside it
that value is tried first; of a row's options all have one, or none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syngap.bench.errors import UserError
from syngap.bench.options import checked, shown

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

__all__ = ["Space"]

_KINDS = ("log", "uniform", "choose")
_EDGE = 0.05  # of the way between the two
_DIGITS = 3  # of a value: more would say what no search knows


@dataclass(frozen=True)
class Space:
    """How values are chosen ("log", "uniform", "choose"), and the two bounds or the choices.

    Where `start` is not None it is the value to try first.
    """

    kind: str
    values: list[Any]
    start: Any = None

    @classmethod
    def from_mapping(
        cls, raw: Any, option: str, allowed: Mapping[str, tuple[Any, Any]], path: str
    ) -> Space:
        """Return the space that is meant; UserError where the option would refuse its values.

        Args:
            raw: such as {"log": [0.01, 1.0]}.
            option: its name.
            allowed: the options of the method, as `signature` gives them.
            path: what messages call the row's spaces.
        """
        if not _is_space(raw):
            raise UserError(
                f"{path}.{option}: got {shown(raw)}, expected {{log: [low, high]}}, "
                "{uniform: [low, high]} or {choose: [one, other]}"
            )
        kind = next(key for key in raw if key != "start")
        only = {option: allowed[option]}
        values = [checked({option: value}, only, path)[option] for value in raw[kind]]
        _check_values(kind, values, f"{path}.{option}.{kind}")
        if raw.get("start") is None:
            return cls(kind, values)
        start_option = {"start": raw["start"]}
        start = checked(start_option, {"start": allowed[option]}, f"{path}.{option}")["start"]
        between = kind != "choose" and isinstance(start, (int, float))
        if start in values or (between and values[0] < start < values[1]):
            return cls(kind, values, start)
        allows = "one of" if kind == "choose" else "a number between"
        raise UserError(
            f"{path}.{option}.start: got {shown(start)}, expected {allows} {shown(values)}"
        )

    def as_mapping(self) -> dict[str, Any]:
        """Return what `from_mapping` makes the same space of."""
        start = {} if self.start is None else {"start": self.start}
        return {self.kind: self.values, **start}

    def distribution(self) -> BaseDistribution:
        """Return what Optuna draws from: numbers, or the places of the choices."""
        from optuna import distributions

        if self.kind == "choose":
            return distributions.CategoricalDistribution(range(len(self.values)))
        low, high = self.values
        if isinstance(low, int) and isinstance(high, int):
            return distributions.IntDistribution(low, high, log=self.kind == "log")
        return distributions.FloatDistribution(low, high, log=self.kind == "log")

    def value(self, drawn: Any) -> Any:
        """Return the option's value for what Optuna drew, in as many digits as are worth it.

        Examples:
            >>> Space("log", [0.01, 1.0]).value(0.123456)
            0.123
            >>> Space("choose", [0.0, 0.9]).value(1)
            0.9
        """
        if self.kind == "choose":
            return self.values[drawn]
        if isinstance(drawn, int):
            return drawn
        low, high = self.values
        return min(max(float(f"{drawn:.{_DIGITS}g}"), low), high)

    def drawn(self, value: Any) -> Any:
        """Return what Optuna would have drawn for the option's `value`."""
        return self.values.index(value) if self.kind == "choose" else value

    def edge(self, value: Any) -> str:
        """Return "lower" or "upper" where `value` is at that edge: better ones may lie beyond.

        Examples:
            >>> Space("log", [0.01, 1.0]).edge(0.95), Space("log", [0.01, 1.0]).edge(0.1)
            ('upper', '')
        """
        if self.kind == "choose":
            numbers = all(isinstance(v, (int, float)) for v in self.values)
            if not numbers or len(self.values) < 3:  # of two, each is at an edge
                return ""
            return {min(self.values): "lower", max(self.values): "upper"}.get(value, "")
        scale = math.log if self.kind == "log" else float
        low, high = map(scale, self.values)
        way = (scale(value) - low) / (high - low)
        return "lower" if way < _EDGE else "upper" if way > 1 - _EDGE else ""


def _check_values(kind: str, values: list[Any], path: str) -> None:
    if kind == "choose":
        if any(value in values[:n] for n, value in enumerate(values)):
            raise UserError(f"{path}: got {shown(values)}, expected different values")
        return
    if not all(isinstance(value, (int, float)) and value is not True for value in values):
        raise UserError(f"{path}: got {shown(values)}, expected numbers; choose takes others")
    if not values[0] < values[1]:
        raise UserError(f"{path}: got {shown(values)}, expected the lower one first")
    if kind == "log" and values[0] <= 0:
        raise UserError(f"{path}: got {shown(values)}, expected positive numbers")


def _is_space(raw: Any) -> bool:
    if not isinstance(raw, dict) or len({*raw} - {"start"}) != 1:
        return False
    kind, values = next((key, value) for key, value in raw.items() if key != "start")
    if kind not in _KINDS or not isinstance(values, list):
        return False
    return len(values) > 1 if kind == "choose" else len(values) == 2
