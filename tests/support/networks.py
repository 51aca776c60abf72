"""Small networks, each with the feature that breaks a careless estimator of importance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution


class Mlp(nn.Module):
    """Plain layers and two heads, of which one is out of use: no score, no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 5)
        self.spare = nn.Linear(5, 3)
        self.head = nn.Linear(5, 3)
        self.spare_in_use = False

    def forward(self, x: Tensor) -> Tensor:
        head = self.spare if self.spare_in_use else self.head
        out: Tensor = head(torch.tanh(self.second(torch.relu(self.first(x)))))
        return out


class ConvNet(nn.Module):
    """Convolutions (padded, strided, grouped, with and without bias) and train-mode BatchNorm.

    The convolution with a bias has no BatchNorm straight after it, which would cancel the bias.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2)
        self.second_norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first_norm(self.first(x)))
        x = self.second_norm(torch.tanh(self.second(x)))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Transformer(nn.Module):
    """One block with causal attention: token logits, an embedding, a parameter of no layer."""

    def __init__(self, tokens: int = 5, length: int = 3, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.randn(length, width))
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feedforward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.position
        q, k, v = self.queries_keys_values(self.attention_norm(h)).chunk(3, dim=-1)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        affinity = (q @ k.transpose(1, 2)).masked_fill(future, -torch.inf)
        h = h + self.mix(affinity.softmax(-1) @ v)
        h = h + self.contract(F.gelu(self.expand(self.feedforward_norm(h))))
        out: Tensor = self.head(h)
        return out


class Shared(nn.Module):
    """A head tied to the embedding and a layer used twice, among layers used once."""

    def __init__(self, tokens: int = 5, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.once = nn.Linear(width, width)
        self.twice = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.once(self.embedding(x).sum(1)))
        h = torch.tanh(self.twice(h))
        h = torch.tanh(self.twice(h))
        out: Tensor = self.head(self.norm(h))
        return out


class FrozenBackbone(nn.Module):
    """Frozen layers, BatchNorm in train mode among them, between a trainable adapter and head."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(4, 5)
        self.backbone = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, eps=0.1), nn.Tanh())
        self.head = nn.Linear(6, 3)
        for parameter in (*self.backbone.parameters(), self.head.bias):
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(torch.tanh(self.adapter(x))))
        return out


def vectors(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, 4, generator=generator)


def images(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, 1, 5, 5, generator=generator)


def sequences(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(5, (rows, 3), generator=generator)


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True)
class Network:
    """How to make a network and its inputs, and which parameters have no per-sample score.

    ``pooled`` names the parameters that no single layer call owns: for them ``exact`` falls back
    to the estimate of ``sampled``.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]
    pooled: frozenset[str] = frozenset()

    def build(self, seed: int = 0) -> nn.Module:
        """Float32 values, so that the float32 and the float64 copies start from the same point."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = self.make()
            for layer in model.modules():
                # Norms start at exactly one and zero, where several mistakes cannot be seen.
                if isinstance(layer, NORMS) and layer.weight is not None:
                    nn.init.uniform_(layer.weight, 0.5, 1.5)
                    nn.init.uniform_(layer.bias, -0.5, 0.5)
                if isinstance(layer, nn.Embedding):
                    nn.init.normal_(layer.weight, std=0.5)
        return model


NETWORKS = {
    "mlp": Network(Mlp, vectors),
    "conv-batchnorm": Network(ConvNet, images),
    "transformer": Network(Transformer, sequences, frozenset({"position"})),
    "shared": Network(
        Shared, sequences, frozenset({"embedding.weight", "twice.weight", "twice.bias"})
    ),
    "frozen-backbone": Network(FrozenBackbone, vectors),
}


def dictated(distribution: Distribution, labels: Tensor) -> Distribution:
    """The same distribution, except that sampling gives ``labels``."""

    def sample(sample_shape: torch.Size | list[int] | tuple[int, ...] = ()) -> Tensor:
        return labels

    distribution.sample = sample  # type: ignore[method-assign]
    return distribution


class Applied(nn.Module):
    """Layers and parameters by name, and what the forward pass does with them."""

    def __init__(
        self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Doubling(nn.Linear):
    """Is a Linear, and does something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)
