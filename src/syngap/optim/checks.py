"""What the optimizer accepts: bad input is met at the door."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, cast

from torch import Tensor

from syngap.optim import fused

__all__ = [
    "NonFinite",
    "check_compact",
    "check_named",
    "check_nonfinite_policy",
    "check_options",
    "check_own_options",
    "check_params",
]

NonFinite: TypeAlias = Literal["raise", "skip"]


def check_options(options: dict[str, Any]) -> None:
    """Check the gate's hyper-parameters, and the rate of whatever moves the parameters."""
    if "lr" in options:
        _require(options, "lr", "≥ 0", _is_at_least_zero)
    _require(options, "retention", "in [0, 1)", lambda value: 0.0 <= value < 1.0)
    _require(options, "consolidation", "in (0, 1)", lambda value: 0.0 < value < 1.0)
    _require(options, "damping", "≥ 0", _is_at_least_zero)
    _require(options, "ambient", "≥ 0", _is_at_least_zero)
    if options["scope"] not in ("network", "tensor"):
        raise ValueError(f"scope must be 'network' or 'tensor', got {options['scope']!r}")


def check_own_options(options: dict[str, Any]) -> None:
    """Check what SynGAP has and a wrapped optimizer brings itself."""
    _require(options, "momentum", "in [0, 1)", lambda value: 0.0 <= value < 1.0)
    _require(options, "weight_decay", "≥ 0", _is_at_least_zero)
    if options["foreach"] and options["differentiable"]:
        raise ValueError("foreach=True and differentiable=True exclude each other")
    if options.get("fused"):
        if options["foreach"] or options["differentiable"]:
            raise ValueError("fused=True excludes foreach=True and differentiable=True")
        if not fused.is_there():
            raise ValueError("fused=True needs Triton, which is not installed")


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
                f"SynGAP takes real parameters, got {param.dtype} of shape {tuple(param.shape)}; "
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


def _require(
    options: dict[str, Any], name: str, allowed: str, holds: Callable[[Any], bool]
) -> None:
    value = options[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number and not (isinstance(value, Tensor) and value.numel() == 1):
        raise ValueError(f"{name} must be a number {allowed}, got {value!r}")
    if not holds(value):  # written so that NaN fails
        raise ValueError(f"{name} must be {allowed}, got {value}")


def _is_at_least_zero(value: Any) -> bool:
    return bool(0.0 <= value < math.inf)
