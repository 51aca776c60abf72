"""Tensors of any precision, whole or sharded over processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "accumulator",
    "alike",
    "as_shard",
    "gathered",
    "is_sharded",
    "kept_in",
    "laid_out_like",
    "local",
    "local_gradient",
    "no_importance",
    "part_of",
    "redistribute_like",
    "require_dense",
    "sum_over_shards",
    "tensors_of",
    "wide",
]

# Precision ----------------------------------------------------------------------------------------


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type that the importance of a parameter of this type is calculated in.

    Squares of half precision overflow or vanish, and a slow average of them stands still.
    """
    return torch.float32 if dtype.itemsize < 4 else dtype


def kept_in(dtype: torch.dtype, compact: bool) -> torch.dtype:
    """Return the type that it is kept in; `compact` knows how not to stand still."""
    return torch.bfloat16 if compact else accumulator(dtype)


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in that type."""
    return tensor.to(accumulator(tensor.dtype))


def alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return tensors in lists of those that share a device and a type."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(found.values())


# Layouts ------------------------------------------------------------------------------------------


def laid_out_like(param: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor of a parameter's shape with its strides, as fused optimizers expect.

    Their kernels go through memory as it lies, and would mix up entries of other layouts.
    """
    if tensor.stride() == param.stride():
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype).copy_(tensor)


# Shards -------------------------------------------------------------------------------------------

_PLAIN = (Tensor, nn.Parameter)  # the usual case, at a tenth of the cost of a missing attribute


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process holds only a part of the tensor (FSDP2, tensor parallelism)."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_gradient(param: Tensor) -> Tensor | None:
    """Return the gradient of the part of a parameter that this process holds."""
    if param.grad is None or not is_sharded(param):
        return param.grad
    # Tensor parallelism may leave a sum over processes to whoever needs it.
    param.grad = redistribute_like(param, param.grad)
    return local(param.grad)


def redistribute_like(param: Any, grad: Any) -> Any:
    """Return a gradient of which each process holds the part that it holds of the parameter."""
    if not is_sharded(grad) or grad.placements == param.placements:
        return grad
    return grad.redistribute(param.device_mesh, param.placements)


def as_shard(part: Tensor, param: Any) -> Tensor:
    """Return this process's part of a tensor as a part of one that is sharded like a parameter."""
    if not is_sharded(param):
        return part
    from torch.distributed.tensor import DTensor

    shape, stride = param.shape, param.stride()
    return DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride
    )


def gathered(part: Tensor, param: Tensor) -> Tensor:
    """Return the whole tensor, of which each process has the part that it has of the parameter."""
    if not is_sharded(param):
        return part
    whole: Tensor = as_shard(part, param).full_tensor()  # type: ignore[attr-defined]
    return whole


def part_of(whole: Tensor, param: Any) -> Tensor:
    """Return the part of a whole tensor that this process would hold of the parameter."""
    if not is_sharded(param):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local(everywhere.redistribute(mesh, param.placements))


def sum_over_shards(sums: list[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """Complete each parameter's sum, of which a process knows the share of its shard."""
    alike: dict[tuple[object, object], list[int]] = {}
    for index, param in enumerate(params):
        if is_sharded(param):
            key = (param.device_mesh, param.placements)  # type: ignore[attr-defined]
            alike.setdefault(key, []).append(index)
    sums = list(sums)
    for (mesh, placements), indices in alike.items():
        stacked = torch.stack([sums[index] for index in indices])
        for dim, placement in enumerate(placements):  # type: ignore[var-annotated,arg-type]
            if not placement.is_replicate():
                dist.all_reduce(stacked, group=mesh.get_group(dim))  # type: ignore[attr-defined]
        for index, value in zip(indices, stacked.unbind(), strict=True):
            sums[index] = value
    return sums


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, in their order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_of(value)


def require_dense(params: Sequence[Tensor]) -> None:
    """Refuse gradients that are sparse or complex."""
    for param in params:
        grad = param.grad
        if grad is not None and (grad.layout != torch.strided or grad.is_complex()):
            got = f"{grad.layout} {grad.dtype} for a parameter of shape {tuple(param.shape)}"
            raise RuntimeError(f"a gate takes dense real gradients, got {got}")


def no_importance(param: Tensor, compact: bool) -> Tensor:
    """Return the importance of a parameter of which nothing is known."""
    dtype = kept_in(param.dtype, compact)
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
