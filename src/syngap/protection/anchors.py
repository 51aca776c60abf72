"""Known inputs: what to remember a model by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.optim.consolidation import Predict
from syngap.optim.tensors import gathered, local, tensors_of

__all__ = [
    "Pass",
    "batches_of",
    "copied",
    "cut",
    "fingerprint",
    "length",
    "mask_of",
    "moved",
    "part_of",
    "tensors_of",
]


class Pass(nn.Module):
    """A model behind `predict`, so that `functional_call` exchanges its parameters."""

    def __init__(self, model: nn.Module, predict: Predict) -> None:
        super().__init__()
        self.model, self._predict = model, predict

    def forward(self, batch: Any, use: Callable[[Any], None]) -> None:
        """Let `use` have the prediction."""
        use(self._predict(batch))


def batches_of(known: Any, size: int) -> list[Any]:
    """Return known inputs as batches.

    Args:
        known: one tensor; one dict of tensors, as a tokenizer returns; or batches, each a tensor, a
            tuple of arguments or a dict of keyword arguments.
        size: of the batches that a tensor or a dict is cut into.
    """
    found = cut([known], size) if isinstance(known, (Tensor, Mapping)) else list(known)
    found = [batch for batch in found if length(batch) != 0]
    if not found:
        raise ValueError("known has no inputs, or they were used up before: pass a list of batches")
    return found


def cut(batches: Iterable[Any], size: int) -> list[Any]:
    """Return batches of at most `size`; what is not of tensors of one length is taken whole."""
    return [part for batch in batches for part in _parts(batch, size)]


def _parts(batch: Any, size: int) -> Iterator[Any]:
    rows = length(batch)
    if rows is None or rows <= size:
        yield batch
        return
    for start in range(0, rows, size):
        yield part_of(batch, slice(start, start + size))


def part_of(batch: Any, rows: slice) -> Any:
    """Return some rows of a batch whose parts are tensors of one length."""
    return _each(batch, lambda value: value[rows])


def length(batch: Any) -> int | None:
    """Return the length of a batch, None where its parts are not tensors of one length."""
    values: Iterable[Any]
    if isinstance(batch, Tensor):
        values = [batch]
    elif isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, (tuple, list)):
        values = batch
    else:
        return None
    lengths = {
        value.shape[0] if isinstance(value, Tensor) and value.dim() else None for value in values
    }
    return lengths.pop() if len(lengths) == 1 else None


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch whose tensors are on a device."""
    return _each(batch, lambda value: value.to(device))


def copied(batch: Any) -> Any:
    """Return a batch whose tensors are copies."""
    return _each(batch, Tensor.clone)


def _each(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch whose tensors are changed, the rest as it is."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _each(value, change) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_each(value, change) for value in batch)
    return batch


def mask_of(batch: Any, prediction: Any) -> Tensor | None:
    """Return which predictions of a batch are not of padding, None for all."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(prediction, (Tensor, Distribution)):
        return None  # which whoever reads it refuses
    shape = prediction.shape[:-1] if isinstance(prediction, Tensor) else prediction.batch_shape
    if isinstance(mask, Tensor) and mask.shape == shape:
        return mask.bool()
    return None


def fingerprint(batches: Iterable[Any], params: Iterable[Tensor]) -> str:
    """Return a short text that other inputs, or other weights, would not give."""
    sums = [f"{_sum(value):.6g}" for batch in batches for value in tensors_of(batch)]
    weights = torch.stack(
        [gathered(local(param.detach()), param).double().sum().cpu() for param in params]
    )
    total = sum((place + 1) * float(number) for place, number in enumerate(sums))
    return f"{len(sums)} {total:.6g} {weights.abs().sum():.6g}"


def _sum(value: Tensor) -> float:
    return float(value.double().abs().sum() if not value.is_complex() else 0.0)
