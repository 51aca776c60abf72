"""The arithmetic of one step as one kernel a tensor, on a GPU: every number is read once.

F, gradient, observation and parameter are read and F and parameter written, 24 bytes a parameter;
the foreach operations in `update` pass over them ten times. Tensors too small to fill a GPU are
left to those, which take all of them at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from syngap.optim.update import Work

__all__ = ["applies", "has_triton", "update_large"]

T = TypeVar("T")

_BLOCK = 1024
_SMALL = 1 << 15
_broken: list[str] = []  # why the kernel does not run here


@cache
def has_triton() -> bool:
    """Return whether Triton, which compiles the kernel, is installed."""
    return find_spec("triton") is not None


def applies(work: Work) -> bool:
    """Return whether large tensors go through the kernel: on a GPU, where nothing forbids it.

    `fused=True` asks for it, `fused=False` and `foreach=True` for the foreach operations.
    """
    options, on_gpu = work.options, work.params[0].is_cuda
    enabled = options.get("fused")
    if enabled is None:
        enabled = options["foreach"] is None and on_gpu and has_triton() and not _broken
    numbers = (options[name] for name in ("ambient", "weight_decay", "momentum"))
    is_plain = work.turn is None and not work.bases and not options["differentiable"]
    can = is_plain and not torch.compiler.is_compiling()
    return bool(enabled) and can and not any(isinstance(number, Tensor) for number in numbers)


def update_large(work: Work) -> Work:
    """Do the step for the large tensors of `work`, and return what is left of it."""
    large = {index for index in range(len(work.params)) if fits(work, index)}
    if not large:
        return work
    device = work.params[0].device
    there: AbstractContextManager[object] = nullcontext()
    if device.type == "cuda":
        there = torch.cuda.device(device)
    done = set()
    try:
        with there:
            for index in large:
                update_one(work, index)
                done.add(index)
    except Exception as error:  # no compiler, no cache, a GPU that Triton does not know
        if work.options.get("fused"):
            raise
        _broken.append(str(error))
        warnings.warn(f"steps are not fused, Triton says: {error}", stacklevel=4)

    def rest(column: Sequence[T]) -> list[T]:
        return [part for index, part in enumerate(column) if index not in done]

    left = replace(
        work,
        params=rest(work.params),
        grads=rest(work.grads),
        importances=rest(work.importances),
        buffers=rest(work.buffers),
        values=rest(work.values),
    )
    if work.slope.dim() and left.params:
        left.slope = torch.stack(rest(work.slope.unbind()))
    return left


def fits(work: Work, index: int) -> bool:
    """Return whether a tensor of `work` is large, in float32, and laid out alike in all its parts.

    A kernel goes through memory as it lies, so (channels last) strides do not matter while all
    have the same and leave no gaps.
    """
    param, grad = work.params[index], work.grads[index]
    if grad is None or param.numel() < _SMALL:
        return False
    value = work.values[index] if work.values else None
    buffer = work.buffers[index] if work.buffers else None
    parts = [part for part in (grad, work.importances[index], value, buffer) if part is not None]
    return (
        param.dtype == torch.float32
        and param.numel() < 2**31 - _BLOCK
        and _is_dense(param)
        and all(p.dtype == torch.float32 and p.stride() == param.stride() for p in parts)
        and all(p.shape == param.shape for p in parts)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Return whether elements lie in memory without gaps, in one of the usual orders."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor.is_contiguous() or bool(last and tensor.is_contiguous(memory_format=last))


def update_one(work: Work, index: int) -> None:
    """Do what `update._update_each` does for one tensor that `fits`."""
    options, lr = work.options, work.options["lr"]
    param, grad, importance = work.params[index], work.grads[index], work.importances[index]
    value = work.values[index] if work.values else None
    slope = work.slope[index] if work.slope.dim() else work.slope
    on_device = isinstance(lr, Tensor) and lr.device == param.device
    count = param.numel()
    _kernel()[(-(-count // _BLOCK),)](
        param,
        grad,
        importance,
        value if value is not None else param,
        work.buffers[index] if options["momentum"] else param,
        slope,
        lr if on_device else float(lr),
        count,
        work.keep,
        (1.0 - work.keep) * work.weight,
        float(work.damping),
        options["ambient"],
        options["weight_decay"],
        options["momentum"],
        FOLDS=bool(work.values),
        OBSERVED=value is not None,
        SQUARED=work.squared,
        BOUNDED=options["bounded"],
        MOMENTUM=bool(options["momentum"]),
        MAXIMIZE=bool(options["maximize"]),
        RATE_ON_DEVICE=on_device,
        BLOCK=_BLOCK,
    )


@cache
def _kernel() -> Any:
    """Return the kernel; what it is compiled for depends on the flags in capitals."""
    import triton
    from triton import language as tl

    def step(  # type: ignore[no-untyped-def]
        param_at, grad_at, importance_at, value_at, buffer_at, slope_at, lr,
        count, keep, weight, damping, ambient, decay, momentum,
        FOLDS: tl.constexpr, OBSERVED: tl.constexpr, SQUARED: tl.constexpr,
        BOUNDED: tl.constexpr, MOMENTUM: tl.constexpr, MAXIMIZE: tl.constexpr,
        RATE_ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        param = tl.load(param_at + at, mask=inside)
        grad = tl.load(grad_at + at, mask=inside)
        importance = tl.load(importance_at + at, mask=inside)
        if FOLDS:
            importance = importance * keep
            if OBSERVED:
                value = tl.load(value_at + at, mask=inside)
                importance += weight * (value if SQUARED else value * value)
            tl.store(importance_at + at, importance, mask=inside)
        if MAXIMIZE:
            grad = -grad
        grad += decay * param
        if MOMENTUM:
            grad += momentum * tl.load(buffer_at + at, mask=inside)
            tl.store(buffer_at + at, grad, mask=inside)
        closing = (importance + damping) * tl.load(slope_at).to(tl.float32)
        gate = (2.0 / (1.0 + tl.exp(-closing)) if BOUNDED else 1.0 + closing) + ambient
        rate = tl.load(lr).to(tl.float32) if RATE_ON_DEVICE else lr
        tl.store(param_at + at, param - rate * gate * grad, mask=inside)

    return triton.jit(step)
