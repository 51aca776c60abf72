"""The forms in which the update of another optimizer goes through the gate.

Along directions in rotated coordinates, along directions as a filter of the finished update, or
entry by entry, of the update or of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from syngap.optim.tensors import as_shard, laid_out_like, local
from syngap.optim.update import Work, masks, portions, scale, stack_masks

__all__ = ["FEW", "Finish", "prepare"]

Finish: TypeAlias = Callable[[], None]


def prepare(base: Optimizer, work: Work, undo: list[Finish]) -> Finish:
    """Do what comes before the step of `base`, and return what comes after it.

    Args:
        base: the optimizer behind the gate.
        work: the work of a step.
        undo: gets what brings parameters and gradients back, before any is changed.
    """
    if work.options.get("rotated") and work.stacks:
        return _rotate(work, undo, keeps_weights=_needs_weights(base, work))
    if work.stacks:
        return _filter_update(work, undo)
    if _is_plain_descent(base, work):
        return _mask_gradients(work, undo)
    return _mask_update(work, undo)


def _is_plain_descent(base: Optimizer, work: Work) -> bool:
    options = work.options
    return type(base) is torch.optim.SGD and not options["momentum"] and not options["weight_decay"]


FEW = 1 << 20  # numbers of masks along entries that are kept, as of norms and biases
# Without decay their updates do not depend on the weights.
_OF_GRADIENTS = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)


def _needs_weights(base: Optimizer, work: Work) -> bool:
    """Return whether the base's step depends on where the weights are."""
    return type(base) not in _OF_GRADIENTS or bool(work.options.get("weight_decay", True))


def _saved_params(work: Work, undo: list[Finish]) -> list[Tensor]:
    """Return copies of the parameters, which `undo` would bring back."""
    saved = list(torch._foreach_mul(work.params, 1.0))  # one call makes all copies
    undo.append(lambda: torch._foreach_copy_(work.params, saved))
    return saved


def _rotate(work: Work, undo: list[Finish], *, keeps_weights: bool) -> Finish:
    """Let the base work in the coordinates of the bases, and bring its masked update back.

    Args:
        work: the work of a step, with bases that are complete.
        undo: gets what brings everything back.
        keeps_weights: False where the base would do the same with weights of zero, which spares
            the products that rotate them.
    """
    places = [place for stack in work.stacks for place in stack.places]
    params = [work.params[place] for place in places]
    saved = _saved_params(work, undo)
    grads = [param.grad for param in work.whole]

    def restore_gradients() -> None:
        for param, grad in zip(work.whole, grads, strict=True):
            param.grad = grad

    undo.append(restore_gradients)
    rotated = [
        param if grad is None else local(grad)
        for param, grad in zip(work.params, grads, strict=True)
    ]
    for stack in work.stacks:
        found = stack.basis.into(stack.gather(rotated)).to(params[0].dtype)
        for place, part in zip(stack.places, stack.split(found), strict=True):
            if grads[place] is not None:
                part = laid_out_like(work.params[place], part)
                work.whole[place].grad = as_shard(part, work.whole[place])
    starts = list(work.params)
    if keeps_weights:
        for stack in work.stacks:
            found = stack.basis.into(stack.gather(work.params)).to(params[0].dtype)
            for place, part in zip(stack.places, stack.split(found), strict=True):
                starts[place] = part
        torch._foreach_copy_(params, [starts[place] for place in places])
    else:
        torch._foreach_zero_(params)
    others = [index for index, basis in enumerate(work.bases) if basis is None]

    def finish() -> None:
        restore_gradients()
        stack_masks(work)
        for stack in work.stacks:
            assert stack.mask is not None
            now = work.params
            change = stack.gather_change(now, starts) if keeps_weights else stack.gather(now)
            stack.put_sum(saved, stack.basis.back_masked(change, stack.mask), work.params)
        _mask_others(work, others, saved)

    return finish


def _filter_update(work: Work, undo: list[Finish]) -> Finish:
    """Note where the parameters are; afterwards filter the way they went along directions."""
    saved = _saved_params(work, undo)
    others = [index for index, basis in enumerate(work.bases) if basis is None]

    def finish() -> None:
        stack_masks(work)
        for stack in work.stacks:
            assert stack.mask is not None
            change = stack.gather_change(work.params, saved)
            stack.subtract(stack.basis.held_back(change, stack.mask), work.params)
        _mask_others(work, others, saved)

    return finish


def _mask_others(work: Work, others: list[int], saved: list[Tensor]) -> None:
    """Mask the updates of parameters whose coordinates are their entries."""
    if others:
        plain, before = ([each[index] for index in others] for each in (work.params, saved))
        found = work.small or masks(work, others)
        if sum(each.numel() for each in found) <= FEW:
            work.small = found
        torch._foreach_sub_(plain, before)
        torch._foreach_mul_(plain, found)
        torch._foreach_add_(plain, before)


def _mask_gradients(work: Work, undo: list[Finish]) -> Finish:
    """Mask the gradients now; give them back afterwards."""
    _saved_params(work, undo)
    grads = [grad for grad in work.grads if grad is not None]
    saved = [grad.clone() for grad in grads]

    def restore() -> None:
        if grads:
            torch._foreach_copy_(grads, saved)

    undo.append(restore)
    for indices in portions(work):
        known = [index for index in indices if work.grads[index] is not None]
        if known:
            parts = [grad for index in known if (grad := work.grads[index]) is not None]
            scale(work, known, parts, masks(work, known), in_place=True)
    return restore


def _mask_update(work: Work, undo: list[Finish]) -> Finish:
    """Note where the parameters are; afterwards mask the way they went."""
    saved = _saved_params(work, undo)

    def finish() -> None:
        for indices in portions(work):
            params, olds = ([each[index] for index in indices] for each in (work.params, saved))
            torch._foreach_sub_(params, olds)
            scale(work, indices, params, masks(work, indices), in_place=True)
            torch._foreach_add_(params, olds)

    return finish
