"""Averaged weights: training uses the newest, evaluation uses their average."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syngap.bench.errors import UserError

__all__ = ["Average", "lag_note"]

_OLD_SHARE = 0.2  # how much of an average may be from before the task that just ended


class Average:
    """A second network whose weights are an exponential moving average of the first's.

    After n steps it is Σ α^(n-i) θᵢ / Σ α^(n-i): from the first step on, the initial weights have
    no part in it. Running statistics of norms are averaged alike. Whole numbers, and masks of -inf,
    are the newest. torch's AveragedModel reads its counter on the CPU, which a step that is
    captured in a CUDA graph cannot; here the counter stays on the device.

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
        try:
            self.model = copy.deepcopy(model).requires_grad_(False).eval()
        except (RuntimeError, TypeError) as error:  # tensors that are computed, locks, open files
            raise UserError(f"average: the network cannot be copied ({error})") from error
        self._source, self._retention = model, retention
        self._fades = [_is_number(tensor) for tensor in _tensors(model)]
        # On the device, because a CUDA graph has to count, too.
        device = next(model.parameters()).device
        self._weight = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def follow(self) -> None:
        """Update the average with the network's weights."""
        self._weight.mul_(self._retention).add_(1 - self._retention)
        share = ((1 - self._retention) / self._weight).float()
        fast, slow = [], []
        # Gathered anew, because a module may put a new tensor in a buffer's place.
        pairs = zip(_tensors(self._source), _tensors(self.model), self._fades, strict=True)
        for newest, averaged, fades in pairs:
            if fades:
                fast.append(newest)
                slow.append(averaged)
            else:
                averaged.copy_(newest)
        ahead = torch._foreach_sub(fast, slow)
        torch._foreach_mul_(ahead, share)
        torch._foreach_add_(slow, ahead)

    @property
    def weight(self) -> Tensor:
        """1 - αⁿ after n steps: which part of its span the average has seen."""
        return self._weight

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged network, and how many steps it stands for."""
        return {"model": self.model.state_dict(), "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.model.load_state_dict(state["model"])
        self._weight.copy_(state["weight"])


def lag_note(retention: float, ends: Sequence[int], option: str = "average") -> str:
    """Return a note about an average that lags behind a whole task, "" if it does not.

    After a task of n steps, α^n of the average is still of weights from before it. A method does
    not know n; who knows both the stream and the configuration calls this.

    Args:
        retention: α; 0 is no average.
        ends: how many steps are done when each task ends.
        option: how the note names it.

    Examples:
        >>> lag_note(0.99, [395, 790])  # 2 % is from before the task
        ''
        >>> lag_note(0.99, [137, 274]).partition(":")[2].partition(":")[0]
        ' 0.99 is long for tasks of 137 steps'
    """
    steps = min(end - start for start, end in zip([0, *ends[:-1]], ends, strict=True))
    old = retention**steps
    if old <= _OLD_SHARE:
        return ""
    shorter = math.floor(1000 * _OLD_SHARE ** (1 / steps)) / 1000
    return (
        f"{option}: {retention} is long for tasks of {steps} steps: {100 * old:.0f} % of the "
        "average is from before the newest task, which may score too low; "
        f"compare with {shorter} or less"
    )


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _is_number(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isfinite().all())
