"""`syngap.protect`: a gate along directions, and the model's former answers as a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Batch, Setting
from syngap.bench.options import Count, NonNegative, Positive, Proportion
from syngap.protection import protect
from syngap.protection.protection import AMBIENT, ANCHORS, CONSOLIDATION

__all__ = ["Protect"]


class Protect(Method):
    """AdamW under `syngap.protect`, with its own defaults.

    Args:
        setting: the model, data and anchors.
        consolidation: τ, how much updates shrink at mean importance.
        ambient: ε, the share of an update that always remains.
        rank: directions of each weight: "full", a number or a share; None chooses by memory.
        rotate: whether AdamW's state is along directions too; None chooses by rank.
        strength: of the teacher.
        anchors: so many a step for the teacher.
        every: the teacher takes part in every k-th step, and counts k times there; None chooses.
        samples: so many of the setting's anchors are known; None is all.
        **others: options of `Method`.
    """

    uses_gate, uses_teacher = True, True

    def __init__(
        self,
        setting: Setting,
        *,
        consolidation: Proportion = CONSOLIDATION,
        ambient: NonNegative = AMBIENT,
        rank: Count | Positive | Literal["full"] | None = None,
        rotate: bool | None = None,
        strength: NonNegative = 1.0,
        anchors: Count = ANCHORS,
        every: Count | None = None,
        samples: Count | None = None,
        **others: Any,
    ) -> None:
        super().__init__(setting, **others)
        self.rank, self.known = rank, self.known_inputs()[:samples]
        self.protection = protect(
            self.model,
            self.known,
            gate=self.uses_gate,
            teacher=self.uses_teacher,
            predict=lambda tokens: setting.predict(self.model, tokens),
            consolidation=consolidation,
            ambient=ambient,
            rank=rank,
            rotate=rotate,
            strength=strength,
            anchors=anchors,
            every=every,
            seed=setting.seed,
        )
        self.change_knowledge()
        self.optimizer = self.protection.optimizer(self.optimizer)

    def known_inputs(self) -> Tensor:
        """Return the inputs that the model is remembered by; controls take others."""
        return self.setting.anchors

    def change_knowledge(self) -> None:
        """Change what is known before the gate uses it: nothing here, controls do."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss with that of the teacher."""
        return self.protection.loss() + super().loss(batch)  # first, which takes less memory

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the teacher goes on with the inputs that come next."""
        super().load_state_dict(state)
        self.protection.calls = self.steps
