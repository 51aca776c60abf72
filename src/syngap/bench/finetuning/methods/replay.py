"""True replay: a share of each batch is old text. It needs the old data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syngap.bench import seeds
from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Setting
from syngap.bench.options import Share

__all__ = ["Replay"]


class Replay(Method):
    """Each window of a batch is, with the probability `share`, replaced by one of old text.

    Args:
        setting: the model, text and old text.
        share: of old windows among all.
        **others: options of `Method`.
    """

    def __init__(self, setting: Setting, *, share: Share = 0.01, **others: Any) -> None:
        super().__init__(setting, **others)
        self.share = share

    def loss(self, windows: Tensor) -> Tensor:
        """Return the loss on the mixed batch."""
        return super().loss(self.mixed(windows))

    def mixed(self, windows: Tensor) -> Tensor:
        """Return the batch of this step with old windows in it."""
        order = seeds.generator(self.setting.seed, f"replayed {self.steps}")
        is_old = torch.rand(len(windows), generator=order) < self.share
        old = self.setting.draw(self.setting.old, len(windows), f"old text {self.steps}")
        return torch.where(is_old[:, None].to(windows.device), old, windows)
