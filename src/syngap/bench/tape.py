"""Decisions that the CPU makes anew at every step, so that the rest of a step can be replayed.

A CUDA graph repeats what the GPU did. The CPU decides which samples a memory draws and stores, by
`decision`. While a step is recorded its decisions go onto a tape: how each is made, and the
tensor on the GPU that holds its result. Before the graph is replayed they are made again, in the
same order, into the same tensors. Without a tape `decision` only copies the result to its device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Tape", "decision", "play", "record"]

Make = Callable[[], Tensor]


class Tape:
    """The decisions of one step, in order."""

    def __init__(self) -> None:
        self._decisions: list[tuple[Make, Tensor]] = []

    def add(self, make: Make, device: torch.device) -> Tensor:
        """Make a decision for the first time; return the tensor that holds its results."""
        place = make().to(device)
        self._decisions.append((make, place))
        return place

    def make_again(self) -> list[Tensor]:
        """Return new decisions, on the CPU."""
        return [make() for make, _ in self._decisions]

    def fits(self, values: Sequence[Tensor]) -> bool:
        """Return whether `values` have the recorded shapes."""
        return [value.shape for value in values] == [place.shape for place in self.places]

    def put(self, values: Sequence[Tensor]) -> None:
        """Copy decisions into the tensors that hold them."""
        for place, value in zip(self.places, values, strict=True):
            # Without non_blocking the CPU would wait until the GPU has nothing left to do.
            place.copy_(value, non_blocking=True)

    @property
    def places(self) -> list[Tensor]:
        """The tensors that hold the decisions."""
        return [place for _, place in self._decisions]


_recording: Tape | None = None
_playing: Iterator[Tensor] | None = None


def decision(make: Make, device: torch.device) -> Tensor:
    """Return the result of `make`, moved to `device`; while a tape plays, the tape's result.

    Args:
        make: returns a new tensor at every call, and counts what the CPU has to count.
        device: where the result is needed.

    Examples:
        >>> count = iter(range(9))
        >>> tape, cpu = Tape(), torch.device("cpu")
        >>> with record(tape):
        ...     place = decision(lambda: torch.tensor([next(count)]), cpu)
        >>> tape.put(tape.make_again())
        >>> place
        tensor([1])
    """
    if _playing is not None:
        value = next(_playing, None)
        if value is None:
            raise RuntimeError("a step made more decisions than were recorded")
        return value.to(device, non_blocking=True)
    if _recording is not None:
        return _recording.add(make, device)
    return make().to(device, non_blocking=True)


@contextmanager
def record(tape: Tape) -> Iterator[None]:
    """Record every decision made inside on `tape`."""
    global _recording
    _recording = tape
    try:
        yield
    finally:
        _recording = None


@contextmanager
def play(values: Sequence[Tensor]) -> Iterator[None]:
    """Use `values` as the decisions made inside."""
    global _playing
    _playing = iter(values)
    try:
        yield
    finally:
        _playing = None
