"""The paper's rule in one page: what to read first.

Aguilar, Zainal, Kavehei, "Metaplasticity as adaptive gradient preconditioning for incremental
learning". `SynGAP` takes the same steps, faster and with more options.

| symbol | name          | meaning                                                        |
|--------|---------------|----------------------------------------------------------------|
| θ      | params        | all trainable parameters of the network                        |
| η      | lr            | step size                                                      |
| F      | importance    | how much each parameter has mattered, zero at first            |
| α      | retention     | how slowly importance fades                                    |
| μ      | mean          | mean of F over all parameters                                  |
| τ      | consolidation | how much steps shrink at mean importance                       |
| λ      | damping       | keeps F/μ defined where F → 0                                  |
| ε      | ambient       | plasticity that always remains                                 |
| Ω      | plasticity    | how much of its step each parameter takes, from ε to 1 + ε     |
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from syngap.optim.defaults import DEFAULTS, Defaults

__all__ = ["Reference"]


class Reference:
    """Gradient descent in which what mattered before moves less.

    Examples:
        >>> model = torch.nn.Linear(4, 3)
        >>> rule = Reference(model.parameters(), lr=0.3)
        >>> logits = model(torch.randn(8, 4))
        >>> rule.step(logits, cross_entropy(logits, torch.randint(3, (8,))))
    """

    def __init__(self, params: Iterable[Tensor], lr: float, values: Defaults = DEFAULTS) -> None:
        self.params = list(params)
        self.lr = lr
        self.values = values
        self.importance = [torch.zeros_like(param) for param in self.params]

    def step(self, logits: Tensor, loss: Tensor, generator: torch.Generator | None = None) -> None:
        """Take one step down a loss, with importance from the logits (N, C) of the same batch."""
        # Labels drawn from the model's own prediction: the largest of logit plus Gumbel noise.
        noise = -torch.empty_like(logits).exponential_(generator=generator).log()
        labels = (logits.detach() + noise).argmax(dim=-1)
        # 1. diag(𝓕) = E[(∇ log p(y|x))²]: scores of drawn labels are independent and have mean
        #    zero, so that the square of their sum over N samples, divided by N, is unbiased.
        scores = torch.autograd.grad(
            -cross_entropy(logits, labels, reduction="sum"), self.params, retain_graph=True
        )
        gradients = torch.autograd.grad(loss, self.params)
        with torch.no_grad():
            # 2. F ← α F + (1 - α) diag(𝓕)
            alpha = self.values.retention
            for importance, score in zip(self.importance, scores, strict=True):
                importance.mul_(alpha).add_(score**2 / len(logits), alpha=1 - alpha)
            # 3. c = arctanh(τ) / (μ + λ)
            mean = torch.cat([importance.flatten() for importance in self.importance]).mean()
            c = math.atanh(self.values.consolidation) / (mean + self.values.damping)
            for param, importance, gradient in zip(
                self.params, self.importance, gradients, strict=True
            ):
                # 4. Ω = 1 - tanh(c (F + λ)) + ε
                closed = torch.tanh(c * (importance + self.values.damping))
                plasticity = 1 - closed + self.values.ambient
                # 5. θ ← θ - η Ω ⊙ ∇L(θ)
                param -= self.lr * plasticity * gradient
