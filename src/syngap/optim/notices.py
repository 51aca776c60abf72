"""Warnings given once, that point at the caller's own line."""

from __future__ import annotations

import sys
import warnings

__all__ = ["DISCARDED", "NEVER_OBSERVED", "Notices"]

DISCARDED = (
    "zero_grad() discarded what observe() took before any backward(): call observe() after "
    "zero_grad() and before loss.backward()"
)
NEVER_OBSERVED = (
    "SynGAP.step() has no importance yet, so every parameter gets the same plasticity: call "
    "observe(logits) after zero_grad() and before loss.backward(), or consolidate() once before "
    "training; in a framework that owns the loop, use SynGAPCallback (Lightning), SynGAPTrainer "
    "(Transformers) or SynGAPPlugin (Avalanche) of syngap.integrations"
)

_INSIDE = {"syngap", "torch", "contextlib"}


class Notices(set[str]):
    """The topics that were warned of."""

    def warn(self, topic: str, message: str) -> None:
        """Warn of a topic, the first time that it comes up."""
        if topic not in self:
            self.add(topic)
            _warn_caller(message)


def _warn_caller(message: str) -> None:
    """Warn at the nearest frame outside this package and torch, whose decorators lie between."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and _package(frame.f_globals) in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
