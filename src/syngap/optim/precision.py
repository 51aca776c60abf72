"""The precision that squares are taken and kept in."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accumulator", "kept_in", "wide"]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type that the importance of a parameter of this type is calculated in.

    Squares of half precision overflow or vanish, and a slow average of them stands still.
    """
    return torch.float32 if dtype.itemsize < 4 else dtype


def kept_in(dtype: torch.dtype, compact: bool) -> torch.dtype:
    """Return the type that it is kept in; `compact` knows how not to stand still."""
    return torch.bfloat16 if compact else accumulator(dtype)


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in that type."""
    return tensor.to(accumulator(tensor.dtype))
