"""EWC in the Kronecker eigenbasis (Ritter 2018; R-EWC, Liu 2018)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from syngap.bench import seeds
from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Batch, Setting
from syngap.bench.options import Count, NonNegative
from syngap.optim.knowledge import Known, take_knowledge

__all__ = ["KroneckerEWC", "known_of"]


class KroneckerEWC(Method):
    """Adds strength / 2 · Σ F ⊙ (Lᵀ (θ - θ₀) R)²; F is the Fisher diagonal in that basis.

    Args:
        setting: the model, data and anchors.
        strength: of the penalty.
        batch: anchors at a time, to take importance.
        **others: options of `Method`.
    """

    def __init__(
        self, setting: Setting, *, strength: NonNegative = 100.0, batch: Count = 8, **others: Any
    ) -> None:
        super().__init__(setting, **others)
        self.strength = strength
        self.known = known_of(setting, self.model, batch)
        self.start = {param: param.detach().clone() for param in self.known}

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss with the penalty."""
        terms = [self._term(param, known) for param, known in self.known.items()]
        return super().loss(batch) + self.strength / 2 * torch.stack(terms).sum()

    def _term(self, param: Tensor, known: Known) -> Tensor:
        moved = param - self.start[param]
        along = moved if known.basis is None else known.basis.into(moved, keep_dtype=False)
        return (known.importance * along.square()).sum()


def known_of(setting: Setting, model: nn.Module, batch: int) -> dict[Tensor, Known]:
    """Return complete Kronecker eigenbases from the anchors, and importance in them."""
    return take_knowledge(
        model,
        list(torch.split(setting.anchors, batch)),
        predict=lambda tokens: setting.predict(model, tokens),
        generator=seeds.generator(setting.seed, "labels", setting.device),
    )
