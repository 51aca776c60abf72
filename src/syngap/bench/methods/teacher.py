"""A teacher on replay: the network is also pulled towards what its own average says.

The average of the weights (`average`) forgets more slowly than the newest weights do. With it as
the teacher, a method minimizes

    loss + strength · D(average's logits, logits)

over the replayed samples, or over all of a step. D is the mean over samples and classes of d², d
the difference of two logits ("mse"); of 2 |d| - 1 where |d| > 1, so that its gradient is bounded,
and d² elsewhere ("huber"); or KL(average || now), the mean over samples ("kl"). With "mse" runs at
high rates diverge in the step in which the pull begins. The average sees the same augmented
samples, in evaluation mode, and no gradient flows into it. The pull begins when the average has
seen half of its span, 1 - αⁿ ≥ 0.5 after n steps (69 of them for 0.99): the running statistics of a
younger one are still those of a new network, and its logits may be huge.

CLS-ER, a relative with two averages, is the method `cls_er`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import huber_loss, kl_div, mse_loss

from syngap.bench.errors import UserError
from syngap.bench.methods.learner import Learner

__all__ = ["TaughtSamples", "Teacher", "TeacherLoss", "refuse_teacher"]

TeacherLoss: TypeAlias = Literal["mse", "huber", "kl"]
TaughtSamples: TypeAlias = Literal["replay", "all"]

_TEACHES_FROM = 0.5  # the part of its span that the average has seen


class Teacher:
    """Pulls logits towards those of the averaged network. Its only state is that average.

    Args:
        learner: the network and its average.
        strength: weight of the pull beside the method's loss.
        loss: D, "mse", "huber" or "kl".
        on: the samples that are pulled: those of "replay", or "all".

    Examples:
        >>> import torch
        >>> from syngap.bench.methods.average import Average
        >>> learner = Learner(torch.nn.Linear(1, 2, bias=False), lambda x, generator: x)
        >>> learner.average = Average(learner.model, 0.5)
        >>> learner.follow()
        >>> with torch.no_grad():
        ...     _ = learner.model.weight.add_(1.0)  # the average stays behind
        >>> teacher = Teacher(learner, 0.5, "mse", "replay")
        >>> logits = teacher.predict(torch.tensor([[3.0], [2.0]]))
        >>> round(teacher.pull(arriving=1).item(), 4)  # 0.5 · (1.0 · 2.0)², of the replayed sample
        2.0
    """

    def __init__(
        self, learner: Learner, strength: float, loss: TeacherLoss, on: TaughtSamples
    ) -> None:
        if learner.average is None:
            raise UserError(
                f"teacher: got {strength} without an average, which is what teaches; "
                "set average too, 0.99 for example, or leave teacher 0"
            )
        self._learner, self._strength, self._loss, self._on = learner, strength, loss, on
        self._average = learner.average
        self._last: tuple[Tensor, Tensor] | None = None

    def predict(self, x: Tensor) -> Tensor:
        """Return logits for learning, and keep them for `pull`, with what the network saw."""
        inputs = self._learner.augment(x)
        logits = self._learner.forward(inputs)
        self._last = inputs, logits
        return logits

    def pull(self, arriving: int) -> Tensor:
        """Return strength · D of the last `predict`; 0 where no sample is taught.

        Args:
            arriving: how many samples, the first, are not replayed.
        """
        if self._last is None:
            raise RuntimeError("teacher: the loss of a method with one calls self.predict(x, y)")
        first = arriving if self._on == "replay" else 0
        inputs, logits = (part[first:] for part in self._last)
        self.discard()
        if not len(inputs):  # nothing to replay yet
            return logits.new_zeros(())
        # Before it teaches, the average's logits may overflow: times zero they would be NaN.
        teaches = self._average.weight >= _TEACHES_FROM
        targets = torch.where(teaches, self._learner.forward_average(inputs), logits.detach())
        if self._loss == "mse":
            divergence = mse_loss(logits, targets)
        elif self._loss == "huber":
            divergence = 2 * huber_loss(logits, targets)
        else:
            now, average = logits.log_softmax(1), targets.log_softmax(1)
            divergence = kl_div(now, average, log_target=True, reduction="batchmean")
        return self._strength * divergence

    def discard(self) -> None:
        """Forget the last `predict`."""
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the average is part of the learner's state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore nothing."""


def refuse_teacher(options: Mapping[str, Any], method: str) -> None:
    """Raise a UserError where the options of a method that takes no teacher have one.

    Examples:
        >>> refuse_teacher({"teacher": 0.3}, "lwf")
        Traceback (most recent call last):
        syngap.bench.errors.UserError: teacher: got 0.3 with lwf, whose loss takes none; leave it 0
    """
    if options.get("teacher"):
        raise UserError(
            f"teacher: got {options['teacher']} with {method}, whose loss takes none; leave it 0"
        )
