"""Means and quantiles of a mask, cheap enough to log at every step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from syngap.optim.tensors import local, wide

if TYPE_CHECKING:
    from syngap.optim.gate import Gate

__all__ = ["describe", "summarize", "thinned"]

_QUANTILES = (0.05, 0.5, 0.95)
_KEPT = 1024
_GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples spread evenly between 0 and 1, in no order


def summarize(gate: Gate) -> dict[str, float]:
    """Return means and quantiles of a gate's masks, overall and by tensor, and μ/λ."""
    network = gate.network_mean()
    names = gate.model_names() or gate.names()
    values: dict[str, Tensor] = {"importance/mean": network}
    parts = []
    for group in gate.groups:
        for param in group["params"]:
            some = wide(thinned(local(gate.importance_of(param))))
            mask = gate.mask(group, param, some, network).to(network)
            values[f"importance/{names[param]}/mean"] = gate.mean_of(param)
            values |= describe(f"plasticity/{names[param]}", [(mask, param.numel())])
            if param.requires_grad:
                parts.append((mask, param.numel()))
    values |= describe("plasticity", parts)
    numbers = torch.stack([value.to(network) for value in values.values()]).tolist()
    summary: dict[str, float] = dict(zip(values, numbers, strict=True))
    damping = max(group["damping"] for group in gate.groups)
    ratio = summary["importance/mean"] / damping if damping else math.inf
    return summary | {"importance/mean_over_damping": ratio}


def thinned(values: Tensor) -> Tensor:
    """Return at most 1024 values of a tensor, one from each of as many equal stretches.

    Where in its stretch is irregular, so that no stride falls in step with the rows of a matrix.
    """
    flat = values.flatten()
    if flat.numel() <= _KEPT:
        return flat
    stretch = torch.arange(_KEPT, device=flat.device)
    inside = (stretch * _GOLDEN_RATIO).frac()
    return flat[((stretch + inside) * (flat.numel() / _KEPT)).long()]


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
    reached = _running_sums(weights[order])
    described = {f"{name}/mean": (values * weights).sum() / reached[-1]}
    for quantile in _QUANTILES:
        index = torch.searchsorted(reached, reached[-1:] * quantile).clamp(max=len(values) - 1)
        described[f"{name}/q{round(100 * quantile):02d}"] = ordered[index].squeeze(0)
    return described


def _running_sums(values: Tensor) -> Tensor:
    """Return `values.cumsum(0)`, for which a GPU has no kernel that is deterministic."""
    if values.is_cuda and torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(0).to(values.device)
    return values.cumsum(0)
