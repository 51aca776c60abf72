"""What is wrong with known inputs: what is refused, and what to do where a model fails on them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from syngap.messages import count_of
from syngap.optim.errors import Notices
from syngap.optim.predictions import inputs_alone
from syngap.optim.tensors import tensors_of

__all__ = [
    "AS_TENSOR",
    "AS_TOKENS",
    "NO_BATCH",
    "are_inputs_and_labels",
    "changes_since",
    "check_known",
    "check_labels",
    "has_no_batch",
    "hints_for",
    "is_array",
    "kinds_of",
    "nonfinite_inputs",
    "vocabulary_hint",
]

AS_TENSOR = "such as torch.from_numpy(known)"
AS_TOKENS = 'such as tokenizer(texts, padding=True, return_tensors="pt")'
_OTHER_TYPE = "dtype|scalar type|Input type"
_NOT_FINITE = r"(?i)\bnan\b|\binf\b|finite|constraint"  # the last is what distributions say
NO_BATCH = (
    "Inputs of one dimension have no batch dimension: pass known[None] for one sample, "
    "torch.stack(known) for a list of samples, [x[None] for x in known] if their lengths differ"
)


def are_inputs_and_labels(parts: Sequence[Any]) -> bool:
    """Return whether two tensors look like inputs and their labels.

    Labels are one number a sample, classes of places beside real numbers, or a text's next tokens.

    Examples:
        >>> x, tokens = torch.randn(8, 3, 4, 4), torch.arange(24).view(4, 6)
        >>> are_inputs_and_labels([x, torch.zeros(8)]), are_inputs_and_labels([x, x])
        (True, False)
        >>> are_inputs_and_labels([x, torch.zeros(8, 4, 4, dtype=torch.long)])
        True
        >>> are_inputs_and_labels([tokens[:, :-1], tokens[:, 1:]])
        True
        >>> are_inputs_and_labels([tokens, torch.ones_like(tokens)])  # a mask
        False
    """
    if len(parts) != 2 or not all(isinstance(part, Tensor) and part.dim() for part in parts):
        return False
    inputs, other = parts
    if len(inputs) != len(other):
        return False
    if other.numel() == len(other) < inputs.numel():
        return True
    if other.is_floating_point() or other.dtype is torch.bool:
        return False
    if inputs.is_floating_point():
        return bool(other.dim() < inputs.dim())
    if inputs.shape != other.shape:
        return False
    ignored = other < 0  # such as -100
    is_next = ((other == inputs.roll(-1, -1)) | ignored)[..., :-1]
    return bool((is_next.numel() and is_next.all()) or ((other == inputs) | ignored).all())


def hints_for(model: nn.Module, batch: Any, message: str) -> Iterator[str]:
    """Yield what may be wrong with a batch that the model did not take."""
    leaves = list(_leaves(batch))
    if any(is_array(leaf) for leaf in leaves):
        yield f"Pass tensors, {AS_TENSOR}"
    if any(isinstance(leaf, (str, bytes)) for leaf in leaves):
        yield f"Pass tokens of texts, {AS_TOKENS}"
    if any(isinstance(leaf, (bool, int, float)) for leaf in leaves):
        yield (
            "Pass tensors in place of lists of numbers: a tokenizer makes them with "
            'padding=True, return_tensors="pt"'
        )
    if isinstance(batch, (tuple, list)) and are_inputs_and_labels(batch):
        yield f"Labels are not needed: pass {inputs_alone(2, 'known')}"
    if _are_labels(model, batch):
        yield "Whole numbers in one dimension look like labels: pass the inputs, not the labels"
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    own = [param.dtype for param in model.parameters() if param.is_floating_point()]
    for tensor in tensors:
        is_real = tensor.is_floating_point()
        if is_real and "Long, Int" in message:
            yield f"Tokens are whole numbers, and known has {tensor.dtype}: convert it by .long()"
        differs = _OTHER_TYPE if is_real else "same dtype|Input type"
        if own and tensor.dtype not in own and re.search(differs, message):
            yield f"Known has {tensor.dtype}, and the model {own[0]}: convert it by .to({own[0]})"
    if "index out of range" in message:
        yield from vocabulary_hint(model, tensors)
    if has_no_batch(batch):
        yield NO_BATCH
    if isinstance(batch, Mapping) and "argument" in message:
        yield (
            "A dict is passed as keyword arguments: if forward takes the dict itself, pass "
            "predict=lambda batch: model(batch)"
        )
    if "channels" in message and any(_has_channels_last(tensor) for tensor in tensors):
        yield "The channels are last, and the model has them first: pass known.permute(0, 3, 1, 2)"
    if re.search(_NOT_FINITE, message) and (found := nonfinite_inputs(batch)):
        yield f"Known inputs {found}"
    if tensors:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        yield f"The model did not take known inputs of shape {shapes}: pass what it was trained on"


def nonfinite_inputs(batch: Any) -> str:
    """Return what to say of numbers of a batch that are not finite, nothing where all are."""
    values = [each for each in tensors_of(batch) if each.is_floating_point()]
    bad = sum(each.numel() - int(each.isfinite().sum()) for each in values)
    total = count_of(sum(each.numel() for each in values), "number")
    advice = "leave out the samples that have them, or replace them"
    return f"have {bad} NaN or infinite among {total}: {advice}" if bad else ""


def kinds_of(model: nn.Module) -> dict[str, str]:
    """Return the types and the devices of a model's parameters."""
    params = list(model.parameters())
    found = {"dtype": {str(each.dtype) for each in params}}
    found["device"] = {str(each.device) for each in params}
    return {kind: " and ".join(sorted(values)) for kind, values in found.items()}


def changes_since(before: Mapping[str, str], model: nn.Module, message: str) -> Iterator[str]:
    """Yield what changed of a model's types and devices, where that may be why it failed.

    Args:
        before: what `kinds_of` returned at protect().
        model: the model now.
        message: of the error.
    """
    patterns = {"dtype": _OTHER_TYPE, "device": "device"}
    for kind, now in kinds_of(model).items():
        if now != before[kind] and re.search(patterns[kind], message):
            yield (
                f"The model's {kind} was {before[kind]} at protect(), and is {now} now: change it "
                "back, or call protect() anew"
            )


def vocabulary_hint(model: nn.Module, tensors: Sequence[Tensor]) -> Iterator[str]:
    """Yield that a token is not in the vocabulary, where one is not."""
    sizes = [len(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)]
    tokens = [int(part.max()) for part in tensors if not part.is_floating_point() and part.numel()]
    if sizes and tokens and max(tokens) >= max(sizes):
        yield (
            f"The largest token is {max(tokens)}, and the model has {max(sizes)}: take the "
            "tokenizer of this model"
        )


def _has_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.shape[-1] in (1, 3, 4) and tensor.shape[1] > 4


def is_array(value: Any) -> bool:
    """Return whether something is an array that is no tensor."""
    return hasattr(value, "__array__") and not isinstance(value, Tensor)


def has_no_batch(batch: Any) -> bool:
    """Return whether a batch, or each part of it, has one dimension."""
    parts = list(batch.values()) if isinstance(batch, Mapping) else [batch]
    return bool(parts) and all(isinstance(part, Tensor) and part.dim() < 2 for part in parts)


def _are_labels(model: nn.Module, batch: Any) -> bool:
    """Return whether a batch is whole numbers in one dimension, and the model reads no tokens."""
    whole = isinstance(batch, Tensor) and not batch.is_floating_point() and batch.dim() == 1
    return whole and not any(isinstance(part, nn.Embedding) for part in model.modules())


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _leaves(value)
    else:
        yield batch


def check_known(known: Any) -> None:
    """Refuse what is no known inputs, and say what to pass in its place."""
    if isinstance(known, Dataset) and not isinstance(known, Iterable):
        raise TypeError(
            "known is a Dataset, and protect() takes batches: pass DataLoader(known, batch_size=16)"
            ", or [x for x, y in DataLoader(known, batch_size=16)] if it has labels"
        )
    if is_array(known):
        raise TypeError(f"known is of type {type(known).__name__}: pass a tensor, {AS_TENSOR}")
    if isinstance(known, (str, bytes)) or not isinstance(known, Iterable):
        raise TypeError(
            "known must be a tensor, a dict of tensors or batches of them, got "
            f"{type(known).__name__}"
        )
    if isinstance(known, Tensor) and not known.dim():
        raise ValueError("known must have a batch dimension, got a tensor of one number")
    if not isinstance(known, (tuple, list)) or not all(isinstance(each, Tensor) for each in known):
        return
    are_tokens = all(not part.is_floating_point() and part.dim() > 1 for part in known)
    if are_inputs_and_labels(known) and (
        isinstance(known, tuple) or (known[0].shape != known[1].shape and not are_tokens)
    ):
        raise TypeError(
            f"pass known[0]: known is a {type(known).__name__} of inputs and what looks like their "
            "labels, which are not needed. If both are arguments of the model, pass [known]"
        )
    if isinstance(known, tuple):
        raise TypeError(
            f"known is a tuple of {count_of(len(known), 'tensor')}, which is one batch of "
            "arguments: pass [known], or a list for batches; labels are not needed"
        )


def check_labels(model: nn.Module, batch: Any) -> None:
    """Refuse a batch of more arguments than the model takes; warn of labels among them."""
    if not isinstance(batch, (tuple, list)) or not any(True for _ in tensors_of(batch)):
        return
    if _takes(model, batch[:1]) and not _takes(model, batch):
        raise TypeError(
            f"a batch of known has {count_of(len(batch), 'part')}, more than "
            f"{type(model).__name__} takes: labels are not needed, so pass "
            f"{inputs_alone(len(batch), 'known')}"
        )
    if _takes(model, batch[:1]) and are_inputs_and_labels(batch):
        Notices().warn(
            "labels",
            "the second part of a batch of known looks like labels, and the model gets it as its "
            "second argument: labels are not needed, so pass [x for x, y in known]. If it is an "
            "input, pass a dict of arguments by name",
        )


def _takes(model: nn.Module, arguments: Sequence[Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True
