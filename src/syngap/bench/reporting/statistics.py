"""Numbers over seeds: mean and spread, paired differences, intervals, and how numbers are written.

A number that is missing, NaN or infinite is None: `finite` is the one place that decides it. It is
null in JSON and a dash in a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from syngap.bench.metrics import mean_and_spread

__all__ = [
    "FEWEST_SEEDS",
    "TOO_FEW_SEEDS",
    "Spread",
    "finite",
    "format_number",
    "format_spread",
    "half_interval",
    "half_prediction",
    "half_width",
    "paired_difference",
    "round_decimals",
    "round_digits",
    "spread_over",
    "time_ratio",
    "verdict",
]


FEWEST_SEEDS = 3  # of an interval: with two, Student's t is 12.7 and the interval says nothing
TOO_FEW_SEEDS = "too few seeds"  # in the place of an interval


class Spread(NamedTuple):
    """Mean and standard deviation over `seeds` of them; the latter is None for a single seed."""

    mean: float
    sd: float | None
    seeds: int = 1


def spread_over(values: Sequence[float]) -> Spread | None:
    """Return mean and standard deviation of one value a seed, None where there is no value.

    Examples:
        >>> spread_over([1.0, 2.0, 3.0]), spread_over([])
        (Spread(mean=2.0, sd=1.0, seeds=3), None)
    """
    return Spread(*mean_and_spread(values), len(values)) if values else None


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Spread | None:
    """Return the mean difference over the seeds that both have, None where they share none.

    Args:
        ours: seed → value.
        theirs: seed → value that is subtracted.

    Examples:
        >>> paired_difference({0: 5.0, 1: 7.0, 2: 9.0}, {1: 6.0, 2: 8.0})
        Spread(mean=1.0, sd=0.0, seeds=2)
    """
    return spread_over([ours[seed] - theirs[seed] for seed in ours if seed in theirs])


def time_ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """Return the total time over shared seeds as a multiple of the other's, None without any."""
    shared = [seed for seed in ours if seed in theirs]
    whole = sum(theirs[seed] for seed in shared)
    return sum(ours[seed] for seed in shared) / whole if whole else None


def half_interval(sd: float, count: int) -> float:
    """Return half the width of the 95 % interval of a mean, by Student's t.

        t(0.975, n - 1) · sd / sqrt(n)

    Args:
        sd: the sample standard deviation of the values.
        count: how many there are, at least two.

    Examples:
        >>> round(half_interval(1.0, 3), 2), round(half_interval(1.0, 5), 2)
        (2.48, 1.24)
    """
    return _t_975(count) * sd / math.sqrt(count)


def half_prediction(sd: float, count: int, new: int = 1) -> float:
    """Return half the width of the 95 % interval in which the mean of new values is expected.

        t(0.975, n - 1) · sd · sqrt(1 / n + 1 / m)

    It is wider than `half_interval`, since new values scatter themselves: about their mean, of
    which the n known ones are an estimate.

    Args:
        sd: the sample standard deviation of the known values.
        count: n, how many they are, at least two.
        new: m, how many new ones the mean is taken of.

    Examples:
        >>> round(half_prediction(1.0, 5), 2), round(half_prediction(1.0, 5, new=5), 2)
        (3.04, 1.76)
    """
    if new < 1:
        raise ValueError(f"the mean of new values needs at least one, got {new}")
    return _t_975(count) * sd * math.sqrt(1 / count + 1 / new)


def half_width(difference: Spread) -> float | None:
    """Return half the 95 % interval of a difference, by Student's t; None for too few seeds.

    Examples:
        >>> half_width(Spread(2.0, 1.0, 2)), round(half_width(Spread(2.0, 1.0, 3)), 2)
        (None, 2.48)
    """
    if difference.sd is None or difference.seeds < FEWEST_SEEDS:
        return None
    return half_interval(difference.sd, difference.seeds)


def verdict(difference: Spread | None) -> int | None:
    """Return the sign of a difference, 0 if its 95 % interval holds zero, None for too few seeds.

    Examples:
        >>> verdict(Spread(2.0, 1.0, 5)), verdict(Spread(2.0, 1.0, 3)), verdict(Spread(9.0, 1.0, 2))
        (1, 0, None)
    """
    width = None if difference is None else half_width(difference)
    if difference is None or width is None:
        return None
    if abs(difference.mean) <= width:
        return 0
    return 1 if difference.mean > 0 else -1


def finite(value: float | None) -> float | None:
    """Return a number, None where it is missing, NaN or infinite.

    Examples:
        >>> finite(1.5), finite(float("nan")), finite(float("inf")), finite(None)
        (1.5, None, None, None)
    """
    return value if value is not None and math.isfinite(value) else None


def round_decimals(value: float | None, decimals: int) -> float | None:
    """Return a number with at most so many decimals, as an int where it is whole.

    Examples:
        >>> round_decimals(0.123, 1), round_decimals(12.04, 1), round_decimals(float("nan"), 1)
        (0.1, 12, None)
    """
    return None if (known := finite(value)) is None else _whole(round(known, decimals))


def round_digits(value: float | None, digits: int) -> float | None:
    """Return a number with so many significant digits, as an int where it is whole.

    Examples:
        >>> round_digits(0.0123456, 3), round_digits(12.0, 3), round_digits(float("inf"), 3)
        (0.0123, 12, None)
    """
    return None if (known := finite(value)) is None else _whole(float(f"{known:.{digits}g}"))


def format_spread(value: Spread | None, decimals: int = 2, sign: str = "-") -> tuple[str, str]:
    """Return mean and sd as text: an empty sd for a single seed, a dash for a missing mean.

    Args:
        value: to write.
        decimals: of both.
        sign: "+" writes the sign of a positive mean too.

    Examples:
        >>> format_spread(Spread(27.284, 0.58)), format_spread(Spread(1234.5, None), 0)
        (('27.28', '0.58'), ('1234', ''))
        >>> format_spread(None), format_spread(Spread(float("nan"), None))
        (('–', ''), ('–', ''))
    """
    mean, sd = (finite(value.mean), finite(value.sd)) if value else (None, None)
    if mean is None:
        return "–", ""
    rounded = round(mean, decimals) + 0.0  # never -0.00
    return f"{rounded:{sign}.{decimals}f}", "" if sd is None else f"{sd:.{decimals}f}"


def format_number(value: Spread | None, decimals: int = 1, sign: str = "-") -> str:
    """Return mean ± sd as it stands in a sentence, with a minus sign in place of a hyphen.

    Examples:
        >>> format_number(Spread(-1.25, 0.5)), format_number(Spread(3.0, None), sign="+")
        ('−1.2 ± 0.5', '+3.0')
    """
    mean, sd = format_spread(value, decimals, sign)
    return (f"{mean} ± {sd}" if sd else mean).replace("-", "−")


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _t_975(count: int) -> float:
    """Return the 0.975 quantile of Student's t with `count` - 1 degrees of freedom."""
    if count < 2:
        raise ValueError(f"an interval needs at least two values, got {count}")
    from scipy.special import stdtrit  # `scipy.stats.t.ppf` without the rest of scipy.stats

    return float(stdtrit(count - 1, 0.975))
