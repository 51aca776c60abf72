"""The arithmetic of one step, for one list of tensors: one at a time, or as torch's foreach.

Large tensors on a GPU have a kernel of their own, in `fused`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from syngap.optim import fused
from syngap.optim.basis import Basis, Stack, filter_along
from syngap.optim.compact import store, store_lists
from syngap.optim.plasticity import damping_and_slope, mask
from syngap.optim.tensors import accumulator, local, local_gradient, sum_over_shards

__all__ = [
    "Work",
    "fold",
    "masks",
    "nonfinite_gradients",
    "portions",
    "scale",
    "stack_masks",
    "update",
]

_PIECE = 1 << 18
_TOGETHER = 1 << 24  # numbers whose masks are in memory at a time, where operations take lists


@dataclass
class Work:
    """What a step needs of the parameters of one group that share a device and a type.

    Attributes:
        options: the parameter group.
        whole: the parameters.
        params: the parts of them that this process holds: themselves, unless they are sharded.
        grads: their gradients, None where there is none.
        importances: F, updated in place.
        slope: what F + damping is multiplied with: one number, or one a parameter.
        damping: λ as the mask takes it.
        buffers: momentum, updated in place; empty without momentum.
        values: what was observed, None where a parameter took no part; empty without observation.
        squared: whether `values` are squares.
        weight: what the squares are multiplied with.
        keep: how much of F stays when something was observed.
        turn: where between two numbers F is rounded up, None where it is kept in full precision.
        bases: the coordinates of F, None where they are entries; empty where all are.
        stacks: those bases by equal shape, with their masks while F stays as it is.
        small: masks of parameters along entries, while F stays as it is.
    """

    options: dict[str, Any]
    slope: Tensor
    damping: float
    whole: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)
    importances: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    values: list[Tensor | None] = field(default_factory=list)
    squared: bool = False
    weight: float = 1.0
    keep: float = 1.0
    turn: Tensor | None = None
    bases: list[Basis | None] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    small: list[Tensor] | None = None

    @classmethod
    def of(
        cls,
        group: dict[str, Any],
        params: list[Tensor],
        states: Sequence[dict[str, Any]],
        network: Tensor,
        bases: list[Basis | None],
    ) -> Work:
        """Lay out a step that observed nothing.

        Args:
            group: the parameter group.
            params: some of its parameters, alike in device and type.
            states: what the gate keeps of them.
            network: the mean importance of the network.
            bases: the coordinates of importance; empty where all are entries.
        """
        mean = network.to(params[0].device)
        if group["scope"] == "tensor":
            mean = torch.stack([state["mean"] for state in states]).to(mean.device)
        damping, slope = damping_and_slope(
            mean, group["consolidation"], group["damping"], group["bounded"]
        )
        return cls(
            options=group,
            slope=cast(Tensor, slope),
            damping=damping,
            whole=params,
            params=[local(param) for param in params],
            grads=[local_gradient(param) for param in params],
            importances=[local(state["importance"]) for state in states],
            bases=bases,
        )

    def renew_gradients(self) -> None:
        """Look gradients up again, but not where a wrapped optimizer's step left none."""
        if self.grads:
            self.grads = [local_gradient(param) for param in self.whole]


def portions(work: Work) -> Iterator[list[int]]:
    """Yield which parameters to do at a time: one, or many where operations take lists."""
    together: list[int] = []
    size = 0
    for index, param in enumerate(work.params):
        if together and (size + param.numel() > _TOGETHER or not _takes_lists(work)):
            yield together
            together, size = [], 0
        together.append(index)
        size += param.numel()
    if together:
        yield together


def masks(work: Work, indices: list[int]) -> list[Tensor]:
    """Return the masks Ω of these parameters, of a portion."""
    return [_mask(work, indices[0])] if len(indices) == 1 else _mask_lists(work, indices)


def scale(
    work: Work,
    indices: Sequence[int],
    updates: list[Tensor],
    masks: list[Tensor],
    *,
    in_place: bool = False,
) -> list[Tensor]:
    """Return updates whose coordinates are multiplied by `masks`.

    They are in the memory of `masks`, or with `in_place` in that of `updates`.
    """
    if work.bases:
        return _scale_directions(work, indices, updates, masks, in_place)
    results, factors = (updates, masks) if in_place else (masks, updates)
    if len(results) == 1:
        results[0].mul_(factors[0])
    else:
        torch._foreach_mul_(results, factors)
    return results


def _scale_directions(
    work: Work,
    indices: Sequence[int],
    updates: list[Tensor],
    masks: list[Tensor],
    in_place: bool,
) -> list[Tensor]:
    results = filter_along(updates, masks, [work.bases[index] for index in indices])
    if not in_place:
        return results
    torch._foreach_copy_(updates, results)
    return updates


def stack_masks(work: Work) -> None:
    """Calculate the masks of stacks that have none, in the precision of their directions."""
    for stack in work.stacks:
        if stack.mask is None:
            found = [_mask(work, place) for place in stack.places]
            dtype = stack.basis.dtype(found[0])
            small = [one.to(dtype) for one in found]
            stack.mask = torch.stack(small) if len(small) > 1 else small[0]


def _mask(work: Work, index: int) -> Tensor:
    options = work.options
    slope = work.slope[index] if work.slope.dim() else work.slope
    return mask(_full(work, index), slope, work.damping, options["ambient"], options["bounded"])


def _full(work: Work, index: int) -> Tensor:
    """Return F in the precision to calculate in: itself, where it is kept so."""
    kept = work.importances[index]
    return kept if work.turn is None else kept.to(accumulator(work.params[index].dtype))


def _full_lists(work: Work, indices: Sequence[int]) -> list[Tensor]:
    kept = [work.importances[index] for index in indices]
    if work.turn is None:
        return kept
    dtype = accumulator(work.params[0].dtype)
    full = [torch.empty_like(tensor, dtype=dtype) for tensor in kept]
    torch._foreach_copy_(full, kept)
    return full


def fold(work: Work) -> None:
    """F ← keep · F + (1 - keep) · observed."""
    if not work.values:
        return
    for indices in portions(work):  # of what is compact not all in full precision at once
        if len(indices) == 1:
            _fold_one(work, indices[0])
        else:
            _fold_lists(work, indices)


def update(work: Work) -> None:
    """Fold, then θ ← θ - η Ω ⊙ m with m ← momentum · m + ∇L + weight_decay · θ."""
    if work.turn is not None and torch.compiler.is_compiling():
        fold(work)
        _end_of_kernel()
        work = replace(work, values=[])
    if (work.params[0].is_cuda or work.options.get("fused")) and fused.applies(work):
        work = fused.update_large(work)
    if not work.params:
        return
    if _takes_lists(work):
        _update_lists(work)
    elif work.params[0].device.type == "cpu" and not torch.compiler.is_compiling():
        _update_each(_in_pieces(work))
    else:
        _update_each(work)


@torch._disable_dynamo  # type: ignore[attr-defined]  # imports dynamo at the first call, not here
def _end_of_kernel() -> None:
    """Let a compiler begin another loop, with rounded numbers: a long one is slow on a CPU."""


def _fold_one(work: Work, index: int) -> None:
    importance, value = _full(work, index), work.values[index]
    importance.mul_(work.keep)
    if value is not None:
        if work.squared:
            importance.add_(value, alpha=(1.0 - work.keep) * work.weight)
        else:
            importance.addcmul_(value, value, value=(1.0 - work.keep) * work.weight)
    if work.turn is not None:
        store(importance, work.importances[index], work.turn)


def _update_each(work: Work) -> None:
    options, lr = work.options, work.options["lr"]
    for index, param in enumerate(work.params):
        if work.values:
            _fold_one(work, index)
        grad = work.grads[index]
        if grad is None:
            continue
        if options["maximize"]:
            grad = -grad
        if options["weight_decay"]:
            grad = grad.add(param, alpha=options["weight_decay"])
        if options["momentum"]:
            grad = work.buffers[index].mul_(options["momentum"]).add_(grad)
        (masked,) = scale(work, [index], [grad], [_mask(work, index)])
        if isinstance(lr, Tensor):
            param.sub_(masked.mul_(lr))
        else:
            param.add_(masked, alpha=-lr)


def _update_lists(work: Work) -> None:
    """Do what `_update_each` does, one kernel for all tensors of an operation."""
    options, lr = work.options, work.options["lr"]
    if work.values:
        _fold_lists(work, range(len(work.params)))
    has_grad = [index for index, grad in enumerate(work.grads) if grad is not None]
    if not has_grad:
        return
    params = [work.params[index] for index in has_grad]
    grads = [grad for grad in work.grads if grad is not None]
    if options["maximize"]:
        grads = list(torch._foreach_neg(grads))
    if options["weight_decay"]:
        grads = list(torch._foreach_add(grads, params, alpha=options["weight_decay"]))
    if options["momentum"]:
        buffers = [work.buffers[index] for index in has_grad]
        torch._foreach_mul_(buffers, options["momentum"])
        torch._foreach_add_(buffers, grads)
        grads = buffers

    masked = scale(work, has_grad, grads, _mask_lists(work, has_grad))
    if isinstance(lr, Tensor):
        torch._foreach_mul_(masked, lr)
        torch._foreach_sub_(params, masked)
    else:
        torch._foreach_add_(params, masked, alpha=-lr)


def _mask_lists(work: Work, indices: list[int]) -> list[Tensor]:
    """Return `_mask` of each of these, by the same operations in the same order."""
    options = work.options
    found = _full_lists(work, indices)
    if work.turn is None:
        found = list(torch._foreach_add(found, work.damping))
    else:  # they are copies
        torch._foreach_add_(found, work.damping)
    if work.slope.dim():
        slopes = work.slope.unbind()
        torch._foreach_mul_(found, [slopes[index] for index in indices])
    else:
        torch._foreach_mul_(found, work.slope)
    if options["bounded"]:
        torch._foreach_sigmoid_(found)
        torch._foreach_mul_(found, 2.0)
        torch._foreach_add_(found, options["ambient"])
    else:
        torch._foreach_add_(found, 1.0 + options["ambient"])
    return found


def _fold_lists(work: Work, indices: Sequence[int]) -> None:
    full = _full_lists(work, indices)
    torch._foreach_mul_(full, work.keep)
    observed = [work.values[index] for index in indices]
    importances = [part for part, value in zip(full, observed, strict=True) if value is not None]
    if importances:
        values = [value for value in observed if value is not None]
        if work.squared:
            torch._foreach_add_(importances, values, alpha=(1.0 - work.keep) * work.weight)
        else:
            torch._foreach_addcmul_(importances, values, values, (1.0 - work.keep) * work.weight)
    if work.turn is not None:
        store_lists(full, [work.importances[index] for index in indices], work.turn)


def _in_pieces(work: Work) -> Work:
    """Cut large tensors into views whose temporaries stay in a CPU's cache.

    A compiled step has no temporaries, and differentiable ones must keep theirs whole.
    """
    if work.options["differentiable"] or work.bases:
        return work
    pieces = replace(work, params=[], grads=[], importances=[], buffers=[], values=[])
    slopes = []
    for index, param in enumerate(work.params):
        columns = [
            (getattr(pieces, name), column[index])
            for name in ("params", "grads", "importances", "buffers", "values")
            if (column := getattr(work, name))
        ]
        known = [tensor for _, tensor in columns if tensor is not None]
        cut = param.numel() > _PIECE and all(tensor.is_contiguous() for tensor in known)
        count = -(-param.numel() // _PIECE) if cut else 1
        for column, tensor in columns:
            if cut and tensor is not None:
                column.extend(torch.split(tensor.view(-1), _PIECE))
            else:
                column.extend([tensor] * count)
        slopes += [work.slope[index]] * count if work.slope.dim() else []
    if slopes:
        pieces.slope = torch.stack(slopes)
    return pieces


def _takes_lists(work: Work) -> bool:
    choice = work.options.get("foreach")  # which another optimizer behind the gate may not have
    if choice is None:
        # On a CPU tensors are large against a call's overhead, and one at a time needs less memory.
        choice = work.params[0].is_cuda and not work.options.get("differentiable", False)
    return bool(choice)


@torch.no_grad()
def nonfinite_gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters whose gradients are not finite, the same in every process.

    One pass over the gradients, and one look. A norm that overflows is no proof, but then there is
    time to look twice.

    Examples:
        >>> good, bad = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        >>> good.grad, bad.grad = torch.tensor([1e30, 1e30]), torch.tensor([0.0, torch.nan])
        >>> [param is bad for param in nonfinite_gradients([good, bad])]
        [True]
    """
    with_gradient = [param for param in params if param.grad is not None]
    grads = [grad for param in with_gradient if (grad := local_gradient(param)) is not None]
    if not grads:
        return []
    norms = sum_over_shards(list(torch._foreach_norm(grads)), with_gradient)
    first = norms[0]
    if any(norm.dtype != first.dtype or norm.device != first.device for norm in norms):
        norms = [norm.to(first) for norm in norms]
    if math.isfinite(torch.stack(norms).sum().item()):
        return []
    counts = [(~grad.isfinite()).sum().to(first.dtype) for grad in grads]
    counts = sum_over_shards(counts, with_gradient)
    return [param for param, count in zip(with_gradient, counts, strict=True) if count > 0]
