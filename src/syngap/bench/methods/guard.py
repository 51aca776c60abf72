"""Checks for non-finite losses and gradients, before they reach weights or state."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from syngap.optim import NonFinite, NotFiniteError, nonfinite_gradients

__all__ = ["Guard"]


class Guard:
    """Checks the loss of every step and, to "skip" steps, their gradients.

    On a CPU the loss is read at once. A GPU is not waited for: it counts the finite losses before
    the first that is not, in three small kernels that a CUDA graph replays with the others. The
    count is read where a wait costs nothing. With "raise", the steps after such a loss are lost.

    Args:
        device: the device of the losses.
        policy: "raise" or "skip".

    Attributes:
        has_loss: whether a loss was checked; a method's own `learn` may check none.

    Examples:
        >>> guard = Guard(torch.device("cpu"), "raise")
        >>> guard.check_loss(torch.tensor(0.7))
        >>> guard.check_loss(torch.tensor(torch.nan))
        Traceback (most recent call last):
        syngap.optim.errors.NotFiniteError: the loss
    """

    def __init__(self, device: torch.device, policy: NonFinite) -> None:
        self.policy = policy
        self.has_loss = False
        self._counters: _Counters | None = None
        if device.type == "cuda" and policy == "raise":
            self._counters = _Counters(device)

    def check_loss(self, loss: Tensor) -> None:
        """Raise NotFiniteError if a loss is not finite; on a GPU, count it."""
        self.has_loss = True
        if self._counters is not None:
            self._counters.add(loss.detach())
        elif not math.isfinite(loss.item()):
            raise NotFiniteError("the loss")

    def check_gradients(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        """Raise NotFiniteError if a gradient is not finite and the policy is "skip"."""
        if self.policy == "skip" and nonfinite_gradients(parameters()):
            raise NotFiniteError("the gradients")

    def finite_losses(self, wait: bool) -> int | None:
        """Return how many losses came before the first non-finite one, None if there is none.

        Args:
            wait: until the GPU has finished its work; else the answer is that of the call before.
        """
        return None if self._counters is None else self._counters.read(wait)


class _Counters:
    """Counters on a GPU: one becomes NaN with the first bad loss, one keeps its finite value."""

    def __init__(self, device: torch.device) -> None:
        self._both = torch.zeros(2, dtype=torch.float64, device=device)
        self._clock, self._good = self._both.unbind()
        self._copy = torch.zeros(2, dtype=torch.float64, pin_memory=device.type == "cuda")
        self._copy_event: torch.cuda.Event | None = None

    def add(self, loss: Tensor) -> None:
        self._clock.add_(1.0)
        self._clock.add_(loss, alpha=0.0)  # 0 · NaN and 0 · ∞ are NaN
        torch.fmax(self._good, self._clock, out=self._good)  # which passes over NaN

    def read(self, wait: bool) -> int | None:
        if wait:
            return _first(self._both.cpu())
        if self._copy_event is None:
            self._copy_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif not self._copy_event.query():  # type: ignore[no-untyped-call]
            return None
        first = _first(self._copy)
        self._copy.copy_(self._both, non_blocking=True)
        self._copy_event.record()
        return first


def _first(numbers: Tensor) -> int | None:
    clock, good = numbers.tolist()
    return int(good) if math.isnan(clock) else None
