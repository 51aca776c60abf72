"""Looks at what a step computes, before that can spoil anything which lasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from syngap.optim import NonFinite, NotFiniteError, nonfinite_gradients

__all__ = ["Guard"]


class Guard:
    """Looks at the loss of every step and, to "skip" steps, at their gradients.

    A CPU has the loss at hand. A GPU is not waited for: it notes itself how many losses were finite
    before the first that was not, in three small kernels that a CUDA graph replays with the others,
    and who has a reason to wait reads that. What comes of such a loss is for "raise" to throw away.

    Args:
        device: where losses are.
        policy: "raise" or "skip".

    Attributes:
        asked: whether it was shown a loss; a method may have a `learn` that shows none.

    Examples:
        >>> guard = Guard(torch.device("cpu"), "raise")
        >>> guard.saw(torch.tensor(0.7))
        >>> guard.saw(torch.tensor(torch.nan))
        Traceback (most recent call last):
        syngap.optim.errors.NotFiniteError: the loss
    """

    def __init__(self, device: torch.device, policy: NonFinite) -> None:
        self.policy = policy
        self.asked = False
        self._notes: _Notes | None = None
        if device.type == "cuda" and policy == "raise":
            self._notes = _Notes(device)

    def saw(self, loss: Tensor) -> None:
        """Raise where a loss is not finite, or note it on a GPU."""
        self.asked = True
        if self._notes is not None:
            self._notes.add(loss.detach())
        elif not math.isfinite(loss.item()):
            raise NotFiniteError("the loss")

    def saw_gradients(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        """Raise where a gradient is not finite, if steps are skipped for that."""
        if self.policy == "skip" and nonfinite_gradients(parameters()):
            raise NotFiniteError("the gradients")

    def finite_losses(self, wait: bool) -> int | None:
        """Return how many losses came before the first that was not finite, None if there is none.

        Args:
            wait: until the GPU has done all that was asked of it; else what is said is of the call
                before this one.
        """
        return None if self._notes is None else self._notes.read(wait)


class _Notes:
    """What a GPU notes: a clock that stops being a number, and the last time that it was one."""

    def __init__(self, device: torch.device) -> None:
        self._both = torch.zeros(2, dtype=torch.float64, device=device)
        self._clock, self._good = self._both.unbind()
        self._copy = torch.zeros(2, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._arrived: torch.cuda.Event | None = None

    def add(self, loss: Tensor) -> None:
        self._clock.add_(1.0)
        self._clock.add_(loss, alpha=0.0)  # 0 · NaN and 0 · ∞ are NaN
        torch.fmax(self._good, self._clock, out=self._good)  # which passes over NaN

    def read(self, wait: bool) -> int | None:
        if wait:
            return _first(self._both.cpu())
        if self._arrived is None:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif not self._arrived.query():  # type: ignore[no-untyped-call]
            return None
        first = _first(self._copy)
        self._copy.copy_(self._both, non_blocking=True)
        self._arrived.record()
        return first


def _first(numbers: Tensor) -> int | None:
    clock, good = numbers.tolist()
    return int(good) if math.isnan(clock) else None
