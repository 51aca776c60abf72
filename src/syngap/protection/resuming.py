"""What the states of optimizers say of a protection, so that a resumed run goes on alike."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import Optimizer

from syngap.optim.gated import GatedOptimizer
from syngap.optim.loaded_directions import check_protection
from syngap.optim.wrapped import WrappedSynGAP, inner_optimizer

__all__ = ["Optimizers"]


class Optimizers:
    """The optimizers of a protection: the state of each has the place of its teacher.

    Args:
        mark: of the known inputs; an optimizer with that of another protection is another's.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._made: list[weakref.ref[Optimizer]] = []  # earlier ones that nobody has are gone
        self._last: Optimizer | None = None
        self._place = 0

    def add(self, optimizer: Optimizer) -> None:
        """Take an optimizer whose first group has the mark, and the place as "drawn"."""
        self._made.append(weakref.ref(optimizer))
        self._last = optimizer

    def add_plain(self, base: Optimizer, record: dict[str, Any]) -> Optimizer:
        """Take and return an optimizer without a gate, which refuses a state of another teacher.

        Args:
            base: the optimizer, whose first group gets the record. One with a gate keeps that of
                the protection that made it.
            record: what a group of a gated one has: which known inputs the teacher takes when, and
                the place.
        """
        if isinstance(base, GatedOptimizer):
            return base
        group = base.param_groups[0]
        record = record | {"protection": self.mark, "rotated": None}  # as there is no gate
        if group.get("protection") == self.mark:  # a state that was loaded before this
            check_protection([group], [record])
            record["drawn"] = group["drawn"]
        group |= record
        inner_optimizer(base).register_load_state_dict_pre_hook(_check)
        self.add(base)
        return base

    @property
    def place(self) -> int:
        """How often the teacher was called."""
        if self._last is None or not self._is_own(self._last):
            return self._place
        return int(self._last.param_groups[0]["drawn"])

    @place.setter
    def place(self, number: int) -> None:
        self._place = number
        for optimizer in self._living():
            if self._is_own(optimizer):
                optimizer.param_groups[0]["drawn"] = number

    def _is_own(self, optimizer: Optimizer) -> bool:
        return bool(optimizer.param_groups[0].get("protection") == self.mark)

    def gated(self) -> list[WrappedSynGAP]:
        """Return those with a gate."""
        return [each for each in self._living() if isinstance(each, WrappedSynGAP)]

    def _living(self) -> list[Optimizer]:
        return [each for reference in self._made if (each := reference()) is not None]


def _check(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    check_protection(state_dict["param_groups"][:1], optimizer.param_groups[:1])
