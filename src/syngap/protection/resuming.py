"""What the states of optimizers say of a protection, so that a resumed run goes on alike."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import Optimizer

from syngap.optim.direction_checks import check_protection
from syngap.optim.errors import Notices
from syngap.optim.gated import GatedOptimizer
from syngap.optim.parameter_state import RECORD
from syngap.optim.wrapped import WrappedSynGAP, inner_optimizer

__all__ = ["Optimizers"]


class Optimizers:
    """The optimizers of a protection: the state of each says how often its teacher was called.

    Args:
        mark: of the known inputs; an optimizer with that of another protection is another's.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self._made: list[weakref.ref[Optimizer]] = []  # earlier ones that nobody has are gone
        self._last: Optimizer | None = None
        self._calls = self._steps = 0

    def add(self, optimizer: Optimizer) -> None:
        """Take an optimizer whose first group has the mark, and the calls as "drawn"."""
        self._steps = self.steps  # those of an optimizer that may be gone now
        self._made.append(weakref.ref(optimizer))
        self._last = optimizer

    def add_plain(self, base: Optimizer, record: dict[str, Any]) -> Optimizer:
        """Take and return an optimizer without a gate, which refuses a state of another teacher.

        Args:
            base: the optimizer, whose first group gets the record. One with a gate keeps that of
                the protection that made it.
            record: what a group of a gated one has: which known inputs the teacher takes when, and
                how often it was called.
        """
        if isinstance(base, GatedOptimizer):
            Notices().warn(
                "gated",
                f"the state of {type(base).__name__} does not say how often the teacher was called:"
                " save protection.calls too, and set it when you resume",
            )
            return base
        group = base.param_groups[0]
        record = record | {"protection": self.mark, "rotated": None}  # as there is no gate
        if group.get("protection") == self.mark:  # a state that was loaded before this
            check_protection([group], [record])
            record["drawn"] = group["drawn"]
        group |= record
        inner_optimizer(base).register_load_state_dict_pre_hook(_checked)
        self.add(base)
        return base

    @property
    def calls(self) -> int:
        """How often the teacher was called."""
        if self._last is None or not self._is_own(self._last):
            return self._calls
        return int(self._last.param_groups[0]["drawn"])

    @calls.setter
    def calls(self, number: int) -> None:
        self._calls = number
        for optimizer in self._living():
            if self._is_own(optimizer):
                optimizer.param_groups[0]["drawn"] = number

    def _is_own(self, optimizer: Optimizer) -> bool:
        return bool(optimizer.param_groups[0].get("protection") == self.mark)

    @property
    def steps(self) -> int:
        """How many steps the gate took, behind the optimizer that made most."""
        return max([self._steps, *(int(each.param_groups[0]["steps"]) for each in self.gated())])

    def gated(self) -> list[WrappedSynGAP]:
        """Return those with a gate."""
        return [each for each in self._living() if isinstance(each, WrappedSynGAP)]

    def _living(self) -> list[Optimizer]:
        return [each for reference in self._made if (each := reference()) is not None]


def _checked(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state to load; one without a teacher goes on with the calls that there were."""
    if not state_dict.get("param_groups"):
        return state_dict  # which torch refuses
    (saved, *others), own = state_dict["param_groups"], optimizer.param_groups[0]
    if "protection" not in saved:
        Notices().warn(
            "record",
            "the state is of an optimizer without a teacher: the teacher goes on with the known "
            "inputs that are next here",
        )
        record = {name: own[name] for name in RECORD}
        return state_dict | {"param_groups": [saved | record, *others]}
    check_protection([saved], [own])
    return state_dict
