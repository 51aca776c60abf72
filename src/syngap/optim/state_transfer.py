"""States restored from a checkpoint, and those of a parameter that grew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syngap.optim.compact import first_turn
from syngap.optim.tensors import accumulator, is_sharded, kept_in

__all__ = [
    "IMPORTANCE",
    "VERSION",
    "grown",
    "names_of",
    "place_to_grow",
    "require_growth",
    "restore_state",
]


# The gate's part of a parameter's state; "left" and "right" are the directions of its two sides.
IMPORTANCE = ("importance", "mean", "turn", "left", "right")

# Of what state_dict() gives: in each group, which whoever moves states keeps. 0 did not say it.
VERSION = 1

# How far rounding may carry a kept mean from the importance it is the mean of.
_DRIFT = {False: 1e-3, True: 0.5}


def _restored_importance(param: Tensor, saved: dict[str, Any], compact: bool) -> dict[str, Tensor]:
    """Return a saved importance and its mean for a parameter, in their own precision."""
    if "importance" not in saved:
        return {}
    importance = saved["importance"].to(param.device, kept_in(param.dtype, compact), copy=True)
    state = {"importance": importance}
    if compact:
        turn = saved.get("turn")
        own = first_turn(param.device)
        state["turn"] = own if turn is None else own.copy_(turn)
    mean = saved.get("mean")
    if is_sharded(importance) and mean is not None:
        return state | {"mean": mean.to(param.device, copy=True)}
    dtype = accumulator(param.dtype)
    true = importance.sum(dtype=dtype) / max(1, importance.numel())
    # The kept mean goes on bit for bit, unless somebody changed the importance alone.
    if mean is None or not torch.isclose(mean.to(true), true, rtol=_DRIFT[compact], atol=0.0):
        mean = true
    # Means are kept in the widest type of the network.
    dtype = torch.promote_types(dtype, mean.dtype)
    return state | {"mean": mean.to(param.device, dtype, copy=True)}


def restore_state(
    param: Tensor, state: dict[str, Any], saved: dict[str, Any], compact: bool
) -> None:
    """Put a saved importance, in its own precision, into a state that torch has loaded."""
    state.pop("turn", None)  # of one that is compact, if this is not
    state |= _restored_importance(param, saved, compact)
    _lay_out_like(param, state)


def _lay_out_like(param: Tensor, state: dict[str, Any]) -> None:
    """Bring what has a parameter's shape into the order of memory that the parameter has.

    Files keep no such order. In another one sums would run otherwise, and end in other last digits
    than those of a run that was never interrupted.
    """
    for key, value in state.items():
        is_like = isinstance(value, Tensor) and value.shape == param.shape
        if is_like and value.stride() != param.stride() and not is_sharded(value):
            like = torch.empty_like(param, dtype=value.dtype, memory_format=torch.preserve_format)
            state[key] = like.copy_(value)


def names_of(groups: Sequence[dict[str, Any]]) -> dict[Tensor, str]:
    """Return the names that came with named parameters, else their numbers."""
    names: dict[Tensor, str] = {}
    for group in groups:
        given = group.get("param_names", [None] * len(group["params"]))
        for param, name in zip(group["params"], given, strict=True):
            names[param] = str(len(names)) if name is None else name
    return names


def place_to_grow(
    old: Tensor,
    new: Tensor,
    groups: Sequence[dict[str, Any]],
    states: Sequence[dict[Tensor, Any]],
    names: Mapping[Tensor, str] | None,
) -> tuple[list[Tensor], int]:
    """Return the list that `old` is in and its place there, if `new` may have that place.

    Args:
        old: the parameter that is replaced.
        new: the parameter that replaces it.
        groups: the parameter groups.
        states: what is kept by parameter.
        names: of the model's parameters, where there is a model.
    """
    lists: list[list[Tensor]] = [group["params"] for group in groups]
    places = [(params, i) for params in lists for i, param in enumerate(params) if param is old]
    if not places:
        raise ValueError(f"old {tuple(old.shape)} is not a parameter of this optimizer")
    require_growth(old, new, states)
    if any(param is new for params in lists for param in params):
        raise ValueError(f"new {tuple(new.shape)} is already a parameter of this optimizer")
    if names is not None and new not in names:
        raise ValueError(
            f"new {tuple(new.shape)} is not a parameter of model; put it there before grow()"
        )
    return places[0]


def require_growth(old: Tensor, new: Tensor, states: Sequence[dict[Tensor, Any]]) -> None:
    """Refuse a parameter that does not begin with the old one, or a state not known to grow."""
    if old.dim() != new.dim() or any(n < o for o, n in zip(old.shape, new.shape, strict=True)):
        raise ValueError(
            f"new must be at least as large as old in every dimension, "
            f"got {tuple(new.shape)} for {tuple(old.shape)}"
        )
    for state in states:
        for key, value in state.get(old, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != old.shape:
                raise ValueError(
                    f"{key} has shape {tuple(value.shape)} for old {tuple(old.shape)}, and how "
                    "that grows is not known"
                )


def grown(state: dict[str, Any], old: Tensor, new: Tensor) -> dict[str, Any]:
    """Return the state of `old` for `new`: the same where it was, zero where it is new."""
    larger = {}
    for key, value in state.items():
        larger[key] = value
        if isinstance(value, Tensor) and value.dim() and value.shape == old.shape:
            larger[key] = torch.zeros_like(
                new, dtype=value.dtype, memory_format=torch.preserve_format
            )
            larger[key][tuple(slice(size) for size in old.shape)] = value
    if "mean" in state:
        larger["mean"] = state["mean"] * (old.numel() / max(1, new.numel()))
    return larger
