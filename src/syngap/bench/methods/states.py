"""Attributes of a method as plain values for a checkpoint, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["restore", "snapshot"]


def snapshot(value: Any, name: str) -> Any:
    """Return `value` as nested containers of tensors, numbers and text.

    Examples:
        >>> snapshot({"steps": 3}, "counts")
        {'steps': 3}
        >>> snapshot(print, "callback")
        Traceback (most recent call last):
        TypeError: callback: a builtin_function_or_method cannot be kept in a checkpoint; ...
    """
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if value is None or isinstance(value, (Tensor, bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        parts = [snapshot(part, f"{name}[{index}]") for index, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, dict):
        return {key: snapshot(part, f"{name}[{key!r}]") for key, part in value.items()}
    raise TypeError(
        f"{name}: a {type(value).__name__} cannot be kept in a checkpoint; "
        "give it state_dict and load_state_dict, or do not make it an attribute"
    )


def restore(value: Any, state: Any, device: torch.device) -> Any:
    """Return `value` restored from `state`; new tensors go to `device`."""
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        value.load_state_dict(state)
        return value
    if isinstance(value, torch.Generator):
        value.set_state(state.cpu())
        return value
    if isinstance(state, Tensor):
        if isinstance(value, Tensor) and (value.shape, value.dtype) == (state.shape, state.dtype):
            with torch.no_grad():
                return value.copy_(state)  # in place: other references to it stay valid
        return state.to(value.device if isinstance(value, Tensor) else device)
    if isinstance(state, dict):
        old = value if isinstance(value, dict) else {}
        return {key: restore(old.get(key), part, device) for key, part in state.items()}
    if isinstance(state, (list, tuple)):
        same = isinstance(value, (list, tuple)) and len(value) == len(state)
        were = value if same else [None] * len(state)
        parts = [restore(was, part, device) for was, part in zip(were, state, strict=True)]
        return tuple(parts) if isinstance(state, tuple) else parts
    return state
