"""Intervals by Student's t: of a mean over seeds, and of what further seeds would give."""

from __future__ import annotations

import math

__all__ = ["half_interval", "half_prediction"]


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


def _t_975(count: int) -> float:
    """Return the 0.975 quantile of Student's t with `count` - 1 degrees of freedom."""
    if count < 2:
        raise ValueError(f"an interval needs at least two values, got {count}")
    from scipy.special import stdtrit  # `scipy.stats.t.ppf` without the rest of scipy.stats

    return float(stdtrit(count - 1, 0.975))
