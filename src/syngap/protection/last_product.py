"""The last layer of a model as a product: logits = features · Wᵀ + b.

Logits of a large vocabulary take much memory, and the features that they are made of a hundredth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

__all__ = ["Head", "LastProduct"]


@dataclass(frozen=True)
class Head:
    """A copy of the weights of a last layer, in the precision that it multiplies in."""

    weight: Tensor
    bias: Tensor | None

    def answer(self, features: Tensor) -> Tensor:
        """Return the logits of features."""
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features, self.weight, self.bias)


class LastProduct(TorchFunctionMode):
    """Notes the last call of `linear` while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._inputs: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._dtype = torch.float32

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, and note it where it is `linear`."""
        found = func(*args, **(kwargs or {}))
        if func is F.linear:
            names = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            self._inputs = names["input"], names["weight"], names.get("bias")
            self._dtype = found.dtype
        return found

    def features(self) -> Tensor | None:
        """Return what was multiplied last, in the precision of the product."""
        return None if self._inputs is None else self._inputs[0].detach().to(self._dtype)

    def head_of(self, prediction: Tensor | Distribution) -> Head | None:
        """Return the last layer where its product is the whole prediction, else None."""
        if self._inputs is None or not isinstance(prediction, Tensor):
            return None
        features, weight, bias = self._inputs
        if (*features.shape[:-1], len(weight)) != prediction.shape:
            return None
        weight, *rest = (
            part.detach().to(self._dtype, copy=True) for part in (weight, bias) if part is not None
        )
        head = Head(weight, rest[0] if rest else None)
        again = head.answer(features.to(self._dtype)).to(prediction.dtype)
        error = (again - prediction).abs().max()
        allowed = 4 * torch.finfo(self._dtype).eps * prediction.abs().max()
        return head if bool(error <= allowed) else None
