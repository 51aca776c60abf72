"""Elastic weight consolidation (Kirkpatrick 2017), importance from anchors without labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.bench import seeds
from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Batch, Setting
from syngap.bench.options import NonNegative
from syngap.optim.scores import sample_labels

__all__ = ["EWC", "diagonal_fisher"]


class EWC(Method):
    """Adds strength / 2 · Σ F (θ - θ₀)², F the diagonal of the Fisher matrix.

    Args:
        setting: the model, data and anchors.
        strength: of the penalty.
        **others: options of `Method`.
    """

    def __init__(self, setting: Setting, *, strength: NonNegative = 100.0, **others: Any) -> None:
        super().__init__(setting, **others)
        self.strength = strength
        self.start = [param.detach().clone() for param in self.model.parameters()]
        self.fisher = diagonal_fisher(setting, self.model)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss with the penalty."""
        params = zip(self.model.parameters(), self.start, self.fisher, strict=True)
        distance = [(fisher * (param - start).square()).sum() for param, start, fisher in params]
        return super().loss(batch) + self.strength / 2 * torch.stack(distance).sum()


def diagonal_fisher(setting: Setting, model: nn.Module) -> list[Tensor]:
    """Return F = 1/N Σ_s (Σ_t ∂ log p(y_t))², y drawn from the model, N predictions in all.

    Args:
        setting: whose anchors the samples s are.
        model: whose parameters F is of.
    """
    params = list(model.parameters())
    fisher, count = [torch.zeros_like(param) for param in params], 0
    generator = seeds.generator(setting.seed, "labels", setting.device)
    model.eval()
    for tokens in setting.anchors:
        chosen = _drawn(setting.predict(model, tokens.unsqueeze(0)), generator)
        grads = torch.autograd.grad(chosen.sum(), params, allow_unused=True)
        count += chosen.numel()
        for total, grad in zip(fisher, grads, strict=True):
            if grad is not None:
                total.addcmul_(grad, grad)
    return [total / count for total in fisher]


def _drawn(prediction: Tensor | Distribution, generator: torch.Generator) -> Tensor:
    """Return log p of one answer to each input, drawn from the prediction."""
    if isinstance(prediction, Distribution):
        found: Tensor = prediction.log_prob(prediction.sample())
        return found
    logs = prediction.float().log_softmax(-1)
    labels = sample_labels(logs.detach(), generator)
    return logs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
