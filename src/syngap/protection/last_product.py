"""The last linear layer of a model: logits = features · Wᵀ + b.

Logits of a large vocabulary take much memory, and the features that they are made of a hundredth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Head", "LastProduct"]


@dataclass(frozen=True)
class Head:
    """A copy of the weights of a last layer, in the precision that it multiplies in."""

    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def answer(self, features: Tensor) -> Tensor:
        """Return the logits of features."""
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features, self.weight, self.bias)


class LastProduct(TorchFunctionMode):
    """Notes the last call of `linear` while it is entered.

    Attributes:
        features: what was multiplied, in the precision of the product; None without a call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features: Tensor | None = None
        self._weights: tuple[Tensor, Tensor | None] | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, and note it where it is `linear`."""
        product = func(*args, **(kwargs or {}))
        if func is F.linear:
            named = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            self.features = named["input"].detach().to(product.dtype)
            self._weights = named["weight"], named.get("bias")
        return product

    def head(self) -> Head | None:
        """Return a copy of the layer that was called last."""
        if self.features is None or self._weights is None:
            return None
        weight, bias = (
            None if each is None else each.detach().to(self.features.dtype, copy=True)
            for each in self._weights
        )
        assert weight is not None
        return Head(weight, bias)
