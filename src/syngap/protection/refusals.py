"""What `protect` refuses, and what it warns of."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from syngap.optim.checks import check_number
from syngap.optim.errors import NotFiniteError
from syngap.optim.knowledge import Known
from syngap.optim.moments import Rank
from syngap.optim.notices import Notices
from syngap.optim.state_transfer import require_growth
from syngap.optim.tensors import is_sharded

__all__ = [
    "check_arguments",
    "check_choices",
    "check_growth",
    "check_knowledge",
    "check_optimizer",
    "names_of",
]


def check_arguments(
    consolidation: float,
    ambient: float,
    strength: float,
    anchors: int,
    every: int | None,
    batch_size: int,
    rank: Rank | None,
) -> None:
    """Refuse numbers that are out of range."""
    check_number("consolidation", consolidation, "in (0, 1)", lambda value: 0 < value < 1)
    check_number("ambient", ambient, "in [0, 1)", lambda value: 0 <= value < 1)
    check_number("strength", strength, "above 0", lambda value: 0 < value < 1e30)
    counts = {"anchors": anchors, "batch_size": batch_size}
    for name, value in (counts if every is None else counts | {"every": every}).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number ≥ 1, got {value!r}")
    is_share = isinstance(rank, float) and 0 < rank <= 1
    is_count = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
    if not (rank in (None, "full") or is_share or is_count):
        raise ValueError(
            f'rank must be "full", a whole number ≥ 1 or a share in (0, 1], got {rank!r}'
        )


def check_choices(switches: dict[str, Any], rotate: Any, seed: Any) -> None:
    """Refuse what is neither of its choices."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    if rotate is not None and not isinstance(rotate, bool):
        raise ValueError(f"rotate must be True, False or None, got {rotate!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, got {seed!r}")


def check_optimizer(params: list[Tensor], known: dict[Tensor, Known], now: set[Tensor]) -> None:
    """Refuse an optimizer of other parameters than the model has now, and had at protect()."""
    if not any(param in known for param in params):
        raise ValueError(
            "the optimizer holds no parameter that protect() saw: make it after the model is "
            "whole, and protect the model that it trains"
        )
    for param in params:
        if param in known and param not in now:
            raise ValueError(
                f"the optimizer holds a parameter of shape {tuple(param.shape)} that the model "
                "no longer has: make the optimizer anew, and call protection.grow(old, new) "
                "for one that grew"
            )


def check_growth(
    old: Any, new: Any, names: dict[Tensor, str], start: dict[str, Tensor], known: dict[Tensor, Any]
) -> None:
    """Refuse a parameter that does not take the place of a smaller one.

    Args:
        old: the parameter that was there.
        new: the one that is there now.
        names: of the model's parameters.
        start: their values at protect(), by name.
        known: what was known at protect().
    """
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        raise TypeError(
            "grow takes two parameters, such as old.weight and new.weight, got "
            f"{type(old).__name__} and {type(new).__name__}"
        )
    if is_sharded(old) or is_sharded(new):
        raise ValueError("a sharded parameter cannot grow: grow the model, then shard and protect")
    require_growth(old, new, [])
    if new not in names:
        raise ValueError(
            f"new {tuple(new.shape)} is not a parameter of the model; put it there before grow()"
        )
    before = start.get(names[new])
    is_other = bool(known) and old.requires_grad and old not in known
    if before is None or before.shape != old.shape or old in names or is_other:
        raise ValueError(
            f"old {tuple(old.shape)} is not what the model had in place of {names[new]}: pass "
            "the parameter that was there, once"
        )


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """Return the names of a model's parameters."""
    return {param: name for name, param in model.named_parameters()}


def check_knowledge(known: dict[Tensor, Known], model: nn.Module) -> None:
    """Refuse an importance that is not finite, or zero everywhere; warn of too few inputs."""
    names = names_of(model)
    means = torch.stack([one.mean.double().cpu() for one in known.values()])
    bad = [names[p] for p, mean in zip(known, means.tolist(), strict=True) if not mean < math.inf]
    if bad:
        raise NotFiniteError(
            f"the importance of {', '.join(bad[:3])} is not finite: look at the inputs, and in "
            "float16 load the model in bfloat16 or float32"
        )
    if not means.any():
        half = any(param.dtype.itemsize < 4 for param in known)
        raise ValueError(
            "the importance of every parameter is zero: "
            + (
                "gradients vanish in half precision, so load the model in float32"
                if half
                else "predictions do not depend on the parameters, or are certain; look at what "
                "the model predicts for known inputs"
            )
        )
    _warn_of_few(known, names, _inputs_sides(model))


def _inputs_sides(model: nn.Module) -> dict[Tensor, int | None]:
    """Return the side of weights that inputs are on, where their layer is known."""
    sides: dict[Tensor, int | None] = {}
    for kinds, side in (((nn.Embedding,), None), ((nn.Linear, nn.Conv1d, nn.Conv2d), 1)):
        sides |= {each.weight: side for each in model.modules() if isinstance(each, kinds)}
    return sides


def _warn_of_few(
    known: dict[Tensor, Known], names: dict[Tensor, str], sides: dict[Tensor, int | None]
) -> None:
    """Warn where a layer saw fewer rows than it has inputs: some directions have no importance."""
    few = []
    for param, one in known.items():
        if one.basis is None or not one.rows:
            continue
        factors = (one.basis.left, one.basis.right)
        sizes = [None if side is None else side.shape[-2] for side in factors]
        if param in sides:
            place = sides[param]
            inputs = None if place is None else sizes[place]  # an embedding has none
        else:
            inputs = min(size for size in sizes if size is not None)
        if inputs is not None and one.rows < inputs:
            few.append((one.rows / inputs, names[param], one.rows, inputs))
    if few:
        _, name, rows, inputs = min(few)
        more = f" ({len(few) - 1} more layers have too few as well)" if len(few) > 1 else ""
        Notices().warn(
            "few",
            f"known inputs gave {rows} rows (samples, or their tokens or places) to {name}, which "
            f"has {inputs} inputs{more}: directions that no row has are not protected, so pass "
            "more inputs",
        )
