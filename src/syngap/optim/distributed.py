"""Importance across processes: what DDP and FSDP2 do for gradients, done for scores.

Scores are summed over processes before they are squared, so that every process holds the importance
of the whole batch, as one process would have taken it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node

from syngap.optim.tensors import accumulator, is_sharded

__all__ = [
    "Group",
    "check_group",
    "find_group",
    "independent_draws",
    "not_a_first_backward",
    "reduced",
    "total",
]

_FAR_BELOW = 64  # nodes between a model's output and what is made of it: a log-softmax, a slice
Group: TypeAlias = "dist.ProcessGroup | Literal['auto'] | None"


def check_group(choice: object) -> None:
    """Refuse what is no choice of processes; torch gives those outside of a group a number."""
    if choice is None or choice == "auto":
        return
    if dist.is_available() and (
        isinstance(choice, dist.ProcessGroup) or choice == dist.GroupMember.NON_GROUP_MEMBER
    ):
        return
    raise ValueError(f"process_group must be 'auto', None or a ProcessGroup, got {choice!r}")


def find_group(choice: Group, model: nn.Module | None) -> dist.ProcessGroup | None:
    """Return the processes that share a batch: the model's under DDP, else all; None if alone."""
    check_group(choice)
    if choice is None or not dist.is_available() or not dist.is_initialized():
        return None
    group: dist.ProcessGroup | None
    if not isinstance(choice, str):
        group = choice
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        group = model.process_group
    else:
        group = dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def total(count: int | Tensor, device: torch.device, group: dist.ProcessGroup) -> Tensor:
    """Return a number of predictions, summed over the group."""
    summed = torch.as_tensor(count, dtype=torch.float64, device=device).clone()
    dist.all_reduce(summed, group=group)
    return summed


def reduced(
    values: Sequence[Tensor | None], params: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Tensor | None]:
    """Sum values over the group; one that took no part here may have taken part elsewhere.

    In full precision, so that the type does not depend on who took part. Sharded parameters are
    left out: theirs are sums already.
    """
    result = list(values)
    summed: dict[int, Tensor] = {}
    for index, (param, value) in enumerate(zip(params, values, strict=True)):
        if is_sharded(param):
            continue
        kind = accumulator(param.dtype)
        value = torch.zeros_like(param, dtype=kind) if value is None else value.to(kind)
        value = value.contiguous()
        if value.data_ptr() in summed:  # autograd gives both terms of a sum the same gradient
            value = value.clone()
        summed[value.data_ptr()] = result[index] = value
    works = [dist.all_reduce(value, group=group, async_op=True) for value in summed.values()]
    for work in works:
        if work is not None:
            work.wait()
    return result


@contextmanager
def not_a_first_backward(output: Tensor) -> Iterator[None]:
    """Keep DDP(static_graph=True) from taking this backward pass for the first of the loss.

    At the end of the first one it finds out which gradients there are and synchronises them.
    """
    ddp: Any = None
    if dist.is_available() and dist.is_initialized():
        for node in islice(_below(output), _FAR_BELOW):
            if node.name() == "_DDPSinkBackward":
                ddp = node.ddp_weakref()  # type: ignore[attr-defined]
                break
    if ddp is None or not ddp.static_graph:
        yield
        return
    done = ddp._static_graph_delay_allreduce_enqueued
    ddp._static_graph_delay_allreduce_enqueued = True
    try:
        yield
    finally:
        ddp._static_graph_delay_allreduce_enqueued = done


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
        # For distributions, which draw from the global generators; those of other devices stay.
        torch.default_generator.manual_seed(seed)
        for shared in devices:
            torch.cuda.default_generators[shared.index].manual_seed(seed)
        yield torch.Generator(device).manual_seed(seed)


def _below(output: Tensor) -> Iterator[Node]:
    """The nodes of a graph, those near the output first."""
    queue = [output.grad_fn] if output.grad_fn is not None else []
    seen = set(queue)
    for node in queue:
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)
