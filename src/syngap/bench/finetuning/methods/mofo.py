"""MoFO (Chen 2024): Adam moves only the entries of each tensor that have the largest momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Setting
from syngap.bench.options import Positive

__all__ = ["MoFO", "MomentumFiltered"]


class MomentumFiltered(torch.optim.Optimizer):
    """Adam without decay whose update is zero but for the entries with the largest momentum.

        m ← β₁ m + (1 - β₁) g,   v ← β₂ v + (1 - β₂) g²
        θ ← θ - lr · [|m| is among the largest share of its tensor] · m̂ / (√v̂ + ε)

    Args:
        params: to train.
        lr: learning rate.
        share: of the entries of each tensor that move.
        betas: β₁ and β₂.
        eps: ε.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float,
        share: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "share": share, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take a step; a closure is not called."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self._update(param, group), alpha=-group["lr"])

    def _update(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        assert param.grad is not None
        state["step"] += 1
        first, second = group["betas"]
        m = state["exp_avg"].lerp_(param.grad, 1 - first)
        v = state["exp_avg_sq"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
        corrected = (v / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        update = m / (1 - first ** state["step"]) / corrected
        count = max(1, round(group["share"] * m.numel()))
        kept = torch.zeros_like(m).flatten()
        kept[m.abs().flatten().topk(count).indices] = 1.0
        filtered: Tensor = update * kept.view_as(m)
        return filtered


class MoFO(Method):
    """Adam through a filter by momentum.

    Args:
        setting: the model and data.
        share: of the entries of each tensor that move at a step.
        **others: options of `Method`.
    """

    def __init__(self, setting: Setting, *, share: Positive = 0.15, **others: Any) -> None:
        self.share = min(1.0, share)
        super().__init__(setting, **others)

    def make_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return Adam through the filter."""
        return MomentumFiltered(params, self.lr, self.share)
