"""The work of a step, laid out from states and from what was observed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syngap.optim.basis import share_stacks, stack_alike
from syngap.optim.compact import shared_turn
from syngap.optim.fisher import Observation
from syngap.optim.state_transfer import basis_in
from syngap.optim.update import Work

__all__ = ["lay_out", "require_dense_gradients"]


def require_dense_gradients(params: Sequence[Tensor]) -> None:
    """Refuse gradients that a mask cannot be multiplied with."""
    for param in params:
        grad = param.grad
        if grad is not None and (grad.layout != torch.strided or grad.is_complex()):
            raise RuntimeError(
                f"SynGAP takes dense real gradients, got {grad.layout} {grad.dtype} for a "
                f"parameter of shape {tuple(param.shape)}"
            )


def lay_out(
    group: dict[str, Any],
    params: list[Tensor],
    states: Sequence[dict[str, Any]],
    network: Tensor,
    *,
    seen: Observation | None,
    keep: float,
    averages: bool,
    compact: bool,
) -> Work:
    """Return what a step does with parameters of a group that share a device and a type.

    Args:
        group: the parameter group.
        params: some of its parameters.
        states: what the gate keeps of them.
        network: the mean importance of the network.
        seen: what was observed, None for nothing.
        keep: how much of the importance stays where something was.
        averages: False where what was observed replaces the importance.
        compact: whether importance is kept in bfloat16.
    """
    bases = [basis_in(state) for state in states]
    work = Work.of(group, params, states, network, bases if any(bases) else [])
    if work.bases and averages:
        work.stacks = stack_alike(work.bases, work.params)
        share_stacks(work.stacks, states)
    if compact:
        turn = shared_turn(states, moves=seen is not None and averages)
        # What is not an average is rounded to nearest, whatever was before.
        work.turn = turn if averages else torch.zeros_like(turn)
    if seen is not None:
        work.values = [seen.values.get(param) for param in params]
        work.squared, work.weight, work.keep = seen.squared, seen.weight, keep
    return work
