"""Known inputs: what to remember a model by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.optim.predictions import Predict
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
    "place_of",
    "tensors_of",
    "warn_of_padding",
]


_CHUNK = 1 << 20  # numbers at a time


class Pass(nn.Module):
    """A model behind `predict`, so that `functional_call` exchanges its parameters."""

    def __init__(self, model: nn.Module, predict: Predict) -> None:
        super().__init__()
        self.model, self._predict = model, predict

    def forward(self, batch: Any, use: Callable[[Any], None]) -> None:
        """Let `use` have the prediction."""
        use(self._predict(batch))


def batches_of(
    known: Any, size: int, anchors: int, *, own: bool = True
) -> tuple[list[Any], list[Any]]:
    """Return known inputs as batches to take importance from, and as batches of the teacher.

    Torch's random numbers are afterwards what they were: to iterate over a DataLoader draws some.

    Args:
        known: one tensor; one dict of tensors, as a tokenizer returns; or batches, each a tensor, a
            tuple of arguments or a dict of keyword arguments.
        size: of the batches that a tensor or a dict is cut into, for importance.
        anchors: inputs of a batch of the teacher, at most.
        own: whether they are copies, which nobody else can write to.
    """
    is_one = isinstance(known, (Tensor, Mapping))
    with torch.random.fork_rng(devices=[]):
        found = [copied(batch) if own else batch for batch in ([known] if is_one else known)]
    found = [batch for batch in found if length(batch) != 0]
    if not found:
        raise ValueError("known has no inputs, or they were used up before: pass a list of batches")
    return cut(found, size) if is_one else found, cut(found, anchors)


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
    """Return a batch whose tensors are copies, without the graphs that they may have."""
    return _each(batch, lambda value: value.detach().clone())


def _each(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch whose tensors are changed, the rest as it is."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _each(value, change) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_each(value, change) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def mask_of(batch: Any, prediction: Any) -> Tensor | None:
    """Return which predictions of a batch are not of padding, None for all."""
    mask = _padding(batch)[1]
    return mask.bool() if mask is not None and mask.shape == _places(prediction) else None


def warn_of_padding(batch: Any, prediction: Any, warn: Callable[[str, str], None]) -> None:
    """Warn where a batch has padding, and predictions are at other places than its mask."""
    name, mask = _padding(batch)
    places = _places(prediction)
    if mask is None or places is None or mask.shape == places:
        return
    if mask.dim() == len(places) > 1 and len(mask) == places[0] and not mask.bool().all():
        warn(
            "padding",
            f"predictions for known inputs have shape {tuple(places)} without classes, and their "
            f"{name} has {tuple(mask.shape)}, so padding counts as well: let predict= return one "
            "prediction for each token, also for the last, as labels are not needed",
        )


def _padding(batch: Any) -> tuple[str, Tensor | None]:
    """Return the mask of what a batch has predictions for, and its name."""
    names = [name for name in batch if isinstance(name, str)] if isinstance(batch, Mapping) else []
    has_decoder = any(name.startswith("decoder_") for name in names)
    name = "decoder_attention_mask" if has_decoder else "attention_mask"
    mask = batch[name] if name in names else None
    return name, mask if isinstance(mask, Tensor) else None


def _places(prediction: Any) -> torch.Size | None:
    """Return the shape of predictions without their classes; None where whoever reads refuses."""
    if isinstance(prediction, Distribution):
        return prediction.batch_shape
    return prediction.shape[:-1] if isinstance(prediction, Tensor) else None


def fingerprint(batches: Iterable[Any], params: Iterable[Tensor]) -> str:
    """Return a short text that other inputs, or other weights, would not give.

    Sign and place of every number count; differences of rounding do not.
    """
    inputs = [_mark(value) for batch in batches for value in tensors_of(batch)]
    weights = [_mark(gathered(local(param.detach()), param)) for param in params]
    return f"{len(inputs)} {_joined(inputs)} {_joined(weights)}"


def _mark(value: Tensor) -> tuple[float, float]:
    """Return the norm, and the sum of numbers times cosines of their places, relative to it.

    Examples:
        >>> _mark(torch.tensor([1.0, -1.0])) == _mark(torch.tensor([-1.0, 1.0]))
        False
    """
    flat = torch.view_as_real(value).flatten() if value.is_complex() else value.flatten()
    sums = torch.zeros(2, dtype=torch.float64, device=flat.device)
    for first in range(0, flat.numel(), _CHUNK):
        part = flat[first : first + _CHUNK].double()
        places = torch.arange(first, first + len(part), device=part.device, dtype=part.dtype)
        sums += torch.stack([part @ part, part @ places.cos()])
    squares, placed = sums.tolist()
    return squares**0.5, placed / max(squares**0.5, 1e-300)


def _joined(marks: Sequence[tuple[float, float]]) -> str:
    norms = sum((place + 1) * norm for place, (norm, _) in enumerate(marks))
    placed = sum(math.cos(place) * share for place, (_, share) in enumerate(marks))
    return f"{norms:.6g} {placed:.5f}"


def place_of(number: int, count: int, seed: int) -> int:
    """Return which inputs the n-th call takes: all in an order of their own, again and again.

    It follows from the number alone, so that a resumed run goes on as the first would have.
    """
    rounds, place = divmod(number, count)
    generator = torch.Generator().manual_seed(seed + 1_000_003 * rounds)
    return int(torch.randperm(count, generator=generator, device="cpu")[place])
