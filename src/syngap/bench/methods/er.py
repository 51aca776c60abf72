"""Experience replay (Chaudhry 2019): every step also learns from samples that were kept."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from syngap.bench.errors import UserError
from syngap.bench.memory import ClassBalanced, Reservoir
from syngap.bench.methods.descent import Descent
from syngap.bench.methods.learner import Learner
from syngap.bench.methods.teacher import TaughtSamples, Teacher, TeacherLoss
from syngap.bench.options import Count, Natural, NonNegative
from syngap.bench.streams.stream import Batch

__all__ = ["ER", "MemoryName"]

MemoryName: TypeAlias = Literal["reservoir", "balanced"]


class ER(Descent):
    """One mean cross-entropy over the arriving batch and a batch drawn from the memory.

    Args:
        learner: the network and how it sees samples.
        buffer: samples the memory holds; 0 is none.
        replay: samples drawn from it at each step.
        memory: "reservoir" keeps every sample with equal chance, "balanced" every class alike.
        teacher: how strongly logits are pulled towards those of `average`; 0 is not at all.
        teacher_loss: by the squared error of logits with a bounded gradient, "huber", without one,
            "mse", or by "kl", KL(average || now).
        teacher_on: the samples that are pulled: those of "replay", or "all".
        **descent: options of `Descent`: lr, momentum, weight_decay, optimizer, average.
    """

    teacher: Teacher | None = None

    def __init__(
        self,
        learner: Learner,
        *,
        buffer: Natural = 2000,
        replay: Count = 64,
        memory: MemoryName = "reservoir",
        teacher: NonNegative = 0.0,
        teacher_loss: TeacherLoss = "huber",
        teacher_on: TaughtSamples = "replay",
        **descent: Any,
    ) -> None:
        super().__init__(learner, **descent)
        kind = Reservoir if memory == "reservoir" else ClassBalanced
        self.memory = kind(buffer, generator=learner.generator("memory"), device=learner.device)
        self.replay = replay
        if teacher and teacher_on == "replay" and not buffer:
            raise UserError(
                f"teacher: got {teacher} on replay with buffer 0, so nothing is replayed; "
                "set buffer, or teacher_on: all"
            )
        if teacher:  # set only then: checkpoints of earlier versions do not have it
            self.teacher = Teacher(learner, teacher, teacher_loss, teacher_on)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of what arrives and what is drawn, together."""
        x, y = self.with_replay(batch)
        return cross_entropy(self.predict(x, y), y)

    def objective(self, batch: Batch) -> Tensor:
        """Return the loss and the pull of the teacher, if there is one."""
        loss = self.loss(batch)
        return loss if self.teacher is None else loss + self.teacher.pull(len(batch.y))

    def predict(self, x: Tensor, y: Tensor) -> Tensor:
        """Return logits for learning, of arriving samples first and then of replayed ones.

        Every use of the logits of a step goes through here.
        """
        return self.learner.predict(x) if self.teacher is None else self.teacher.predict(x)

    def with_replay(self, batch: Batch) -> Batch:
        """Return `batch` followed by samples from the memory, if it has any."""
        drawn = self.memory.draw(self.replay)
        if not drawn:
            return batch
        return Batch(torch.cat([batch.x, drawn["x"]]), torch.cat([batch.y, drawn["y"]]))

    def remember(self, batch: Batch) -> None:
        """Offer the arriving samples, as they were stored, to the memory."""
        self.memory.add(x=batch.x, y=batch.y)

    def undo(self) -> None:
        """Discard also the logits that the teacher kept."""
        super().undo()
        if self.teacher is not None:
            self.teacher.discard()
