"""A classifier of images as the comparison sees it, with a second head for new classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["NEW_HEAD", "Classifier", "TwoHeads"]

NEW_HEAD = "new_head"


@dataclass(frozen=True)
class Classifier:
    """A classifier before tuning.

    Args:
        features: from images to features (N, width).
        head: from features to the logits of the classes that it knows.
        prepare: from images as uint8 (N, 3, height, width) to what `features` takes.
    """

    features: nn.Module
    head: nn.Linear
    prepare: Callable[[Tensor], Tensor]


class TwoHeads(nn.Module):
    """A network with its own head, and one for new classes whose weights begin at zero.

    Statistics of batch norms stay those of the start, also while it learns.

    Args:
        features: from images to features.
        head: the head that it has.
        classes: how many are new.
    """

    def __init__(self, features: nn.Module, head: nn.Linear, classes: int) -> None:
        super().__init__()
        self.features, self.head = features, head
        self.new_head = nn.Linear(head.in_features, classes).to(head.weight.device)
        nn.init.zeros_(self.new_head.weight)
        nn.init.zeros_(self.new_head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of the classes that it knew."""
        logits: Tensor = self.head(self.features(images))
        return logits

    def all_logits(self, images: Tensor) -> Tensor:
        """Return logits of the classes that it knew, and then of the new ones."""
        features = self.features(images)
        return torch.cat([self.head(features), self.new_head(features)], dim=1)

    def train(self, mode: bool = True) -> TwoHeads:
        """Change the mode of all modules but batch norms."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self
