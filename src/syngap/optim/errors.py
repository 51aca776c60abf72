"""What goes wrong while training, and not at the door: errors, and warnings given once."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = [
    "DISCARDED",
    "FLOAT16",
    "FROZEN_BEFORE",
    "NEVER_OBSERVED",
    "UNRELATED",
    "NotFiniteError",
    "Notices",
    "nonfinite_error",
    "nonfinite_gradients_error",
]

DISCARDED = (
    "zero_grad() discarded what observe() took before any backward(): call observe() after "
    "zero_grad() and before loss.backward()"
)
CAPTURED_REFRESH = (
    "a refresh of directions cannot be captured in a CUDA graph: capture a step before which "
    "optimizer.refreshes_directions() is false"
)
REPLAYED_REFRESH = (
    "the step that was replayed should have refreshed directions, which no CUDA graph does: run a "
    "step as it is where optimizer.refreshes_directions() is true before it"
)
NEVER_OBSERVED = (
    "SynGAP.step() has no importance yet, so every parameter gets the same plasticity: call "
    "observe(logits) after zero_grad() and before loss.backward(), or consolidate() once before "
    "training; in a framework that owns the loop, use SynGAPCallback (Lightning), SynGAPTrainer "
    "(Transformers) or SynGAPPlugin (Avalanche) of syngap.integrations"
)
UNRELATED = (
    "the prediction from known inputs does not depend on any trainable parameter of the model that "
    "protect() got: predict= must use this model, not another one or a copy, and not detach. Where "
    "all that known inputs reach is frozen, nothing needs protection"
)
FROZEN_BEFORE = (
    "parameters learn that were frozen at syngap.protect(), so nothing is known of them and the "
    "gate lets them change freely: unfreeze what shall learn, then call protect()"
)
FLOAT16 = "in float16 numbers overflow: load the model in float32, and train under torch.autocast"
_INSIDE = {"syngap", "torch", "contextlib"}  # not the caller's own lines
_NAMED = 3  # parameters in a message
_SMALLER = 10.0  # by how much a rate to try is


class NotFiniteError(FloatingPointError, ValueError):
    """A prediction or a gradient with NaN or infinite numbers, which would spoil all that follows.

    It is raised before anything has changed.
    """


def nonfinite_gradients_error(
    step: int, names: Sequence[str], groups: Iterable[Mapping[str, Any]]
) -> NotFiniteError:
    """Return the error of a step whose gradients are not finite, for parameters of these names."""
    listed = ", ".join(names[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return nonfinite_error(
        f"the gradients of step {step} are not finite (of {listed}{more}): nothing has moved",
        groups,
    )


def nonfinite_error(message: str, groups: Iterable[Mapping[str, Any]]) -> NotFiniteError:
    """Return the error of a message, with what to do about it in an optimizer of these groups."""
    groups = list(groups)
    if any(param.dtype == torch.float16 for group in groups for param in group["params"]):
        return NotFiniteError(f"{message}; {FLOAT16}")
    rate = max((float(group["lr"]) for group in groups if "lr" in group), default=0)
    numbers = f" (it is {rate:g}, try {rate / _SMALLER:g})" if rate else ""
    return NotFiniteError(f"{message}. A smaller lr may help{numbers}, or {_how_to_go_on(groups)}")


def _how_to_go_on(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return how to leave such steps out, by what the user called to make the optimizer."""
    if any("protection" in group for group in groups):
        return "catch this error and go on with the next batch, which leaves this step out"
    is_wrapped = any(group.get("behind") for group in groups)
    called = "SynGAP.wrap(..., non_finite='skip')" if is_wrapped else "SynGAP(non_finite='skip')"
    return f"{called}, which leaves such steps out and counts them"


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
