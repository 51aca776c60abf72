"""Scores of parameters of which a process holds a shard: FSDP2, and DTensor in general.

FSDP2 gathers parameters and scatters gradients in hooks of `backward`, and delivers to `.grad`
alone. Scores go the same way, with everything set aside that they could mix with. Torch has no
public name for some of that, so this file, and no other, reads what `fully_shard` keeps for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syngap.messages import count_of
from syngap.optim.scores import SCALE, Prediction
from syngap.optim.tensors import is_sharded, local, redistribute_like

__all__ = ["named_parameters", "reshard", "sharded_scores", "whole_leaves"]


def named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name a model's parameters, as the optimizer knows them.

    Between forward and backward, and after a forward pass alone, FSDP2 may leave whole parameters
    in the place of the sharded ones.
    """
    sharded = {whole: shard for unit in _units(_states()) for shard, whole in _pairs(unit)}
    for name, param in model.named_parameters():
        yield name, sharded.get(param, param)


def reshard(model: nn.Module) -> None:
    """Let each process hold its own part of what FSDP2 leaves whole after a forward pass alone."""
    for module in _sharded_modules(model):
        module.reshard()


def whole_leaves(model: nn.Module, params: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """Return what takes each parameter's place in a forward pass: itself, or what FSDP2 gathers."""
    if not any(is_sharded(param) for param in params):
        return {param: param for param in params}
    for module in _sharded_modules(model):  # the leaves are there after the first time
        module.unshard()
        module.reshard()
    leaves = {shard: leaf for unit in _units(_states()) for shard, leaf in _pairs(unit)}
    found = {param: leaves.get(param, param) for param in params}
    if any(is_sharded(leaf) for leaf in found.values()):
        raise ValueError(
            "a parameter is a DTensor that fully_shard does not gather: protect() takes FSDP2's "
            "shards, and no tensor parallelism; protect a model that is not divided so"
        )
    return found


def _sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called on."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sharded_scores(
    prediction: Prediction, params: Sequence[Tensor], group: dist.ProcessGroup | None
) -> list[Tensor | None]:
    """Return this process's part of the scores, summed over the group where they are sharded.

    FSDP2 averages over the group, in the precision that its policy has for gradients, so the sum
    is taken back. Gradients are afterwards what they were, also those that wait to be synchronised.
    """
    states = _states()
    units = _units(states)
    whole = {shard: leaf for unit in units for shard, leaf in _pairs(unit)}
    processes = 1 if group is None else dist.get_world_size(group)
    _require_group(units, params, processes)
    leaves = [whole.get(param, param) for param in params]
    with _set_aside(states, units, params):
        # Without `inputs` this would add to the gradient of every leaf, not only of ours.
        torch.autograd.backward(
            prediction.output,
            prediction.cotangent * SCALE,
            retain_graph=True,
            inputs=leaves,
        )
        grads = [param.grad for param in params]
    scores: list[Tensor | None] = []
    for param, grad in zip(params, grads, strict=True):
        if grad is None:
            scores.append(None)
        else:
            averaged_over = processes if param in whole else 1
            scores.append(local(redistribute_like(param, grad)).mul(averaged_over))
    return scores


def _require_group(units: list[Any], params: Sequence[Tensor], processes: int) -> None:
    """Refuse a group other than the one that FSDP2 averages over."""
    rest = {param for param in params if is_sharded(param)}
    for unit in units:
        own = rest.intersection(shard for shard, _ in _pairs(unit))
        rest -= own
        if own and unit.mesh_info.mesh.size() != processes:
            raise ValueError(
                f"FSDP2 averages gradients over {count_of(unit.mesh_info.mesh.size(), 'process')}, "
                f"but process_group has {processes}: pass process_group=, the processes that share "
                "a batch"
            )
    if rest and processes > 1:
        raise ValueError(
            "parameters are DTensors, but not of FSDP2: with tensor parallelism alone every "
            "process sees the same batch, so seed them alike and pass process_group=None"
        )


def _states() -> list[Any]:
    """What FSDP2 keeps about each module that `fully_shard` was called on, in this process."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    from torch.distributed._composable_state import _get_module_state, _module_state_mapping

    states = [_get_module_state(module) for module in list(_module_state_mapping)]
    return [state for state in states if hasattr(state, "_state_ctx")]


def _units(states: list[Any]) -> list[Any]:
    """The parameters that FSDP2 gathers and scatters together."""
    units: list[Any] = []
    for state in states:
        several = getattr(state, "_fsdp_param_groups", None)  # older versions have but one
        units += [state._fsdp_param_group] if several is None else several
    return [unit for unit in units if unit is not None]


def _pairs(unit: Any) -> list[tuple[Tensor, Tensor]]:
    """The parameters of a unit: sharded, and as the leaves that they are in the graph."""
    return [
        (member.sharded_param, member._unsharded_param)
        for member in unit.fsdp_params
        if hasattr(member, "_unsharded_param")
    ]


@contextmanager
def _set_aside(states: list[Any], units: list[Any], params: Sequence[Tensor]) -> Iterator[None]:
    """Make room for a backward pass of its own, finished, synchronised and averaged; then undo it.

    The pass would otherwise add to gradients, also to those that wait to be synchronised
    (`set_requires_gradient_sync(False)`), run hooks that take a step, be divided by what the user
    chose (`set_gradient_divide_factor`), and use up the order in which to prefetch.
    """
    room: list[tuple[Any, str, Any]] = []
    room += [(state._state_ctx, "is_last_backward", True) for state in states]
    touched: dict[Any, None] = dict.fromkeys(params)
    for unit in units:
        order = getattr(unit.comm_ctx, "post_forward_order", ())
        room += [
            (unit, "reduce_grads", True),
            (unit, "all_reduce_grads", True),
            (unit, "gradient_divide_factor", None),
            (unit, "reduce_scatter_reduce_op", None),
            (unit, "_partial_reduce_output", None),
            (unit, "_partial_reduce_output_layout", {}),
            (unit, "_post_backward_pending", False),
            (unit, "_post_forward_indices", list(unit._post_forward_indices)),
            (unit.comm_ctx, "post_forward_order", [*order]),
        ]
        for member in unit.fsdp_params:
            if "unsharded_accumulated_grad" in vars(member):  # else the leaf has it
                room.append((member, "unsharded_accumulated_grad", None))
        touched |= dict.fromkeys(tensor for pair in _pairs(unit) for tensor in pair)
    for tensor in touched:
        room.append((tensor, "grad", None))
        if getattr(tensor, "_post_accumulate_grad_hooks", None):
            room.append((tensor, "_post_accumulate_grad_hooks", {}))
    # Not every version of torch has all of these, nor has a model that has not run.
    room = [(owner, name, value) for owner, name, value in room if hasattr(owner, name)]
    saved = []
    try:
        for owner, name, value in room:
            saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(saved):
            setattr(owner, name, value)
