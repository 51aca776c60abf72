"""Storage of a memory's samples: one preallocated tensor a field."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Fields", "indices"]

_Kind: TypeAlias = tuple[torch.dtype, torch.Size]


class Fields:
    """Named tensors of `size` rows; the first samples fix names, shapes and dtypes.

    On a GPU one more row takes what is not kept, so that writing does the same work at every step.

    Examples:
        >>> fields, samples = Fields(2), {"y": torch.tensor([7, 8, 9])}
        >>> fields.admit(samples)
        3
        >>> fields.write(samples, torch.tensor([2, 1, 0]))
        >>> fields.read(torch.tensor([0, 1]))
        {'y': tensor([9, 8])}
    """

    def __init__(self, size: int, device: torch.device | str | None = None) -> None:
        self.size = size
        self.device = torch.device(device or "cpu")
        self.tensors: dict[str, Tensor] = {}
        self._kinds: dict[str, _Kind] = {}

    def admit(self, samples: Mapping[str, Tensor]) -> int:
        """Return the number of samples; ValueError if fields do not match."""
        lengths = {values.shape[0] if values.dim() else None for values in samples.values()}
        if None in lengths or len(lengths) != 1:
            shapes = {name: list(values.shape[:1]) for name, values in samples.items()}
            raise ValueError(f"fields need one first length in common, got {shapes}")
        if not self.tensors:
            self._allocate(samples)
        kinds = _kinds(samples)
        if kinds != self._kinds:
            raise ValueError(f"got fields {kinds}, but this memory began with {self._kinds}")
        return int(lengths.pop() or 0)

    def write(self, samples: Mapping[str, Tensor], slots: Tensor) -> None:
        """Copy each sample to its slot; below `size` these are all different."""
        if not self.size:
            return
        if self.device.type == "cpu":  # nothing has to be the same work at every step
            kept = indices([row for row, slot in enumerate(slots.tolist()) if slot < self.size])
            if not len(kept):
                return
            slots = slots.index_select(0, kept)
            samples = {name: values.index_select(0, kept) for name, values in samples.items()}
        for name, values in samples.items():
            self.tensors[name].index_copy_(0, slots, values.detach().to(self.device))

    def read(self, slots: Tensor) -> dict[str, Tensor]:
        """Return copies of the samples at `slots`."""
        return {name: tensor.index_select(0, slots) for name, tensor in self.tensors.items()}

    def state_dict(self, length: int) -> dict[str, Tensor]:
        """Return copies of the first `length` samples, which are all there is."""
        return {name: tensor[:length].clone() for name, tensor in self.tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state_dict`."""
        self.tensors = {}
        self._allocate(state)
        for name, values in state.items():
            self.tensors[name][: len(values)] = values

    def _allocate(self, like: Mapping[str, Tensor]) -> None:
        for name, values in like.items():
            shape = (self.size + 1, *values.shape[1:])
            self.tensors[name] = torch.empty(shape, dtype=values.dtype, device=self.device)
        self._kinds = _kinds(like)


def _kinds(samples: Mapping[str, Tensor]) -> dict[str, _Kind]:
    return {name: (values.dtype, values.shape[1:]) for name, values in samples.items()}


def indices(numbers: list[int]) -> Tensor:
    """Return whole numbers as an int64 tensor, in a quarter of the time of `torch.tensor`."""
    if not numbers:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)
