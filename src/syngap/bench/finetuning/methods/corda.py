"""CorDA (Yang 2024), knowledge-preserving, from peft: adapters where inputs vary least."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from syngap.bench.errors import UserError
from syngap.bench.finetuning.methods.lora import LoRA
from syngap.bench.finetuning.methods.peft_method import linear_layers
from syngap.bench.finetuning.setting import Setting
from syngap.bench.options import Count

__all__ = ["CorDA"]


class CorDA(LoRA):
    """LoRA that begins in the directions that the anchors use least.

    Args:
        setting: the model, data and anchors.
        samples: so many of the anchors are looked at, one by one; as many as in the paper.
        **options: those of `LoRA`.
    """

    def __init__(self, setting: Setting, *, samples: Count = 256, **options: Any) -> None:
        self.samples = samples
        super().__init__(setting, **options)

    def configure(self, peft: Any, model: nn.Module) -> Any:
        """Return peft's LoraConfig, and have peft look at the anchors."""
        layers = linear_layers(model)
        weights = [model.get_parameter(f"{name}.weight") for name in layers]
        sides = [side for weight in weights for side in weight.shape]
        if self.rank > min(sides):
            raise UserError(
                f"rank: got {self.rank}, and the smallest side of a weight is {min(sides)}"
            )
        from peft.tuners.lora.config import CordaConfig
        from peft.tuners.lora.corda import preprocess_corda

        config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=layers,
            init_lora_weights="corda",
            corda_config=CordaConfig(corda_method="kpm"),
        )

        @torch.no_grad()
        def run() -> None:
            model.eval()
            for tokens in torch.split(self.setting.anchors[: self.samples], 1):
                self.setting.predict(model, tokens)

        preprocess_corda(model, config, run_model=run)
        return config
