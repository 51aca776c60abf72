"""Averaged weights: training goes on with the newest, the network is judged by their average."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Average"]


class Average:
    """A second network whose weights are a fading average of the first's.

    After n steps it is Σ α^(n-i) θᵢ / Σ α^(n-i): from the first step on, the initial weights have
    no part in it. Running statistics of norms are averaged alike; whole numbers are the newest.

    Args:
        model: the network that learns.
        retention: α; the average spans about 1 / (1 - α) steps.

    Attributes:
        model: the averaged network; before the first step, a copy.

    Examples:
        >>> fast = nn.Linear(1, 1, bias=False)
        >>> average = Average(fast, 0.5)
        >>> for value in (0.0, 3.0):
        ...     _ = nn.init.constant_(fast.weight, value)
        ...     average.follow()
        >>> average.model.weight.item()  # (0.5 · 0 + 3) / (0.5 + 1)
        2.0
    """

    def __init__(self, model: nn.Module, retention: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self._retention = retention
        self._fast, self._slow = _floats(model), _floats(self.model)
        self._whole = list(zip(_whole(self.model), _whole(model), strict=True))
        # On the device and in two digits more than the weights: a CUDA graph has to count, too.
        self._weight = torch.zeros((), dtype=torch.float64, device=self._slow[0].device)

    @torch.no_grad()
    def follow(self) -> None:
        """Take in what the network is now."""
        self._weight.mul_(self._retention).add_(1 - self._retention)
        share = ((1 - self._retention) / self._weight).float()
        ahead = torch._foreach_sub(self._fast, self._slow)
        torch._foreach_mul_(ahead, share)
        torch._foreach_add_(self._slow, ahead)
        for slow, fast in self._whole:
            slow.copy_(fast)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged network, and how many steps it stands for."""
        return {"model": self.model.state_dict(), "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.model.load_state_dict(state["model"])
        self._weight.copy_(state["weight"])


def _tensors(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


def _floats(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in _tensors(model) if tensor.is_floating_point()]


def _whole(model: nn.Module) -> list[Tensor]:
    return [tensor for tensor in _tensors(model) if not tensor.is_floating_point()]
