"""What the optimizer accepts: bad input is met at the door."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from numbers import Real
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from syngap.optim import fused

__all__ = [
    "GATE_OPTIONS",
    "LARGEST_OPTION",
    "OWN_OPTIONS",
    "NonFinite",
    "check_base_options",
    "check_changed_options",
    "check_compact",
    "check_counts",
    "check_named",
    "check_nonfinite_policy",
    "check_number",
    "check_options",
    "check_own_options",
    "check_params",
    "check_whole",
    "is_compiled",
    "is_number",
    "is_of_torch",
]

NonFinite: TypeAlias = Literal["raise", "skip"]

# A step in float32 multiplies and divides options further, and has room for 3e38.
LARGEST_OPTION = 1e30
GATE_OPTIONS = ("retention", "consolidation", "damping", "ambient", "scope", "bounded")
OWN_OPTIONS = (
    "momentum",
    "weight_decay",
    "maximize",
    "capturable",
    "differentiable",
    "foreach",
    "fused",
)


def check_options(options: dict[str, Any]) -> None:
    """Check the gate's hyper-parameters, and the rate of whatever moves the parameters."""
    for name in (*GATE_OPTIONS, *(("lr",) if "lr" in options else ())):
        _check_option(name, options[name])


def check_own_options(options: dict[str, Any]) -> None:
    """Check what SynGAP has and a wrapped optimizer brings itself."""
    for name in OWN_OPTIONS:
        if name in options:
            _check_option(name, options[name])
    _check_kernels(options)


def check_changed_options(
    number: int, group: dict[str, Any], names: Sequence[str], passed: Sequence[Any]
) -> bool:
    """Refuse options of a group that are out of range; return whether more than its rate changed.

    A tensor can change in place: on a CPU it is read again. On other devices it is not, because a
    step never waits for the device.

    Args:
        number: of the group.
        group: the parameter group.
        names: the options to check.
        passed: their values at the last check, which need none; empty at the first.
    """
    try:
        check_counts(group)
        for place, name in enumerate(names):
            value = group.get(name)
            is_new = not passed or value is not passed[place]
            if value.device.type == "cpu" if isinstance(value, Tensor) else is_new:
                _check_option(name, value)
        if "foreach" in names:
            _check_kernels(group)
    except ValueError as error:
        raise ValueError(f"param_groups[{number}]: {error}") from None
    others = [place for place, name in enumerate(names) if name != "lr"]
    return not passed or any(group.get(names[n]) is not passed[n] for n in others)


def check_number(name: str, value: Any, allowed: str, holds: Callable[[Any], bool]) -> None:
    """Check one option, of which `allowed` says in words what `holds` looks at."""
    if not is_number(value):
        raise ValueError(f"{name} must be a number {allowed}, got {value!r}")
    if not holds(value):  # written so that NaN fails
        raise ValueError(f"{name} must be {allowed}, got {value}")


def is_number(value: Any) -> bool:
    """Return whether a value is one real number, of Python or in a tensor."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def check_counts(options: dict[str, Any]) -> None:
    """Check how many steps were taken and left out."""
    for name in ("steps", "skipped", *(["observed"] if "observed" in options else [])):
        check_whole(name, options[name], 0)


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number, or a smaller one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number ≥ {least}, got {value!r}")


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has a part in how a module runs."""
    wraps = "_orig_mod" in module._modules
    return wraps or vars(module).get("_compiled_call_impl") is not None


def is_of_torch(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's class is one of torch's own."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def check_base_options(base: Optimizer, options: dict[str, Any]) -> None:
    """Check the numbers of an optimizer of torch by its own rules, which its constructor has."""
    kind = type(base)
    if not is_of_torch(base):
        return
    like = base.param_groups[0]["params"][0]
    empty = torch.empty((0,) * like.dim(), dtype=like.dtype, device=like.device)
    for name in signature(kind).parameters:
        value = options.get(name) if name != "params" else None
        if is_number(value) or isinstance(value, (tuple, list)):
            try:
                cast(Any, kind)([torch.nn.Parameter(empty)], **{name: value})
            except Exception as error:  # its checks take numbers for granted
                raise ValueError(f"{name} is refused by {kind.__name__}: {error}") from None


def check_compact(compact: object) -> None:
    """Check how importance is kept."""
    if not isinstance(compact, bool):
        raise ValueError(
            "compact must be True (importance in bfloat16) or False (in full precision), "
            f"got {compact!r}"
        )


def check_nonfinite_policy(policy: object, capturable: bool) -> None:
    """Check what a step is to do about gradients that are not finite."""
    if policy not in ("raise", "skip", None):
        raise ValueError(f"non_finite must be 'raise', 'skip' or None, got {policy!r}")
    if policy == "skip" and capturable:
        raise ValueError(
            "non_finite='skip' looks at the gradients of every step, and with capturable=True "
            "nothing may be looked at: leave out one of them"
        )


def check_params(params: list[Tensor]) -> None:
    """Refuse parameters that have no Fisher diagonal of their own type."""
    for param in params:
        if param.is_complex():
            raise ValueError(
                f"a gate takes real parameters, got {param.dtype} of shape {tuple(param.shape)}; "
                "optimize torch.view_as_real(parameter) instead"
            )


def check_named(params: Iterable[Tensor], names: dict[Tensor, str] | None) -> None:
    """Refuse parameters that the model does not have, where there is a model."""
    for param in params if names is not None else ():
        if param not in cast(dict[Tensor, str], names):
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is not one of model's; pass the model "
                "whose parameters are optimized, and call grow() for one that it replaced"
            )


def _check_option(name: str, value: Any) -> None:
    if name not in _CHOICES:
        check_number(name, value, *_NUMBERS[name])
    elif not any(value is choice or _is_text(value, choice) for choice in _CHOICES[name]):
        allowed = " or ".join(map(repr, _CHOICES[name]))
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _check_kernels(options: dict[str, Any]) -> None:
    if options["foreach"] and options["differentiable"]:
        raise ValueError("foreach=True and differentiable=True exclude each other")
    if options.get("fused"):
        if options["foreach"] or options["differentiable"]:
            raise ValueError("fused=True excludes foreach=True and differentiable=True")
        if not fused.has_triton():
            raise ValueError("fused=True needs Triton, which is not installed")


def _is_text(value: object, choice: object) -> bool:
    return isinstance(choice, str) and isinstance(value, str) and value == choice


def _is_at_least_zero(value: Any) -> bool:
    return bool(0.0 <= value <= LARGEST_OPTION)


def _is_below_one(value: Any) -> bool:
    return bool(0.0 <= value < 1.0)


def _is_between(value: Any) -> bool:
    return bool(0.0 < value < 1.0)


_AT_LEAST_ZERO = (f"≥ 0 and ≤ {LARGEST_OPTION:g}", _is_at_least_zero)
_NUMBERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "lr": _AT_LEAST_ZERO,
    "retention": ("in [0, 1)", _is_below_one),
    "consolidation": ("in (0, 1)", _is_between),
    "damping": _AT_LEAST_ZERO,
    "ambient": _AT_LEAST_ZERO,
    "momentum": ("in [0, 1)", _is_below_one),
    "weight_decay": _AT_LEAST_ZERO,
}
_CHOICES: dict[str, tuple[object, ...]] = {
    "scope": ("network", "tensor"),
    "bounded": (True, False),
    "maximize": (True, False),
    "capturable": (True, False),
    "differentiable": (True, False),
    "foreach": (None, True, False),
    "fused": (None, True, False),
}
