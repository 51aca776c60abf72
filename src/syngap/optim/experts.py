"""Parameters that are stacks of matrices, such as experts, and which of them a product takes.

A product takes a whole stack (`torch.bmm`), one matrix for each row (`stack[experts_of_rows]`, as
"batched_mm" of transformers), or each matrix for some rows that follow one another ("grouped_mm").
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Experts", "Matrices", "Part"]

Part: TypeAlias = "tuple[int, slice | Tensor]"  # which matrix of a stack, and where its rows are


@dataclass(frozen=True)
class Matrices:
    """Matrices of a parameter, in the order in which a product takes them.

    Attributes:
        param: the parameter, of three dimensions.
        indices: which of its matrices, None for all in their order.
        transposed: whether each is transposed.
    """

    param: Tensor
    indices: Tensor | None
    transposed: bool

    def parts(self) -> Iterator[Part]:
        """Yield each matrix that is taken, and at which places."""
        if self.indices is None:
            yield from ((index, slice(index, index + 1)) for index in range(len(self.param)))
        elif _has_numbers(self.indices):
            for index in sorted(set(self.indices.tolist())):
                yield index, (self.indices == index).nonzero()[:, 0]
        else:
            yield from self._any_parts()

    def groups(self, ends: Tensor) -> Iterator[Part]:
        """Yield each matrix that has rows, and which: those up to its end."""
        if not _has_numbers(ends) or not (self.indices is None or _has_numbers(self.indices)):
            yield from self._any_parts()
            return
        indices = range(len(self.param)) if self.indices is None else self.indices.tolist()
        start = 0
        for index, end in zip(indices, ends.tolist(), strict=True):
            if start < end:
                yield index, slice(start, end)
            start = end

    def _any_parts(self) -> Iterator[Part]:
        """Yield all matrices, where there are shapes and no numbers."""
        yield from ((index, slice(None)) for index in range(len(self.param)))


class Experts:
    """Finds out of which stack the matrices of a product are.

    Args:
        params: the parameters to look for.
    """

    def __init__(self, params: Collection[Tensor]) -> None:
        self.params = params
        # Of a tensor: the parameter that it was gathered from, and which matrices.
        self._gathered: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakTensorKeyDictionary()

    def note(self, output: Tensor, source: Any, *where: Any, **_: Any) -> None:
        """Note that an output is `source[indices]`, or `source.index_select(0, indices)`."""
        if source not in self.params or source.dim() != 3 or where[:-1] not in ((), (0,)):
            return
        (indices,) = where[-1:] or (None,)
        if not isinstance(indices, Tensor) or indices.dim() != 1:
            return
        if indices.dtype in (torch.int32, torch.int64):  # not a mask
            self._gathered[output] = source, indices % len(source)

    def find(self, weight: Tensor) -> Matrices | None:
        """Return the stack that matrices are of, None where they are of none."""
        if weight.dim() != 3:
            return None
        base = weight if weight in self.params or weight._base is None else weight._base
        param, indices = base, None
        if base in self._gathered:
            param, indices = self._gathered[base]
        if param not in self.params or base.dim() != 3:
            return None
        for transposed, whole in ((False, base), (True, base.mT)):
            if weight.shape == whole.shape and weight.stride() == whole.stride():
                return Matrices(param, indices, transposed)
        return None


def _has_numbers(tensor: Tensor) -> bool:
    """Return whether it is a plain tensor, not one of a shape alone (torch's `FakeTensor`)."""
    return type(tensor) is Tensor
