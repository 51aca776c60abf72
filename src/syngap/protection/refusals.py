"""What `protect` refuses, and what it warns of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Adam, AdamW
from torch.optim.optimizer import Optimizer

from syngap.messages import count_of
from syngap.optim.checks import check_number, check_whole, is_number
from syngap.optim.errors import FLOAT16, UNRELATED, NotFiniteError, Notices
from syngap.optim.gated import GatedOptimizer
from syngap.optim.knowledge import Known
from syngap.optim.moments import Rank
from syngap.optim.parameter_state import require_growth
from syngap.optim.predictions import Predict, as_it_was, call, check_predict
from syngap.optim.scores import require_classes_last
from syngap.optim.tensors import is_sharded
from syngap.protection.anchors import mask_of
from syngap.protection.answers import check_divergence
from syngap.protection.gradients import is_foreign
from syngap.protection.hints import (
    NO_BATCH,
    changes_since,
    has_no_batch,
    hints_for,
    kinds_of,
    nonfinite_inputs,
)

__all__ = [
    "check_arguments",
    "check_choices",
    "check_classes",
    "check_growth",
    "check_knowledge",
    "check_model",
    "check_optimizer",
    "check_share",
    "explained_by",
    "names_of",
    "predicting",
    "require_module",
    "rotates",
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
        check_whole(name, value, 1)
    is_share = isinstance(rank, float) and 0 < rank <= 1
    is_count = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
    if not (rank in (None, "full") or is_share or is_count):
        raise ValueError(
            f'rank must be "full", a whole number ≥ 1 or a share in (0, 1], got {rank!r}'
        )


def check_choices(switches: dict[str, Any], rotate: Any, seed: Any, progress: Any) -> None:
    """Refuse what is neither of its choices."""
    if progress is not None and not callable(progress):
        raise ValueError(
            "progress must be a function of two numbers, how many batches are done and how many "
            f"there are, such as print, got {progress!r}"
        )
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    if rotate is not None and not isinstance(rotate, bool):
        raise ValueError(f"rotate must be True, False or None, got {rotate!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, got {seed!r}")


def check_share(share: float) -> None:
    """Refuse a share that is out of range, such as one in per cent."""
    number = float(share) if is_number(share) else 0.0
    hint = f", such as {number / 100:g} for {number:g} %" if 2 <= number <= 100 else ""
    check_number("share", share, f"in [0, 1]{hint}", lambda value: 0 <= value <= 1)


_HALF = {
    torch.float16: "numbers overflow and small moments of an optimizer vanish",
    torch.bfloat16: "an update that is small against its weight is rounded away",
}


def require_module(model: Any, called: str) -> None:
    """Refuse what is no model, by the name of the function that was called."""
    if not isinstance(model, nn.Module):
        hint = "pass the model itself"
        if isinstance(model, str):
            hint = f"load it first, as by AutoModelForCausalLM.from_pretrained({model!r})"
        raise TypeError(f"{called}() takes a torch.nn.Module, got {type(model).__name__}: {hint}")


def check_model(model: Any, gate: bool) -> None:
    """Refuse what is no model, and a model that cannot learn."""
    require_module(model, "protect")
    params = list(model.parameters())
    if not params:
        raise ValueError(
            f"{type(model).__name__} has no parameters, so there is nothing to protect"
        )
    if gate and not any(param.requires_grad for param in params):
        raise ValueError(
            "every parameter of the model is frozen, so nothing can be forgotten: call "
            "requires_grad_(True) on what shall learn, then protect(); with peft, call protect() "
            "after get_peft_model()"
        )
    kinds = {param.dtype for param in params if param.requires_grad}
    for dtype in kinds & _HALF.keys():
        Notices().warn(
            "half",
            f"the weights are {str(dtype)[6:]}, in which {_HALF[dtype]}: load the model in "
            "float32, and train under torch.autocast",
        )


# Known inputs.


@torch.enable_grad()
def check_classes(model: nn.Module, batch: Any, predict: Predict, teacher: bool) -> None:
    """Refuse logits of another model, or with classes not in the last dimension, by one pass."""
    floats = [param for param in model.parameters() if param.is_floating_point()]
    frozen = [param for param in floats if not (param.requires_grad or param.is_inference())]
    with as_it_was(model, None):
        try:
            for param in frozen:  # what does not learn now is the model's all the same
                param.requires_grad_(True)
            prediction = predict(batch)
        finally:
            for param in frozen:
                param.requires_grad_(False)
    if isinstance(prediction, Tensor):
        mask = mask_of(batch, prediction)
        require_classes_last(prediction, mask=mask, warn=Notices().warn)
        is_differentiable = teacher and prediction.is_floating_point()
        if is_differentiable and (not prediction.requires_grad or is_foreign(prediction, model)):
            raise ValueError(UNRELATED)


@contextmanager
def explained_by(batches: list[Any]) -> Iterator[None]:
    """Say where something is not finite that known inputs are not, where that is so."""
    try:
        yield
    except NotFiniteError as error:
        if not (found := nonfinite_inputs(batches)):
            raise
        raise NotFiniteError(f"known inputs {found} ({error})") from None


# Of an error that a model raises: what Python and torch raise, with a message alone.
_OWN = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)


def predicting(model: nn.Module, predict: Predict | None, needs_kl: bool = False) -> Predict:
    """Return what predicts from a batch, and says what to do where the model did not take it."""
    check_predict(predict)
    kinds = kinds_of(model)

    def predicted(batch: Any) -> Tensor | Distribution:
        nonlocal needs_kl
        try:
            found: Tensor | Distribution = predict(batch) if predict else call(model, batch)
        except Exception as error:
            if type(error) not in _OWN:
                raise
            changes = changes_since(kinds, model, str(error))
            hint = next(chain(changes, hints_for(model, batch, str(error))), "")
            raise type(error)(f"known inputs: {error}{hint and f'. {hint}'}") from error
        if isinstance(found, Tensor) and found.dim() < 2 and has_no_batch(batch):  # one sample
            raise ValueError(
                f"known inputs: the prediction has shape {tuple(found.shape)}. {NO_BATCH}"
            )
        if needs_kl:
            check_divergence(found)
            needs_kl = False
        return found

    return predicted


def check_base(base: object, gate: bool) -> None:
    """Refuse what is no optimizer, and for a gate one that another object steps for."""
    if not isinstance(base, Optimizer):
        raise TypeError(
            "optimizer() takes an optimizer that holds parameters, such as "
            f"torch.optim.AdamW(model.parameters()), got {base!r}"
        )
    if gate and isinstance(base, GatedOptimizer):
        raise ValueError(
            f"optimizer() got {type(base).__name__}, which is gated already: call it once, with a "
            "plain optimizer such as torch.optim.AdamW(model.parameters())"
        )
    if gate and not hasattr(base, "_optimizer_step_post_hooks"):
        raise TypeError(
            f"optimizer() takes a plain optimizer, got {type(base).__name__} around another, which "
            "may leave out steps that the gate would count: pass the plain one, and prepare what "
            "this returns, as in accelerator.prepare(protection.optimizer(base))"
        )


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


def rotates(wanted: bool | None, base: Optimizer, known: Iterable[Known]) -> bool:
    """Return whether moments of `base` shall be along directions; refuse what does not allow it."""
    bases = [one.basis for one in known if one.basis is not None]
    complete = all(basis.is_complete for basis in bases)
    if wanted is None:  # moments that are there already are along entries
        return complete and isinstance(base, (Adam, AdamW)) and not base.state
    if wanted and not complete:
        raise ValueError('rotate=True needs complete bases: leave it out, or pass rank="full"')
    if wanted and base.state:
        raise ValueError(
            "rotate=True needs an optimizer that has made no step, as its moments are along "
            "entries of the weights: make a new one, or leave out rotate"
        )
    return wanted


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
            f"the importance of {', '.join(bad[:3])} is not finite: look at the inputs; {FLOAT16}"
        )
    if not means.any():
        half = any(param.dtype.itemsize < 4 for param in known)
        raise ValueError(
            "the importance of every parameter is zero: "
            + (
                "gradients vanish in half precision, so load the model in float32, and train under "
                "torch.autocast"
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
        more = (
            f" (too few for {count_of(len(few) - 1, 'more layer')} as well)" if len(few) > 1 else ""
        )
        Notices().warn(
            "few",
            f"known inputs gave {count_of(rows, 'row')} (samples, or their tokens or places) to "
            f"{name}, which has {count_of(inputs, 'input')}{more}: directions that no row has are "
            "not protected, so pass more inputs",
        )
