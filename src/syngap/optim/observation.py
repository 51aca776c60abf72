"""What was observed since the last step, waiting to be folded into the importance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from syngap.optim.precision import wide
from syngap.optim.sharded import sum_over_shards

__all__ = ["Observation", "merged"]


@dataclass
class Observation:
    """An estimate of the Fisher diagonal: weight · values², or weight · values if squared already.

    A single estimate keeps its scores as the backward pass left them, so that a step can square and
    fold them in one pass over memory. Several are averaged as squares.

    Attributes:
        values: by parameter; one that took no part is absent.
        means: the mean of the diagonal over each of those parameters.
        count: how many predictions it is the mean of.
        squared: whether `values` are squares.
        weight: what the squares are multiplied with.
    """

    values: dict[Tensor, Tensor]
    means: dict[Tensor, Tensor]
    count: int | Tensor
    squared: bool
    weight: float = 1.0

    @classmethod
    def of_scores(
        cls, scores: dict[Tensor, Tensor], count: int | Tensor, weight: float
    ) -> Observation:
        """Describe score sums, one backward pass's."""
        values = list(scores.values())
        norms = torch._foreach_norm([wide(value) for value in values])
        means = _per_element(list(torch._foreach_mul(norms, norms)), list(scores), weight)
        return cls(scores, means, count, squared=False, weight=weight)

    @classmethod
    def of_squares(
        cls, squares: dict[Tensor, Tensor], count: int | Tensor, weight: float
    ) -> Observation:
        """Describe sums of per-sample squares."""
        means = _per_element([square.sum() for square in squares.values()], list(squares), weight)
        return cls(squares, means, count, squared=True, weight=weight)

    def diagonal(self, value: Tensor) -> Tensor:
        """Return one of `values` as its part of the diagonal."""
        return (value if self.squared else wide(value).square()) * self.weight

    def is_finite(self) -> bool:
        """Whether every value is; a mean of squares is finite only if they are."""
        return bool(self._stacked_means().isfinite().all())

    def without_overflow(self) -> Observation:
        """Return the same with tensors that overflowed counted as zero, decided on the device."""
        stacked = self._stacked_means()
        finite, zero = stacked.isfinite(), stacked.new_zeros(())
        values = {
            param: torch.where(flag, value, zero)
            for flag, (param, value) in zip(finite.unbind(), self.values.items(), strict=True)
        }
        means = dict(zip(values, stacked.where(finite, zero).unbind(), strict=True))
        return Observation(values, means, self.count, self.squared, self.weight)

    def _stacked_means(self) -> Tensor:
        first = next(iter(self.means.values()))
        return torch.stack([mean.to(first) for mean in self.means.values()])


def merged(earlier: Observation | None, later: Observation | None) -> Observation | None:
    """Return the average of two observations, each counting by its predictions."""
    if earlier is None or later is None:
        return later if earlier is None else earlier
    count = earlier.count + later.count
    values: dict[Tensor, Tensor] = {}
    means: dict[Tensor, Tensor] = {}
    for part in (earlier, later):
        share = _share(part.count, count)
        for param, value in part.values.items():
            square = part.diagonal(value) * share
            values[param] = values[param].add_(square) if param in values else square
            mean = part.means[param] * share
            means[param] = means[param] + mean if param in means else mean
    return Observation(values, means, count, squared=True)


def _share(part: int | Tensor, whole: int | Tensor) -> float | Tensor:
    if isinstance(whole, Tensor):  # a mask may leave out everything, and only the device knows
        return torch.as_tensor(part, device=whole.device).double() / whole.clamp(min=1)
    return part / whole


def _per_element(sums: list[Tensor], params: list[Tensor], weight: float) -> dict[Tensor, Tensor]:
    sums = sum_over_shards(sums, params)
    means = torch._foreach_mul(sums, [weight / max(1, param.numel()) for param in params])
    return dict(zip(params, means, strict=True))
