"""The gate along directions that follow a stream, in plain loops and float64.

It shares no code with ``syngap``. With the scores of a batch summed, G, as a matrix (d0, d1):

    A <- a A + (1 - a) G G' / n,  B <- a B + (1 - a) G' G / n,  F <- a F + (1 - a) (L' G R)^2 / n

At each k-th observation L is orthonormalised from (A / mean eigenvalue + 0.001 I) L, its columns
ordered by their length under A, and F_new[i, j] = sum_pq (l_i' l_p)^2 F[p, q] (r_q' r_j)^2. The
step is u - L ((1 - Omega) * (L' u R)) R'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SHIFT = 1e-3


def drawn_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """The largest of logit plus Gumbel noise."""
    noise = torch.empty_like(logits).exponential_(generator=generator)
    return (logits.detach() - noise.log()).argmax(-1)


def orthonormalised(columns: Tensor) -> Tensor:
    """Gram and Schmidt, each column twice, which is enough."""
    result: list[Tensor] = []
    for number in range(columns.shape[1]):
        column = columns[:, number].clone()
        for _ in range(2):
            for earlier in result:
                column = column - (earlier @ column) * earlier
        result.append(column / math.sqrt(float(column @ column)))
    return torch.stack(result, dim=1)


def refreshed(moment: Tensor, directions: Tensor) -> Tensor:
    """One shifted power iteration, the longest directions first."""
    size = len(moment)
    mean = sum(float(moment[i, i]) for i in range(size)) / size
    scaled = moment / mean
    lengths = [float(directions[:, i] @ scaled @ directions[:, i]) for i in range(size)]
    order = sorted(range(size), key=lambda i: -lengths[i])
    columns = [scaled @ directions[:, i] + SHIFT * directions[:, i] for i in order]
    return orthonormalised(torch.stack(columns, dim=1))


def carried_over(
    importance: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]
) -> Tensor:
    """F along new directions, one entry at a time."""
    result = torch.zeros_like(importance)
    rows, columns = importance.shape
    for i in range(rows):
        for j in range(columns):
            total = 0.0
            for p in range(rows):
                across = float(new[0][:, i] @ old[0][:, p]) ** 2
                for q in range(columns):
                    along = float(old[1][:, q] @ new[1][:, j]) ** 2
                    total += across * float(importance[p, q]) * along
            result[i, j] = total
    return result


@dataclass
class Weight:
    """What is kept of one weight; sides that keep their entries never move from the identity."""

    left: Tensor
    right: Tensor
    left_moment: Tensor
    right_moment: Tensor
    importance: Tensor

    @classmethod
    def at_first(cls, matrix: Tensor) -> Weight:
        left, right = (torch.eye(size, dtype=matrix.dtype) for size in matrix.shape)
        zeros = torch.zeros_like(matrix)
        return cls(left, right, torch.zeros_like(left), torch.zeros_like(right), zeros)


class DirectionsOracle:
    """The rule on a network of its own."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        retention: float,
        consolidation: float,
        refresh: int,
        largest: int = 2048,
        damping: float = 1e-16,
        ambient: float = 0.01,
        momentum: float = 0.0,
    ) -> None:
        self.params = list(model.parameters())
        self.lr, self.retention, self.consolidation = lr, retention, consolidation
        self.refresh, self.largest = refresh, largest
        self.damping, self.ambient, self.momentum = damping, ambient, momentum
        self.weights = [
            Weight.at_first(p.detach().reshape(len(p), -1)) if p.dim() > 1 else None
            for p in self.params
        ]
        self.entries = [torch.zeros_like(p) for p in self.params]
        self.buffers = [torch.zeros_like(p) for p in self.params]
        self.steps = 0

    def scores(self, logits: Tensor, labels: Tensor) -> list[Tensor]:
        """The gradients of log p(label), summed over predictions, one after the other."""
        total = [torch.zeros_like(p) for p in self.params]
        rows, picked = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        for row, label in zip(rows, picked, strict=True):
            value = row[int(label)] - torch.log(torch.exp(row).sum())
            found = torch.autograd.grad(value, self.params, retain_graph=True)
            total = [a + b for a, b in zip(total, found, strict=True)]
        return total

    def step(self, batches: list[tuple[Tensor, Tensor]], loss: Tensor) -> None:
        """One step down a loss, with importance from pairs of logits and labels."""
        count = sum(labels.numel() for _, labels in batches)
        scores = [self.scores(logits, labels) for logits, labels in batches]
        gradients = torch.autograd.grad(loss, self.params)
        self.steps += 1
        with torch.no_grad():
            # Each batch's square of summed scores, divided by its count and weighted by it.
            for number, weight in enumerate(self.weights):
                found = [each[number] for each in scores]
                self.fold(number, weight, found, count)
                if weight is not None and self.steps % self.refresh == 0:
                    self.turn(weight)
            mean = self.mean_importance()
            for number, (param, weight) in enumerate(zip(self.params, self.weights, strict=True)):
                buffer = self.momentum * self.buffers[number] + gradients[number]
                self.buffers[number] = buffer
                param.sub_(self.lr * self.masked(number, weight, buffer, mean))

    def fold(self, number: int, weight: Weight | None, scores: list[Tensor], count: int) -> None:
        a = self.retention
        if weight is None:
            seen = sum(score**2 for score in scores) / count
            self.entries[number] = a * self.entries[number] + (1 - a) * seen
            return
        matrices = [score.reshape(weight.importance.shape) for score in scores]
        rotated = [weight.left.T @ g @ weight.right for g in matrices]
        weight.importance = a * weight.importance + (1 - a) * sum(c**2 for c in rotated) / count
        left = sum(g @ g.T for g in matrices) / count
        right = sum(g.T @ g for g in matrices) / count
        weight.left_moment = a * weight.left_moment + (1 - a) * left
        weight.right_moment = a * weight.right_moment + (1 - a) * right

    def turn(self, weight: Weight) -> None:
        old = (weight.left, weight.right)
        if len(weight.left) <= self.largest:
            weight.left = refreshed(weight.left_moment, weight.left)
        if len(weight.right) <= self.largest:
            weight.right = refreshed(weight.right_moment, weight.right)
        weight.importance = carried_over(weight.importance, old, (weight.left, weight.right))

    def importance(self) -> list[Tensor]:
        return [
            entries if weight is None else weight.importance
            for entries, weight in zip(self.entries, self.weights, strict=True)
        ]

    def mean_importance(self) -> float:
        values = [float(value) for f in self.importance() for value in f.flatten()]
        return sum(values) / len(values)

    def masked(self, number: int, weight: Weight | None, update: Tensor, mean: float) -> Tensor:
        c = math.atanh(self.consolidation) / (mean + self.damping)
        importance = self.importance()[number]
        omega = 1 - torch.tanh(c * (importance + self.damping)) + self.ambient
        if weight is None:
            return omega * update
        matrix = update.reshape(importance.shape)
        removed = (1 - omega) * (weight.left.T @ matrix @ weight.right)
        return (matrix - weight.left @ removed @ weight.right.T).reshape(update.shape)
