"""What a state holds of a parameter: its names, restored from a checkpoint, or of one that grew."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syngap.optim.basis import Basis
from syngap.optim.compact import first_turn
from syngap.optim.tensors import accumulator, as_shard, is_sharded, kept_in, part_of

__all__ = [
    "DIRECTIONS",
    "IMPORTANCE",
    "MOMENTS",
    "RECORD",
    "VERSION",
    "RestoredDirections",
    "basis_in",
    "grown",
    "names_of",
    "place_to_grow",
    "require_growth",
    "restore_state",
    "sharded_state",
    "unshared",
    "without_directions",
]


# The gate's part of a parameter's state; "left" and "right" are the directions of its two sides,
# moments what they follow in a stream.
DIRECTIONS = ("left", "right")
MOMENTS = ("left_moment", "right_moment")
# What a group says of a protected run.
RECORD = ("protection", "rotated", "drawn", "teacher_every", "teacher_seed", "teacher_strength")
IMPORTANCE = ("importance", "mean", "turn", *DIRECTIONS, *MOMENTS)

# Of what state_dict() gives: in each group, which whoever moves states keeps. 0 did not say it.
VERSION = 1

# How far rounding may carry a kept mean from the importance it is the mean of.
_DRIFT = {False: 1e-3, True: 0.5}


def basis_in(state: Mapping[str, Any]) -> Basis | None:
    """Return the coordinates that a state's importance is in, None where they are entries."""
    left, right = (state.get(name) for name in DIRECTIONS)
    return None if left is None and right is None else Basis(left, right)


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
    true = importance.sum(dtype=dtype) / max(1, param.numel())
    basis = basis_in(saved)
    # The kept mean goes on bit for bit, unless somebody changed the importance alone. It counts
    # directions that the basis leaves out, and those of a basis in half precision overlap a little.
    drift = _DRIFT[compact or basis is not None]
    is_whole = basis is None or basis.is_complete
    most = true * (1.0 + drift) if is_whole else torch.full_like(true, math.inf)
    if mean is None or not true * (1.0 - drift) <= mean.to(true) <= most:
        mean = true
    # Means are kept in the widest type of the network.
    dtype = torch.promote_types(dtype, mean.dtype)
    return state | {"mean": mean.to(param.device, dtype, copy=True)}


class RestoredDirections:
    """Directions that are restored, each in memory once: layers with the same inputs share them.

    Args:
        own: the states before loading. A resumed run has taken the same directions again.
    """

    def __init__(self, own: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self._own = own
        self._restored: dict[object, Tensor] = {}

    def restored(self, param: Tensor, name: str, saved: Tensor) -> Tensor:
        """Return saved directions in their own type, on the device of their parameter."""
        own = self._own.get(param, {}).get(name)
        if (
            isinstance(own, Tensor)
            and (own.dtype, own.shape, own.device) == (saved.dtype, saved.shape, param.device)
            and torch.equal(own, saved.to(own.device))
        ):
            return own
        # A view, as one row of a stack, has the memory of others, and another shape.
        key = (saved.data_ptr(), saved.dtype, saved.shape, saved.stride(), param.device)
        if key not in self._restored:
            copied = saved.detach().to(param.device, copy=True)
            self._restored[key] = copied.contiguous()
        return self._restored[key]


def restore_state(
    param: Tensor,
    state: dict[str, Any],
    saved: dict[str, Any],
    compact: bool,
    directions: RestoredDirections,
) -> None:
    """Put a saved importance, in its own precision, into a state that torch has loaded."""
    state.pop("turn", None)  # of one that is compact, if this is not
    state |= _restored_importance(param, saved, compact)
    _lay_out_like(param, state)
    if basis_in(saved) is not None:
        state["importance"] = state["importance"].contiguous()
        for name in DIRECTIONS:
            if name in saved:
                state[name] = directions.restored(param, name, saved[name])
        for name in MOMENTS:
            if name in saved:
                state[name] = saved[name].detach().to(param.device, copy=True).contiguous()


def _lay_out_like(param: Tensor, state: dict[str, Any]) -> None:
    """Bring what has a parameter's shape into the order of memory that the parameter has.

    Files keep no such order. In another one sums would run otherwise, and end in other last digits
    than those of a run that was never interrupted.
    """
    for key, value in state.items():
        is_like = isinstance(value, Tensor) and value.shape == param.shape
        if is_like and value.stride() != param.stride() and not is_sharded(param):
            like = torch.empty_like(param, dtype=value.dtype, memory_format=torch.preserve_format)
            state[key] = like.copy_(value)


def names_of(groups: Sequence[dict[str, Any]]) -> dict[Tensor, str]:
    """Return the names that came with named parameters, else their numbers."""
    names: dict[Tensor, str] = {}
    for group in groups:
        param_names = group.get("param_names", [None] * len(group["params"]))
        for param, name in zip(group["params"], param_names, strict=True):
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
    require_growth(old, new, states)
    lists: list[list[Tensor]] = [group["params"] for group in groups]
    places = [(params, i) for params in lists for i, param in enumerate(params) if param is old]
    if not places:
        raise ValueError(f"old {tuple(old.shape)} is not a parameter of this optimizer")
    if any(param is new for params in lists for param in params):
        raise ValueError(f"new {tuple(new.shape)} is already a parameter of this optimizer")
    if names is not None and new not in names:
        raise ValueError(
            f"new {tuple(new.shape)} is not a parameter of model; put it there before grow()"
        )
    return places[0]


def require_growth(old: Any, new: Any, states: Sequence[dict[Tensor, Any]]) -> None:
    """Refuse a parameter that does not begin with the old one, or a state not known to grow."""
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        raise TypeError(
            "grow takes two parameters, such as old.weight and new.weight, got "
            f"{type(old).__name__} and {type(new).__name__}"
        )
    if old.dim() != new.dim() or any(n < o for o, n in zip(old.shape, new.shape, strict=True)):
        raise ValueError(
            f"new must be at least as large as old in every dimension, "
            f"got {tuple(new.shape)} for {tuple(old.shape)}"
        )
    for states_of in states:
        state = states_of.get(old, {})
        known = () if basis_in(state) is None else IMPORTANCE
        for key, value in state.items():
            if key in known:
                continue
            if isinstance(value, Tensor) and value.dim() and value.shape != old.shape:
                raise ValueError(
                    f"{key} has shape {tuple(value.shape)} for old {tuple(old.shape)}, and how "
                    "that grows is not known"
                )


def grown(
    state: dict[str, Any], old: Tensor, new: Tensor, rotated: Basis | None = None
) -> dict[str, Any]:
    """Return the state of `old` for `new`: the same where it was, zero where it is new.

    Directions of a complete side become those of a larger one, with the new entries as directions
    of their own. Others have zeros there, so that new entries are in none of them.

    Args:
        state: of the gate, or of an optimizer behind it.
        old: the smaller parameter.
        new: the larger one.
        rotated: the coordinates of `old` that the optimizer behind the gate works in, if it does.
    """
    basis = basis_in(state)
    larger = dict(state)
    for key, value in state.items():
        if not isinstance(value, Tensor) or not value.dim():
            continue
        if key in DIRECTIONS and basis is not None:
            larger[key] = _grown_side(value, old, new, DIRECTIONS.index(key))
        elif key in MOMENTS and basis is not None:
            larger[key] = _grown_moment(value, old, new, MOMENTS.index(key))
        elif key == "importance" and basis is not None:
            larger[key] = _grown_coordinates(value, basis, old, new)
        elif value.shape == old.shape:
            larger[key] = torch.zeros_like(
                new, dtype=value.dtype, memory_format=torch.preserve_format
            )
            if rotated is None:
                larger[key][tuple(slice(size) for size in old.shape)] = value
            else:
                plain = old.new_empty(old.shape, dtype=value.dtype).copy_(value)  # if quantised
                found = _grown_coordinates(plain.reshape(rotated.shape(old)), rotated, old, new)
                larger[key].copy_(found.view(new.shape))
    if "mean" in state:
        larger["mean"] = state["mean"] * (old.numel() / max(1, new.numel()))
    return larger


def _grown_side(side: Tensor, old: Tensor, new: Tensor, place: int) -> Tensor:
    """Return the directions of a side of `old`, for that of `new`."""
    before, after = (_extent(weight, side, place) for weight in (old, new))
    size, (rows, count) = math.prod(after), side.shape[-2:]
    if size == rows and old.shape[0] == new.shape[0]:
        return side
    is_complete = rows == count
    stack = new.shape[:1] if side.dim() == 3 else ()
    larger = side.new_zeros(*stack, size, size if is_complete else count)
    known = _places(before, after, side.device)
    part = larger[: len(side)] if stack else larger
    part[..., known, :count] = side
    if is_complete:
        added = torch.ones(size, dtype=torch.bool, device=side.device)
        added[known] = False
        (added,) = added.nonzero(as_tuple=True)
        part[..., added, torch.arange(rows, size, device=side.device)] = 1.0
    if stack:
        larger[len(side) :] = torch.eye(*larger.shape[1:], dtype=side.dtype, device=side.device)
    return larger


def _grown_moment(moment: Tensor, old: Tensor, new: Tensor, place: int) -> Tensor:
    """Return the second moment of a side of `old`, for that of `new`: zero where it is new."""
    before, after = (_extent(weight, moment, place) for weight in (old, new))
    known = _places(before, after, moment.device)
    larger = moment.new_zeros(math.prod(after), math.prod(after))
    larger[known.unsqueeze(-1), known] = moment
    return larger


def _grown_coordinates(value: Tensor, basis: Basis, old: Tensor, new: Tensor) -> Tensor:
    """Return numbers in the coordinates of `old`, for those of `new`."""
    factors = (basis.left, basis.right)
    some = basis.left if basis.right is None else basis.right
    assert some is not None
    sides = [None if s is None else _grown_side(s, old, new, n) for n, s in enumerate(factors)]
    larger = value.new_zeros(Basis(*sides).shape(new))
    rows, columns = (
        _places(_extent(old, some, place), _extent(new, some, place), value.device)
        if side is None
        else torch.arange(side.shape[-1], device=value.device)
        for place, side in enumerate(factors)
    )
    part = larger[: len(value)] if some.dim() == 3 else larger
    part[..., rows.unsqueeze(-1), columns] = value
    return larger


def _extent(weight: Tensor, side: Tensor, place: int) -> tuple[int, ...]:
    """Return the dimensions of a weight that one of its two sides has."""
    shape = tuple(weight.shape[1:] if side.dim() == 3 else weight.shape)
    return shape[:1] if place == 0 else shape[1:]


def _places(before: Sequence[int], after: Sequence[int], device: torch.device) -> Tensor:
    """Return where entries of a smaller shape are among all of a larger one."""
    numbers = torch.arange(math.prod(after), device=device).view(*after)
    return numbers[tuple(slice(size) for size in before)].flatten()


def sharded_state(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Return a state of whole tensors, as a full checkpoint has them, sharded as a parameter is.

    What is along directions stays whole.
    """
    if not is_sharded(param):
        return state
    whole = () if basis_in(state) is None else ("importance", *DIRECTIONS)
    found = dict(state)
    for key, value in state.items():
        is_plain = isinstance(value, Tensor) and not is_sharded(value)
        if is_plain and key not in whole and value.shape == param.shape:
            found[key] = as_shard(part_of(value, param).clone(), param)
    return found


def without_directions(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state but for its directions and their moments."""
    left_out = (*DIRECTIONS, *MOMENTS)
    return {key: value for key, value in state.items() if key not in left_out}


def unshared(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict in which no two entries are in the same memory."""
    seen: set[object] = set()
    for index, state in state_dict["state"].items():
        for key in ("turn", *DIRECTIONS):
            value = state.get(key)
            if not isinstance(value, Tensor):
                continue
            if id(value) in seen:
                state = state_dict["state"][index] = state | {key: value.clone()}
            seen.add(id(value))
    return state_dict
