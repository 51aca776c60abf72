"""Checks of a loaded state by how it was made: of which optimizer, protected, along directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syngap.optim.directions import Directions
from syngap.optim.errors import Notices
from syngap.optim.parameter_state import DIRECTIONS, MOMENTS, RECORD
from syngap.optim.tensors import accumulator, local

__all__ = ["check_directions", "check_kind", "check_protection"]

_PROTECTION = RECORD[:3]  # the others came later
_AGAIN = "call protect() with the same inputs on the model before training, then load"
_OTHERWISE = "load it into an optimizer that was made as that one was"
_NOT_GATED = (
    "the state_dict is not one of SynGAP: its groups lack retention; one of a bare optimizer "
    "behind SynGAP.wrap goes into optimizer.base.load_state_dict()"
)
_NOT_PROTECTED = (
    "the state_dict is of an optimizer without a gate: its groups lack retention; protect the "
    "model as in that run (gate=), or load the state of a bare optimizer into base before "
    "protection.optimizer(base)"
)
_GROWN = "load before that and call grow()"
_MANY = 1 << 53  # calls of a loss, which no run makes
# How far products of directions may be from those of orthonormal ones, by their type.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_PROBES = 8


def check_kind(saved: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Refuse groups of an optimizer that is not gated, or that has another one behind the gate."""
    if not all("retention" in group for group in saved):
        is_protected = any("protection" in group for group in groups)
        raise ValueError(_NOT_PROTECTED if is_protected else _NOT_GATED)
    for theirs, ours in zip(saved, groups, strict=True):
        own = ours.get("behind")
        found = theirs.get("behind", own)  # the first versions did not say
        if type(found) is not type(own) or found != own:
            raise ValueError(
                f"the state_dict is of {_kind(theirs, found)}, and this optimizer is "
                f"{_kind(ours, own)} (param_groups have another 'behind'): {_OTHERWISE}"
            )


def _kind(group: Mapping[str, Any], behind: object) -> str:
    called = "protection.optimizer" if "protection" in group else "SynGAP.wrap"
    return "SynGAP itself" if behind is None else f"{called}({behind})"


def check_protection(saved: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Refuse groups of a run that was protected otherwise, or not at all, or that should not be.

    What is saved of a protected run only means something along its own directions, and its teacher
    goes on with its own known inputs.
    """
    for number, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        where = f"param_groups[{number}] of the state_dict"
        for name in _PROTECTION:
            if (name in theirs) != (name in ours):
                which = "is" if name in theirs else "is not"
                raise ValueError(
                    f"{where}: the run {which} of an optimizer of syngap.protect (it has "
                    f"{'a' if name in theirs else 'no'} {name!r}), and this one "
                    f"{'is not' if name in theirs else 'is'}: "
                    + (_AGAIN if name in theirs else _OTHERWISE)
                )
        for name in ("protection", "rotated"):
            value, own = theirs.get(name), ours.get(name)
            if type(value) is not type(own) or value != own:
                option = "gate=" if None in (value, own) else "rotate="
                differs = f"; there it is {str(value)[:80]!r}, here {str(own)[:80]!r} ({option})"
                raise ValueError(
                    "the run was protected with other known inputs (or in another order, as from a "
                    "DataLoader that shuffles), another start model or other options of "
                    f"protect(): {_AGAIN}. This shows in {name!r} of {where}"
                    + ("" if name == "protection" else differs)
                )
        for name in ("every", "seed", "strength"):
            own = ours.get(f"teacher_{name}")
            value = theirs.get(f"teacher_{name}", own)  # earlier versions did not save it
            is_open = own is None or value is None  # as a seed where each process has its own
            if not is_open and (type(value) is not type(own) or value != own):
                raise ValueError(
                    f"{where}: teacher_{name} is {str(value)[:80]!r}, and here {own}: make both "
                    f"with the same protect(..., {name}=)"
                )
        for name in ("consolidation", "ambient"):
            value, own = theirs.get(name), ours.get(name)
            is_option = isinstance(value, float) and 0.0 <= value < 1.0  # others are refused
            if is_option and "protection" in ours and value != own:
                Notices().warn(
                    name,
                    f"{name} is {value} from now on, as in the run that is loaded; "
                    f"protect() was given {own}",
                )
        drawn = theirs.get("drawn", 0)
        if isinstance(drawn, bool) or not isinstance(drawn, int) or not 0 <= drawn < _MANY:
            raise ValueError(f"{where}: drawn must be a whole number ≥ 0, got {str(drawn)[:80]!r}")


def check_directions(
    saved: Mapping[Tensor, dict[str, Any]],
    states: Mapping[Tensor, dict[str, Any]],
    groups: Sequence[dict[str, Any]],
    names: Mapping[Tensor, str],
    directions: Directions | None,
) -> None:
    """Refuse directions that a parameter of this optimizer does not have, or that are none.

    Args:
        saved: what is to be loaded, by parameter.
        states: the optimizer's own.
        groups: its parameter groups.
        names: of the parameters, for messages.
        directions: how its directions follow the scores, None where they do not.
    """
    is_protected = any("protection" in group for group in groups)
    for param, state in saved.items():
        own = states.get(param, {})
        whose = f"for a parameter of shape {tuple(param.shape)} ({names[param]})"
        if directions is not None:
            _check_following(whose, param, state, directions)
            continue
        if any(name in state for name in MOMENTS):
            raise ValueError(
                f"the state_dict has moments of directions {whose}: it is of SynGAP(..., "
                "directions=True), and this optimizer is not"
            )
        for key in DIRECTIONS:
            if (key in state) != (key in own):
                stored, here = ("directions", "entries") if key in state else ("no", "directions")
                raise ValueError(
                    f"the state_dict has {stored} {key} {whose}, and this optimizer {here}: the "
                    f"run was protected in another form, or not at all; {_AGAIN}"
                )
            if key in state:
                advice = "protect() with the same rank; if the parameter grew, " + _GROWN
                _check_side(f"the state_dict has {key}", whose, state[key], own[key].shape, advice)
        known = own.get("importance")
        is_needed = any(key in state for key in DIRECTIONS) or (
            is_protected and isinstance(known, Tensor) and bool(local(known).any())
        )
        if is_needed and "importance" not in state:
            raise ValueError(f"the state_dict has no importance {whose}, which was protected")


def _check_following(
    whose: str, param: Tensor, state: Mapping[str, Any], directions: Directions
) -> None:
    """Refuse a state whose directions and moments are not those of a weight in a stream."""
    if "importance" not in state and not any(name in state for name in (*DIRECTIONS, *MOMENTS)):
        return  # of a run that took no step
    sides = directions.sides(param)
    for name, moment in zip(DIRECTIONS, MOMENTS, strict=True):
        if not (name in state) == (moment in state) == (name in sides):
            has = " and ".join(key for key in (name, moment) if key in state) or f"no {name}"
            raise ValueError(
                f"the state_dict has {has} {whose}, and this optimizer has "
                + (f"{name} and {moment}" if name in sides else f"no {name}")
                + ": make it with the same directions as the optimizer that was saved"
            )
        if name in sides:
            shape = torch.Size((sides[name], sides[name]))
            advice = f"if the parameter grew, {_GROWN}"
            _check_side(f"the state_dict has {name}", whose, state[name], shape, advice)
            _check_moment(f"the state_dict has {moment}", whose, state[moment], shape, advice)
    if "importance" not in state:
        raise ValueError(f"the state_dict has no importance {whose}, which has directions")


def _check_moment(where: str, whose: str, value: Any, shape: torch.Size, advice: str) -> None:
    """Refuse a second moment that is not symmetric and finite, with a diagonal of at least zero."""
    _check_tensor(where, whose, value, shape, advice)
    wide = value.to(accumulator(value.dtype))
    diagonal = wide.diagonal()
    slack = _TOLERANCE[value.dtype] * diagonal.sum()
    is_symmetric = bool(((wide - wide.T).abs() <= slack).all())  # written so that NaN fails
    if not (is_symmetric and bool((diagonal >= 0).all()) and bool(wide.isfinite().all())):
        raise ValueError(
            f"{where} {whose}: it must be symmetric and finite, with a diagonal of at least zero; "
            "the file is damaged or was changed: load an earlier one"
        )


def _check_tensor(where: str, whose: str, value: Any, shape: torch.Size, advice: str) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} {str(value)[:80]!r} {whose}: it must be a tensor")
    if value.dtype not in _TOLERANCE or value.layout != torch.strided:
        raise ValueError(
            f"{where} of {value.dtype} {value.layout} {whose}: it must be a dense tensor of "
            "floating-point numbers"
        )
    if value.shape != shape:
        raise ValueError(
            f"{where} of shape {tuple(value.shape)} {whose}, and here it is {tuple(shape)}: "
            + advice
        )


def _check_side(where: str, whose: str, value: Any, shape: torch.Size, advice: str) -> None:
    """Refuse directions that are not orthonormal columns of the shape that is needed here."""
    _check_tensor(where, whose, value, shape, advice)
    tolerance = _TOLERANCE[value.dtype]
    error = _distance_from_orthonormal(value)
    if not error <= tolerance:  # written so that NaN fails
        raise ValueError(
            f"{where} {whose}: its columns must be orthonormal, and are not (by {error:.2g}, "
            f"{tolerance:g} is rounding); the file is damaged or was changed: load an earlier one"
        )


@torch.no_grad()
def _distance_from_orthonormal(directions: Tensor) -> float:
    """Return how far QᵀQ z is from z, for a few z of signs: the product itself costs too much."""
    wide = directions.to(accumulator(directions.dtype))
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (wide.shape[-1], _PROBES), generator=generator, device="cpu")
    probes = signs.mul(2).sub(1).to(wide)
    errors = (wide.mT @ (wide @ probes) - probes).abs()
    return float(errors.max()) if errors.numel() else 0.0
