"""Estimates of the Fisher diagonal: from what labels, by which pass, of whose processes, and when.

`scores` has why the square of summed scores is unbiased for it, `exact` sums squares.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.optim import distributed, sharded
from syngap.optim.checks import check_whole
from syngap.optim.errors import NotFiniteError, Notices
from syngap.optim.exact import CallRecorder, squared_scores
from syngap.optim.scores import (
    SCALE,
    Prediction,
    read_prediction,
    require_classes_last,
    score_sums,
    suspect_probabilities,
)
from syngap.optim.tensors import is_sharded, sum_over_shards, wide

__all__ = ["Estimator", "EstimatorName", "Observation", "Schedule", "merged"]

EstimatorName: TypeAlias = Literal["sampled", "exact", "empirical"]


@dataclass
class Observation:
    """An estimate of the Fisher diagonal: weight · values², or weight · values if squared already.

    A single estimate keeps its scores, which a step squares and folds in one pass over memory.

    Attributes:
        values: by parameter; one that took no part is absent.
        means: the mean of the diagonal over each of those parameters.
        count: how many predictions it is the mean of.
        squared: whether `values` are squares.
        weight: what the squares are multiplied with.
        moments: second moments by parameter and side, where `directions` follow them.
    """

    values: dict[Tensor, Tensor]
    means: dict[Tensor, Tensor]
    count: int | Tensor
    squared: bool
    weight: float = 1.0
    moments: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def of_scores(
        cls, scores: dict[Tensor, Tensor], count: int | Tensor, weight: float
    ) -> Observation:
        """Describe score sums, one backward pass's."""
        values = list(scores.values())
        norms = torch._foreach_norm([wide(value) for value in values])
        means = _per_element(list(torch._foreach_mul(norms, norms)), list(scores), weight)
        return cls(scores, means, count, squared=False, weight=weight)

    @classmethod
    def of_squares(
        cls, squares: dict[Tensor, Tensor], count: int | Tensor, weight: float
    ) -> Observation:
        """Describe sums of per-sample squares."""
        means = _per_element([square.sum() for square in squares.values()], list(squares), weight)
        return cls(squares, means, count, squared=True, weight=weight)

    def diagonal(self, value: Tensor) -> Tensor:
        """Return one of `values` as its part of the diagonal."""
        return (value if self.squared else wide(value).square()) * self.weight

    def is_finite(self) -> bool:
        """Return whether every value is; a mean of squares is finite only if they are."""
        return bool(self._stacked_means().isfinite().all())

    def without_overflow(self) -> Observation:
        """Return the same with tensors that overflowed counted as zero, decided on the device."""
        stacked = self._stacked_means()
        finite, zero = stacked.isfinite(), stacked.new_zeros(())
        values = {
            param: torch.where(flag, value, zero)
            for flag, (param, value) in zip(finite.unbind(), self.values.items(), strict=True)
        }
        means = dict(zip(values, stacked.where(finite, zero).unbind(), strict=True))
        return Observation(values, means, self.count, self.squared, self.weight)

    def _stacked_means(self) -> Tensor:
        first = next(iter(self.means.values()))
        return torch.stack([mean.to(first) for mean in self.means.values()])


def merged(earlier: Observation | None, later: Observation | None) -> Observation | None:
    """Return the average of two observations, each counting by its predictions."""
    if earlier is None or later is None:
        return later if earlier is None else earlier
    count = earlier.count + later.count
    values: dict[Tensor, Tensor] = {}
    means: dict[Tensor, Tensor] = {}
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for part in (earlier, later):
        share = _share(part.count, count)
        for param, value in part.values.items():
            square = part.diagonal(value) * share
            values[param] = values[param].add_(square) if param in values else square
            mean = part.means[param] * share
            means[param] = means[param] + mean if param in means else mean
        for param, sides in part.moments.items():
            so_far = moments.get(param, {})
            moments[param] = {side: sides[side] * share + so_far.get(side, 0.0) for side in sides}
    return Observation(values, means, count, squared=True, moments=moments)


def _share(part: int | Tensor, whole: int | Tensor) -> float | Tensor:
    if isinstance(whole, Tensor):  # a mask may leave out everything, and only the device knows
        return torch.as_tensor(part, device=whole.device).double() / whole.clamp(min=1)
    return part / whole


def _per_element(sums: list[Tensor], params: list[Tensor], weight: float) -> dict[Tensor, Tensor]:
    sums = sum_over_shards(sums, params)
    means = torch._foreach_mul(sums, [weight / max(1, param.numel()) for param in params])
    return dict(zip(params, means, strict=True))


class Estimator:
    """Estimates the Fisher diagonal of parameters; see `SynGAP` for its arguments.

    Attributes:
        recorder: the hooks of "exact", None otherwise.
    """

    def __init__(
        self,
        name: EstimatorName,
        generator: torch.Generator | None,
        model: nn.Module | None,
        process_group: distributed.Group,
    ) -> None:
        if name not in ("sampled", "exact", "empirical"):
            raise ValueError(f"estimator must be 'sampled', 'exact' or 'empirical', got {name!r}")
        distributed.check_group(process_group)
        self.name = name
        self.generator = generator
        self.model = model
        self.process_group = process_group
        self.recorder: CallRecorder | None = None
        self._notices = Notices()
        self._has_looked = False
        if name == "exact":
            self.recorder = CallRecorder()
            self.attach()

    def attach(self) -> None:
        """Hook the model's modules, also those that it gained since."""
        if self.recorder is None:
            return
        if self.model is None:
            raise ValueError(
                "estimator='exact' hooks the model's modules: pass model=, "
                "or use estimator='sampled', which needs none"
            )
        for handle in self.recorder.attach(self.model):
            weakref.finalize(self, handle.remove)  # or every optimizer of a model leaves its hooks

    def record(self, enabled: bool) -> None:
        """Say whether forward passes from now on will be observed."""
        if self.recorder is not None:
            self.recorder.enabled = enabled

    def names(self) -> dict[Tensor, str] | None:
        """Return the parameters' names, None without a model."""
        if self.model is None:
            return None
        model = self.model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        named = sharded.named_parameters(model) if _is_distributed() else model.named_parameters()
        return {param: name for name, param in named}

    def estimate(
        self,
        prediction: Tensor | Distribution,
        params: list[Tensor],
        *,
        targets: Tensor | None = None,
        mask: Tensor | None = None,
        labelled: bool = True,
        check: bool = True,
        leave_out: bool = False,
    ) -> Observation | None:
        """Return the estimate of one forward pass, None where it overflowed.

        With `leave_out` also None where the prediction itself is not finite, which is refused else.
        """
        if not params:
            raise RuntimeError("every parameter of this optimizer is frozen: nothing to observe")
        if isinstance(prediction, Tensor):
            require_classes_last(prediction, targets, mask, warn=self._notices.warn)
        if self.name != "empirical" or not labelled:
            targets = None
        elif targets is None:
            raise ValueError("estimator='empirical' needs observe(..., targets=labels)")
        if check:
            self._suspect_probabilities(prediction)
        shares_batch = _is_distributed()
        group = distributed.find_group(self.process_group, self.model) if shares_batch else None
        with (
            nullcontext(self.generator)
            if group is None
            else distributed.independent_draws(group, self.generator, params[0].device)
        ) as generator:
            # Processes go on together: what is not finite in one is not in their sum.
            alone = group is None or not leave_out
            try:
                read = read_prediction(
                    prediction,
                    targets=targets,
                    mask=mask,
                    generator=generator,
                    check=check and alone,
                )
            except NotFiniteError:
                if leave_out:
                    return None
                raise
        if group is not None:
            # A process may bring nothing but padding, if another brings more.
            read = read.pooled(distributed.total(read.count, params[0].device, group))
        if check and not read.count:
            raise ValueError("mask leaves out every position, so there is nothing to observe")
        separate = distributed.not_a_first_backward(read.output) if shares_batch else nullcontext()
        with torch.no_grad(), _explained(), separate:
            if self.name == "exact":
                squares = self._squares(read, params, group)
                observation = Observation.of_squares(squares, read.count, SCALE**-2)
            else:
                scores = self._scores(read, params, group)
                observation = Observation.of_scores(scores, read.count, SCALE**-2)
        if not check:
            return observation.without_overflow()
        if observation.is_finite():
            return observation
        self._notices.warn(
            "overflow",
            "the importance of a batch was not finite and is left out; if this goes on, the "
            "model's gradients overflow: lower the learning rate, or use bfloat16 for float16",
        )
        return None

    def _suspect_probabilities(self, prediction: Tensor | Distribution) -> None:
        """Look once whether logits went through a softmax already."""
        if self._has_looked or not isinstance(prediction, Tensor) or prediction.dim() < 2:
            return
        self._has_looked = True
        if suspect_probabilities(prediction):
            self._notices.warn(
                "probabilities",
                "the rows of logits are positive and sum to one: observe takes what goes into the "
                "softmax, not what comes out",
            )

    def _scores(
        self, read: Prediction, params: list[Tensor], group: dist.ProcessGroup | None
    ) -> dict[Tensor, Tensor]:
        if any(is_sharded(param) for param in params):
            scores = sharded.sharded_scores(read, params, group)
        else:
            scores = score_sums(read, params)
        _require_some(scores)
        if group is not None:
            scores = distributed.reduced(scores, params, group)
        return _known(params, scores)

    def _squares(
        self, read: Prediction, params: list[Tensor], group: dist.ProcessGroup | None
    ) -> dict[Tensor, Tensor]:
        assert self.recorder is not None
        if any(is_sharded(param) for param in params):
            raise RuntimeError(
                "estimator='exact' cannot read sharded parameters; use estimator='sampled'"
            )
        squares, fallback = squared_scores(read, params, self.recorder)
        _require_some(squares)
        if fallback:
            names = self.names()
            assert names is not None
            listed = ", ".join(names[param] for param in fallback)
            self._notices.warn(
                f"fallback of {listed}",
                "estimator='exact' takes the one-backward estimate (unbiased, but noisier) for "
                f"{listed}: shared, used other than by one call of a known module, with an input "
                "that does not have the batch first, or in a forward pass that was observed before",
            )
        if group is not None:
            squares = distributed.reduced(squares, params, group)
        return _known(params, squares)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _known(params: list[Tensor], values: list[Tensor | None]) -> dict[Tensor, Tensor]:
    known = {p: value for p, value in zip(params, values, strict=True) if value is not None}
    for param, value in known.items():
        if value.layout != torch.strided:
            raise RuntimeError(
                f"SynGAP takes dense gradients, got {value.layout} for a parameter of shape "
                f"{tuple(param.shape)}; use sparse=False"
            )
    return known


def _require_some(values: list[Tensor | None]) -> None:
    if all(value is None for value in values):
        raise RuntimeError(
            "the prediction does not depend on any trainable parameter of this optimizer; "
            "pass the output of the model whose parameters it holds"
        )


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise RuntimeError(
                "observe came after the graph was freed; call it before loss.backward()"
            ) from error
        raise


@dataclass(frozen=True)
class Schedule:
    """Which steps, counted from 0, refresh importance: each of the first, then every k-th.

    Where importance comes from few observations its noise leaves the gate too open, just while
    steps are largest. Later it changes by a thousandth a step, and few passes refresh it.

    Args:
        every: k.
        warmup: so many steps come before, all of which refresh.

    Examples:
        >>> schedule = Schedule(every=4, warmup=2)
        >>> {step: schedule.elapsed(step) for step in range(12) if schedule.is_due(step)}
        {0: 1, 1: 1, 2: 1, 6: 4, 10: 4}
        >>> [schedule.refreshes(step) for step in (0, 1, 2, 5, 6, 10)]
        [1, 2, 3, 3, 4, 5]
    """

    every: int
    warmup: int

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("warmup", 0)):
            check_whole(name, getattr(self, name), least)

    def is_due(self, step: int) -> bool:
        """Return whether a step refreshes importance."""
        return step < self.warmup or (step - self.warmup) % self.every == 0

    def refreshes(self, step: int) -> int:
        """Return how many steps up to this one were due, it included."""
        return min(step, self.warmup) + 1 + max(0, step - self.warmup) // self.every

    def elapsed(self, step: int) -> int:
        """Return how many steps the average moves on by at a step that is due: 1 or k."""
        return self.every if step > self.warmup else 1
