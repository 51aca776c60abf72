"""Changes of a gate between steps: importance from inputs, taken over, restored, or grown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from syngap.optim.fisher import Observation, merged
from syngap.optim.gate import Gate
from syngap.optim.knowledge import Knowledge
from syngap.optim.parameter_state import (
    RestoredDirections,
    grown,
    place_to_grow,
    restore_state,
)
from syngap.optim.predictions import predictions
from syngap.optim.update import fold

__all__ = ["adopt", "consolidate", "grow", "restore", "take_known"]


def consolidate(
    gate: Gate, model: nn.Module, inputs: Tensor | Iterable[Any], **options: Any
) -> None:
    """Set importance to its mean over unlabelled inputs."""
    if gate.directions is not None:
        raise RuntimeError(
            "consolidate() takes importance along directions that stay, and those of "
            "SynGAP(..., directions=True) follow what is observed: use syngap.protect(model, "
            "inputs), or leave out directions"
        )
    gate.check_options()
    estimator, seen = gate.estimator, None
    estimator.record(True)
    try:
        for prediction in predictions(model, inputs, generator=estimator.generator, **options):
            found = estimator.estimate(prediction, gate.trainable(), labelled=False)
            seen = merged(seen, gate.in_coordinates(found))
    finally:
        estimator.record(gate.is_due())
    if seen is None:
        raise ValueError("no batch gave consolidate a finite importance")
    _replace(gate, seen)


@torch.no_grad()
def _replace(gate: Gate, seen: Observation) -> None:
    means = gate.current_means()
    means.follow(gate.groups, seen.means, lambda group: 0.0)
    for work in gate.lay_out(seen, means.network(), keep=0.0):
        fold(work)
    gate.has_importance = True


def adopt(gate: Gate, knowledge: Knowledge) -> None:
    """Take over importance and directions; what is not known of a parameter is zero.

    What is known may be of parameters that the optimizer gets later. Directions are in the memory
    of the gate's states from then on.
    """
    gate.knowledge, gate.has_importance = knowledge, True
    gate.lay_out(None, gate.network_mean())  # which stacks directions of equal shape
    for param in gate.params():
        if (known := knowledge.by_param.get(param)) is not None:
            known.basis = gate.basis_of(param)


def take_known(gate: Gate) -> None:
    """Let parameters that came after `adopt` have what is known of them before a step."""
    for param in gate.params():
        if param in gate.knowledge.by_param:
            gate.state_of(param)


def grow(gate: Gate, old: Tensor, new: Tensor) -> None:
    """Let `new` take the place of `old`, a smaller parameter whose entries it begins with."""
    names = gate.estimator.names()
    params, index = place_to_grow(old, new, gate.groups, gate.states, names)
    rotated = gate.rotation_of(old)
    larger = [
        grown(states[old], old, new, rotated) if old in states else None for states in gate.states
    ]
    params[index] = new
    gate.observation = None
    for states, state in zip(gate.states, larger, strict=True):
        if state is not None:
            del states[old]
            states[new] = state
    gate.estimator.attach()


def restore(
    gate: Gate,
    saved: Mapping[Tensor, dict[str, Any]],
    own: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Take what was saved of each parameter, in its own precision, and go on from there.

    Args:
        gate: the gate.
        saved: what was saved, by parameter.
        own: the states before that. Directions that are equal stay where they are.
    """
    directions = RestoredDirections(own)
    for param, state in saved.items():
        if state:
            restore_state(param, gate.states[0][param], state, gate.compact, directions)
    gate.observation = None
    gate.has_importance = any(bool(gate.mean_of(param) > 0) for param in saved)
