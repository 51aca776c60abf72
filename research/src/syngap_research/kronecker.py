"""A gate on directions in place of weights: importance is Kronecker-factored."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, unfold

from syngap.bench.methods.er import ER
from syngap.bench.methods.er_ace import ERACE
from syngap.bench.methods.learner import Learner
from syngap.bench.options import Count, Natural, NonNegative, Proportion, Retention
from syngap.optim.scores import sample_labels

__all__ = ["Kronecker", "KroneckerACE"]

Layer = nn.Linear | nn.Conv2d


class Kronecker(ER):
    """Replay, with gradients that move less along directions that matter.

    The importance of a layer's weights is A ⊗ B (K-FAC): A is the second moment of what comes in,
    B that of the gradient of what goes out, with labels sampled from the model. Its eigenvectors
    are products of theirs, so the mask 1 - tanh(c F/μ) + ε is taken of products of eigenvalues, and
    the gradient is rotated into that basis and, with the mask, into entries again. Other parameters
    have masks as in SynGAP.

    Args:
        learner: the network and how it sees samples.
        directions: "both" sides of a layer are rotated, or its "inputs" alone, a gate of low rank
            where inputs lie in few directions.
        inputs: those of a convolution are "patches", or "channels" at each place of its kernel
            alike, which is cheaper by far.
        rank: so many directions of inputs, the steepest, have a mask of their own; the others share
            one; 0 is all. Each refresh brings them one power iteration nearer, so that no
            eigenvectors of large matrices are taken.
        retention: α of both factors.
        consolidation: τ.
        ambient: ε.
        every: both factors are refreshed at each k-th step, and at all of the first `early`.
        early: see `every`.
        refresh: eigenvectors are taken anew at each k-th step, and more often in the beginning.
        **er: options of `ER`.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        directions: Literal["both", "inputs"] = "both",
        inputs: Literal["patches", "channels"] = "patches",
        rank: Natural = 0,
        retention: Retention = 0.999,
        consolidation: Proportion = 0.1,
        ambient: NonNegative = 0.01,
        every: Count = 4,
        early: Natural = 100,
        refresh: Count = 50,
        **er: Any,
    ) -> None:
        super().__init__(learner, **er)
        self.directions, self.retention, self.refresh = directions, retention, refresh
        self.every, self.early = every, early
        self.by_channel = inputs == "channels"
        self.steepness, self.ambient = math.atanh(consolidation), ambient
        weights = {f"{name}.weight" for name in self._layers()}
        sides = {
            name: self._matrices(layer.weight).shape[1:] for name, layer in self._layers().items()
        }
        self.factors = {  # inputs alone need the other side's mean
            name: [
                torch.zeros(side, side, device=learner.device)
                for side in (outer if directions == "both" else 1, inner)
            ]
            for name, (outer, inner) in sides.items()
        }
        self.others = {
            name: torch.zeros_like(parameter.detach())
            for name, parameter in learner.model.named_parameters()
            if parameter.requires_grad and name not in weights
        }
        self.labels = learner.generator("labels", learner.device)
        guesses = learner.generator("directions", learner.device)
        self.turns: dict[str, list[Tensor]] = {}
        self.masks: dict[str, Tensor] = {}  # open as long as nothing was observed
        self.rests: dict[str, Tensor] = {}
        for name, layer in self._layers().items():
            places, outer, inner = self._matrices(layer.weight).shape
            kept = min(rank or inner, inner)
            guess = torch.randn(inner, kept, generator=guesses, device=learner.device)
            self.turns[name] = [_identity(self.factors[name][0]), torch.linalg.qr(guess).Q]
            self.masks[name] = guess.new_ones(places, outer, kept)
            self.rests[name] = guess.new_ones(outer, 1)
        self.masks |= {name: torch.ones_like(value) for name, value in self.others.items()}
        self.weight, self.steps = 0.0, 0
        self.share = torch.ones((), device=learner.device)  # of the next batch in both factors
        self._weigh()

    def predict(self, x: Tensor, y: Tensor) -> Tensor:
        """Return logits of samples for learning; both factors come from the same forward pass."""
        if not self.phase():
            return super().predict(x, y)
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def keep(name: str) -> Any:
            return lambda layer, inputs, output: seen.update({name: (inputs[0], output)})

        hooks = [layer.register_forward_hook(keep(n)) for n, layer in self._layers().items()]
        try:
            logits = super().predict(x, y)
        finally:
            for hook in hooks:
                hook.remove()
        self._observe(logits, seen)
        return logits

    def adjust(self) -> None:
        """Slow the gradients along what matters."""
        parameters = dict(self.learner.model.named_parameters())
        for name in self.others:
            parameters[name].grad.mul_(self.masks[name])
        for name, (outer, inner) in self.turns.items():
            mask, rest = self.masks[name], self.rests[name]
            gradient = parameters[f"{name}.weight"].grad
            rotated = self._matrices(gradient)
            if self.directions == "both":
                rotated = outer.T @ rotated
            rotated = rest * rotated + (mask - rest) * (rotated @ inner) @ inner.T
            if self.directions == "both":
                rotated = outer @ rotated
            gradient.copy_(rotated.permute(1, 2, 0).reshape(gradient.shape))

    def phase(self) -> Hashable:
        """Return whether the factors are observed in the next step."""
        return self.steps < self.early or self.steps % self.every == 0

    def after_step(self) -> None:
        """Take directions anew where it is time, and count."""
        observed = self.phase()
        self.steps += 1
        if self.steps % self.refresh == 0 or (
            self.steps < self.refresh and self.steps.bit_count() == 1
        ):
            self._turn()
        if observed:
            self._weigh()

    def _weigh(self) -> None:
        """Set the next batch's share in the averages, which are corrected for their beginning."""
        keep = self.retention if self.steps < self.early else self.retention**self.every
        self.weight = keep * self.weight + 1 - keep
        self.share.fill_((1 - keep) / self.weight)

    def _layers(self) -> dict[str, Layer]:
        found = self.learner.model.named_modules()
        return {name: module for name, module in found if isinstance(module, Layer)}

    def _matrices(self, weight: Tensor) -> Tensor:
        """Return a weight, or its gradient, as matrices from inputs to outputs, places first."""
        if self.by_channel:
            return weight.flatten(2).permute(2, 0, 1) if weight.dim() > 2 else weight[None]
        return weight.flatten(1)[None]

    def _rows(self, layer: Layer, inputs: Tensor) -> Tensor:
        """Return what those matrices are multiplied with, a row for each place."""
        if self.by_channel and isinstance(layer, nn.Conv2d):
            return inputs.movedim(1, -1).flatten(0, -2)
        return patches(layer, inputs)

    def _observe(self, logits: Tensor, seen: dict[str, tuple[Tensor, Tensor]]) -> None:
        count, drawn = len(logits), sample_labels(logits, self.labels)
        parameters = dict(self.learner.model.named_parameters())
        wanted = [output for _, output in seen.values()] + [parameters[n] for n in self.others]
        loss = cross_entropy(logits, drawn, reduction="sum")
        scores = list(torch.autograd.grad(loss, wanted, retain_graph=True))
        layers = self._layers()
        for (name, (inputs, _)), score in zip(seen.items(), scores, strict=False):
            rows = self._rows(layers[name], inputs.detach())
            deltas = score.movedim(1, -1).flatten(0, -2)
            rows, deltas = rows.float(), deltas.float()
            outer, inner = self.factors[name]
            inner.lerp_(rows.T @ rows / len(rows), self.share)
            if self.directions == "both":
                outer.lerp_(deltas.T @ deltas / count, self.share)
            else:  # the mean of its diagonal
                outer.lerp_(deltas.square().mean(1).sum() / count, self.share)
        for value, score in zip(self.others.values(), scores[len(seen) :], strict=True):
            value.lerp_(score.square() / count, self.share)

    @torch.no_grad()
    def _turn(self) -> None:
        """Take eigenvectors of the factors, and the masks in their basis."""
        total = sum(value.sum(dtype=torch.float64) for value in self.others.values())
        mattered = dict(self.others)
        beyond = {}
        for name, (outer, inner) in self.factors.items():
            places, rows, _ = self.masks[name].shape
            lengths, ways, rest = self._steepest(inner, self.turns[name][1])
            outer_lengths, outer_ways = _eigen(outer)
            across = outer_lengths.expand(rows)
            self.turns[name][0].copy_(outer_ways)
            self.turns[name][1].copy_(ways)
            mattered[name] = torch.outer(across, lengths)
            beyond[name] = across[:, None] * rest
            total += places * across.sum() * inner.trace()
        mean = total / sum(parameter.numel() for parameter in self.learner.parameters())
        for masks, values in ((self.masks, mattered), (self.rests, beyond)):
            for name, value in values.items():
                ratio = (value / mean.clamp_min(1e-30)).float()
                masks[name].copy_(1 - torch.tanh(self.steepness * ratio) + self.ambient)

    def _steepest(self, moment: Tensor, ways: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return lengths and directions of a moment, the steepest, and the others' mean length.

        All are its eigenvalues and -vectors. Fewer are brought one power iteration nearer to the
        steepest of those, and lengths are taken along them as they are.
        """
        missing = len(moment) - ways.shape[1]
        if not missing:
            return *_eigen(moment), moment.new_zeros(())
        ways = torch.linalg.qr(moment @ ways).Q
        lengths = (ways * (moment @ ways)).sum(0)
        rest = (moment.trace() - lengths.sum()) / missing
        return lengths.clamp_min(0), ways, rest.clamp_min(0)


def _eigen(moment: Tensor) -> tuple[Tensor, Tensor]:
    lengths, ways = torch.linalg.eigh(moment.double())
    return lengths.clamp_min(0).float(), ways.float()


def _identity(matrix: Tensor) -> Tensor:
    return torch.eye(len(matrix), device=matrix.device)


def patches(layer: Layer, inputs: Tensor) -> Tensor:
    """Return what a layer's weight is multiplied with, a row for each place."""
    if isinstance(layer, nn.Linear):
        return inputs.flatten(0, -2)
    assert layer.groups == 1
    assert layer.dilation == (1, 1)
    assert not isinstance(layer.padding, str)
    found = unfold(inputs, layer.kernel_size, padding=layer.padding, stride=layer.stride)
    return found.transpose(1, 2).flatten(0, 1)


class KroneckerACE(Kronecker, ERACE):
    """The same with the loss of ER-ACE."""
