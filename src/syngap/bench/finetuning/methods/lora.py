"""LoRA (Hu 2021), from peft: a product of two thin matrices is added to each weight."""

from __future__ import annotations

from typing import Any

from torch import nn

from syngap.bench.finetuning.methods.peft_method import PeftMethod, linear_layers
from syngap.bench.finetuning.setting import Setting
from syngap.bench.options import Count, Positive

__all__ = ["LoRA"]


class LoRA(PeftMethod):
    """AdamW on peft's LoRA of all linear layers in the blocks.

    Args:
        setting: the model and data.
        rank: of the product.
        alpha: the product is multiplied with alpha / rank.
        **others: options of `Method`.
    """

    def __init__(
        self, setting: Setting, *, rank: Count = 32, alpha: Positive = 64.0, **others: Any
    ) -> None:
        self.rank, self.alpha = rank, alpha
        super().__init__(setting, **others)

    def configure(self, peft: Any, model: nn.Module) -> Any:
        """Return peft's LoraConfig."""
        return peft.LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules=linear_layers(model)
        )
