"""Gradients that are known before a backward pass, and what a graph of autograd is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from syngap.optim.tensors import alike, is_sharded

__all__ = ["is_foreign", "leaves_of", "nodes_of", "times", "with_gradient", "with_zero_gradient"]


def with_gradient(loss: Tensor, gradients: Sequence[Tensor], params: Sequence[Tensor]) -> Tensor:
    """Return a loss whose gradients by some parameters are known."""
    found: Tensor = _KnownGradient.apply(loss, tuple(gradients), *params)  # type: ignore[no-untyped-call]
    return found


def with_zero_gradient(loss: Tensor, model: nn.Module) -> Tensor:
    """Return a loss whose gradients by all parameters of a model that learn are zero.

    DDP waits for gradients of all, also of a head that the teacher alone asks at some steps.
    """
    params: list[Tensor] = [param for param in model.parameters() if param.requires_grad]
    if not torch.is_grad_enabled() or any(map(is_sharded, params)):
        return loss
    return with_gradient(loss, [param.new_zeros(()).expand_as(param) for param in params], params)


class _KnownGradient(torch.autograd.Function):
    """A loss whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor, ...], *params: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *times(ctx.saved_tensors, grad)


def times(gradients: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Return gradients times a number."""
    found: dict[Tensor, Tensor] = {}
    for some in alike(gradients):
        found |= zip(some, torch._foreach_mul(some, factor.to(some[0])), strict=True)
    return [found[each] for each in gradients]


def nodes_of(found: Tensor) -> set[Node]:
    """Return all nodes of the graph of a tensor."""
    assert found.grad_fn is not None
    nodes, left = {found.grad_fn}, [found.grad_fn]
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and node not in nodes:
                nodes.add(node)
                left.append(node)
    return nodes


def is_foreign(found: Tensor, model: nn.Module) -> bool:
    """Return whether the gradient of a tensor ends in tensors of which none is of a model.

    What a graph hides, as one of reentrant checkpoints does, and shards may be the model's.
    """
    nodes = nodes_of(found)
    if any(node.name().startswith("CheckpointFunction") for node in nodes):
        return False
    leaves, own = leaves_of(nodes), set(model.parameters())
    return bool(leaves) and own.isdisjoint(leaves) and not any(map(is_sharded, own))


def leaves_of(nodes: Iterable[Node]) -> list[Tensor]:
    """Return the tensors that the gradients of a graph end in."""
    return [node.variable for node in nodes if hasattr(node, "variable")]
