"""A plane of networks: two directions from one set of weights, measured in filter norms.

Li et al. (2018) make directions of different networks comparable by scaling every filter of a
random direction to the norm of the same filter of the network. Here the same scaling is a way of
measuring: `FilterNorm` is an inner product in which the length of a change is the root mean square,
over all filters, of how far each moved as a share of its own norm. A direction of Li's has length
1, and so may any other direction: that of a path.

A filter is a slice along dimension 0 of a weight tensor. Tensors of one dimension (biases, what
BatchNorm learns and what it has counted) do not count towards lengths, but move along with the rest
wherever a direction comes from two networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["FilterNorm", "Flat", "Plane", "Weights", "random_plane", "through"]

Weights: TypeAlias = Mapping[str, Tensor]


class Flat(ValueError):
    """The directions that were given do not span a plane."""


class FilterNorm:
    """The inner product of two changes of weights, in filter norms of `reference`.

    Args:
        reference: the network whose filters everything is measured against.
        counted: the names of the tensors that are learned; of those, the ones with filters count.

    Examples:
        >>> reference = {"weight": torch.tensor([[3.0, 4.0], [0.0, 2.0]]), "bias": torch.ones(2)}
        >>> norm = FilterNorm(reference, reference)
        >>> norm(reference, reference)  # a network is one filter norm long
        1.0
        >>> norm.filters
        2
    """

    def __init__(self, reference: Weights, counted: Iterable[str]) -> None:
        self._squares: dict[str, Tensor] = {}
        for name in counted:
            if reference[name].dim() > 1:
                self._squares[name] = reference[name].double().flatten(1).square().sum(1)
        self.counted = frozenset(self._squares)
        self.filters = sum(int((square > 0).sum()) for square in self._squares.values())

    def __call__(self, one: Weights, other: Weights) -> float:
        """Return the inner product; a filter whose reference is zero has no norm to count in."""
        total = 0.0
        for name, square in self._squares.items():
            product = (one[name].double() * other[name].double()).flatten(1).sum(1)
            total += float(torch.where(square > 0, product / square, 0.0).sum())
        return total / max(self.filters, 1)

    def length(self, change: Weights) -> float:
        """Return how long a change is."""
        return math.sqrt(self(change, change))


@dataclass(frozen=True)
class Plane:
    """Every network `origin + x first + y second`; the directions are orthonormal under `norm`.

    Args:
        origin: weights and buffers; what is not a real number stays as it is there.
        first: the direction of x, by name, float64.
        second: the direction of y.
        norm: what lengths and angles mean.
        lowest: the least value of some tensors. Variances that BatchNorm has counted would turn
            negative far out; they stop at the smallest of the networks that the plane came from.
    """

    origin: Weights
    first: Weights
    second: Weights
    norm: FilterNorm
    lowest: Weights

    def at(self, x: float, y: float) -> dict[str, Tensor]:
        """Return the network at a place, each tensor in its own precision."""
        found = {}
        for name, value in self.origin.items():
            if name not in self.first:
                found[name] = value
                continue
            moved = value.double() + x * self.first[name] + y * self.second[name]
            if name in self.lowest:
                moved = torch.maximum(moved, self.lowest[name].double())
            found[name] = moved.to(value.dtype)
        return found

    def coordinates(self, weights: Weights) -> tuple[float, float]:
        """Return the place of a network, or of its shadow where it is not in the plane."""
        change = _difference(weights, self.origin)
        return self.norm(change, self.first), self.norm(change, self.second)

    def distance(self, weights: Weights) -> float:
        """Return how far from the plane a network is."""
        x, y = self.coordinates(weights)
        change = _difference(weights, self.origin)
        off = _less(_less(change, x, self.first), y, self.second)
        return self.norm.length(off)


def through(
    before: Weights, origin: Weights, after: Weights, norm: FilterNorm, variances: Iterable[str]
) -> Plane:
    """Return the plane of three networks: x runs from `before` to `origin`, y towards `after`.

    All that is a real number moves, so that the three networks are in it exactly, statistics of
    BatchNorm included.

    Args:
        before: lies at (-its distance, 0).
        origin: lies at (0, 0).
        after: lies at y > 0.
        norm: what lengths and angles mean.
        variances: names of tensors that must not turn negative.
    """
    lowest = {
        name: torch.minimum(torch.minimum(before[name], origin[name]), after[name])
        for name in variances
    }
    directions = _difference(origin, before), _difference(after, origin)
    first, second = _orthonormal(*directions, norm)
    return Plane(origin, first, second, norm, lowest)


def random_plane(origin: Weights, norm: FilterNorm, draw: Callable[[Tensor], Tensor]) -> Plane:
    """Return the plane of two random directions, as Li et al. (2018) have it.

    Each filter of a direction is drawn and scaled to the norm of the network's; one-dimensional
    tensors and what BatchNorm has counted stay as they are.

    Args:
        origin: the network in the middle.
        norm: what lengths and angles mean.
        draw: returns Gaussian numbers in the shape of a tensor.
    """

    def direction() -> dict[str, Tensor]:
        found = {}
        for name, value in origin.items():
            if not value.is_floating_point():
                continue
            if name not in norm.counted:
                found[name] = torch.zeros_like(value, dtype=torch.float64)
                continue
            drawn = draw(value).double()
            by_filter = (-1, *[1] * (value.dim() - 1))
            size = value.double().flatten(1).norm(dim=1) / drawn.flatten(1).norm(dim=1)
            found[name] = drawn * size.reshape(by_filter)
        return found

    first, second = _orthonormal(direction(), direction(), norm)
    return Plane(origin, first, second, norm, {})


def _orthonormal(
    one: dict[str, Tensor], other: dict[str, Tensor], norm: FilterNorm
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the two by Gram and Schmidt: the first keeps its direction."""
    first = _unit(one, norm, norm.length(one))
    straight = _less(other, norm(other, first), first)
    straight = _less(straight, norm(straight, first), first)  # once more, for the last digits
    return first, _unit(straight, norm, norm.length(other))


def _unit(change: dict[str, Tensor], norm: FilterNorm, scale: float) -> dict[str, Tensor]:
    length = norm.length(change)
    if not length > 1e-6 * scale:  # what is left is rounding; nor NaN
        raise Flat("the weights did not move, or moved along one line")
    return {name: value / length for name, value in change.items()}


def _difference(one: Weights, other: Weights) -> dict[str, Tensor]:
    return {
        name: value.double() - other[name].double()
        for name, value in one.items()
        if value.is_floating_point()
    }


def _less(change: Weights, share: float, direction: Weights) -> dict[str, Tensor]:
    return {name: value - share * direction[name] for name, value in change.items()}
