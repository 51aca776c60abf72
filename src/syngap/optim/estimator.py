"""From a prediction to an observation: which labels, which pass, whose processes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.optim import distributed, sharded
from syngap.optim.errors import NotFiniteError
from syngap.optim.exact import CallRecorder, squared_scores
from syngap.optim.importance import (
    SCALE,
    Prediction,
    read_prediction,
    require_classes_last,
    score_sums,
    suspect_classes_first,
)
from syngap.optim.notices import Notices
from syngap.optim.observation import Observation

__all__ = ["Estimator", "EstimatorName"]

EstimatorName: TypeAlias = Literal["sampled", "exact", "empirical"]


class Estimator:
    """Estimates the Fisher diagonal of parameters; see `SynGAP` for its arguments.

    Attributes:
        model: what names the parameters and is hooked.
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
        if isinstance(process_group, str) and process_group != "auto":
            raise ValueError(
                f"process_group must be 'auto', None or a ProcessGroup, got {process_group!r}"
            )
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
        return {param: name for name, param in sharded.named_parameters(model)}

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

        A prediction that is not finite itself is refused, or with `leave_out` also None.
        """
        if not params:
            raise RuntimeError("every parameter of this optimizer is frozen: nothing to observe")
        if isinstance(prediction, Tensor):
            self._look_for_classes(prediction, targets, mask)
        if self.name != "empirical" or not labelled:
            targets = None
        elif targets is None:
            raise ValueError("estimator='empirical' needs observe(..., targets=labels)")
        if check:
            self._suspect_probabilities(prediction)
        group = distributed.find_group(self.process_group, self.model)
        with distributed.independent_draws(group, self.generator, params[0].device) as generator:
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
            # A process may bring a batch of nothing but padding, if another brings more.
            read = read.pooled(distributed.total(read.count, params[0].device, group))
        if check and not read.count:
            raise ValueError("mask leaves out every position, so there is nothing to observe")
        with torch.no_grad(), _explained(), distributed.not_a_first_backward(read.output):
            take = self._squares if self.name == "exact" else self._scores
            observation = take(read, params, group)
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

    def _look_for_classes(
        self, logits: Tensor, targets: Tensor | None, mask: Tensor | None
    ) -> None:
        """Refuse logits whose classes are not in the last dimension; where it is likely, say so."""
        require_classes_last(logits, targets, mask)
        if targets is None and mask is None and suspect_classes_first(logits):
            self._notices.warn(
                "classes first",
                f"logits of shape {tuple(logits.shape)} look like images, or a series, with the "
                "classes in dimension 1, and observe takes them in the last one: pass "
                "logits.movedim(1, -1); if the last one has the classes, pass "
                "logits.flatten(0, -2)",
            )

    def _suspect_probabilities(self, prediction: Tensor | Distribution) -> None:
        """Look once whether logits went through a softmax already."""
        if self._has_looked or not isinstance(prediction, Tensor) or prediction.dim() < 2:
            return
        self._has_looked = True
        rows = prediction.detach()
        if rows.numel() and bool((rows >= 0).all() and (rows.sum(-1) - 1).abs().max() < 1e-3):
            self._notices.warn(
                "probabilities",
                "the rows of logits are positive and sum to one: observe takes what goes into the "
                "softmax, not what comes out",
            )

    def _scores(
        self, read: Prediction, params: list[Tensor], group: dist.ProcessGroup | None
    ) -> Observation:
        if any(sharded.is_sharded(param) for param in params):
            scores = sharded.sharded_scores(read, params, group)
        else:
            scores = score_sums(read, params)
        _require_some(scores)
        if group is not None:
            scores = distributed.reduced(scores, params, group)
        return Observation.of_scores(_known(params, scores), read.count, SCALE**-2)

    def _squares(
        self, read: Prediction, params: list[Tensor], group: dist.ProcessGroup | None
    ) -> Observation:
        assert self.recorder is not None
        if any(sharded.is_sharded(param) for param in params):
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
        return Observation.of_squares(_known(params, squares), read.count, SCALE**-2)


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
