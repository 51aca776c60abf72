"""The values of one option that a search may try.

    lr: {log: [0.01, 1.0]}              any between the two, small and large ones equally likely
    alpha: {uniform: [0.1, 1.0]}        any between the two
    retention: {decay: [0.99, 0.9999]}  the same for numbers close to 1: 1 - value is as in `log`
    momentum: {choose: [0.0, 0.9]}      one of these

Where the option is a whole number, so are all values between the two. With `or: 0.0` beside it a
third of the draws is that value, which switches an option off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from syngap.bench.errors import UserError
from syngap.bench.options import checked, shown

__all__ = ["Space"]

_KINDS = ("log", "uniform", "decay", "choose")
_EDGE = 0.1  # of the way between the two: about one of 16 draws is closer
_OFF = 1 / 3  # of the draws
_WIDER = (
    1 / 3,
    1 / 6,
    1 / 12,
)  # of the way between the two: what an option may not be is not tried
_NEAR = 0.15  # of the way, either side
_DIGITS = 3  # of a value: more would say what no search knows


@dataclass(frozen=True)
class Space:
    """How values are drawn, and the two bounds or the choices.

    Args:
        kind: "log", "uniform", "decay" or "choose".
        values: the lower and the upper bound, or the choices.
        off: a value besides, None where there is none.
    """

    kind: str
    values: list[Any]
    off: Any = None

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
        if isinstance(raw, dict) and "start" in raw:
            raise UserError(
                f"{path}.{option}.start: is gone; the method's default and the value of the row "
                "are always tried"
            )
        if not _is_space(raw):
            raise UserError(
                f"{path}.{option}: got {shown(raw)}, expected {{log: [low, high]}}, "
                "{uniform: [low, high]}, {decay: [low, high]} or {choose: [one, other]}"
            )
        kind = next(key for key in raw if key != "or")
        only = {option: allowed[option]}
        values = [checked({option: value}, only, path)[option] for value in raw[kind]]
        _check_values(kind, values, f"{path}.{option}.{kind}")
        if raw.get("or") is None:
            return cls(kind, values)
        return cls(kind, values, checked({option: raw["or"]}, only, path)[option])

    def as_mapping(self) -> dict[str, Any]:
        """Return what `from_mapping` makes the same space of."""
        return {self.kind: self.values, **({} if self.off is None else {"or": self.off})}

    @property
    def holds_zero(self) -> bool:
        """Whether 0 is one of its values, or could be if it were wider."""
        return self.kind in ("uniform", "choose") or self.off == 0

    def at(self, quantile: float) -> Any:
        """Return the value at a quantile from 0 to below 1, in as many digits as are worth it.

        Examples:
            >>> Space("log", [0.01, 1.0]).at(0.5), Space("choose", [0.0, 0.9]).at(0.5)
            (0.1, 0.9)
            >>> Space("decay", [0.9, 0.999], off=0.0).at(0.3), Space("decay", [0.9, 0.999]).at(0.5)
            (0.0, 0.99)
        """
        if self.off is not None:
            if quantile < _OFF:
                return self.off
            quantile = (quantile - _OFF) / (1 - _OFF)
        if self.kind == "choose":
            return self.values[int(quantile * len(self.values))]
        return self._between(quantile)

    def near(self, value: Any, quantile: float) -> Any:
        """Return a value close to another; of choices, and from `off`, any."""
        if self.kind == "choose" or value == self.off or math.isnan(way := self._way(value)):
            return self.at(quantile)
        return self._between(min(max(way + _NEAR * (2 * quantile - 1), 0.0), 1.0))

    def edge(self, value: Any) -> str:
        """Return "lower" or "upper" where `value` is at that edge: better ones may lie beyond.

        Examples:
            >>> Space("log", [0.01, 1.0]).edge(0.95), Space("log", [0.01, 1.0]).edge(0.1)
            ('upper', '')
        """
        if self.off is not None and value == self.off:
            return ""
        if self.kind == "choose":
            numbers = all(isinstance(v, (int, float)) for v in self.values)
            if not numbers or len(self.values) < 3:  # of two, each is at an edge
                return ""
            return {min(self.values): "lower", max(self.values): "upper"}.get(value, "")
        way = self._way(value)
        return "lower" if way < _EDGE else "upper" if way > 1 - _EDGE else ""

    def widened(self, value: Any, allows: Callable[[Any], bool]) -> tuple[Space, Space] | None:
        """Return the space widened at the edge where `value` is, and the new part of it alone.

        It grows by a third of its length, by less where the option would refuse that, and from
        `value` on where that lies outside. None where there is nothing beyond, as of choices.

        Args:
            value: at an edge.
            allows: whether the option takes a value.

        Examples:
            >>> wider, new = Space("log", [0.001, 1.0]).widened(0.9, lambda value: True)
            >>> wider.values, new.values
            ([0.001, 10.0], [1.0, 10.0])
        """
        edge = self.edge(value)
        if self.kind == "choose" or not edge:
            return None
        low, high = self.values
        way = self._way(value)
        for more in _WIDER:
            far = min(way, 0.0) - more if edge == "lower" else max(way, 1.0) + more
            try:
                bound = self._rounded(self._unscaled(far))
            except OverflowError:
                continue
            if bound not in self.values and allows(bound):
                whole = [bound, high] if edge == "lower" else [low, bound]
                new = [bound, low] if edge == "lower" else [high, bound]
                return replace(self, values=whole), Space(self.kind, new)
        return None

    @property
    def text(self) -> str:
        """What may be tried, in words.

        Examples:
            >>> Space("log", [0.003, 1.0]).text, Space("choose", [0.0, 0.9]).text
            ('0.003 to 1 (log)', '0 or 0.9')
            >>> Space("decay", [0.9, 0.99], off=0.0).text
            '0.9 to 0.99 (decay), or 0'
        """
        values = [f"{v:g}" if isinstance(v, float) else str(v) for v in [*self.values, self.off]]
        *values, off = values
        if self.kind == "choose":
            between = " or ".join(filter(None, [", ".join(values[:-1]), values[-1]]))
        else:
            scale = "" if self.kind == "uniform" else f" ({self.kind})"
            between = " to ".join(values) + scale
        return between if self.off is None else f"{between}, or {off}"

    def _between(self, way: float) -> Any:
        low, high = self.values
        return min(max(self._rounded(self._unscaled(way)), low), high)

    def _rounded(self, value: float) -> Any:
        if all(isinstance(bound, int) for bound in self.values):
            return round(value)
        if self.kind == "decay":
            return float(f"{1 - float(f'{1 - value:.{_DIGITS}g}'):.12g}")
        return float(f"{value:.{_DIGITS}g}")

    def _way(self, value: Any) -> float:
        """Return where `value` is from the lower bound, 0, to the upper, 1; NaN: on no such way."""
        low, high = map(self._scaled, self.values)
        try:
            return (self._scaled(value) - low) / (high - low)
        except ValueError:  # the logarithm of 0
            return math.nan

    def _unscaled(self, way: float) -> float:
        low, high = map(self._scaled, self.values)
        scaled = low + way * (high - low)
        if self.kind == "log":
            return math.exp(scaled)
        return 1 - math.exp(-scaled) if self.kind == "decay" else scaled

    def _scaled(self, value: float) -> float:
        if self.kind == "log":
            return math.log(value)
        return -math.log(1 - value) if self.kind == "decay" else float(value)


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
    if kind == "decay" and values[1] >= 1:
        raise UserError(f"{path}: got {shown(values)}, expected numbers below 1")


def _is_space(raw: Any) -> bool:
    if not isinstance(raw, dict) or len({*raw} - {"or"}) != 1:
        return False
    kind, values = next((key, value) for key, value in raw.items() if key != "or")
    if kind not in _KINDS or not isinstance(values, list):
        return False
    return len(values) > 1 if kind == "choose" else len(values) == 2
