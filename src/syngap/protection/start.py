"""The weights that a model had before training: to interpolate with, and to answer with again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from syngap.optim.sharded import reshard
from syngap.optim.tensors import is_sharded, local, sum_over_shards

__all__ = ["Start"]


class Start:
    """Copies of parameters, and of buffers that are averages, in the memory of the CPU.

    Those that training changes move to the model's device when the model first answers with them.

    Args:
        model: as it is before training.

    Attributes:
        values: what this process holds of them, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        self.values = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in _floats(model).items()
        }
        self._params, self._frozen = {name for name, _ in model.named_parameters()}, _frozen(model)
        self._versions = _versions(model)

    @torch.no_grad()
    def differs(self, model: nn.Module) -> bool:
        """Return whether parameters that were written to since have other values than here."""
        versions, now = _versions(model), _floats(model)
        return any(
            not torch.equal(now[name].cpu(), self.values[name].cpu())
            for name in versions
            if versions[name] != self._versions.get(name)
            and _has_shape(self.values.get(name), now[name])
        )

    @torch.no_grad()
    def interpolate(self, model: nn.Module, share: float) -> None:
        """Give a model the weights start + share · (now - start), as in WiSE-FT (Wortsman 2022).

        Parameters that were added after protect() stay as they are.
        """
        now = _floats(model)
        self._check(now, self._params)
        for name, value in now.items():
            if _has_shape(self.values.get(name), value):
                value.copy_(torch.lerp(self.values[name].to(value), value, share))

    @contextmanager
    def restored(self, model: nn.Module) -> Iterator[None]:
        """Give a model back after the block the weights that it had before."""
        now = {name: tensor.detach().clone() for name, tensor in _floats(model).items()}
        torch.clear_autocast_cache()  # as below
        try:
            yield
        finally:
            _copy(_floats(model), now)
            torch.clear_autocast_cache()

    @contextmanager
    def in_model(self, model: nn.Module) -> Iterator[None]:
        """Let a model have these weights inside the block, without a trace in its graphs.

        Weights are exchanged, not copied, unless they are sharded. Parameters that were added after
        protect() keep their values.
        """
        parts = _floats(model)
        self._check({name: parts[name] for name in self._params & parts.keys()}, self._params)
        unchanged = self._unchanged(model, parts)
        exchanged = {
            name: tensor
            for name, tensor in parts.items()
            if name not in unchanged and _has_shape(self.values.get(name), tensor)
        }
        for name, tensor in exchanged.items():
            self.values[name] = self.values[name].to(tensor)
        sharded = any(is_sharded(param) for param in model.parameters())
        exchange = _copy if sharded else _point
        current = {
            name: tensor.detach().clone() if sharded else tensor.data
            for name, tensor in exchanged.items()
        }
        # Autocast keeps weights in half precision by the tensor, which has other values now.
        torch.clear_autocast_cache()
        try:
            exchange(exchanged, self.values)
            yield
        finally:
            if sharded:
                reshard(model)
            exchange(exchanged, current)
            torch.clear_autocast_cache()

    def _unchanged(self, model: nn.Module, parts: dict[str, Tensor]) -> set[str]:
        """Return what was frozen and is, and has the same values: it need not be exchanged."""
        versions = _versions(model)
        for name in (frozen := self._frozen & _frozen(model)):
            is_written = versions[name] != self._versions.get(name)
            if is_written and torch.equal(parts[name].cpu(), self.values[name].cpu()):
                self._versions[name] = versions[name]  # as where a state was loaded
        return {name for name in frozen if versions[name] == self._versions.get(name)}

    def grow(self, name: str, old: Tensor, new: Tensor) -> None:
        """Take a larger parameter for an old one, whose entries it begins with."""
        before = self.values[name]
        larger = new.detach().to(before.device, copy=True)
        larger[tuple(slice(size) for size in old.shape)] = before
        self.values[name] = larger

    @torch.no_grad()
    def distance(self, model: nn.Module) -> float:
        """Return how far weights are from here, by the norm of the start; new ones do not count."""
        way = norm = 0.0
        for name, param in model.named_parameters():
            start, now = self.values.get(name), local(param)
            if start is not None and start.shape == now.shape:
                start = start.to(now.device)
                squares = [float(each.float().norm()) ** 2 for each in (now - start, start)]
                if is_sharded(param):
                    parts = torch.tensor(squares, dtype=torch.float64, device=now.device)
                    squares = sum_over_shards([parts], [param])[0].tolist()
                way += squares[0]
                norm += squares[1]
        return float((way / max(norm, 1e-30)) ** 0.5)

    def _check(self, now: dict[str, Tensor], names: set[str]) -> None:
        """Refuse a model with other parameters than the start has."""
        shapes, before = (
            {name: tuple(each[name].shape) for name in each if name in names}
            for each in (now, self.values)
        )
        if shapes != before:
            other = sorted(shapes.items() ^ before.items())[0]
            raise ValueError(
                f"the model has other parameters than at protect(), such as {other[0]} {other[1]}: "
                "for one that grew, call protection.grow(old, new)"
            )


def _versions(model: nn.Module) -> dict[str, int | None]:
    """Return how often parameters were written to, by name; torch does not count all of them."""
    params = model.named_parameters()
    return {name: None if each.is_inference() else each._version for name, each in params}


def _frozen(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if not param.requires_grad}


def _has_shape(value: Tensor | None, tensor: Tensor) -> bool:
    return value is not None and value.shape == tensor.shape


def _floats(model: nn.Module) -> dict[str, Tensor]:
    """Return what this process holds of parameters and of buffers that are averages, by name."""
    reshard(model)
    buffers = {name: each for name, each in model.named_buffers() if each.is_floating_point()}
    found: dict[str, Tensor] = dict(model.named_parameters()) | buffers
    return {name: local(tensor) for name, tensor in found.items()}


def _point(tensors: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.data = values[name]


@torch.no_grad()
def _copy(tensors: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])
