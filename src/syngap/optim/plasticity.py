"""How far a parameter may move: the mask Ω of its importance, measured against the mean μ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syngap.optim.defaults import DEFAULTS
from syngap.optim.tensors import wide

__all__ = ["Means", "linear_plasticity", "plasticity"]

# The largest arctanh of a float below one is 18.7; divided by this it still fits a float32.
_SMALLEST_DAMPING = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps

_MUCH_LARGER = 10.0


def plasticity(
    importance: Tensor,
    mean: Tensor | float,
    *,
    consolidation: float = DEFAULTS.consolidation,
    damping: float = DEFAULTS.damping,
    ambient: float = DEFAULTS.ambient,
) -> Tensor:
    """Return the bounded mask Ω = 1 - tanh(c (F + λ)) + ε with c = arctanh(τ) / (μ + λ).

    It is computed as 2 sigmoid(-2 c (F + λ)) + ε, which is the same function but keeps its digits
    where `1 - tanh` has cancelled to zero.

    Args:
        importance: F, non-negative, of any shape.
        mean: μ, the mean importance that F is measured against; a number or a 0-dim tensor.
        consolidation: τ in (0, 1), how much steps shrink at mean importance.
        damping: λ ≥ 0, added to F and to μ. Zero is replaced by the smallest number for which the
            quotient is safe, so that an all-zero importance counts as being at its mean.
        ambient: ε ≥ 0, the plasticity that always remains.

    Returns:
        A tensor like `importance` with values in [ε, 1 + ε], and 1 - τ + ε where F = μ.

    Examples:
        >>> gate = plasticity(torch.tensor([0.0, 1.0, 1e30]), 1.0, consolidation=0.5, ambient=0.0)
        >>> [round(value, 6) for value in gate.tolist()]
        [1.0, 0.5, 0.0]
    """
    damping, slope = damping_and_slope(mean, consolidation, damping, bounded=True)
    return mask(importance, slope, damping, ambient, bounded=True)


def linear_plasticity(
    importance: Tensor,
    mean: Tensor | float,
    *,
    consolidation: float = DEFAULTS.consolidation,
    damping: float = DEFAULTS.damping,
    ambient: float = DEFAULTS.ambient,
) -> Tensor:
    """Return the ablation 1 - c (F + λ) + ε: the same slope without the tanh, unbounded below.

    Far above the mean (ten times at τ = 0.1) it turns negative and the step climbs the loss. It is
    here to be compared with, not to be used.

    Examples:
        >>> gate = linear_plasticity(torch.tensor([0.0, 40.0]), 1.0, damping=0.0, ambient=0.0)
        >>> [round(value, 4) for value in gate.tolist()]
        [1.0, -3.0134]
    """
    damping, slope = damping_and_slope(mean, consolidation, damping, bounded=False)
    return mask(importance, slope, damping, ambient, bounded=False)


def damping_and_slope(
    mean: Tensor | float, consolidation: float, damping: float, bounded: bool
) -> tuple[float, Tensor | float]:
    """Return λ, raised where it is too small to divide by, and what F + λ is multiplied with.

    These are few numbers a step, while `mask` runs over all of importance.
    """
    damping = max(damping, _SMALLEST_DAMPING)
    factor = -2.0 if bounded else -1.0
    return damping, factor * math.atanh(consolidation) / (mean + damping)


def mask(
    importance: Tensor, slope: Tensor | float, damping: float, ambient: float, bounded: bool
) -> Tensor:
    """Return Ω, given what `damping_and_slope` returned."""
    argument = wide(importance).add(damping).mul_(slope)
    if bounded:
        argument.sigmoid_().mul_(2.0).add_(ambient)
    else:
        argument.add_(1.0 + ambient)
    return argument.to(importance.dtype)


def mask_of_group(importance: Tensor, mean: Tensor, group: dict[str, Any]) -> Tensor:
    """Return Ω by the options of a parameter group, for a mean on the same device."""
    bounded = group["bounded"]
    damping, slope = damping_and_slope(mean, group["consolidation"], group["damping"], bounded)
    return mask(importance, slope, damping, group["ambient"], bounded)


def damping_notice(
    groups: Sequence[dict[str, Any]], network: float, mean_of: Callable[[Tensor], Tensor]
) -> str | None:
    """Return what to say of a damping that is far above the mean importance, None if none is.

    Args:
        groups: the parameter groups.
        network: the mean importance of the network.
        mean_of: returns that of a parameter.
    """
    for group in groups:
        least = network
        if group["scope"] == "tensor":
            own = [mean_of(param).item() for param in group["params"]]
            least = min((mean for mean in own if mean > 0.0), default=0.0)
        if 0.0 < least < group["damping"] / _MUCH_LARGER:  # at zero no damping would help
            return (
                f"damping {group['damping']:g} is far above the mean importance {least:g}, so "
                "parameters get nearly the same plasticity and SynGAP is plain descent with a "
                f"smaller step: set damping below {least / _MUCH_LARGER:g}"
            )
    return None


class Means:
    """The mean importance of each tensor and of the network, without a pass over importance.

    The mean of an exponential average is the exponential average of the means, so it costs a few
    numbers a step. They live in one vector, of which every parameter's state holds its element: one
    operation advances all, and `state_dict` needs to know nothing of it.

    Args:
        params: the parameters that count.
        states: their optimizer states, whose "mean" becomes an element of the vector.
        before: the mean importance of a network, and those of its parameters, from which that of
            the network moves on as theirs do; None for a parameter that is not of it.
        numel: of the network; by default of the parameters.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        before: tuple[Tensor, Sequence[Tensor | None]] | None = None,
        numel: int = 0,
    ) -> None:
        numel = numel or max(1, sum(param.numel() for param in params))
        kept = [state["mean"] for state in states] or [torch.zeros(())]
        dtype = max((mean.dtype for mean in kept), key=lambda dtype: dtype.itemsize)
        self.vector = torch.stack([mean.to(kept[0].device, dtype) for mean in kept])
        self._shares = self.vector.new_tensor([param.numel() / numel for param in params] or [0.0])
        self._before: tuple[Tensor, Tensor] | None = None
        self._still: Tensor | None = None  # the network's, before anything is observed
        self._has_advanced = False
        if before is not None:
            known = [(mean if mean is not None else kept[0].new_zeros(())) for mean in before[1]]
            known = [mean.to(self.vector) for mean in known] or [self.vector[0]]
            self._before = before[0].to(self.vector), torch.stack(known)
            counts = [float(mean is not None) for mean in before[1]] or [0.0]
            self._shares *= self._shares.new_tensor(counts)
        self._elements = self.vector.unbind()[: len(states)]
        for state, element in zip(states, self._elements, strict=True):
            state["mean"] = element

    def fits(self, states: Sequence[dict[str, Any]]) -> bool:
        """Return whether these states, no more and no fewer, hold the elements of this vector."""
        return len(states) == len(self._elements) and all(
            state.get("mean") is element
            for state, element in zip(states, self._elements, strict=True)
        )

    def advance(self, first: int, observed: Sequence[Tensor | None], keep: float) -> None:
        """Let means from the `first` on follow what was observed of their parameters."""
        like = self.vector
        seen = [like.new_zeros(()) if mean is None else mean for mean in observed]
        if any(mean.dtype != like.dtype or mean.device != like.device for mean in seen):
            seen = [mean.to(like) for mean in seen]
        self._still, self._has_advanced = None, True
        part = self.vector[first : first + len(seen)]
        part.mul_(keep).add_(torch.stack(seen), alpha=1.0 - keep)

    def follow(
        self,
        groups: Sequence[dict[str, Any]],
        observed: Mapping[Tensor, Tensor],
        keep: Callable[[dict[str, Any]], float],
    ) -> None:
        """Let the means follow the average that importance follows.

        Args:
            groups: the parameter groups, of which parameters that are frozen do not count.
            observed: the mean of what was observed, by parameter.
            keep: how much of its importance a group keeps.
        """
        first = 0
        for group in groups:
            means = [observed.get(param) for param in group["params"] if param.requires_grad]
            if means:
                self.advance(first, means, keep(group))
            first += len(means)

    def network(self) -> Tensor:
        """Return the mean over all elements of all parameters."""
        if self._still is not None:
            return self._still
        if self._before is not None:
            mean, means = self._before
            found = mean + (self.vector - means).dot(self._shares)
            is_replayed = found.is_cuda and torch.cuda.is_current_stream_capturing()
            self._still = None if self._has_advanced or is_replayed else found
            return found
        if len(self.vector) == 1:
            return self.vector[0].clone()
        return self.vector.dot(self._shares)
