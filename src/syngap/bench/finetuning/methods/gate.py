"""The gate of `syngap.protect` alone: updates along important directions are scaled down."""

from __future__ import annotations

from syngap.bench.finetuning.methods.protect import Protect

__all__ = ["Gate"]


class Gate(Protect):
    """AdamW behind the gate, without a teacher.

    Args:
        setting: the model, data and anchors.
        **options: those of `Protect`; of these, the teacher's have no effect.
    """

    uses_teacher = False
