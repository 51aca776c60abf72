"""What fine-tunes a model: AdamW, the gate on it, a quadratic penalty, low-rank adapters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from syngap import SynGAP, protect
from syngap.optim.basis import Basis
from syngap.protection import Protection

__all__ = [
    "LowRank",
    "QuadraticPenalty",
    "adamw",
    "add_adapters",
    "gated_adamw",
    "interpolated",
    "protection_along_directions",
]


def adamw(params: Iterable[Tensor], lr: float, weight_decay: float = 0.0) -> torch.optim.AdamW:
    params = list(params)
    return torch.optim.AdamW(params, lr, weight_decay=weight_decay, fused=params[0].is_cuda)


def gated_adamw(
    model: nn.Module, lr: float, consolidation: float, importance: dict[str, Tensor]
) -> SynGAP:
    """Return AdamW behind the gate, with an importance that was measured before and stays."""
    gate = SynGAP.wrap(
        adamw(model.parameters(), lr), consolidation=consolidation, model=model, non_finite=None
    )
    names = [name for name, _ in model.named_parameters()]
    state = {index: {"importance": importance[name]} for index, name in enumerate(names)}
    gate.load_state_dict(gate.state_dict() | {"state": state})
    return gate


def protection_along_directions(
    model: nn.Module, text: Tensor, consolidation: float | None, seed: int
) -> Protection:
    """Return what lets AdamW work along directions, with a gate or, without a τ, with none."""
    open_gate = {"consolidation": 1e-12, "ambient": 0.0}  # a mask of 1
    gate = open_gate if consolidation is None else {"consolidation": consolidation}
    return protect(model, text, teacher=False, rank="full", rotate=True, seed=seed, **gate)


class QuadraticPenalty:
    """Adds the gradient of λ/2 Σ F (θ - θ₀)²; θ₀ are the parameters at construction.

    With bases, F and θ - θ₀ are in their coordinates.
    """

    def __init__(
        self,
        model: nn.Module,
        penalty: float,
        importance: dict[str, Tensor],
        bases: dict[str, Basis | None] | None = None,
    ) -> None:
        names = [name for name, _ in model.named_parameters()]
        self.bases = None if bases is None else [bases[name] for name in names]
        self.params = list(model.parameters())
        self.start = [param.detach().clone() for param in self.params]
        self.strength = [penalty * importance[name] for name, _ in model.named_parameters()]

    @torch.no_grad()
    def add_gradient(self) -> None:
        offsets = torch._foreach_sub(self.params, self.start)
        if self.bases is None:
            torch._foreach_addcmul_([param.grad for param in self.params], self.strength, offsets)
            return
        for param, strength, offset, basis in zip(
            self.params, self.strength, offsets, self.bases, strict=True
        ):
            if basis is None:
                param.grad.addcmul_(strength, offset)
            else:
                param.grad.add_(basis.back(strength * basis.into(offset), offset))


class LowRank(nn.Module):
    """A matrix plus a product of two thin ones (LoRA); these alone learn, from a product of 0."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        down = torch.randn(rank, weight.shape[1], device=weight.device)
        self.down = nn.Parameter(down / math.sqrt(weight.shape[1]))
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def add_adapters(model: nn.Module, rank: int) -> list[nn.Parameter]:
    """Freeze the model, give its linear layers adapters, and return their parameters."""
    model.requires_grad_(False)
    for module in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        parametrize.register_parametrization(module, "weight", LowRank(module.weight, rank))
    return [param for param in model.parameters() if param.requires_grad]


@contextmanager
def interpolated(params: list[nn.Parameter], start: list[Tensor], share: float) -> Iterator[None]:
    """Interpolate the parameters with the start (WiSE-FT) for a while; 1 leaves them unchanged."""
    ends = [param.detach().clone() for param in params]
    try:
        with torch.no_grad():
            torch._foreach_lerp_(params, start, 1 - share)
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(params, ends)
