"""OSF (Nayak 2025), from peft: the top singular directions of each weight are frozen."""

from __future__ import annotations

from typing import Any

from torch import nn

from syngap.bench.finetuning.methods.peft_method import PeftMethod, linear_layers
from syngap.bench.finetuning.setting import Setting
from syngap.bench.options import Proportion

__all__ = ["OSF"]


class OSF(PeftMethod):
    """AdamW on peft's OSF of all linear layers in the blocks.

    Args:
        setting: the model and data.
        frozen: share of the singular directions of each weight that is frozen.
        **others: options of `Method`.
    """

    def __init__(self, setting: Setting, *, frozen: Proportion = 0.5, **others: Any) -> None:
        self.frozen = frozen
        super().__init__(setting, **others)

    def configure(self, peft: Any, model: nn.Module) -> Any:
        """Return peft's OSFConfig."""
        return peft.OSFConfig(effective_rank=self.frozen, target_modules=linear_layers(model))
