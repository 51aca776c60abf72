"""Directions of weights in a stream: they follow the scores, and importance follows them.

With the scores G of a batch, summed over its samples, as a matrix (outputs, inputs):

    A ← α A + (1 - α) G Gᵀ,   B ← α B + (1 - α) Gᵀ G

Their eigenvectors are the directions of the two sides, as in Shampoo and SOAP. Scores of sampled
labels are independent and have mean zero, so A is the moment of output gradients, each times the
squared length of its input, and B the other way round: up to a factor those of K-FAC where the two
are independent. Nothing of the forward pass has to be recorded.

A refresh takes one power iteration, L ← QR(A L), and carries importance over by squared overlaps:

    F ← (LₙᵀL)² F (RᵀRₙ)²

which keeps its sum. It is an approximation: it takes the scores along old directions for
uncorrelated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syngap.messages import count_of
from syngap.optim.basis import Basis
from syngap.optim.checks import check_whole
from syngap.optim.errors import CAPTURED_REFRESH
from syngap.optim.parameter_state import DIRECTIONS, MOMENTS, basis_in
from syngap.optim.tensors import accumulator, is_sharded
from syngap.optim.update import Work, fold

__all__ = [
    "Directions",
    "by_cholesky",
    "check_group",
    "chosen_directions",
    "first_state",
    "follow",
    "follow_scores",
    "orthonormal",
    "refresh",
    "require_weights",
    "require_whole",
    "second_moments",
]

# Of the mean eigenvalue. Directions without any score stay where they are, rather than anywhere.
_SHIFT = 1e-3


@dataclass(frozen=True)
class Directions:
    """How the directions of weights follow the scores, in `SynGAP(..., directions=...)`.

    Attributes:
        refresh: directions are refreshed at each k-th observation.
        largest: a side of a weight with more rows than that keeps its entries. A side of n rows
            keeps 2 n² numbers, and a step multiplies with n numbers for each entry of the weight.
    """

    refresh: int = 10
    largest: int = 2048

    def __post_init__(self) -> None:
        for name in ("refresh", "largest"):
            check_whole(name, getattr(self, name), 1)

    def is_refresh(self, group: Mapping[str, Any]) -> bool:
        """Return whether the next step that sees scores refreshes directions.

        Args:
            group: the parameter group that counts those steps.
        """
        seen: int = group.get("observed", 0)
        return (seen + 1) % self.refresh == 0

    def count(self, group: dict[str, Any]) -> None:
        """Count a step that saw scores."""
        group["observed"] = group.get("observed", 0) + 1

    def sides(self, param: Tensor) -> dict[str, int]:
        """Return the rows of those sides of a parameter that have directions, by name."""
        if param.dim() < 2:
            return {}
        rows = (len(param), math.prod(param.shape[1:]))
        sides = zip(DIRECTIONS, rows, strict=True)
        return {name: size for name, size in sides if size <= self.largest}


def chosen_directions(
    directions: bool | Directions, *, estimator: str, compact: bool
) -> Directions | None:
    """Return how directions follow the scores, None for the entries of weights."""
    if directions is False:
        return None
    if directions is not True and not isinstance(directions, Directions):
        raise ValueError(f"directions must be True, False or a Directions, got {directions!r}")
    if estimator == "exact":
        raise ValueError(
            "estimator='exact' squares the entries of scores, and directions need the scores "
            "themselves: use estimator='sampled' with directions"
        )
    if compact:
        raise ValueError(
            "compact=True excludes directions, whose moments are in full precision and larger than "
            "importance: leave out one of them"
        )
    return Directions() if directions is True else directions


def check_group(options: Mapping[str, Any], directions: Directions | None) -> None:
    """Refuse options of a group that exclude directions."""
    if directions is not None and options.get("fused"):
        raise ValueError(
            "fused=True excludes directions, as the fused kernel works on entries: leave out one "
            "of them"
        )


def require_whole(params: Iterable[Tensor], directions: Directions | None) -> None:
    """Refuse parameters that are sharded, where weights have directions."""
    if directions is not None and any(is_sharded(param) for param in params):
        raise ValueError(
            "directions need whole weights, and a parameter is sharded over processes (FSDP2, "
            "tensor parallelism): leave out directions, or use DDP"
        )


def require_weights(params: Iterable[Tensor], directions: Directions | None) -> None:
    """Refuse parameters of which none would have directions."""
    if directions is not None and not any(directions.sides(param) for param in params):
        raise ValueError(
            "directions are of weights with two or more dimensions and a side of at most "
            f"{count_of(directions.largest, 'row')}, and this optimizer has none: leave out "
            "directions, or pass directions=Directions(largest=...)"
        )


def first_state(param: Tensor, directions: Directions) -> dict[str, Tensor]:
    """Return what is kept of a weight at first: its entries as directions, and zeros."""
    like: dict[str, Any] = {"dtype": accumulator(param.dtype), "device": param.device}
    state: dict[str, Tensor] = {}
    for name, size in directions.sides(param).items():
        state["importance"] = torch.zeros(param.flatten(1).shape, **like)
        state[name] = torch.eye(size, **like)
        state[MOMENTS[DIRECTIONS.index(name)]] = torch.zeros(size, size, **like)
    return state


def second_moments(score: Tensor, basis: Basis, weight: float) -> dict[str, Tensor]:
    """Return G Gᵀ and Gᵀ G of summed scores, times a weight, for the sides that have directions."""
    matrix = score.flatten(1)
    found = {}
    if basis.left is not None:
        found[MOMENTS[0]] = (matrix @ matrix.T) * weight
    if basis.right is not None:
        found[MOMENTS[1]] = (matrix.T @ matrix) * weight
    return found


def follow(
    directions: Directions,
    group: dict[str, Any],
    works: Iterable[Work],
    moments: Mapping[Tensor, Mapping[str, Tensor]],
    state_of: Callable[[Tensor], dict[str, Any]],
) -> bool:
    """Let moments follow the scores that a step saw, and return whether directions were refreshed.

    Args:
        directions: how they follow.
        group: the parameter group that counts such steps.
        works: of the step.
        moments: second moments of the scores, by parameter and side.
        state_of: returns what is kept of a parameter.
    """
    is_due = directions.is_refresh(group)
    if is_due and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(CAPTURED_REFRESH)
    directions.count(group)
    for work in works:
        if is_due:
            fold(work)  # along the directions that it was observed in
        for param in work.whole:
            follow_scores(state_of(param), moments.get(param, {}), work.keep)
            if is_due:
                refresh(state_of(param))
    return is_due


def follow_scores(state: dict[str, Any], observed: Mapping[str, Tensor], keep: float) -> None:
    """Let the moments of a parameter follow the average that its importance follows."""
    for name in MOMENTS:
        if name in state:
            state[name].mul_(keep)
            if name in observed:
                state[name].add_(observed[name], alpha=1.0 - keep)


def refresh(state: dict[str, Any]) -> None:
    """Bring directions of a parameter nearer to the eigenvectors, and carry importance over."""
    old = basis_in(state)
    if old is None:
        return
    new = {
        name: _power_iteration(state[moment], state[name])
        for name, moment in zip(DIRECTIONS, MOMENTS, strict=True)
        if name in state
    }
    carried = state["importance"]
    if old.left is not None:
        carried = (new["left"].T @ old.left).square() @ carried
    if old.right is not None:
        carried = carried @ (old.right.T @ new["right"]).square()
    for name, value in (new | {"importance": carried}).items():
        state[name].copy_(value)  # where it is: a CUDA graph reads it there


def _power_iteration(moment: Tensor, directions: Tensor) -> Tensor:
    """Return directions one power iteration nearer to the eigenvectors, the largest first."""
    mean = moment.diagonal().mean().clamp(min=torch.finfo(moment.dtype).tiny)
    products = moment @ directions / mean
    quotients = (directions * products).sum(0)
    order = quotients.argsort(descending=True, stable=True)
    shifted = products + _SHIFT * directions
    return orthonormal(shifted[:, order])


def orthonormal(columns: Tensor) -> Tensor:
    """Return the Q of a QR decomposition, up to the signs of its columns."""
    found = by_cholesky(columns) if columns.is_cuda else None
    return torch.linalg.qr(columns).Q if found is None else found


def by_cholesky(columns: Tensor) -> Tensor | None:
    """Return Q = C R⁻¹ with RᵀR = CᵀC: a quarter of a QR decomposition's time on an H200.

    It squares the condition, so it is in double precision, and is orthonormalised once more: one
    step of Newton and Schulz squares what the first is off by. None: that is too far off.
    """
    wide = columns.double()
    factor, failed = torch.linalg.cholesky_ex(wide.mT @ wide, upper=True)
    found: Tensor = torch.linalg.solve_triangular(factor, wide, upper=True, left=False)
    products = found.mT @ found
    off = (products - torch.eye(len(products), dtype=wide.dtype, device=wide.device)).norm()
    if (failed != 0) | ~(off < torch.finfo(columns.dtype).eps ** 0.5):  # also where it is NaN
        return None
    return (1.5 * found - 0.5 * found @ products).to(columns.dtype)
