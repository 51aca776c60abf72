"""A gate on directions in place of weights: importance is Kronecker-factored."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, unfold

from syngap.methods.er import ER
from syngap.methods.learner import Learner
from syngap.options import Count, NonNegative, Proportion, Retention

__all__ = ["Kronecker"]

Layer = nn.Linear | nn.Conv2d


class Kronecker(ER):
    """Replay, with gradients that move less along directions that matter.

    The importance of a layer's weights is A ⊗ B (K-FAC): A is the second moment of what comes in,
    B that of the gradient of what goes out, with labels sampled from the model. Its eigenvectors
    are products of theirs, so the mask 1 - tanh(c F/μ) + ε is taken of products of eigenvalues, and
    the gradient is turned into that basis and back. Other parameters have masks as in SynGAP.

    Args:
        learner: the network and how it sees samples.
        directions: "both" sides of a layer are turned, or its "inputs" alone, a gate of low rank
            where inputs lie in few directions.
        retention: α of both factors.
        consolidation: τ.
        ambient: ε.
        refresh: eigenvectors are taken anew at each k-th step, and more often in the beginning.
        **er: options of `ER`.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        directions: Literal["both", "inputs"] = "both",
        retention: Retention = 0.999,
        consolidation: Proportion = 0.1,
        ambient: NonNegative = 0.01,
        refresh: Count = 50,
        **er: Any,
    ) -> None:
        super().__init__(learner, **er)
        self.directions, self.retention, self.refresh = directions, retention, refresh
        self.steepness, self.ambient = math.atanh(consolidation), ambient
        weights = {f"{name}.weight" for name in self._layers()}
        sides = {name: rows_and_columns(layer) for name, layer in self._layers().items()}
        self.factors = {
            name: [torch.zeros(side, side, device=learner.device) for side in both]
            for name, both in sides.items()
        }
        self.others = {
            name: torch.zeros_like(parameter.detach())
            for name, parameter in learner.model.named_parameters()
            if parameter.requires_grad and name not in weights
        }
        self.turns: dict[str, list[Tensor]] = {}
        self.masks: dict[str, Tensor] = {}
        self.weight, self.steps = 0.0, 0
        self.labels = learner.generator("labels", learner.device)

    def predict(self, x: Tensor, y: Tensor) -> Tensor:
        """Return logits of samples for learning; both factors come from the same forward pass."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def keep(name: str) -> Any:
            return lambda layer, inputs, output: seen.update({name: (inputs[0], output)})

        hooks = [layer.register_forward_hook(keep(n)) for n, layer in self._layers().items()]
        logits = super().predict(x, y)
        for hook in hooks:
            hook.remove()
        self._observe(logits, seen)
        return logits

    def adjust(self) -> None:
        """Slow the gradients along what matters."""
        early = self.steps < self.refresh and self.steps.bit_count() == 1
        if early or self.steps % self.refresh == 0:
            self._turn()
        parameters = dict(self.learner.model.named_parameters())
        for name, mask in self.masks.items():
            gradient = parameters[name].grad
            assert gradient is not None
            if name not in self.turns:
                gradient.mul_(mask)
                continue
            outer, inner = self.turns[name]
            turned = mask * (outer.T @ gradient.flatten(1) @ inner)
            gradient.copy_((outer @ turned @ inner.T).view_as(gradient))
        self.steps += 1

    def _layers(self) -> dict[str, Layer]:
        found = self.learner.model.named_modules()
        return {name: module for name, module in found if isinstance(module, Layer)}

    def _observe(self, logits: Tensor, seen: dict[str, tuple[Tensor, Tensor]]) -> None:
        count = len(logits)
        with torch.no_grad():
            drawn = torch.multinomial(logits.softmax(1), 1, generator=self.labels).squeeze(1)
        parameters = dict(self.learner.model.named_parameters())
        wanted = [output for _, output in seen.values()] + [parameters[n] for n in self.others]
        loss = cross_entropy(logits, drawn, reduction="sum")
        scores = list(torch.autograd.grad(loss, wanted, retain_graph=True))
        self.weight = self.retention * self.weight + 1 - self.retention
        step = (1 - self.retention) / self.weight
        layers = self._layers()
        for (name, (inputs, _)), score in zip(seen.items(), scores, strict=False):
            rows = patches(layers[name], inputs.detach())
            deltas = score.movedim(1, -1).flatten(0, -2)
            outer, inner = self.factors[name]
            outer.lerp_(deltas.T @ deltas / count, step)
            inner.lerp_(rows.T @ rows / len(rows), step)
        for value, score in zip(self.others.values(), scores[len(seen) :], strict=True):
            value.lerp_(score.square() / count, step)

    def _turn(self) -> None:
        """Take eigenvectors of the factors, and the masks in their basis."""
        mattered = dict(self.others)
        for name, (outer, inner) in self.factors.items():
            lengths, ways = torch.linalg.eigh(inner.double())
            if self.directions == "both":
                outer_lengths, outer_ways = torch.linalg.eigh(outer.double())
            else:
                outer_lengths = outer.double().diagonal().mean().expand(len(outer))
                outer_ways = torch.eye(len(outer), device=outer.device)
            self.turns[f"{name}.weight"] = [outer_ways.float(), ways.float()]
            product = torch.outer(outer_lengths.clamp_min(0), lengths.clamp_min(0))
            mattered[f"{name}.weight"] = product.float()
        total = sum(float(value.double().sum()) for value in mattered.values())
        mean = max(total / sum(value.numel() for value in mattered.values()), 1e-30)
        self.masks = {
            name: 1 - torch.tanh(self.steepness * value / mean) + self.ambient
            for name, value in mattered.items()
        }


def rows_and_columns(layer: Layer) -> tuple[int, int]:
    """Return the sides of a layer's weight, as a matrix from patches to outputs."""
    return layer.weight.shape[0], layer.weight[0].numel()


def patches(layer: Layer, inputs: Tensor) -> Tensor:
    """Return what a layer's weight is multiplied with, a row for each place."""
    if isinstance(layer, nn.Linear):
        return inputs.flatten(0, -2)
    assert layer.groups == 1
    assert layer.dilation == (1, 1)
    assert not isinstance(layer.padding, str)
    found = unfold(inputs, layer.kernel_size, padding=layer.padding, stride=layer.stride)
    return found.transpose(1, 2).flatten(0, 1)
