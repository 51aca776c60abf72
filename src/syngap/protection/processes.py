"""One protection for all processes that train a model together: DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from syngap.optim.basis import Basis
from syngap.optim.knowledge import Known

__all__ = ["raised_in_all", "require_same", "share_knowledge"]


@contextmanager
def raised_in_all(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise in every process where the block fails in one, for which the others would wait."""
    if group is None:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    said = _gathered(f"{type(failure).__name__}: {failure}" if failure else None, group)
    if failure is not None:
        raise failure
    for rank, text in enumerate(said):
        if text is not None:
            raise RuntimeError(f"protect() failed in process {rank} of {len(said)}: {text}")


def require_same(values: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Refuse arguments of which processes have different ones."""
    if group is None:
        return
    first, *others = _gathered(values, group)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other[name] != value:
                raise ValueError(
                    f"{name}: {value!r} in process 0, {other[name]!r} in process {rank}. Give "
                    "every process the same known inputs, options and start model; for a model "
                    "that one process trains alone pass process_group=None"
                )


def share_knowledge(known: dict[Tensor, Known], group: dist.ProcessGroup | None) -> None:
    """Give every process what the first one knows, bit for bit.

    A GPU adds in no fixed order, and eigenvectors of nearly equal moments may have another sign, or
    be others. With bases of their own, processes would come to different weights.
    """
    if group is None or not known:
        return
    params, source = list(known), dist.get_global_rank(group, 0)
    tensors: list[Tensor] = []  # each once: layers with the same inputs share directions
    plan: list[Any] = [None, None]
    is_first = dist.get_rank(group) == 0
    if is_first:
        numbers: dict[int, int] = {}
        forms, entries = [], []
        for place, one in enumerate(known.values()):
            sides = (None, None) if one.basis is None else (one.basis.left, one.basis.right)
            entry: list[int | None] = []
            for tensor in (one.importance, one.mean, *sides):
                if tensor is not None and id(tensor) not in numbers:
                    numbers[id(tensor)] = len(tensors)
                    tensors.append(tensor)
                    forms.append((tuple(tensor.shape), tensor.dtype, place))
                entry.append(None if tensor is None else numbers[id(tensor)])
            entries.append((*entry, one.rows))
        plan = [forms, entries]
    dist.broadcast_object_list(plan, source, group, device=params[0].device)
    if not is_first:
        known.clear()  # which frees the memory for what comes
        tensors = [
            torch.empty(shape, dtype=dtype, device=params[place].device)
            for shape, dtype, place in plan[0]
        ]
    for tensor in tensors:
        dist.broadcast(tensor, source, group)
    if is_first:
        return
    for param, (importance, mean, left, right, rows) in zip(params, plan[1], strict=True):
        directions = [None if side is None else tensors[side] for side in (left, right)]
        basis = None if left is None and right is None else Basis(*directions)
        known[param] = Known(tensors[importance], tensors[mean], basis, rows)


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values
