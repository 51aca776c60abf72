"""A loss that a GPU still computes beside other work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = ["Pending"]


class Pending(Tensor):
    """A tensor that another stream writes; whatever uses it waits for that first.

    Only the GPU waits. The first use is an addition to another loss, as a rule, when the forward
    pass of that loss has run beside the writing.
    """

    _value: Tensor
    _written: torch.cuda.Event

    @classmethod
    def of(cls, value: Tensor, written: torch.cuda.Event) -> Tensor:
        """Return a tensor as one that waits for an event."""
        found = value.as_subclass(cls)  # with its gradient, for what does not ask below
        found._value, found._written = value, written
        return found

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function with values that are there."""
        return func(*tree_map(_settled, args), **tree_map(_settled, dict(kwargs or {})))


def _settled(value: Any) -> Any:
    if not isinstance(value, Pending):
        return value
    torch.cuda.current_stream(value._value.device).wait_event(value._written)
    return value._value
