"""The gradient of each sample along directions, squared: importance, F = 1/N Σ_s (Lᵀ G_s R)²."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from syngap.optim.basis import Basis
from syngap.optim.scores import SCALE
from syngap.optim.tensors import accumulator
from syngap.optim.uses import Key, Rows, Use

__all__ = ["Gathering", "Known", "Scored", "gradients"]

_TOGETHER = 1 << 26  # numbers of per-sample gradients in memory at a time


@dataclass
class Known:
    """What is known of a parameter.

    Attributes:
        importance: F, in the coordinates of `basis`.
        mean: the mean of F over all directions, those that the basis leaves out included.
        basis: None where the coordinates are its entries.
        rows: how many rows gave it its basis; 0 where it was taken from whole batches.
    """

    importance: Tensor
    mean: Tensor
    basis: Basis | None = None
    rows: int = 0


@dataclass
class Scored:
    """A batch whose labels were drawn: the uses of weights in it, and gradients of log p."""

    uses: list[Use]
    deltas: list[Tensor]
    scores: dict[Tensor, Tensor]
    batch: int
    count: int

    def factors(self, wanted: set[Tensor]) -> Iterator[tuple[Use, Rows, Rows]]:
        """Yield the rows of each use, scaled so that squares are sums over predictions."""
        for use, delta in zip(self.uses, self.deltas, strict=True):
            if use.key[0] in wanted:
                yield use, *self._rows(use, delta)

    def by_weight(self, wanted: set[Tensor]) -> Iterator[tuple[Key, Sequence[tuple[Rows, Rows]]]]:
        """Yield the rows of all uses of one weight at a time, which take much memory."""
        uses: dict[Key, list[tuple[Use, Tensor]]] = {}
        for use, delta in zip(self.uses, self.deltas, strict=True):
            if use.key[0] in wanted:
                uses.setdefault(use.key, []).append((use, delta))
        for key, pairs in uses.items():
            yield key, [self._rows(use, delta) for use, delta in pairs]

    def _rows(self, use: Use, delta: Tensor) -> tuple[Rows, Rows]:
        dtype = accumulator(use.key[0].dtype)
        return use.factors(delta, self.batch, dtype, self.count**0.5 / SCALE)


class Gathering:
    """Sums squares of gradients, sample by sample where it is known which rows are whose."""

    def __init__(
        self, bases: dict[Tensor, Basis], covered: set[Tensor], params: list[Tensor]
    ) -> None:
        self.bases, self.covered, self.params = bases, covered, params
        self.sums: dict[Tensor, Tensor] = {}
        self.squares: dict[Tensor, Tensor] = {}
        self.count = 0

    def add(self, scored: Scored) -> None:
        """Add the squares of a batch."""
        self.count += scored.count
        for (param, index), factors in scored.by_weight(self.covered):
            basis = self._basis(param, index)
            total = self._total(param)
            part = total if index is None else total[index]
            for gradients in _in_parts(factors, basis, param, index):
                square = gradients.square().sum(0)
                part.view(square.shape).add_(square)
            if basis is not None and not basis.is_complete:
                self._note(param, _squared_norm(factors, param, index))
        for param, score in scored.scores.items():
            if param not in self.covered:
                wide = score.to(accumulator(param.dtype))
                self._total(param).addcmul_(wide, wide, value=scored.count / SCALE**2)

    def finish(self, rows: Mapping[Tensor, int]) -> dict[Tensor, Known]:
        """Return means, and how many rows each parameter had."""
        known = {}
        for param in self.params:
            importance = self._total(param) / max(1, self.count)
            total = self.squares.get(param)
            total = importance.sum() if total is None else total / max(1, self.count)
            mean = total / max(1, param.numel())
            known[param] = Known(importance, mean, self.bases.get(param), rows.get(param, 0))
        return known

    def _basis(self, param: Tensor, index: int | None) -> Basis | None:
        basis = self.bases.get(param)
        if basis is None or index is None:
            return basis
        sides = (basis.left, basis.right)
        return Basis(*(None if side is None else side[index] for side in sides))

    def _total(self, param: Tensor) -> Tensor:
        if param not in self.sums:
            basis, dtype = self.bases.get(param), accumulator(param.dtype)
            shape = param.shape if basis is None else basis.shape(param)
            self.sums[param] = torch.zeros(shape, dtype=dtype, device=param.device)
        return self.sums[param]

    def _note(self, param: Tensor, square: Tensor) -> None:
        self.squares[param] = self.squares[param] + square if param in self.squares else square


def _in_parts(
    factors: Sequence[tuple[Rows, Rows]], basis: Basis | None, param: Tensor, index: int | None
) -> Iterator[Tensor]:
    """Yield gradients (groups, k0, k1) of some samples at a time, summed over all uses."""
    groups = {left.groups for left, _ in factors}
    if len(groups) > 1:
        factors = [(left.pooled(), right.pooled()) for left, right in factors]
        groups = {1}
    (count,) = groups
    size = (param.shape if index is None else param.shape[1:]).numel()
    together = max(1, _TOGETHER // max(1, size))
    for start in range(0, count, together):
        part = slice(start, start + together)
        yield gradients(
            [
                (Rows(left.values[part], left.is_one_hot), Rows(right.values[part]))
                for left, right in factors
            ],
            basis,
            param,
            index,
        )


def gradients(
    factors: Sequence[tuple[Rows, Rows]], basis: Basis | None, param: Tensor, index: int | None
) -> Tensor:
    """Return Lᵀ G_s R of each sample, summed over the uses of a weight."""
    total: Tensor | None = None
    for left, right in factors:
        rows = _rotated(right.values, None if basis is None else basis.right)
        if left.is_one_hot:
            vocabulary = param.shape[0 if index is None else 1]
            found = rows.new_zeros(len(rows), vocabulary, rows.shape[-1])
            tokens = left.values.unsqueeze(-1).expand_as(rows)
            found.scatter_add_(1, tokens, rows)
            side = None if basis is None else basis.left
            found = found if side is None else side.mT.to(found.dtype) @ found
        else:
            found = _rotated(left.values, None if basis is None else basis.left).mT @ rows
        total = found if total is None else total.add_(found)
    assert total is not None
    return total


def _rotated(rows: Tensor, directions: Tensor | None) -> Tensor:
    return rows if directions is None else rows @ directions.to(rows.dtype)


def _squared_norm(factors: Sequence[tuple[Rows, Rows]], param: Tensor, index: int | None) -> Tensor:
    """Return Σ_s |G_s|², over all directions."""
    if len(factors) == 1 and not factors[0][0].is_one_hot:
        (left, right) = factors[0]
        if left.values.shape[1] <= min(left.values.shape[2], right.values.shape[2]):
            grams = [rows.values @ rows.values.mT for rows in (left, right)]
            return (grams[0] * grams[1]).sum()
    parts = [part.square().sum() for part in _in_parts(factors, None, param, index)]
    return torch.stack(parts).sum()
