"""What the optimizer accepts: bad input is met at the door."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["check_options", "check_own_options", "check_params"]


def check_options(options: dict[str, Any]) -> None:
    """Check the gate's hyper-parameters."""

    def require(name: str, allowed: str, holds: Callable[[Any], bool]) -> None:
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
            raise ValueError(f"{name} must be a number {allowed}, got {value!r}")
        if not holds(value):  # written so that NaN fails
            raise ValueError(f"{name} must be {allowed}, got {value}")

    def at_least_zero(value: Any) -> bool:
        return bool(0.0 <= value < math.inf)

    require("retention", "in [0, 1)", lambda value: 0.0 <= value < 1.0)
    require("consolidation", "in (0, 1)", lambda value: 0.0 < value < 1.0)
    require("damping", "≥ 0", at_least_zero)
    require("ambient", "≥ 0", at_least_zero)
    if "lr" in options:
        require("lr", "≥ 0", at_least_zero)
    if options["scope"] not in ("network", "tensor"):
        raise ValueError(f"scope must be 'network' or 'tensor', got {options['scope']!r}")


def check_own_options(options: dict[str, Any]) -> None:
    """Check what SynGAP has and a wrapped optimizer brings itself."""
    if not 0.0 <= options["momentum"] < 1.0:
        raise ValueError(f"momentum must be in [0, 1), got {options['momentum']}")
    if not 0.0 <= options["weight_decay"] < math.inf:
        raise ValueError(f"weight_decay must be ≥ 0, got {options['weight_decay']}")
    if options["foreach"] and options["differentiable"]:
        raise ValueError("foreach=True and differentiable=True exclude each other")


def check_params(params: list[Tensor]) -> None:
    """Refuse parameters that have no Fisher diagonal of their own type."""
    for param in params:
        if param.is_complex():
            raise ValueError(
                f"SynGAP takes real parameters, got {param.dtype} of shape {tuple(param.shape)}; "
                "optimize torch.view_as_real(parameter) instead"
            )
