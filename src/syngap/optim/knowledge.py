"""What a model knows, taken from inputs without labels: directions of its weights, and importance.

Two passes over the inputs, with labels drawn from the model. The first sums the second moments of
what each weight is multiplied with and of the gradient of log p, whose eigenvectors are the basis
(K-FAC). Of many inputs it takes every second batch. The second squares the gradient of each sample
in that basis (EKFAC). Both leave batches out, evenly, where there are more than 65,536 predictions:

    F = 1/N Σ_s (Lᵀ G_s R)²,   G_s = Σ_rows left ⊗ right
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.optim.basis import Basis
from syngap.optim.consolidation import Predict, Progress, predictions
from syngap.optim.moments import (
    Moments,
    Rank,
    add_moments,
    find_bases,
    half_is_enough,
    require_finite,
)
from syngap.optim.scores import SCALE, Prediction, read_prediction
from syngap.optim.sharded import reshard, whole_leaves
from syngap.optim.state_transfer import DIRECTIONS, basis_in, grown
from syngap.optim.tensors import accumulator, as_shard, is_sharded, kept_in, part_of
from syngap.optim.uses import Key, Recorder, Rows, Use

__all__ = ["Known", "adopt_knowledge", "grow_knowledge", "take_knowledge"]

Masks: TypeAlias = Callable[[Any, "Tensor | Distribution"], "Tensor | None"]

_ENOUGH = 1 << 16  # predictions, as of 256 texts of 256 tokens: more hardly change importance
_TOGETHER = 1 << 26  # numbers of per-sample gradients in memory at a time
_AGREES = 0.05  # relative error, which half precision stays below


@dataclass
class Known:
    """What is known of a parameter.

    Attributes:
        importance: F, in the coordinates of `basis`.
        mean: the mean of F over all directions, those that the basis leaves out included.
        basis: None where the coordinates are its entries.
        rows: how many rows gave it its basis; 0 where it was taken from whole batches.
    """

    importance: Tensor
    mean: Tensor
    basis: Basis | None = None
    rows: int = 0


def take_knowledge(
    model: nn.Module,
    inputs: Iterable[Any],
    *,
    rank: Rank = "full",
    dtype: torch.dtype | None = None,
    mask_of: Masks = lambda batch, prediction: None,
    predict: Predict | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> dict[Tensor, Known]:
    """Return what a model knows of its trainable parameters, by parameter.

    Args:
        model: as it is; nothing of it changes.
        inputs: batches; of many, some that are evenly spread are enough.
        rank: "full" takes all directions of both sides of a weight; a number, or a share of all,
            the most important ones of the inputs' side, and entries on the other.
        dtype: of the bases; None is the weights' own, at least float32.
        mask_of: returns which predictions of a batch count, None for all.
        predict: computes logits or a distribution from a batch in place of `model(batch)`.
        generator: source of the drawn labels.
        progress: called after each batch with the number done and, where known, of all.
    """
    params: list[Tensor] = [param for param in model.parameters() if param.requires_grad]
    batches = list(inputs)
    passes = _Passes(model, batches, params, mask_of, predict, generator, progress)
    sides: dict[Key, Moments] = {}
    covered: set[Tensor] | None = None
    taken = range(len(batches))
    skipped: set[int] = set()
    # Forward passes of sharded weights wait for all processes, whose shapes may differ.
    may_skip = not any(is_sharded(param) for param in model.parameters())
    for scored in passes.run((place for place in range(len(batches)) if place not in skipped), 0):
        is_first, count = covered is None, scored.count
        if covered is None:
            covered = _explained(scored, params)
            passes.wanted = []
        add_moments(scored.factors(covered), sides)
        del scored
        if is_first and may_skip:
            taken = taken[:: max(1, len(batches) * count // _ENOUGH)]
            half = taken[::2] if half_is_enough(sides, len(taken)) else taken
            skipped.update(set(range(len(batches))) - set(half))
    assert covered is not None
    sides = {
        key: side
        for key, side in sides.items()
        if any(bool(use.squares(place) > 0) for use in side.uses for place in (0, 1))
    }
    require_finite(sides, model)
    bases = find_bases(sides, rank, dtype)
    rows = {param: max(int(use.rows) for use in side.uses) for (param, _), side in sides.items()}
    sides.clear()  # moments are large
    gathering = _Gathering(bases, set(rows), params)
    passes.wanted = [param for param in params if param not in gathering.covered]
    for scored in passes.run(taken, len(batches)):
        gathering.add(scored)
        del scored
    return gathering.finish(rows)


def adopt_knowledge(param: Tensor, state: dict[str, Any], known: Known, compact: bool) -> None:
    """Put what is known of a parameter into its state, where observations go on from it."""
    importance = known.importance.to(param.device, kept_in(param.dtype, compact))
    known.importance = importance.to("cpu", copy=True)  # for another optimizer
    state["importance"] = (
        as_shard(part_of(importance, param), param) if known.basis is None else importance
    )
    state["mean"] = known.mean.to(accumulator(param.dtype))
    state |= _sides(known)


def grow_knowledge(known: Known, old: Tensor, new: Tensor) -> Known:
    """Return what is known of a parameter for a larger one in its place."""
    importance = known.importance.to(new.device)
    state = {"importance": importance, "mean": known.mean, **_sides(known)}
    larger = grown(state, old, new)
    return Known(larger["importance"], larger["mean"], basis_in(larger), known.rows)


def _sides(known: Known) -> dict[str, Tensor]:
    if known.basis is None:
        return {}
    sides = zip(DIRECTIONS, (known.basis.left, known.basis.right), strict=True)
    return {name: side for name, side in sides if side is not None}


# Passes -------------------------------------------------------------------------------------------


@dataclass
class _Scored:
    """A batch whose labels were drawn: the uses of weights in it, and gradients of log p."""

    uses: list[Use]
    deltas: list[Tensor]
    scores: dict[Tensor, Tensor]
    batch: int
    count: int

    def factors(self, wanted: set[Tensor]) -> Iterator[tuple[Use, Rows, Rows]]:
        """Yield the rows of each use, scaled so that squares are sums over predictions."""
        for use, delta in zip(self.uses, self.deltas, strict=True):
            if use.key[0] in wanted:
                yield use, *self._rows(use, delta)

    def by_weight(self, wanted: set[Tensor]) -> Iterator[tuple[Key, Sequence[tuple[Rows, Rows]]]]:
        """Yield the rows of all uses of one weight at a time, which take much memory."""
        uses: dict[Key, list[tuple[Use, Tensor]]] = {}
        for use, delta in zip(self.uses, self.deltas, strict=True):
            if use.key[0] in wanted:
                uses.setdefault(use.key, []).append((use, delta))
        for key, pairs in uses.items():
            yield key, [self._rows(use, delta) for use, delta in pairs]

    def _rows(self, use: Use, delta: Tensor) -> tuple[Rows, Rows]:
        delta = delta * (self.count**0.5 / SCALE)
        return use.factors(delta, self.batch, accumulator(use.key[0].dtype))


class _Passes:
    def __init__(
        self,
        model: nn.Module,
        batches: list[Any],
        params: list[Tensor],
        mask_of: Masks,
        predict: Predict | None,
        generator: torch.Generator | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.batches, self.params = model, batches, params
        self.mask_of, self.predict, self.generator = mask_of, predict, generator
        self.progress = progress
        self.wanted = params  # whose gradients are taken as well
        self.leaves = whole_leaves(model, params)

    def run(self, places: Iterable[int], done: int) -> Iterator[_Scored]:
        """Yield the batches at some places; `done` were there before."""
        recorder = Recorder(self.leaves.values())
        params = {leaf: param for param, leaf in self.leaves.items()}
        taken: list[int] = []

        def batches() -> Iterator[Any]:
            for place in places:
                taken.append(place)
                yield self.batches[place]

        with torch.enable_grad():
            for prediction in predictions(
                self.model,
                batches(),
                batch_size=1,
                predict=self.predict,
                progress=None,
                generator=None,
                during=recorder,
            ):
                mask = self.mask_of(self.batches[taken[-1]], prediction)
                read = read_prediction(prediction, mask=mask, generator=self.generator)
                del prediction  # here and below: none is in memory beside the next
                self._name(recorder.uses, params)
                if read.count:
                    yield self._scored(read, recorder.uses)
                del read
                recorder.uses.clear()
                if self.progress is not None:
                    self.progress(done + taken[-1] + 1, 2 * len(self.batches))
        reshard(self.model)

    @staticmethod
    def _name(uses: list[Use], params: Mapping[Tensor, Tensor]) -> None:
        for use in uses:
            use.key = params[use.key[0]], use.key[1]

    def _scored(self, read: Prediction, uses: list[Use]) -> _Scored:
        outputs = list({id(use.output): use.output for use in uses}.values())
        found = torch.autograd.grad(
            read.output,
            [*outputs, *(self.leaves[param] for param in self.wanted)],
            read.cotangent * SCALE,
            allow_unused=True,
        )
        deltas = dict(zip(map(id, outputs), found[: len(outputs)], strict=True))
        kept = [use for use in uses if deltas[id(use.output)] is not None]
        scores = dict(zip(self.wanted, found[len(outputs) :], strict=True))
        known = {param: score for param, score in scores.items() if score is not None}
        count = int(read.count)
        return _Scored(
            kept, [deltas[id(use.output)] for use in kept], known, read.output.shape[0], count
        )


def _explained(scored: _Scored, params: list[Tensor]) -> set[Tensor]:
    """Return the parameters whose gradient is the sum over their recorded uses.

    One that is also used in another way, or whose uses are not what they seem, keeps its entries.
    """
    sums: dict[Tensor, Tensor] = {}
    shared: set[Tensor] = set()
    for use, left, right in scored.factors(set(params)):
        param, index = use.key
        if left.is_one_hot and left.groups != scored.batch:  # looked up once for all samples
            shared.add(param)
        found = _gradients([(left.pooled(), right.pooled())], None, param, index)[0]
        total = sums.setdefault(param, found.new_zeros(param.shape))
        (total if index is None else total[index]).view(found.shape).add_(found)
    scale = scored.count**0.5 / SCALE
    return {
        param
        for param, total in sums.items()
        if param in scored.scores
        and param not in shared
        and _distance(total, scored.scores[param].to(total.dtype) * scale) <= _AGREES
    }


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=torch.finfo(one.dtype).tiny))


# Importance ---------------------------------------------------------------------------------------


class _Gathering:
    """Sums squares of gradients, sample by sample where it is known which rows are whose."""

    def __init__(
        self, bases: dict[Tensor, Basis], covered: set[Tensor], params: list[Tensor]
    ) -> None:
        self.bases, self.covered, self.params = bases, covered, params
        self.sums: dict[Tensor, Tensor] = {}
        self.squares: dict[Tensor, Tensor] = {}
        self.count = 0

    def add(self, scored: _Scored) -> None:
        self.count += scored.count
        for (param, index), factors in scored.by_weight(self.covered):
            basis = self._basis(param, index)
            total = self._total(param)
            part = total if index is None else total[index]
            for gradients in _in_parts(factors, basis, param, index):
                square = gradients.square().sum(0)
                part.view(square.shape).add_(square)
            if basis is not None and not basis.is_complete:
                self._note(param, _squared_norm(factors, param, index))
        for param, score in scored.scores.items():
            if param not in self.covered:
                wide = score.to(accumulator(param.dtype))
                self._total(param).addcmul_(wide, wide, value=scored.count / SCALE**2)

    def finish(self, rows: Mapping[Tensor, int]) -> dict[Tensor, Known]:
        known = {}
        for param in self.params:
            importance = self._total(param) / max(1, self.count)
            total = self.squares.get(param)
            total = importance.sum() if total is None else total / max(1, self.count)
            mean = total / max(1, param.numel())
            known[param] = Known(importance, mean, self.bases.get(param), rows.get(param, 0))
        return known

    def _basis(self, param: Tensor, index: int | None) -> Basis | None:
        basis = self.bases.get(param)
        if basis is None or index is None:
            return basis
        sides = (basis.left, basis.right)
        return Basis(*(None if side is None else side[index] for side in sides))

    def _total(self, param: Tensor) -> Tensor:
        if param not in self.sums:
            basis, dtype = self.bases.get(param), accumulator(param.dtype)
            shape = param.shape if basis is None else basis.shape(param)
            self.sums[param] = torch.zeros(shape, dtype=dtype, device=param.device)
        return self.sums[param]

    def _note(self, param: Tensor, square: Tensor) -> None:
        self.squares[param] = self.squares[param] + square if param in self.squares else square


def _in_parts(
    factors: Sequence[tuple[Rows, Rows]], basis: Basis | None, param: Tensor, index: int | None
) -> Iterator[Tensor]:
    """Yield gradients (groups, k0, k1) of some samples at a time, summed over all uses."""
    groups = {left.groups for left, _ in factors}
    if len(groups) > 1:
        factors = [(left.pooled(), right.pooled()) for left, right in factors]
        groups = {1}
    (count,) = groups
    size = (param.shape if index is None else param.shape[1:]).numel()
    together = max(1, _TOGETHER // max(1, size))
    for start in range(0, count, together):
        part = slice(start, start + together)
        yield _gradients(
            [
                (Rows(left.values[part], left.is_one_hot), Rows(right.values[part]))
                for left, right in factors
            ],
            basis,
            param,
            index,
        )


def _gradients(
    factors: Sequence[tuple[Rows, Rows]], basis: Basis | None, param: Tensor, index: int | None
) -> Tensor:
    total: Tensor | None = None
    for left, right in factors:
        rows = _rotated(right.values, None if basis is None else basis.right)
        if left.is_one_hot:
            vocabulary = param.shape[0 if index is None else 1]
            found = rows.new_zeros(len(rows), vocabulary, rows.shape[-1])
            tokens = left.values.unsqueeze(-1).expand_as(rows)
            found.scatter_add_(1, tokens, rows)
            side = None if basis is None else basis.left
            found = found if side is None else side.mT.to(found.dtype) @ found
        else:
            found = _rotated(left.values, None if basis is None else basis.left).mT @ rows
        total = found if total is None else total.add_(found)
    assert total is not None
    return total


def _rotated(rows: Tensor, directions: Tensor | None) -> Tensor:
    return rows if directions is None else rows @ directions.to(rows.dtype)


def _squared_norm(factors: Sequence[tuple[Rows, Rows]], param: Tensor, index: int | None) -> Tensor:
    """Return Σ_s |G_s|², over all directions."""
    if len(factors) == 1 and not factors[0][0].is_one_hot:
        (left, right) = factors[0]
        if left.values.shape[1] <= min(left.values.shape[2], right.values.shape[2]):
            grams = [rows.values @ rows.values.mT for rows in (left, right)]
            return (grams[0] * grams[1]).sum()
    parts = [part.square().sum() for part in _in_parts(factors, None, param, index)]
    return torch.stack(parts).sum()
