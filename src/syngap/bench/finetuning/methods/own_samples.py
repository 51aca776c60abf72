"""Cross-entropy on own samples: what the model wrote before tuning is learned again."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Batch, Setting
from syngap.bench.options import Count, NonNegative

__all__ = ["OwnSamples"]


class OwnSamples(Method):
    """Adds strength · the loss on a few own samples.

    Args:
        setting: the model, text and own samples.
        strength: of the added term.
        samples: so many a step.
        **others: options of `Method`.
    """

    refused: ClassVar = {
        "pairs": "an encoder writes no texts, so it has no own samples",
        "images": "a classifier makes no images, so it has no own samples",
    }

    def __init__(
        self,
        setting: Setting,
        *,
        strength: NonNegative = 1.0,
        samples: Count = 8,
        **others: Any,
    ) -> None:
        super().__init__(setting, **others)
        self.strength, self.count, self.own = strength, samples, setting.own

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss on both."""
        written = self.next_rows(self.own, self.count)
        added = self.setting.loss(self.model, (written,))
        return super().loss(batch) + self.strength * added
