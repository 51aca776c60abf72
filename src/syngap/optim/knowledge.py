"""What a model knows, taken from inputs without labels: directions of its weights, and importance.

Two passes over the inputs, with labels drawn from the model. The first sums the second moments of
what each weight is multiplied with and of the gradient of log p, whose eigenvectors are the basis
(K-FAC). Of many inputs it takes every second batch. The second squares the gradient of each sample
in that basis (EKFAC). Of more than twice 65,536 predictions both take some, evenly spread:

    F = 1/N Σ_s (Lᵀ G_s R)²,   G_s = Σ_rows left ⊗ right
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.optim.basis import Basis
from syngap.optim.errors import UNRELATED, Notices
from syngap.optim.moments import (
    Moments,
    Rank,
    add_moments,
    find_bases,
    half_is_enough,
    require_finite,
)
from syngap.optim.parameter_state import DIRECTIONS, basis_in, grown
from syngap.optim.plasticity import Means
from syngap.optim.predictions import Predict, Progress, predictions
from syngap.optim.scores import SCALE, Prediction, read_prediction, require_classes_last
from syngap.optim.sharded import reshard, whole_leaves
from syngap.optim.squares import Gathering, Known, Scored, gradients
from syngap.optim.tensors import (
    accumulator,
    as_shard,
    is_sharded,
    kept_in,
    part_of,
    tensors_of,
)
from syngap.optim.uses import Key, Recorder, Use

__all__ = ["Knowledge", "Known", "adopt_knowledge", "grow_knowledge", "take_knowledge"]

Masks: TypeAlias = Callable[[Any, "Tensor | Distribution"], "Tensor | None"]

_ENOUGH = 1 << 16  # predictions, as of 256 texts of 256 tokens: more hardly change importance
_SAMPLES = 256  # at least
_AGREES = 0.05  # relative error, which half precision stays below


@dataclass(frozen=True)
class Knowledge:
    """What is known of a model, and of which parameters nothing is.

    Attributes:
        by_param: what is known of each parameter.
        mean: μ, the mean importance over all of them; None where nothing is known.
        numel: how many numbers they had together.
        frozen_before: parameters that were frozen when it was taken.
    """

    by_param: Mapping[Tensor, Known] = field(default_factory=dict)
    mean: Tensor | None = None
    numel: int = 0
    frozen_before: Collection[Tensor] = ()

    @classmethod
    def of(cls, known: Mapping[Tensor, Known], model: nn.Module) -> Knowledge:
        """Return what is known of the parameters of a model."""
        frozen = {param for param in model.parameters() if not param.requires_grad}
        if not known:
            return cls(known, frozen_before=frozen)
        states = [{"mean": one.mean.to(accumulator(param.dtype))} for param, one in known.items()]
        numel = sum(param.numel() for param in known)
        return cls(known, Means(list(known), states).network(), numel, frozen)

    def means(self, params: Sequence[Tensor], states: Sequence[dict[str, Any]]) -> Means:
        """Return means of an optimizer's parameters, of which others do not change μ."""
        if self.mean is None:
            return Means(params, states)
        known = [self.by_param.get(param) for param in params]
        before = [None if one is None else one.mean for one in known]
        return Means(params, states, (self.mean, before), self.numel)

    def __getstate__(self) -> dict[str, Any]:
        """Leave frozen parameters out of copies and pickles."""
        return vars(self) | {"by_param": dict(self.by_param), "frozen_before": ()}


def take_knowledge(
    model: nn.Module,
    inputs: Iterable[Any],
    *,
    rank: Rank = "full",
    find: Callable[..., dict[Tensor, Basis]] | None = None,
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
        find: takes moments, rank and dtype, and returns bases; None is `find_bases`.
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
    taken = list(range(len(batches)))
    skipped: set[int] = set()
    # Forward passes of sharded weights wait for all processes, whose shapes may differ.
    may_skip = not any(is_sharded(param) for param in model.parameters())
    for scored in passes.run((place for place in range(len(batches)) if place not in skipped), 0):
        is_first, count, samples = covered is None, scored.count, scored.batch
        if covered is None:
            if not scored.scores:
                raise ValueError(UNRELATED)
            covered = _explained(scored, params)
            passes.wanted = []
        add_moments(scored.factors(covered), sides)
        del scored
        if is_first and may_skip:
            taken = _spread(batches, count, samples, sides)
            half = taken[::2] if half_is_enough(sides, len(taken)) else taken
            skipped.update(set(range(len(batches))) - set(half))
    assert covered is not None
    sides = {
        key: side
        for key, side in sides.items()
        if any(bool(use.squares(place) > 0) for use in side.uses for place in (0, 1))
    }
    require_finite(sides, model)
    bases = (find or find_bases)(sides, rank, dtype)
    rows = {param: max(int(use.rows) for use in side.uses) for (param, _), side in sides.items()}
    sides.clear()  # moments are large
    gathering = Gathering(bases, set(rows), params)
    passes.wanted = [param for param in params if param not in gathering.covered]
    for scored in passes.run(taken, len(batches)):
        gathering.add(scored)
        del scored
    return gathering.finish(rows)


def _spread(
    batches: list[Any], count: int, samples: int, sides: Mapping[Key, Moments]
) -> list[int]:
    """Return the batches that are enough: one at random of each few that follow one another.

    It follows from shapes alone, so that all processes decide alike. Batches of several sizes, and
    matrices of a stack, which may be used by few batches, get all.

    Args:
        batches: all.
        count: predictions of the first one.
        samples: how many it has.
        sides: its moments.
    """
    total = len(batches)
    sizes = {tensor.shape[:1] for batch in batches[:-1] for tensor in tensors_of(batch)}
    step = min(total * count // _ENOUGH, total * samples // _SAMPLES) if len(sizes) == 1 else 1
    while step > 1 and not half_is_enough(sides, 2 * (total // step)):
        step -= 1
    if step <= 1:
        return list(range(total))
    order = torch.Generator().manual_seed(0)
    drawn = torch.randint(step, (-(-total // step),), generator=order, device="cpu").tolist()
    places = [min(total - 1, step * block + place) for block, place in enumerate(drawn)]
    return [0, *places[1:]]  # the first has been looked at


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
        self.progress, self._notices = progress, Notices()
        self.wanted = params  # whose gradients are taken as well
        self.leaves = whole_leaves(model, params)

    def run(self, places: Iterable[int], done: int) -> Iterator[Scored]:
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
                if isinstance(prediction, Tensor):
                    require_classes_last(prediction, mask=mask, warn=self._notices.warn)
                    if prediction.is_floating_point() and not prediction.requires_grad:
                        raise ValueError(UNRELATED)
                read = read_prediction(prediction, mask=mask, generator=self.generator)
                del prediction  # here and below: none is in memory beside the next
                self._name(recorder.uses, params)
                if read.count:
                    yield self._scored(read, recorder.uses)
                del read
                recorder.uses.clear()
                if self.progress is not None:
                    self.progress(done + taken[-1] + 1, 2 * len(self.batches))
        if self.progress is not None and done and taken[-1] + 1 < len(self.batches):
            self.progress(2 * len(self.batches), 2 * len(self.batches))
        reshard(self.model)

    @staticmethod
    def _name(uses: list[Use], params: Mapping[Tensor, Tensor]) -> None:
        for use in uses:
            use.key = params[use.key[0]], use.key[1]

    def _scored(self, read: Prediction, uses: list[Use]) -> Scored:
        outputs = list({id(use.output): use.output for use in uses}.values())
        inputs = [*outputs, *(self.leaves[param] for param in self.wanted)]
        # Of a model without a layer that is recognised there may be nothing to ask for.
        found = inputs and torch.autograd.grad(
            read.output, inputs, read.cotangent * SCALE, allow_unused=True
        )
        deltas = dict(zip(map(id, outputs), found[: len(outputs)], strict=True))
        kept = [use for use in uses if deltas[id(use.output)] is not None]
        scores = dict(zip(self.wanted, found[len(outputs) :], strict=True))
        known = {param: score for param, score in scores.items() if score is not None}
        count = int(read.count)
        return Scored(
            kept, [deltas[id(use.output)] for use in kept], known, read.output.shape[0], count
        )


def _explained(scored: Scored, params: list[Tensor]) -> set[Tensor]:
    """Return the parameters whose gradient is the sum over their recorded uses.

    One that is also used in another way, or whose uses are not what they seem, keeps its entries.
    """
    sums: dict[Tensor, Tensor] = {}
    shared: set[Tensor] = set()
    for use, left, right in scored.factors(set(params)):
        param, index = use.key
        shared |= {param} if left.are_shared(scored.batch) else set()
        found = gradients([(left.pooled(), right.pooled())], None, param, index)[0]
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
