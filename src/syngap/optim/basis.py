"""The coordinates of a weight: its entries, or directions of its two sides.

A diagonal says little of weights that only matter together. For a layer y = W x the Fisher matrix
is close to A ⊗ B (K-FAC), where A is the second moment of x and B that of the gradient of log p
with respect to y. With their eigenvectors as columns of R and L, W = L C Rᵀ, and in the entries of
C the matrix is close to diagonal: each is how strongly one direction of inputs moves one of
outputs. Rotating into that basis is the idea of R-EWC, EKFAC and SOAP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syngap.optim.tensors import gathered, is_sharded, part_of

__all__ = ["Basis", "Stack", "filter_along", "share_stacks", "stack_alike"]

TOGETHER = 1 << 25  # numbers of equal weights that are multiplied at once


@dataclass(frozen=True)
class Basis:
    """Orthonormal directions of the two sides of a weight, as columns; None is its entries.

    A weight of two dimensions is a matrix (d0, d1), that of a convolution one of (outputs, inputs ·
    places), and one of three dimensions whose directions have three is a stack of matrices.

    Attributes:
        left: (d0, k0), directions of the first dimension.
        right: (d1, k1), of the others.
    """

    left: Tensor | None
    right: Tensor | None

    @property
    def is_complete(self) -> bool:
        """Whether it has as many directions as the weight has rows and columns."""
        sides = (side for side in (self.left, self.right) if side is not None)
        return all(side.shape[-1] == side.shape[-2] for side in sides)

    def shape(self, weight: Tensor) -> tuple[int, ...]:
        """Return the shape of a weight's coordinates."""
        shape = list(self._matrix(weight).shape)
        if self.left is not None:
            shape[-2] = self.left.shape[-1]
        if self.right is not None:
            shape[-1] = self.right.shape[-1]
        return tuple(shape)

    def into(self, weight: Tensor, *, keep_dtype: bool = True) -> Tensor:
        """Return the coordinates Lᵀ W R of a weight, or of what has its shape."""
        found = self._matrix(weight)
        # A basis in half precision multiplies on tensor cores, and its numbers are summed wide.
        dtype = self.dtype(found)
        found = found.to(dtype)
        if self.left is not None:
            found = self.left.mT.to(dtype) @ found
        if self.right is not None:
            found = found @ self.right.to(dtype)
        return found.to(weight.dtype) if keep_dtype else found

    def back(self, coordinates: Tensor, like: Tensor) -> Tensor:
        """Return L C Rᵀ, in the shape of `like`."""
        dtype = self.dtype(coordinates)
        found = self._matrix(coordinates).to(dtype)
        if self.left is not None:
            found = self.left.to(dtype) @ found
        if self.right is not None:
            found = found @ self.right.mT.to(dtype)
        return found.to(like.dtype).reshape(like.shape)

    def filter(self, update: Tensor, mask: Tensor) -> Tensor:
        """Return u - L ((1 - Ω) ⊙ Lᵀ u R) Rᵀ: what lies in no direction of the basis stays."""
        return update - self.held_back(update, mask)

    def held_back(self, update: Tensor, mask: Tensor) -> Tensor:
        """Return the part of an update that the gate removes: L ((1 - Ω) ⊙ Lᵀ u R) Rᵀ."""
        along = self.into(update, keep_dtype=False)
        return self.back(along * (1.0 - mask.to(along.dtype)), update)

    def back_masked(self, coordinates: Tensor, mask: Tensor) -> Tensor:
        """Return L (Ω ⊙ C) Rᵀ, in the shape of `coordinates`."""
        dtype = self.dtype(coordinates)
        masked = coordinates.to(dtype) * mask.to(dtype).view_as(coordinates)
        return self.back(masked, coordinates)

    def _matrix(self, weight: Tensor) -> Tensor:
        side = self.left if self.right is None else self.right
        if side is None or side.dim() == 3 or weight.dim() == 2:
            return weight
        return weight.flatten(1)

    def dtype(self, tensor: Tensor) -> torch.dtype:
        """Return what products with a tensor are calculated in: the less precise of both."""
        side = self.left if self.right is None else self.right
        if side is None or tensor.dtype.itemsize < side.dtype.itemsize:
            return tensor.dtype
        return side.dtype


@dataclass
class Stack:
    """Bases of weights of equal shape, which a GPU multiplies at once.

    The matrix of a weight that is sharded is gathered for it, in every process.

    Attributes:
        weights: the list of weights.
        places: which of them they are of.
        basis: their directions, stacked where there are several.
        mask: their masks, once they are known, likewise.
    """

    weights: Sequence[Tensor]
    places: list[int]
    basis: Basis
    mask: Tensor | None = None

    def select(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of a list at these places."""
        return [tensors[place] for place in self.places]

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors of a list at these places as one, in the type of its products."""
        some = self.select(tensors)
        if len(some) == 1:
            whole = gathered(some[0], self.weights[self.places[0]])
            return whole.to(self.basis.dtype(whole))
        return self._stack_tensors(some)

    def gather_change(self, now: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
        """Return now - before at these places as one tensor, in the type of its products."""
        news, olds = self.select(now), self.select(before)
        if len(news) > 1:
            return self._stack_tensors(torch._foreach_sub(news, olds))
        weight = self.weights[self.places[0]]
        if is_sharded(weight):
            change = gathered(news[0] - olds[0], weight)
            return change.to(self.basis.dtype(change))
        found = torch.empty_like(news[0], dtype=self.basis.dtype(news[0]))
        return torch.sub(news[0], olds[0], out=found)

    def split(self, found: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of one tensor, place by place, in the shapes of the weights."""
        weight = self.weights[self.places[0]]
        if len(self.places) == 1:
            return (part_of(found.view(weight.shape), weight),)
        return found.view(len(self.places), *weight.shape).unbind()

    def put_sum(self, starts: Sequence[Tensor], found: Tensor, targets: Sequence[Tensor]) -> None:
        """Do targets[place] ← starts[place] + its part of one tensor, for each place."""
        olds, news, parts = self.select(starts), self.select(targets), self.split(found)
        if len(news) == 1:
            torch.add(olds[0], parts[0], out=news[0])
        else:
            torch._foreach_copy_(news, parts)
            torch._foreach_add_(news, olds)

    def subtract(self, found: Tensor, targets: Sequence[Tensor]) -> None:
        """Do targets[place] ← targets[place] - its part of one tensor, for each place."""
        news = self.select(targets)
        if len(news) == 1:
            news[0].sub_(self.split(found)[0])
        else:
            torch._foreach_sub_(news, self.split(found.to(news[0].dtype)))

    def _stack_tensors(self, some: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
        """Return several tensors as one, in the type of its products."""
        like = some[0]
        found = like.new_empty((len(some), *like.shape), dtype=self.basis.dtype(like))
        torch._foreach_copy_(found.unbind(), some)
        return found.flatten(2)


def stack_alike(bases: Sequence[Basis | None], weights: Sequence[Tensor]) -> list[Stack]:
    """Return stacks of the bases of those weights that have one, of equal shape on a GPU.

    A stack has as many weights as are multiplied at once.
    """
    return list(_stacks(bases, weights, lambda basis, weight: weight.numel()))


def _stacks(
    bases: Sequence[Basis | None],
    weights: Sequence[Tensor],
    size: Callable[[Basis, Tensor], int],
) -> Iterator[Stack]:
    alike: dict[object, list[int]] = {}
    for place, (basis, weight) in enumerate(zip(bases, weights, strict=True)):
        if basis is not None:
            kind = _kind(basis, weight) if is_stacked(weight) else place
            alike.setdefault(kind, []).append(place)
    for kind_places in alike.values():
        found = [(place, basis) for place in kind_places if (basis := bases[place]) is not None]
        count = max(1, TOGETHER // max(1, size(found[0][1], weights[kind_places[0]])))
        for start in range(0, len(found), count):
            places, some = zip(*found[start : start + count], strict=True)
            yield Stack(weights, [*places], some[0] if len(some) == 1 else _stacked(some))


def _largest(basis: Basis, weight: Tensor) -> int:
    """Return the numbers of a weight or of its directions, whichever are more."""
    sides = [side for side in (basis.left, basis.right) if side is not None]
    return max(tensor.numel() for tensor in (weight, *sides))


def filter_along(
    updates: Sequence[Tensor], masks: Sequence[Tensor], bases: Sequence[Basis | None]
) -> list[Tensor]:
    """Return u - L ((1 - Ω) ⊙ Lᵀ u R) Rᵀ of each update, and Ω ⊙ u where it has no directions.

    On a GPU weights of equal shape are multiplied at once. Products have the precision that
    `torch.set_float32_matmul_precision` says: "high" (TF32) is off by 6e-4 of an update, so it
    suits an ε of 0.005 or more.
    """
    found = {
        place: updates[place] * masks[place] for place, basis in enumerate(bases) if basis is None
    }
    for stack in _stacks(bases, updates, _largest):  # with copies of directions: one at a time
        parts = _filter_stack(stack, updates, masks)
        found.update(zip(stack.places, parts, strict=True))
    return [found[place] for place in range(len(updates))]


def _filter_stack(
    stack: Stack, updates: Sequence[Tensor], masks: Sequence[Tensor]
) -> Sequence[Tensor]:
    some = stack.select(updates)
    if len(some) == 1:
        return (stack.basis.filter(some[0], masks[stack.places[0]]),)
    whole = stack.gather(updates)
    along = stack.basis.into(whole)
    parts = along.unbind()
    torch._foreach_addcmul_(parts, parts, stack.select(masks), -1.0)
    return torch._foreach_sub(some, stack.split(stack.basis.back(along, whole)))


def is_stacked(weight: Tensor) -> bool:
    """Return whether a weight is multiplied together with others: a GPU's kernels are short."""
    return weight.is_cuda and not is_sharded(weight)


def share_stacks(stacks: Sequence[Stack], states: Sequence[dict[str, Any]]) -> None:
    """Let states hold parts of the stacks in place of directions of their own, which go."""
    for stack in stacks:
        for part, place in enumerate(stack.places if len(stack.places) > 1 else ()):
            for name in ("left", "right"):
                side = getattr(stack.basis, name)
                if side is not None:
                    states[place][name] = side[part]


def _kind(basis: Basis, tensor: Tensor) -> object:
    sides = (basis.left, basis.right)
    if any(side is not None and side.dim() == 3 for side in sides):
        return id(basis)
    shapes = tuple(None if side is None else (side.shape, side.dtype) for side in sides)
    return tensor.shape, tensor.dtype, tensor.device, shapes


def _stacked(bases: Sequence[Basis]) -> Basis:
    lefts = [basis.left for basis in bases if basis.left is not None]
    rights = [basis.right for basis in bases if basis.right is not None]
    return Basis(
        torch.stack(lefts) if lefts else None,
        torch.stack(rights) if rights else None,
    )
