"""KL to the start on anchors (Learning without Forgetting, Li and Hoiem 2016)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, kl_divergence
from torch.nn.functional import kl_div

from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Batch, Setting
from syngap.bench.options import Count, NonNegative

__all__ = ["KL", "mean_divergence"]


class KL(Method):
    """Adds strength · KL(start ‖ now) on a few anchors; a frozen copy of the start is kept.

    `teacher`, the part of `syngap.protect`, stores the start's answers in place of the copy where
    they are small, of a language model the inputs of its last layer, and calculates others again.

    Args:
        setting: the model, data and anchors.
        strength: of the added term.
        anchors: so many a step.
        **others: options of `Method`.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        strength: NonNegative = 1.0,
        anchors: Count = 8,
        **others: Any,
    ) -> None:
        super().__init__(setting, **others)
        self.strength, self.count, self.anchors = strength, anchors, setting.anchors
        self.frozen = copy.deepcopy(setting.start).requires_grad_(False).eval()

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss with the mean KL of a prediction."""
        tokens = self.next_rows(self.anchors, self.count)
        with torch.no_grad():
            before = self.setting.predict(self.frozen, tokens)
        self.model.eval()
        now = self.setting.predict(self.model, tokens)
        self.model.train()
        return super().loss(batch) + self.strength * mean_divergence(before, now)


def mean_divergence(before: Tensor | Distribution, now: Tensor | Distribution) -> Tensor:
    """Return the mean KL(before ‖ now) of a prediction, from logits or distributions."""
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        ours, theirs = (p.float().log_softmax(-1).flatten(0, -2) for p in (now, before))
        return kl_div(ours, theirs, reduction="batchmean", log_target=True)
    return kl_divergence(before, now).mean()  # type: ignore[arg-type]
