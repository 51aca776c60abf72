"""Means and quantiles of a mask, cheap enough to log at every step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["describe", "thinned"]

_QUANTILES = (0.05, 0.5, 0.95)
_KEPT = 1024


def thinned(values: Tensor) -> Tensor:
    """Return at most 1024 evenly spaced values of a tensor."""
    flat = values.flatten()
    return flat[:: max(1, math.ceil(flat.numel() / _KEPT))]


def describe(name: str, parts: Iterable[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """Return mean and quantiles over tensors of which only some values are known.

    Args:
        name: what the keys begin with.
        parts: the known values of each tensor, and how many it has in all.
    """
    known = [(values, numel) for values, numel in parts if values.numel()]
    if not known:
        return {}
    values = torch.cat([values for values, _ in known])
    weights = torch.cat([torch.full_like(v, numel / v.numel()) for v, numel in known])
    ordered, order = values.sort()
    reached = weights[order].cumsum(0)
    described = {f"{name}/mean": (values * weights).sum() / reached[-1]}
    for quantile in _QUANTILES:
        index = torch.searchsorted(reached, reached[-1:] * quantile).clamp(max=len(values) - 1)
        described[f"{name}/q{round(100 * quantile):02d}"] = ordered[index].squeeze(0)
    return described
