"""True replay: a share of each batch is old data, which it needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syngap.bench import seeds
from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Batch, Setting
from syngap.bench.options import Share

__all__ = ["Replay"]


class Replay(Method):
    """Each example of a batch is, with the probability `share`, replaced by an old one.

    Args:
        setting: the model, data and old data.
        share: of old examples among all.
        **others: options of `Method`.
    """

    def __init__(self, setting: Setting, *, share: Share = 0.01, **others: Any) -> None:
        super().__init__(setting, **others)
        self.share = share

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss on the mixed batch."""
        return super().loss(self.mixed(batch))

    def mixed(self, batch: Batch) -> Batch:
        """Return the batch of this step with old examples in it."""
        order = seeds.generator(self.setting.seed, f"replayed {self.steps}")
        is_old = torch.rand(len(batch[0]), generator=order) < self.share
        old = self.setting.old_batch(len(batch[0]), f"old text {self.steps}")
        return tuple(
            torch.where(is_old.to(new.device).view(-1, *[1] * (new.dim() - 1)), known, new)
            for new, known in zip(batch, old, strict=True)
        )
