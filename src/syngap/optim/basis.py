"""Where the importance of a weight lives: in which coordinates, which type and which process.

A gate asks its basis three things: what importance starts from, what scores are in its coordinates,
and what an update is whose coordinates are multiplied by their masks. The basis of the paper is the
entries of a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "IMPORTANCE",
    "Coordinates",
    "Entries",
    "accumulator",
    "is_sharded",
    "kept_in",
    "local",
    "local_gradient",
    "note_plain",
    "note_rotated",
    "redistribute_like",
    "sum_over_shards",
    "wide",
]


IMPORTANCE = ("importance", "mean", "turn")  # the gate's part of a parameter's state


class Entries:
    """Each entry of a weight is a coordinate of its own, so that nothing is left to compute."""

    def zeros(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the importance of a parameter that nothing is known of."""
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)

    def coordinates(self, scores: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return scores, by parameter, in these coordinates."""
        return scores

    def scale(
        self, updates: list[Tensor], masks: list[Tensor], *, in_place: bool = False
    ) -> list[Tensor]:
        """Return updates whose coordinates are multiplied by `masks`.

        They are in the memory of `masks`, or with `in_place` in that of `updates`.
        """
        results, factors = (updates, masks) if in_place else (masks, updates)
        if len(results) == 1:
            results[0].mul_(factors[0])
        else:
            torch._foreach_mul_(results, factors)
        return results


# Precision ----------------------------------------------------------------------------------------


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type that the importance of a parameter of this type is calculated in.

    Squares of half precision overflow or vanish, and a slow average of them stands still.
    """
    return torch.float32 if dtype.itemsize < 4 else dtype


def kept_in(dtype: torch.dtype, compact: bool) -> torch.dtype:
    """Return the type that it is kept in; `compact` knows how not to stand still."""
    return torch.bfloat16 if compact else accumulator(dtype)


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in that type."""
    return tensor.to(accumulator(tensor.dtype))


# Shards -------------------------------------------------------------------------------------------

_PLAIN = (Tensor, nn.Parameter)  # the usual case, at a tenth of the cost of a missing attribute


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process holds only a part of the tensor (FSDP2, tensor parallelism)."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local_gradient(param: Tensor) -> Tensor | None:
    """Return the gradient of the part of a parameter that this process holds."""
    if param.grad is None or not is_sharded(param):
        return param.grad
    # Tensor parallelism may leave a sum over processes to whoever needs it.
    param.grad = redistribute_like(param, param.grad)
    return local(param.grad)


def redistribute_like(param: Any, grad: Any) -> Any:
    """Return a gradient of which each process holds the part that it holds of the parameter."""
    if not is_sharded(grad) or grad.placements == param.placements:
        return grad
    return grad.redistribute(param.device_mesh, param.placements)


def sum_over_shards(sums: list[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """Complete each parameter's sum, of which a process knows the share of its shard."""
    alike: dict[tuple[object, object], list[int]] = {}
    for index, param in enumerate(params):
        if is_sharded(param):
            key = (param.device_mesh, param.placements)  # type: ignore[attr-defined]
            alike.setdefault(key, []).append(index)
    sums = list(sums)
    for (mesh, placements), indices in alike.items():
        stacked = torch.stack([sums[index] for index in indices])
        for dim, placement in enumerate(placements):  # type: ignore[var-annotated,arg-type]
            if not placement.is_replicate():
                dist.all_reduce(stacked, group=mesh.get_group(dim))  # type: ignore[attr-defined]
        for index, value in zip(indices, stacked.unbind(), strict=True):
            sums[index] = value
    return sums


# Rotated models -----------------------------------------------------------------------------------
# `rotate` and `unrotate` give a parameter other values that mean the same. What an optimizer knows
# of it, importance and momentum, is then of something else, entry by entry, and nothing would show.

_NAME = "_syngap_coordinates"  # of a parameter: which change made them, none where it is plain
_UNROTATED = 0
_changes = 0  # of all parameters of this process


def note_rotated(param: Tensor) -> None:
    """Note that a parameter's values are in coordinates of their own from now on."""
    global _changes
    _changes += 1
    setattr(param, _NAME, _changes)


def note_plain(param: Tensor) -> None:
    """Note that they are plain again.

    A copy of a parameter has no note, and optimizers of it take its values to be plain. What they
    know is of other coordinates from now on, so that plain gets a number of its own there.
    """
    global _changes
    _changes += 1
    setattr(param, _NAME, _UNROTATED if hasattr(param, _NAME) else _changes)


class Coordinates:
    """Those in which an optimizer knows its parameters."""

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
        self._seen_changes = -1

    def are_current(self) -> bool:
        """Return whether nothing was rotated since the last `learn`; it costs one comparison."""
        return self._seen_changes == _changes

    def changed(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose coordinates are others than `learn` saw."""
        return [param for param in params if self._known.get(param, _now(param)) != _now(param)]

    def are_stale(
        self,
        params: Iterable[Tensor],
        states: Iterable[Mapping[Tensor, Mapping[str, Any]]],
        *,
        momentum_alone: bool = False,
    ) -> bool:
        """Return whether what is known of any parameter is of other coordinates than it has.

        Args:
            params: the parameters.
            states: what is known, by parameter.
            momentum_alone: whether importance does not count, because it is replaced.
        """
        if self.are_current():
            return False
        others = set(IMPORTANCE) if momentum_alone else set()
        changed = self.changed(params)
        return any(set(known.get(param, {})) - others for param in changed for known in states)

    def refuse_stale(
        self,
        params: Iterable[Tensor],
        states: Iterable[Mapping[Tensor, Mapping[str, Any]]],
        *,
        momentum_alone: bool = False,
    ) -> None:
        """Raise where `are_stale`."""
        if self.are_stale(params, states, momentum_alone=momentum_alone):
            raise RuntimeError(
                "the model was rotated, or unrotated, after this optimizer had learned of its "
                "weights, so its importance or momentum is of other coordinates: call rotate() "
                "before consolidate(), and make a new optimizer after steps or unrotate()"
            )

    def learn(self, params: Iterable[Tensor]) -> None:
        """Take the coordinates of now to be those of all that is known."""
        self._known.clear()
        for param in params:
            self._known[param] = _now(param)
        self._seen_changes = _changes

    def look_again(self) -> None:
        """Learn at the next opportunity: there are other parameters."""
        self._seen_changes = -1


def _now(param: Tensor) -> int:
    number: int = getattr(param, _NAME, _UNROTATED)
    return number
