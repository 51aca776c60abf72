"""Checks of a loaded state: all of it is checked before any of it is used.

One NaN of a damaged file would reach every weight at the next step. Values are looked at here, as
loading may wait for the device, and a step may not.

What can be known of a state: importance is an average of squared scores, which are multiplied with
SCALE and have a finite sum. So its sum is at most the largest number of its type divided by SCALE²;
a state is refused from SCALE times that on, 3.3e35 in float32. Other numbers have the same bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from syngap.optim.checks import LARGEST_OPTION, is_number, is_of_torch
from syngap.optim.parameter_state import DIRECTIONS, MOMENTS, RECORD, VERSION, basis_in
from syngap.optim.scores import SCALE
from syngap.optim.tensors import accumulator, local

__all__ = [
    "check_groups",
    "check_states",
    "forms_of",
    "match",
    "unchanged_on_error",
]

_PLAIN = (Tensor, torch.nn.Parameter)
_NOT_OPTIONS = ("params", "param_names", "behind", "version", *RECORD)
_ABSENT = object()


@dataclass(frozen=True)
class Form:
    """What a value of a state has to be.

    Attributes:
        single: whether it is one number, or of its parameter's shape.
        signed: whether it may be negative.
        integer: whether it is a whole number of 16 bits, or a floating-point number.
        plain: whether a number of Python does as well as a tensor.
        optional: whether it may be None.
        wide: whether it is kept in full precision where its parameter is not.
    """

    single: bool = False
    signed: bool = False
    integer: bool = False
    plain: bool = False
    optional: bool = False
    wide: bool = False


_OWN = {
    "importance": Form(wide=True),
    "mean": Form(single=True),
    "turn": Form(single=True, signed=True, integer=True),
    "momentum_buffer": Form(signed=True, optional=True),
    "square": Form(wide=True),  # of Ballistic
}
# Of torch's own optimizers, whose states are as these names say; others may mean something else.
_TORCH = {
    "step": Form(single=True, plain=True),
    "momentum_buffer": Form(signed=True),
    "exp_avg": Form(signed=True),
    "exp_avg_sq": Form(),
    "max_exp_avg_sq": Form(),
    "exp_inf": Form(),
    "mu_product": Form(single=True, plain=True),
    "sum": Form(),
    "acc_delta": Form(),
    "square_avg": Form(),
    "grad_avg": Form(signed=True),
    "ax": Form(signed=True),
    "eta": Form(single=True, plain=True),
    "mu": Form(single=True, plain=True),
    "prev": Form(signed=True),
    "step_size": Form(),
}


def forms_of(optimizer: Optimizer) -> Mapping[str, Form]:
    """Return what is known of an optimizer's state, by key."""
    module = type(optimizer).__module__
    if module.startswith("syngap."):
        return _OWN
    if not is_of_torch(optimizer):
        return {}
    if isinstance(optimizer, torch.optim.SGD):
        return _TORCH | {"momentum_buffer": Form(signed=True, optional=True)}
    return _TORCH


@contextmanager
def unchanged_on_error(groups: Sequence[dict[str, Any]], *owners: object) -> Iterator[None]:
    """Give groups, and the optimizers and gates that own them, back what they had, on an error.

    Loading makes new states and leaves the old ones alone, so that it is enough to remember which
    they were, and which options the groups had.
    """
    kept = [(each, dict(each)) for each in (*map(vars, owners), *groups)]
    try:
        yield
    except BaseException:
        for each, content in kept:
            each.clear()
            each.update(content)
        raise


# Structure ----------------------------------------------------------------------------------------


def match(
    state_dict: dict[str, Any], groups: Sequence[dict[str, Any]]
) -> dict[Tensor, dict[str, Any]]:
    """Return the saved state by parameter, or say what does not fit."""
    saved, states = _parts(state_dict)
    _check_versions(saved)
    saved_sizes = [len(group["params"]) for group in saved]
    own_sizes = [len(group["params"]) for group in groups]
    if saved_sizes != own_sizes:
        raise ValueError(
            f"the state_dict has param_groups of {saved_sizes} parameters, "
            f"this optimizer of {own_sizes}"
        )
    indices = [index for group in saved for index in group["params"]]
    if len(set(indices)) != len(indices):
        raise ValueError(
            "the state_dict has the same parameter twice: params of its param_groups are "
            f"{[group['params'] for group in saved]}"
        )
    unknown = [index for index in states if index not in set(indices)]
    if unknown:
        raise ValueError(
            f"the state_dict has states of parameters {unknown}, which are in no params of its "
            f"param_groups: {[group['params'] for group in saved]}"
        )
    params = [param for group in groups for param in group["params"]]
    return {param: states.get(index, {}) for index, param in zip(indices, params, strict=True)}


def _parts(state_dict: Any) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    """Return groups and states, if they have the structure that `state_dict()` gives them."""
    groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    states = state_dict.get("state") if isinstance(state_dict, dict) else None
    if not isinstance(groups, list) or not isinstance(states, dict):
        raise ValueError(
            "a state_dict has a list 'param_groups' and a dict 'state', got "
            f"{type(groups).__name__} and {type(states).__name__}; pass what state_dict() returned"
        )
    for number, group in enumerate(groups):
        where = f"param_groups[{number}] of the state_dict"
        if not isinstance(group, dict):
            raise ValueError(f"{where} must be a dict, got {group!r}")
        params = group.get("params")
        if not isinstance(params, (list, tuple)):
            raise ValueError(f"{where}: params must be a list of numbers, got {params!r}")
        for place, index in enumerate(params):
            if isinstance(index, bool) or not isinstance(index, (int, str)):
                raise ValueError(
                    f"{where}: params[{place}] must be the number of a parameter, got {index!r}"
                )
        names = group.get("param_names", ["" for _ in params])
        if (
            not isinstance(names, (list, tuple))
            or len(names) != len(params)
            or not all(isinstance(name, str) for name in names)
        ):
            raise ValueError(f"{where}: param_names must name each parameter, got {names!r}")
    for index, state in states.items():
        if not isinstance(state, dict):
            raise ValueError(
                f"the state_dict's state of parameter {index} must be a dict, got {state!r}"
            )
    return groups, states


def _check_versions(groups: Sequence[dict[str, Any]]) -> None:
    """Refuse groups that a newer syngap gave."""
    for number, group in enumerate(groups):
        version = group.get("version", 0)
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise ValueError(
                f"param_groups[{number}] of the state_dict: version must be a whole number from 0 "
                f"to {VERSION}, got {version!r}"
            )
        if version > VERSION:
            raise ValueError(
                f"the state_dict is of a newer syngap (version {version}, this one reads "
                f"{VERSION}): upgrade syngap"
            )


# Options ------------------------------------------------------------------------------------------


def check_groups(
    saved: Sequence[dict[str, Any]],
    groups: Sequence[dict[str, Any]],
    check: Callable[[dict[str, Any]], None],
) -> None:
    """Refuse options of a saved group that this optimizer would not have taken from the user.

    Args:
        saved: the groups of the state_dict.
        groups: the optimizer's own, as many.
        check: raises a ValueError where options are out of range. It gets a saved group, with the
            optimizer's own value where the saved one has none.
    """
    for number, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        where = f"param_groups[{number}] of the state_dict"
        try:
            check({**ours, **theirs})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        for name, value in theirs.items():
            if name not in _NOT_OPTIONS:
                own = ours.get(name, _ABSENT)
                _check_alike(f"{where}: {name}", value, own, LARGEST_OPTION)


def _check_alike(where: str, value: Any, own: Any, largest: float) -> None:
    """Refuse a value of another kind than the optimizer has, and a number that is not finite."""
    if is_number(own):
        if not is_number(value):
            raise ValueError(f"{where} must be a number, got {value!r}")
    elif isinstance(own, (bool, str)):
        if not isinstance(value, type(own)) and value is not None:
            raise ValueError(f"{where} must be a {type(own).__name__}, got {value!r}")
    elif isinstance(own, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(own):
            raise ValueError(f"{where} must be of length {len(own)}, got {value!r}")
    elif own is None:
        if not is_number(value) and not isinstance(value, (bool, type(None))):
            raise ValueError(f"{where} must be None, true or false or a number, got {value!r}")
    elif isinstance(own, Tensor) and _outside(value) != _outside(own):
        raise ValueError(f"{where} must be {_outside(own)}, got {_outside(value)}")
    if isinstance(value, (list, tuple)):
        several = isinstance(own, (list, tuple))
        for place, one in enumerate(value):
            _check_alike(f"{where}[{place}]", one, own[place] if several else _ABSENT, largest)
    elif isinstance(value, dict):
        for key, one in value.items():
            inner = own.get(key, _ABSENT) if isinstance(own, dict) else _ABSENT
            _check_alike(f"{where}[{key!r}]", one, inner, largest)
    elif isinstance(value, Tensor):
        _check_range(where, value, largest, signed=True)
    elif is_number(value):
        _check_bounds(where, value, value, largest, signed=True)


def _outside(value: Any) -> str:
    """Describe a tensor but for its numbers."""
    if not isinstance(value, Tensor):
        return repr(value)
    kind = "floating-point" if value.is_floating_point() else str(value.dtype)
    return f"a tensor of {kind} numbers, {value.layout}, of shape {tuple(value.shape)}"


# States -------------------------------------------------------------------------------------------


def check_states(
    saved: Mapping[Tensor, dict[str, Any]],
    states: Mapping[Tensor, dict[str, Any]],
    forms: Mapping[str, Form],
    names: Mapping[Tensor, str],
    prefix: str = "",
) -> None:
    """Refuse states of other shapes, types or values than they can have.

    Args:
        saved: what is to be loaded, by parameter.
        states: the optimizer's own. What no form is known of has to be like it, where it is there.
        forms: what is known of values, by key.
        names: of the parameters, for messages.
        prefix: what the key begins with in the state_dict, for messages.
    """
    for param, state in saved.items():
        for key, value in state.items():
            if key in (*DIRECTIONS, *MOMENTS) and forms is _OWN:
                continue  # which `check_directions` looks at
            where = f"the state_dict has {prefix}{key}"
            whose = f"for a parameter of shape {tuple(param.shape)} ({names[param]})"
            form = forms.get(key)
            if form is None:
                own = states.get(param, {}).get(key)
                own = _ABSENT if own is None else own
                _check_alike(f"{where} {whose}: it", value, own, _largest(param))
            elif not (value is None and form.optional):
                basis = basis_in(state) if forms is _OWN and key == "importance" else None
                shape = tuple(param.shape) if basis is None else basis.shape(param)
                _check_form(where, whose, key, value, param, form, shape)


def _check_form(
    where: str,
    whose: str,
    key: str,
    value: Any,
    param: Tensor,
    form: Form,
    whole_shape: tuple[int, ...],
) -> None:
    if form.plain and is_number(value) and not isinstance(value, Tensor):
        _check_bounds(f"{where} {whose}", value, value, _largest(param), form.signed)
        return
    kind = "whole numbers" if form.integer else "floating-point numbers"
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} {value!r} {whose}: it must be a tensor of {kind}")
    whole = not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
    if value.layout != torch.strided or (
        not whole if form.integer else not value.is_floating_point()
    ):
        raise ValueError(
            f"{where} of {value.dtype} {value.layout} {whose}: it must be a dense tensor of {kind}"
        )
    shape = () if form.single else whole_shape
    if tuple(value.shape) != shape:
        advice = f"it must be {shape}; if the parameter grew, load before that and call grow()"
        raise ValueError(
            f"{where} of shape {tuple(value.shape)} {whose}: "
            + ("it must be a single number" if form.single else advice)
        )
    if not param.numel():
        return  # what there would be to know of it is of no entries
    if form.integer:
        _check_range(f"{where} {whose}", value, float(torch.iinfo(torch.int16).max), form.signed)
        return
    largest = _largest(param)
    if param.dtype == torch.float16 and not form.single and not form.wide:
        # Squares of ordinary gradients overflow there, and such steps are zero.
        largest = torch.finfo(torch.float16).max if form.signed else math.inf
    _check_range(f"{where} {whose}", value, largest, form.signed)
    if key == "importance":
        total = local(value).sum(dtype=accumulator(param.dtype)).item()
        _check_bounds(f"{where} {whose}, in sum", total, total, largest, form.signed)


def _largest(param: Tensor) -> float:
    return float(torch.finfo(accumulator(param.dtype)).max) / SCALE


def _check_range(where: str, value: Tensor, largest: float, signed: bool) -> None:
    """Check all numbers of a tensor; of one that is sharded, those that this process holds."""
    if value.is_complex():
        raise ValueError(f"{where}: its numbers must be real, got {value.dtype}")
    part = local(value.detach())
    if type(part) not in _PLAIN or part.is_quantized or not part.numel():
        return  # how to read those that other packages make is for them to say
    if part.is_floating_point() and part.dtype.itemsize == 1:
        part = part.float()
    if part.layout == torch.strided and part.dtype != torch.bool:
        low, high = (bound.item() for bound in part.aminmax())
        _check_bounds(where, low, high, largest, signed)


def _check_bounds(where: str, low: Any, high: Any, largest: float, signed: bool) -> None:
    least = -largest if signed else 0.0
    if not (least <= low and high <= largest):  # written so that NaN fails
        got = _short(low) + ("" if low == high or low != low else f" to {_short(high)}")
        raise ValueError(
            f"{where}: its numbers must lie between {least:.2g} and {largest:.2g}, got {got}; the "
            "file is damaged or was changed, or its run had diverged: load an earlier one"
        )


def _short(number: Any) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)[:24]
