"""Importance across processes: what DDP and FSDP2 do for gradients, done for scores.

Scores are summed over processes before they are squared, so that every process holds the importance
of the whole batch, as one process would have taken it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syngap.optim.importance import Prediction

__all__ = [
    "Group",
    "find_group",
    "independent_draws",
    "is_sharded",
    "local",
    "reduce_sum",
    "reduced",
    "sharded_scores",
    "sum_over_shards",
    "total",
]

_PLAIN = (Tensor, nn.Parameter)  # the usual case, at a tenth of the cost of a missing attribute
Group: TypeAlias = "dist.ProcessGroup | Literal['auto'] | None"


def find_group(choice: Group, model: nn.Module | None) -> dist.ProcessGroup | None:
    """Return the processes that share a batch: the model's under DDP, else all; None if alone."""
    if choice is None or not dist.is_available() or not dist.is_initialized():
        return None
    group: dist.ProcessGroup | None
    if isinstance(choice, str):
        group = getattr(model, "process_group", None) or dist.group.WORLD
    else:
        group = choice
    return group if dist.get_world_size(group) > 1 else None


def reduce_sum(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over the group, in place."""
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        if work is not None:
            work.wait()


def total(count: int | Tensor, device: torch.device, group: dist.ProcessGroup) -> Tensor:
    """Return a number of predictions, summed over the group."""
    summed = torch.as_tensor(count, dtype=torch.float64, device=device).clone()
    dist.all_reduce(summed, group=group)
    return summed


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds only a part of the tensor (FSDP2, tensor parallelism)."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def reduced(
    values: list[Tensor | None], params: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Tensor | None]:
    """Sum values over the group; one that took no part here may have taken part elsewhere."""
    present = [
        torch.zeros_like(param) if value is None else value.contiguous()
        for param, value in zip(params, values, strict=True)
    ]
    reduce_sum(present, group)
    return list(present)


def sharded_scores(
    prediction: Prediction, params: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Tensor | None]:
    """Return the scores of FSDP2 parameters, summed over processes and sharded like them.

    FSDP2 gathers parameters and scatters gradients inside `backward` and delivers to `.grad`
    alone, so gradients are set aside while it does the same for the scores. It averages over the
    processes of a parameter's mesh; the sum is taken back.
    """
    held = [param.grad for param in params]
    try:
        for param in params:
            param.grad = None
        torch.autograd.backward(
            prediction.output, prediction.cotangent * prediction.scale, retain_graph=True
        )
        scores: list[Tensor | None] = []
        for param in params:
            if param.grad is None:
                scores.append(None)
            elif is_sharded(param):
                scores.append(local(param.grad).mul(param.device_mesh.size()))  # type: ignore[attr-defined]
            else:
                scores.append(param.grad)
        whole = [
            s for p, s in zip(params, scores, strict=True) if s is not None and not is_sharded(p)
        ]
        reduce_sum(whole, group)
        return scores
    finally:
        for param, grad in zip(params, held, strict=True):
            param.grad = grad


@contextmanager
def independent_draws(
    group: dist.ProcessGroup | None, generator: torch.Generator | None, device: torch.device
) -> Iterator[torch.Generator | None]:
    """Give each process its own random numbers, even if all were seeded alike.

    Labels drawn with the same numbers on two processes are not independent, and the square of a sum
    of scores is then biased. The seed comes from the caller's generator, so that restoring that one
    restores the draws.
    """
    if group is None:
        yield generator
        return
    source = generator.device if generator is not None else torch.device("cpu")
    drawn = torch.randint(2**62, (), generator=generator, device=source).item()
    seed = (int(drawn) + 0x9E3779B97F4A7C15 * dist.get_rank(group)) % 2**63
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)  # for distributions, which draw from the global generators
        yield torch.Generator(device).manual_seed(seed)


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
            if placement.is_shard():
                dist.all_reduce(stacked, group=mesh.get_group(dim))  # type: ignore[attr-defined]
        for index, value in zip(indices, stacked.unbind(), strict=True):
            sums[index] = value
    return sums
