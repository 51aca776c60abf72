"""The gate of `syngap.protect` alone: updates along important directions are scaled down."""

from __future__ import annotations

from typing import Any

from syngap.bench.finetuning.methods.protect import Protect
from syngap.bench.finetuning.setting import Setting
from syngap.bench.options import Proportion
from syngap.protection.protection import CONSOLIDATION_ALONE

__all__ = ["Gate"]


class Gate(Protect):
    """AdamW behind the gate, without a teacher.

    Args:
        setting: the model, data and anchors.
        consolidation: τ, how much updates shrink at mean importance.
        **options: others of `Protect`; of these, the teacher's have no effect.
    """

    uses_teacher = False

    def __init__(
        self, setting: Setting, *, consolidation: Proportion = CONSOLIDATION_ALONE, **options: Any
    ) -> None:
        super().__init__(setting, consolidation=consolidation, **options)
