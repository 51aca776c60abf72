"""Non-finite numbers in training: raise an error that says where and why, or skip the step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from syngap.bench.errors import UserError
from syngap.bench.methods.method import Method
from syngap.bench.options import defaults
from syngap.bench.streams.stream import Batch, Stream
from syngap.bench.training.checkpoint import random_states, restore_random_states
from syngap.messages import count_of

__all__ = ["Watch"]

_IN_A_ROW = 100  # steps that may be skipped one after another: then nothing is learned any more
_GLANCE = 64  # steps between checks of a GPU's counters, without waiting for it
_LOWER = 10.0

Take = Callable[[Batch], None]


class Watch:
    """Runs the steps of a method, and stops or skips those with non-finite numbers.

    Args:
        method: the method; its learner's guard holds the policy.
        stream: for the number of steps and tasks in messages.
        steps_before: steps done before this object was made.
        skip_counts: steps skipped so far, and how many of these were the last ones.
    """

    def __init__(
        self,
        method: Method,
        stream: Stream,
        steps_before: int,
        skip_counts: tuple[int, int] = (0, 0),
    ) -> None:
        self._method, self._guard, self._stream = method, method.learner.guard, stream
        self._steps_before = steps_before
        self._skipped, self._in_a_row = skip_counts

    @property
    def skips(self) -> bool:
        """Whether steps are skipped, and so counted."""
        return self._guard.policy == "skip"

    @property
    def skip_counts(self) -> tuple[int, int]:
        """Steps skipped so far, and how many of these were the last ones."""
        return self._skipped, self._in_a_row

    def summary(self) -> dict[str, float]:
        """Return how many steps were skipped, if they are."""
        return {"skipped": self._skipped} if self.skips else {}

    def step(self, take: Take, batch: Batch, step: int) -> None:
        """Run one step (the first is 1); raise or undo it where numbers are not finite.

        FloatingPointError says which step, what was not finite, and what may help.
        """
        if not self.skips:
            try:
                take(batch)
            except FloatingPointError as error:
                raise self._failure(error, batch, step) from error
            if step % _GLANCE == 0:
                self._read_notes(wait=False)
            return
        restore = self._snapshot()
        try:
            take(batch)
        except FloatingPointError as error:
            self._skipped += 1
            self._in_a_row += 1
            if self._in_a_row == _IN_A_ROW or not _finite(self._method.learner.parameters()):
                raise self._failure(error, batch, step) from error
            self._method.undo()
            restore()
        else:
            self._in_a_row = 0
            if not self._guard.has_loss:
                raise UserError(
                    "training.non_finite: skip needs a method that calls self.backward(loss) "
                    f"before it changes anything, and {type(self._method).__name__} has a learn of "
                    "its own that does not"
                )

    def check(self, step: int) -> None:
        """Raise FloatingPointError if the state after `step` steps is not finite."""
        self._read_notes(wait=True)
        if not _finite(self._method.finite_tensors()):
            raise FloatingPointError(self._message("the update", step))

    @contextmanager
    def advice_on_error(self) -> Iterator[None]:
        """Add advice to a FloatingPointError raised inside."""
        try:
            yield
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}{self._advice()}") from error

    def _snapshot(self) -> Callable[[], None]:
        learner = self._method.learner
        restore_learner, random = learner.snapshot(), random_states(learner.device)

        def restore() -> None:
            restore_learner()
            restore_random_states(random, learner.device)

        return restore

    def _read_notes(self, wait: bool) -> None:
        finite = self._guard.finite_losses(wait)
        if finite is not None:
            raise FloatingPointError(self._message("the loss", self._steps_before + finite + 1))

    def _failure(self, error: FloatingPointError, batch: Batch, step: int) -> FloatingPointError:
        """Return the error that says what was the first not to be finite."""
        learner = self._method.learner
        if not _finite([batch.x]):
            return FloatingPointError(
                f"the samples of {self._where(step)} have values that are not finite: fill in or "
                "leave out what misses"
            )
        if not _finite(learner.parameters()):
            return FloatingPointError(self._message("the update", step - 1))
        what = "the gradients" if "gradients" in str(error) else "the loss"
        if not _finite([learner.evaluate(batch.x, newest=True)]):
            what = "the logits"
        many = f", as in {count_of(self._in_a_row, 'step')} in a row" if self._in_a_row > 1 else ""
        return FloatingPointError(self._message(what, step, many))

    def _message(self, what: str, step: int, many: str = "") -> str:
        verb = "are" if what in ("the logits", "the gradients") else "is"
        return f"{what} of {self._where(step)} {verb} not finite{many}{self._advice()}"

    def _where(self, step: int) -> str:
        ends = self._stream.ends
        task = f", task {bisect_left(ends, step) + 1} of {len(ends)}," if len(ends) > 1 else ""
        return f"step {step} of {len(self._stream)}{task}"

    def _advice(self) -> str:
        groups = self._method.optimizer.param_groups
        rate = max((float(group["lr"]) for group in groups if "lr" in group), default=0.0)
        if not rate:
            return ""
        better = min(rate / _LOWER, float(defaults(type(self._method)).get("lr", rate)))
        return f": a smaller lr may help (it is {rate:g}, try {better:g})"


@torch.no_grad()
def _finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers are; one look at them all."""
    known = [t.detach() for t in tensors if t.is_floating_point() and t.numel()]
    if not known:
        return True
    # A sum of finite numbers may overflow, the largest of them cannot.
    parts = [torch.stack(torch.aminmax(value)).double().sum() for value in known]
    return bool(torch.stack([part.to(parts[0].device) for part in parts]).sum().isfinite())
