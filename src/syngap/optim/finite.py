"""What a step does where its gradients are not finite: nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from syngap.optim import sharded

__all__ = ["NonFinite", "check_policy", "spoilt"]

NonFinite: TypeAlias = Literal["raise", "skip"]


def check_policy(policy: object, capturable: bool) -> None:
    """Check what is asked for where numbers are not finite."""
    if policy not in ("raise", "skip", None):
        raise ValueError(f"non_finite must be 'raise', 'skip' or None, got {policy!r}")
    if policy == "skip" and capturable:
        raise ValueError(
            "non_finite='skip' looks at the gradients of every step, and with capturable=True "
            "nothing may be looked at: leave out one of them"
        )


@torch.no_grad()
def spoilt(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters whose gradients are not finite, the same in every process.

    One pass over the gradients, and one look. A norm that overflows is no proof, but then there is
    time to look twice.

    Examples:
        >>> good, bad = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        >>> good.grad, bad.grad = torch.tensor([1e30, 1e30]), torch.tensor([0.0, torch.nan])
        >>> [param is bad for param in spoilt([good, bad])]
        [True]
    """
    moved = [param for param in params if param.grad is not None]
    if not moved:
        return []
    grads = [sharded.local_gradient(param) for param in moved]
    known = [grad for grad in grads if grad is not None]
    norms = sharded.sum_over_shards(list(torch._foreach_norm(known)), moved)
    if math.isfinite(_total(norms)):
        return []
    counts = [(~grad.isfinite()).sum().to(norms[0].dtype) for grad in known]
    counts = sharded.sum_over_shards(counts, moved)
    return [param for param, count in zip(moved, counts, strict=True) if count > 0]


def _total(values: list[Tensor]) -> float:
    first = values[0]
    if any(value.dtype != first.dtype or value.device != first.device for value in values):
        values = [value.to(first) for value in values]
    return torch.stack(values).sum().item()
