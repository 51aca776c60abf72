"""Averaged weights: training uses the newest, evaluation uses their average."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syngap.bench.errors import UserError
from syngap.bench.tape import decision
from syngap.messages import count_of

__all__ = ["AutomaticAverage", "Average", "OccasionalAverage", "lag_note"]

_PARTS, _MOST_STEPS = 6, 500  # of an automatic average
_LABELS = 1 << 16  # that it distinguishes; of a fixed size, so that a CUDA graph can look there
_TEACHING = 0.99  # as with this one a teacher begins

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
    def follow(self, labels: Tensor | None = None) -> None:
        """Update the average with the network's weights; labels are those that arrived."""
        self._weight.mul_(self._retention).add_(1 - self._retention)
        self._approach((1 - self._retention) / self._weight)

    def _approach(self, share: Tensor) -> None:
        """Replace this share of the average by the network's weights."""
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
        torch._foreach_mul_(ahead, share.float())
        torch._foreach_add_(slow, ahead)

    @property
    def weight(self) -> Tensor:
        """1 - αⁿ after n steps: which part of its span the average has seen."""
        return self._weight

    def has_seen(self, updates: int) -> Tensor:
        """Return whether the average has had so many updates, or all that it spans.

        It is a tensor on the network's device, so that a CUDA graph can read it anew.
        """
        left = max(self._retention ** (updates - 0.5), 1e-12)  # half an update of room
        return torch.gt(self._weight, 1 - left)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged network, and how many steps it stands for."""
        return {"model": self.model.state_dict(), "weight": self._weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.model.load_state_dict(state["model"])
        self._weight.copy_(state["weight"])


class OccasionalAverage(Average):
    """An average that each `follow` updates with a probability only.

    Args:
        model: the network that learns.
        retention: α.
        probability: of an update.
        generator: of the random numbers, on the CPU; its state is part of this one's.

    Examples:
        >>> fast = nn.Linear(1, 1, bias=False)
        >>> never = OccasionalAverage(fast, 0.5, 0.0, torch.Generator())
        >>> never.follow()
        >>> never.has_seen(1)
        tensor(False)
    """

    def __init__(
        self, model: nn.Module, retention: float, probability: float, generator: torch.Generator
    ) -> None:
        super().__init__(model, retention)
        self._probability, self._generator = probability, generator

    @torch.no_grad()
    def follow(self, labels: Tensor | None = None) -> None:
        """Update the average, or leave it; a CUDA graph does the same work either way."""
        update = decision(self._decide, self._weight.device)
        weight = self._weight * self._retention + (1 - self._retention)
        share = torch.where(update, (1 - self._retention) / weight, 0.0)
        self._weight.copy_(torch.where(update, weight, self._weight))
        self._approach(share)

    def _decide(self) -> Tensor:
        return torch.rand((), generator=self._generator) < self._probability

    def state_dict(self) -> dict[str, Any]:
        """Return also the state of the random numbers."""
        return {**super().state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self._generator.set_state(state["generator"].cpu())


class AutomaticAverage(Average):
    """An average that chooses its own length, for streams whose task lengths are not known.

    It spans a sixth of the longest run of steps so far in which no class was new, at most 500
    steps: with g the length of that run, the present one included, step by step

        average ← average + s (θ - average),  s = max(0.002, 6 / (g + 6)).

    Where new classes come task by task, g is about the length of a task; where they are all there
    from the beginning, it is the number of steps so far. A teacher begins as with 0.99.

    Args:
        model: the network that learns.

    Examples:
        >>> fast = nn.Linear(1, 1, bias=False)
        >>> average = AutomaticAverage(fast)
        >>> for value in (0.0, 7.0):  # the shares of the newest weights are 1 and 6/7
        ...     _ = nn.init.constant_(fast.weight, value)
        ...     average.follow(torch.tensor([0, 1]))
        >>> round(average.model.weight.item(), 4)
        6.0
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, _TEACHING)
        device = self._weight.device
        self._seen = torch.zeros(_LABELS, dtype=torch.bool, device=device)
        self._run = torch.zeros_like(self._weight)
        self._longest = torch.zeros_like(self._weight)

    @torch.no_grad()
    def follow(self, labels: Tensor | None = None) -> None:
        """Update the average; a label that never arrived before begins another run of steps."""
        if labels is None:
            raise RuntimeError("average: auto goes by the labels that arrive: follow(batch.y)")
        self._weight.mul_(_TEACHING).add_(1 - _TEACHING)
        places = labels.to(self._seen.device).remainder(_LABELS)
        self._run.copy_(torch.where(self._seen[places].all(), self._run + 1, 0.0))
        self._seen.index_fill_(0, places, True)
        torch.maximum(self._longest, self._run, out=self._longest)
        self._approach((_PARTS / (self._longest + _PARTS)).clamp_min(1 / _MOST_STEPS))

    def state_dict(self) -> dict[str, Any]:
        """Return also which labels arrived, and how long none of them was new."""
        own = {"seen": self._seen, "run": self._run, "longest": self._longest}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self._seen.copy_(state["seen"])
        self._run.copy_(state["run"])
        self._longest.copy_(state["longest"])


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
        f"{option}: {retention} is long for tasks of {count_of(steps, 'step')}: {100 * old:.0f} % "
        "of the average is from before the newest task, which may score too low; "
        f"compare with {shorter} or less"
    )


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _is_number(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and bool(tensor.isfinite().all())
