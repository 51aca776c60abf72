"""The base class of replay memories; a subclass decides which samples are stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from syngap.bench.memory.fields import Fields, indices
from syngap.bench.tape import decision

__all__ = ["Memory", "subset"]


class Memory(ABC):
    """At most `size` samples of a stream.

    A step costs O(batch), however large the memory is. Every sample takes one random number, so
    batch sizes make no difference to what is stored, unless draws come between.

    Args:
        size: how many samples it holds; 0 keeps none.
        generator: of all its random numbers, on the CPU. None makes one seeded from torch's own, so
            `torch.manual_seed` makes the memory repeat.
        device: where the samples lie and are drawn to; None is the CPU.

    Attributes:
        samples_seen: how many samples were added in all.
    """

    def __init__(
        self,
        size: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if size < 0:
            raise ValueError(f"size must be at least 0, got {size}")
        if generator is None:
            generator = torch.Generator().manual_seed(_random_seed())
        if generator.device.type != "cpu":
            raise ValueError(
                f"generator must be one of the CPU, got one of {generator.device}; give "
                "torch.Generator(), or none: samples may lie on any device all the same"
            )
        self.size = size
        self.samples_seen = 0
        self._generator = generator
        self._fields = Fields(size, device)

    def __len__(self) -> int:
        return min(self.samples_seen, self.size)

    def __bool__(self) -> bool:
        return len(self) > 0

    def add(self, **fields: Tensor) -> None:
        """Offer a batch to the memory, in the order of the stream.

        Args:
            **fields: what belongs to a sample, such as x, y and logits: tensors of the same first
                length. The first call fixes names, shapes and dtypes.
        """
        count = self._fields.admit(fields)
        slots = decision(lambda: self._assign_slots(count, fields), self._fields.device)
        self._fields.write(fields, slots)

    def draw(self, count: int) -> dict[str, Tensor]:
        """Return `count` different samples, or all if there are fewer; {} if there are none.

        Every set of samples is as likely as any other; their order means nothing.
        """
        if not self:
            return {}
        return self._fields.read(decision(lambda: self._draw_slots(count), self._fields.device))

    def samples(self) -> dict[str, Tensor]:
        """Return copies of all samples; {} if there are none. Nothing is drawn at random."""
        return self._fields.state_dict(len(self)) if self else {}

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything: nested dictionaries of tensors and whole numbers."""
        return {
            "size": self.size,
            "seen": self.samples_seen,
            "generator": self._generator.get_state(),
            "fields": self._fields.state_dict(len(self)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, bit for bit."""
        if state["size"] != self.size:
            raise ValueError(f"this memory has size {self.size}, the state {state['size']}")
        self.samples_seen = state["seen"]
        self._generator.set_state(state["generator"].cpu())
        self._fields.load_state_dict(state["fields"])

    def _draw_slots(self, count: int) -> Tensor:
        """Return the slots of `count` samples, or of all."""
        return indices(subset(min(count, len(self)), len(self), self._generator))

    def _assign_slots(self, count: int, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the slot of each of `count` new samples, and count them; `size` is nowhere."""
        uniform = torch.rand(count, dtype=torch.float64, generator=self._generator)
        slots = self._slots(uniform.tolist(), fields)
        # Where two of a batch want the same slot the later one has it; writing both at once would
        # leave that to chance on an accelerator.
        latest = {slot: row for row, slot in enumerate(slots) if slot < self.size}
        kept = [self.size] * count
        for slot, row in latest.items():
            kept[row] = slot
        self.samples_seen += count
        return indices(kept)

    @abstractmethod
    def _slots(self, uniform: list[float], fields: Mapping[str, Tensor]) -> list[int]:
        """Return where each sample goes; `self.size` or more says nowhere.

        Args:
            uniform: a number in [0, 1) for each sample.
            fields: the samples; `self.samples_seen` does not count them yet.
        """


def _random_seed() -> int:
    return int(torch.randint(2**62, (), device="cpu"))  # whatever torch.set_default_device says


def subset(count: int, total: int, generator: torch.Generator) -> list[int]:
    """Return `count` different numbers below `total`, every set of them as likely as any other.

    The work is O(count) (Bentley and Floyd 1987). The order is not random: larger numbers tend to
    come later.

    Examples:
        >>> sorted(subset(3, 3, torch.Generator()))
        [0, 1, 2]
    """
    uniform = torch.rand(count, dtype=torch.float64, generator=generator).tolist()
    chosen: dict[int, None] = {}  # ordered, so that the same numbers come in the same order
    for top, u in enumerate(uniform, total - count):
        number = int(u * (top + 1))
        chosen[top if number in chosen else number] = None
    return list(chosen)
