"""Every rule that was tried, as options of one method: plain code, two or three backward passes."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from syngap.bench.methods.er import ER
from syngap.bench.methods.learner import Learner
from syngap.bench.options import NonNegative, Proportion, Retention
from syngap.bench.streams.stream import Batch

__all__ = ["Metaplastic"]

Tensors = list[Tensor]


class Metaplastic(ER):
    """Replay, with gradients or weights that move by how much they matter.

    Args:
        learner: the network and how it sees samples.
        rule: "none" gates nothing.
        loss: "ce" (ER), "ace" (ER-ACE), "derpp" (DER++) or "ace_derpp" (both).
        alpha: weight of the stored logits (DER++).
        beta: weight of the replayed labels (DER++).
        gated: the gate is on "all" of the gradient, on the "stream" part alone, or on the stream's
            where it is "opposed" to the replay's, by unit.
        source: importance comes from "all" logits or those of "replay" alone.
        unit: importance of every "weight", or the mean of an "output" unit's, or of a "tensor".
        where: the gate is on the "network", its "head" or its "body" alone.
        mean: what τ refers to: the "network" mean, each "tensor"'s, the "median" of units, or the
            importance that a "share" of all units is below.
        share: that share.
        retention: α of importance.
        head_retention: that of the head's; 0 is the same.
        second: α of a second average; 0 is none.
        times: the second average "chained" behind the first, or the first "less" the second.
        consolidation: τ.
        ambient: ε.
        head_rate: the head's gradient times this, whatever matters.
        stem_rate: that of the first tensors, up to the first stage, likewise.
        average: retention of averaged weights, with which the network is evaluated; 0 is none.
        corrected: the average counts steps that there were; False begins with the initial weights,
            of which 0.998 has half left after 350 steps.
        careful: the average follows by the gate, too.
        **er: options of `ER`.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        rule: Literal["none", "gate"] = "gate",
        loss: Literal["ce", "ace", "derpp", "ace_derpp"] = "ce",
        alpha: NonNegative = 0.1,
        beta: NonNegative = 0.5,
        gated: Literal["all", "stream", "opposed"] = "all",
        source: Literal["all", "replay"] = "all",
        unit: Literal["weight", "output", "tensor"] = "weight",
        where: Literal["network", "head", "body"] = "network",
        mean: Literal["network", "tensor", "median", "share"] = "network",
        share: Proportion = 0.9,
        retention: Retention = 0.999,
        head_retention: Retention = 0.0,
        second: Retention = 0.0,
        times: Literal["chained", "less"] = "chained",
        consolidation: Proportion = 0.1,
        ambient: NonNegative = 0.01,
        head_rate: NonNegative = 1.0,
        stem_rate: NonNegative = 1.0,
        average: Retention = 0.0,
        corrected: bool = True,
        careful: bool = False,
        **er: Any,
    ) -> None:
        super().__init__(learner, **er)
        self.rule, self.loss_name, self.alpha, self.beta = rule, loss, alpha, beta
        self.gated, self.source, self.unit, self.mean = gated, source, unit, mean
        self.second, self.times = second, times
        self.steepness, self.ambient = math.atanh(consolidation), ambient
        self.average, self.corrected, self.careful = average, corrected, careful
        parameters = learner.parameters()
        named = [name for name, p in learner.model.named_parameters() if p.requires_grad]
        heads = [name.startswith(("head", "fc", "linear")) for name in named]
        chosen = {"network": [True] * len(named), "head": heads, "body": [not h for h in heads]}
        self.open = [not is_chosen for is_chosen in chosen[where]]
        self.share = {"median": 0.5, "share": share}.get(mean, 0.0)
        self.retentions = [head_retention or retention if head else retention for head in heads]
        stems = [not head and n < 3 for n, head in enumerate(heads)]
        self.rates = [
            head_rate if head else stem_rate if stem else 1.0
            for head, stem in zip(heads, stems, strict=True)
        ]
        self.needs_gate = rule == "gate"
        self.importance: Tensors = []
        self.later: Tensors = []
        if self.needs_gate:
            self.importance = [torch.zeros_like(self._by_unit(p.detach())) for p in parameters]
            if second:
                self.later = [torch.zeros_like(value) for value in self.importance]
        self.weights = [torch.zeros((), device=learner.device) for _ in heads]
        self.later_weights = [weight.clone() for weight in self.weights]
        self.followed = torch.zeros((), device=learner.device)
        self.labels = learner.generator("labels", learner.device)
        self.said: Tensor | None = None
        self.slow: Tensors = []
        if average:
            self.averaged = _Averaged(learner)
            self.slow = self.averaged.tensors
            self.learner = self.averaged

    def learn(self, batch: Batch) -> None:
        """Learn from one batch by the rule."""
        parameters = self.learner.parameters()
        stream, replay, logits = self._losses(batch)
        if self.needs_gate:
            self._observe(logits[len(batch.y) :] if self.source == "replay" else logits, parameters)
        gate = self._gate(parameters) if self.needs_gate else None
        if gate is None or self.gated == "all" or replay is None:
            total = stream if replay is None else stream + replay
            gradients = list(torch.autograd.grad(total, parameters))
            if gate is not None and (self.gated == "all"):
                torch._foreach_mul_(gradients, gate)
        else:
            theirs = list(torch.autograd.grad(replay, parameters, retain_graph=True))
            ours = list(torch.autograd.grad(stream, parameters))
            if self.gated == "opposed":
                gate = [
                    torch.where(self._by_unit(a * b) < 0, g, 1.0)
                    for a, b, g in zip(ours, theirs, gate, strict=True)
                ]
            torch._foreach_mul_(ours, gate)
            gradients = [a + b for a, b in zip(ours, theirs, strict=True)]
        for parameter, gradient, rate in zip(parameters, gradients, self.rates, strict=True):
            parameter.grad = gradient if rate == 1.0 else gradient * rate
        self.optimizer.step()
        if self.slow:
            self._follow(gate)
        self.remember(batch)

    def remember(self, batch: Batch) -> None:
        """Offer samples to the memory, with logits where the loss wants them."""
        if "derpp" in self.loss_name:
            assert self.said is not None
            self.memory.add(x=batch.x, y=batch.y, logits=self.said)
            self.said = None
        else:
            super().remember(batch)

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the stream's loss, the replay's, and all logits, the stream's first."""
        draws = [self.memory.draw(self.replay)] if len(self.memory) and self.replay else []
        if draws and "derpp" in self.loss_name:
            draws.append(self.memory.draw(self.replay))
        parts = [batch.x, *(drawn["x"] for drawn in draws)]
        logits = self.learner.predict(torch.cat(parts))
        arriving, *past = torch.split(logits, [len(part) for part in parts])
        if "derpp" in self.loss_name:
            self.said = arriving.detach()
        if "ace" in self.loss_name:
            absent = torch.ones(arriving.shape[1], dtype=torch.bool, device=arriving.device)
            absent.index_fill_(0, batch.y, False)
            stream = cross_entropy(arriving.masked_fill(absent, -torch.inf), batch.y)
        else:
            stream = cross_entropy(arriving, batch.y)
        if not past:
            return stream, None, logits
        if "derpp" in self.loss_name:
            replay = self.alpha * mse_loss(past[0], draws[0]["logits"])
            replay = replay + self.beta * cross_entropy(past[1], draws[1]["y"])
        else:
            replay = cross_entropy(past[0], draws[0]["y"])
        if self.loss_name == "ce":  # one mean over all
            share = len(arriving) / len(logits)
            stream, replay = share * stream, (1 - share) * replay
        return stream, replay, logits

    def _observe(self, logits: Tensor, parameters: Sequence[Tensor]) -> None:
        if not len(logits):
            return
        with torch.no_grad():
            chances = logits.softmax(1)
            drawn = torch.multinomial(chances, 1, generator=self.labels).squeeze(1)
        scores = torch.autograd.grad(cross_entropy(logits, drawn), parameters, retain_graph=True)
        fresh = [self._by_unit(score.square()) * len(logits) for score in scores]
        _ema(self.importance, fresh, self.retentions, self.weights)
        if self.second:
            behind = self.importance if self.times == "chained" else fresh
            _ema(self.later, behind, [self.second] * len(behind), self.later_weights)

    def _gate(self, parameters: Sequence[Tensor]) -> Tensors:
        if not self.second:
            mattered = self.importance
        elif self.times == "chained":
            mattered = self.later
        else:  # mattered before, does not now: the longer average less the shorter one
            pairs = zip(self.importance, self.later, strict=True)
            mattered = [(slow - fast).clamp_min(0) for slow, fast in pairs]
        if self.share:
            every = torch.cat([value.flatten() for value in mattered])
            middle = every.kthvalue(math.ceil(self.share * len(every))).values
            means = [middle] * len(mattered)
        elif self.mean == "tensor":
            means = [value.mean() for value in mattered]
        else:
            sums = [v.mean() * p.numel() for v, p in zip(mattered, parameters, strict=True)]
            means = [torch.stack(sums).sum() / sum(p.numel() for p in parameters)] * len(mattered)
        gate = []
        for value, mean, is_open in zip(mattered, means, self.open, strict=True):
            closed = torch.tanh(self.steepness * value / mean.clamp_min(1e-30))
            gate.append(torch.ones_like(value) if is_open else 1 - closed + self.ambient)
        return gate

    def _follow(self, gate: Tensors | None) -> None:
        """Let the averaged network follow: parameters, by the gate where asked, then buffers."""
        self.followed.mul_(self.average).add_(1 - self.average)
        rate = (1 - self.average) / self.followed if self.corrected else 1 - self.average
        by_gate = gate if self.careful and gate is not None else []
        for number, (slow, value) in enumerate(
            zip(self.slow, self.averaged.current(), strict=True)
        ):
            slow.add_((value - slow) * (rate * by_gate[number] if number < len(by_gate) else rate))

    def _by_unit(self, value: Tensor) -> Tensor:
        """Return the mean over what shares an importance, in a shape that broadcasts."""
        if self.unit == "weight":
            return value
        first = 0 if self.unit == "tensor" else 1
        across = tuple(range(first, value.dim()))
        return value.mean(across, keepdim=True) if across else value


def _ema(
    values: Tensors, fresh: Sequence[Tensor], retentions: Sequence[float], weights: Tensors
) -> None:
    """Average on, from the first value: what is there counts by how much of it there is."""
    for value, new, retention, weight in zip(values, fresh, retentions, weights, strict=True):
        weight.mul_(retention).add_(1 - retention)
        value.add_((new - value) * ((1 - retention) / weight))


class _Averaged(Learner):
    """A learner that is evaluated with averaged weights; parameters come first, then buffers."""

    def __init__(self, learner: Learner) -> None:
        self.__dict__.update(learner.__dict__)
        self.copied = copy.deepcopy(learner.model).requires_grad_(False)
        self.tensors = self._of(self.copied)

    def current(self) -> Tensors:
        """Return what is averaged, as training has it now."""
        return [tensor.detach() for tensor in self._of(self.model)]

    @torch.no_grad()
    def evaluate(self, x: Tensor) -> Tensor:
        """Return logits of the averaged network."""
        fast, self.model = self.model, self.copied
        try:
            return super().evaluate(x)
        finally:
            self.model = fast

    def state_dict(self) -> dict[str, Any]:
        """Return both networks."""
        return {**super().state_dict(), "copied": self.copied.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both networks."""
        super().load_state_dict(state)
        self.copied.load_state_dict(state["copied"])

    @staticmethod
    def _of(model: torch.nn.Module) -> Tensors:
        floats = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        return [*model.parameters(), *floats]
