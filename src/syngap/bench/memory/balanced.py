"""Class-balancing reservoir sampling (Chrysakis and Moens 2020, algorithm 1)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from syngap.bench.memory.base import Memory

__all__ = ["ClassBalanced"]


class ClassBalanced(Memory):
    """Keeps as many of each class as it can, and of each class a uniform sample. Needs a field `y`.

    While there is room, everything is kept. Afterwards a class is full from when it was first
    among the largest. A sample of a class that is not full replaces one of the largest classes,
    at random; of a full class with m samples kept of n seen, it replaces one of them with chance
    m / n.

    Examples:
        >>> memory = ClassBalanced(4)
        >>> memory.add(y=torch.tensor([0] * 100 + [1] * 2))
        >>> sorted(memory.draw(4)["y"].tolist())
        [0, 0, 1, 1]
    """

    def __init__(
        self,
        size: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(size, generator=generator, device=device)
        self._shelves = _Shelves()
        self._class_counts: dict[int, int] = defaultdict(int)
        self._full: set[int] = set()

    def add(self, **fields: Tensor) -> None:
        """Offer a batch to the memory; `y` holds the classes, whole numbers of one dimension."""
        y = fields.get("y")
        if y is None or y.dim() != 1 or y.is_floating_point() or y.is_complex():
            raise ValueError("a class-balanced memory needs a field y: one whole number a sample")
        super().add(**fields)

    def _slots(self, uniform: list[float], fields: Mapping[str, Tensor]) -> list[int]:
        pairs = zip(fields["y"].tolist(), uniform, strict=True)
        return [
            self._slot(self.samples_seen + row, label, u) for row, (label, u) in enumerate(pairs)
        ]

    def _slot(self, number: int, label: int, uniform: float) -> int:
        self._class_counts[label] += 1
        if number < self.size:
            self._shelves.put(label, number)
            if number == self.size - 1:
                self._full.update(self._shelves.largest())
            return number
        if label in self._full or not self.size:
            place = int(uniform * self._class_counts[label])
            kept = self._shelves.slots[label]
            return kept[place] if place < len(kept) else self.size
        slot = self._shelves.take_from_largest(uniform)
        self._shelves.put(label, slot)
        self._full.update(self._shelves.largest())
        return slot

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything: nested dictionaries of tensors and whole numbers."""
        labels = sorted(self._class_counts)
        slots = [self._shelves.slots[label] for label in labels]
        classes = {
            "label": torch.tensor(labels, dtype=torch.int64),
            "met": torch.tensor([self._class_counts[label] for label in labels], dtype=torch.int64),
            "full": torch.tensor([label in self._full for label in labels], dtype=torch.bool),
            "kept": torch.tensor([len(some) for some in slots], dtype=torch.int64),
            "slots": torch.tensor([slot for some in slots for slot in some], dtype=torch.int64),
        }
        return {**super().state_dict(), "classes": classes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, bit for bit."""
        super().load_state_dict(state)
        classes = {name: values.tolist() for name, values in state["classes"].items()}
        labels = classes["label"]
        self._class_counts = defaultdict(int, zip(labels, classes["met"], strict=True))
        self._full = {one for one, full in zip(labels, classes["full"], strict=True) if full}
        self._shelves = _Shelves()
        ends = list(accumulate(classes["kept"]))
        for label, start, end in zip(labels, [0, *ends], ends, strict=False):
            for slot in classes["slots"][start:end]:
                self._shelves.put(label, slot)


class _Shelves:
    """Which slots each class has, and which classes have most, both without a search.

    Classes of one size stand in order, so that the slots are all there is to save: a place drawn
    at random means the same after a restart.
    """

    def __init__(self) -> None:
        self.slots: dict[int, list[int]] = defaultdict(list)
        self._of_size: dict[int, list[int]] = defaultdict(list)
        self._top = 0

    def largest(self) -> list[int]:
        return self._of_size[self._top]

    def put(self, label: int, slot: int) -> None:
        kept = self.slots[label]
        if kept:
            self._unrank(label)
        kept.append(slot)
        insort(self._of_size[len(kept)], label)
        self._top = max(self._top, len(kept))

    def take_from_largest(self, uniform: float) -> int:
        """Free a slot of the largest classes, each as likely as any other, and return it."""
        largest = self.largest()
        which, place = divmod(int(uniform * (len(largest) * self._top)), self._top)
        label = largest[which]
        self._unrank(label)
        kept = self.slots[label]
        kept[place], kept[-1] = kept[-1], kept[place]
        slot = kept.pop()
        if kept:
            insort(self._of_size[len(kept)], label)
        if not largest:
            self._top -= 1
        return slot

    def _unrank(self, label: int) -> None:
        same = self._of_size[len(self.slots[label])]
        del same[bisect_left(same, label)]
