"""What the CPU decides anew at every step, so that the rest of a step can be replayed.

A CUDA graph repeats what the GPU did. Which samples a memory draws and keeps is decided on the CPU;
`decided` marks such places. Around a step that is recorded the decisions go onto a tape: how each
is made, and the tensor on the GPU that its result is read from. Before the graph is replayed they
are made again, in the same order, into the same tensors. Without a tape `decided` does nothing but
bring a decision to its device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Tape", "decided", "played", "recorded"]

Make = Callable[[], Tensor]


class Tape:
    """The decisions of one step, in order."""

    def __init__(self) -> None:
        self._made: list[tuple[Make, Tensor]] = []

    def add(self, make: Make, device: torch.device) -> Tensor:
        """Make a decision for the first time; return where its results will be found."""
        place = make().to(device)
        self._made.append((make, place))
        return place

    def make_again(self) -> list[Tensor]:
        """Return new decisions, on the CPU."""
        return [make() for make, _ in self._made]

    def fits(self, values: Sequence[Tensor]) -> bool:
        """Return whether these have the shapes of those before."""
        return [value.shape for value in values] == [place.shape for place in self.places]

    def put(self, values: Sequence[Tensor]) -> None:
        """Bring decisions to where they are read."""
        for place, value in zip(self.places, values, strict=True):
            # Without non_blocking the CPU would wait until the GPU has nothing left to do.
            place.copy_(value, non_blocking=True)

    @property
    def places(self) -> list[Tensor]:
        """Where decisions are read from."""
        return [place for _, place in self._made]


_recording: Tape | None = None
_playing: Iterator[Tensor] | None = None


def decided(make: Make, device: torch.device) -> Tensor:
    """Return what `make` decides on the CPU, on `device`; under a tape, what the tape has.

    Args:
        make: returns a new tensor at every call; whatever the CPU has to count, it counts.
        device: where the result is needed.

    Examples:
        >>> count = iter(range(9))
        >>> tape, cpu = Tape(), torch.device("cpu")
        >>> with recorded(tape):
        ...     place = decided(lambda: torch.tensor([next(count)]), cpu)
        >>> tape.put(tape.make_again())
        >>> place
        tensor([1])
    """
    if _playing is not None:
        value = next(_playing, None)
        if value is None:
            raise RuntimeError("a step asked for more decisions than were recorded")
        return value.to(device, non_blocking=True)
    if _recording is not None:
        return _recording.add(make, device)
    return make().to(device, non_blocking=True)


@contextmanager
def recorded(tape: Tape) -> Iterator[None]:
    """Put every decision within onto `tape`."""
    global _recording
    _recording = tape
    try:
        yield
    finally:
        _recording = None


@contextmanager
def played(values: Sequence[Tensor]) -> Iterator[None]:
    """Let these be the decisions within."""
    global _playing
    _playing = iter(values)
    try:
        yield
    finally:
        _playing = None
