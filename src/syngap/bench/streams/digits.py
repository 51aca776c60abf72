"""Handwritten digits, 8×8 (Alpaydin & Kaynak 1998): they come with scikit-learn."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from syngap.bench.options import Count
from syngap.bench.registry import import_or_refuse
from syngap.bench.streams.arrays import arrays
from syngap.bench.streams.tasks import Pixels, Tasks

__all__ = ["digits"]


def digits(seed: int, data: Path | None, *, tasks: Count = 5) -> Tasks:
    """Return scikit-learn's 1,797 digits in tasks.

    Every fourth image of each digit is for testing, whatever the seed.

    Args:
        seed: of the order of classes.
        data: not needed.
        tasks: how many, of equal numbers of digits.

    Examples:
        >>> split = digits(0, None)
        >>> split.count, len(split.train.labels), len(split.test.labels)
        (5, 1352, 445)
    """
    sklearn = import_or_refuse("sklearn.datasets", "stream.name", "pip install scikit-learn")
    x, y = _read(sklearn)
    tested = np.zeros(len(y), dtype=bool)
    for digit in range(10):
        tested[np.flatnonzero(y == digit)[3::4]] = True
    parts = x[~tested], y[~tested], x[tested], y[tested]
    return arrays(*parts, tasks=tasks, seed=seed, pixels=Pixels(16.0))


@cache
def _read(sklearn: Any) -> tuple[Any, Any]:
    """Return images and labels; a process that has several runs parses their text once."""
    loaded = sklearn.load_digits()
    return loaded.images.astype(np.uint8)[:, None], loaded.target
