"""Whether things happen as often as they should: chi-square tests on fixed seeds."""

from __future__ import annotations

import torch
from torch import Tensor

UNLIKELY = 1e-6  # seeds are fixed, so what is sound passes always and not almost always


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def p_value(observed: Tensor, expected: Tensor) -> float:
    """How likely counts are as far from what is expected as these, or farther."""
    statistic = ((observed - expected).square() / expected).sum().double()
    half_freedom = torch.tensor((len(observed) - 1) / 2).double()
    return float(torch.special.gammaincc(half_freedom, statistic / 2))


def as_events(chosen: Tensor, trials: int) -> tuple[Tensor, Tensor]:
    """Counts and their expectation, where each trial chose the same number of members at most once.

    Being chosen or not varies less than the number of events does by which chi-square is defined.
    """
    share = (chosen.sum() / trials / len(chosen)).item()
    expected = torch.full_like(chosen, trials * share, dtype=torch.float64)
    return expected + (chosen - expected) / (1 - share) ** 0.5, expected


def doubling(counts: Tensor) -> Tensor:
    """Sums over the first, the next, the next 2, 4, ...: what is odd at the start stands out."""
    bounds = [0, 1]
    while 2 * bounds[-1] < len(counts):
        bounds.append(2 * bounds[-1])
    ends = [*bounds[1:], len(counts)]
    return torch.stack([counts[a:b].sum() for a, b in zip(bounds, ends, strict=True)])
