"""The arithmetic of one step, for one list of tensors: one at a time, or as torch's foreach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from syngap.optim.plasticity import mask

__all__ = ["Work", "fold", "masks", "update"]

_PIECE = 1 << 19


@dataclass
class Work:
    """What a step needs of the parameters of one group that share a device and a type.

    Attributes:
        options: the parameter group.
        params: the parameters (their local parts, where they are sharded).
        grads: their gradients, None where there is none.
        importances: F, updated in place.
        slope: what F + damping is multiplied with: one number, or one a parameter.
        damping: λ as the mask takes it.
        buffers: momentum, updated in place; empty without momentum.
        values: what was observed, None where a parameter took no part; empty without observation.
        squared: whether `values` are squares.
        weight: what the squares are multiplied with.
        keep: how much of F stays when something was observed.
    """

    options: dict[str, Any]
    slope: Tensor
    damping: float
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)
    importances: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    values: list[Tensor | None] = field(default_factory=list)
    squared: bool = False
    weight: float = 1.0
    keep: float = 1.0


def masks(work: Work) -> Iterator[Tensor]:
    """Yield the mask Ω of each parameter, one in memory at a time."""
    for index in range(len(work.params)):
        yield _mask(work, index)


def _mask(work: Work, index: int) -> Tensor:
    options = work.options
    slope = work.slope[index] if work.slope.dim() else work.slope
    return mask(
        work.importances[index], slope, work.damping, options["ambient"], options["bounded"]
    )


def fold(work: Work) -> None:
    """F ← keep · F + (1 - keep) · observed."""
    for importance, value in zip(work.importances, work.values, strict=False):
        _fold_one(importance, value, work)


def update(work: Work) -> None:
    """Fold, then θ ← θ - η Ω ⊙ m with m ← momentum · m + ∇L + weight_decay · θ."""
    if _takes_lists(work):
        _update_lists(work)
    elif work.params[0].device.type == "cpu" and not torch.compiler.is_compiling():
        _update_each(_in_pieces(work))
    else:
        _update_each(work)


def _fold_one(importance: Tensor, value: Tensor | None, work: Work) -> None:
    importance.mul_(work.keep)
    if value is None:
        return
    if work.squared:
        importance.add_(value, alpha=(1.0 - work.keep) * work.weight)
    else:
        importance.addcmul_(value, value, value=(1.0 - work.keep) * work.weight)


def _update_each(work: Work) -> None:
    options, lr = work.options, work.options["lr"]
    for index, param in enumerate(work.params):
        importance = work.importances[index]
        if work.values:
            _fold_one(importance, work.values[index], work)
        grad = work.grads[index]
        if grad is None:
            continue
        if options["maximize"]:
            grad = -grad
        if options["weight_decay"]:
            grad = grad.add(param, alpha=options["weight_decay"])
        if options["momentum"]:
            grad = work.buffers[index].mul_(options["momentum"]).add_(grad)
        masked = _mask(work, index).mul_(grad)
        if isinstance(lr, Tensor):
            param.sub_(masked.mul_(lr))
        else:
            param.add_(masked, alpha=-lr)


def _update_lists(work: Work) -> None:
    """Do what `_update_each` does, one kernel for all tensors of an operation."""
    options, lr = work.options, work.options["lr"]
    if work.values:
        _fold_lists(work)
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

    masked = _mask_lists(work, has_grad)
    torch._foreach_mul_(masked, grads)
    if isinstance(lr, Tensor):
        torch._foreach_mul_(masked, lr)
        torch._foreach_sub_(params, masked)
    else:
        torch._foreach_add_(params, masked, alpha=-lr)


def _mask_lists(work: Work, indices: list[int]) -> tuple[Tensor, ...]:
    """Return `_mask` of each of these, by the same operations in the same order."""
    options = work.options
    found = torch._foreach_add([work.importances[index] for index in indices], work.damping)
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


def _fold_lists(work: Work) -> None:
    torch._foreach_mul_(work.importances, work.keep)
    known = [index for index, value in enumerate(work.values) if value is not None]
    if not known:
        return
    importances = [work.importances[index] for index in known]
    values = [value for value in work.values if value is not None]
    if work.squared:
        torch._foreach_add_(importances, values, alpha=(1.0 - work.keep) * work.weight)
    else:
        torch._foreach_addcmul_(importances, values, values, (1.0 - work.keep) * work.weight)


def _in_pieces(work: Work) -> Work:
    """Cut large tensors into views whose temporaries stay in a CPU's cache.

    A compiled step has no temporaries, and differentiable ones must keep theirs whole.
    """
    if work.options["differentiable"]:
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
    choice = work.options["foreach"]
    if choice is None:
        # On a CPU tensors are large against a call's overhead, and one at a time needs less memory.
        choice = work.params[0].is_cuda and not work.options["differentiable"]
    return bool(choice)
