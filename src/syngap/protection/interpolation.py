"""Weight interpolation with the start, as in WiSE-FT (Wortsman and others 2022)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from syngap.optim.sharded import reshard
from syngap.optim.tensors import local

__all__ = ["copy_floats", "interpolate"]


def _floats(model: nn.Module) -> dict[str, Tensor]:
    """Return what this process holds of parameters and of buffers that are averages, by name."""
    reshard(model)
    buffers = {name: each for name, each in model.named_buffers() if each.is_floating_point()}
    found: dict[str, Tensor] = dict(model.named_parameters()) | buffers
    return {name: local(tensor) for name, tensor in found.items()}


def copy_floats(model: nn.Module) -> dict[str, Tensor]:
    """Return copies in the memory of the CPU: they are needed once, after training."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in _floats(model).items()}


@torch.no_grad()
def interpolate(model: nn.Module, start: Mapping[str, Tensor], share: float) -> None:
    """Give a model the weights start + share · (now - start)."""
    values = _floats(model)
    shapes, before = (
        {name: tuple(value.shape) for name, value in each.items()} for each in (values, start)
    )
    if shapes != before:
        other = sorted(shapes.items() ^ before.items())[0]
        raise ValueError(
            f"the model has other parameters than at protect(), such as {other[0]} {other[1]}: for "
            "one that grew, call protection.grow(old, new)"
        )
    for name, value in values.items():
        value.copy_(torch.lerp(start[name].to(value), value, share))
