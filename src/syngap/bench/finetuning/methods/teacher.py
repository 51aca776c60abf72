"""The teacher of `syngap.protect` alone: the model's former answers on anchors."""

from __future__ import annotations

from syngap.bench.finetuning.methods.protect import Protect

__all__ = ["Teacher"]


class Teacher(Protect):
    """AdamW with the teacher, without a gate.

    Args:
        setting: the model, data and anchors.
        **options: those of `Protect`; of these, the gate's have no effect.
    """

    uses_gate = False
