"""What methods of peft have in common: adapters in place of weights, merged to be evaluated."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from syngap.bench import seeds
from syngap.bench.finetuning.methods.freeze import blocks_of
from syngap.bench.finetuning.methods.method import Method
from syngap.bench.registry import import_or_refuse

__all__ = ["PeftMethod", "linear_layers"]


class PeftMethod(Method, ABC):
    """AdamW on the parameters that peft adds to the linear layers of blocks."""

    refused: ClassVar = {
        "images": "adapters are for linear layers, and the blocks of a classifier of images are "
        "convolutions",
    }

    @classmethod
    def check(cls) -> None:
        """Refuse where peft is not installed."""
        import_or_refuse("peft", cls.__name__, "pip install peft")

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model with adapters, drawn from the run's seed."""
        peft = import_or_refuse("peft", type(self).__name__, "pip install peft")
        torch.manual_seed(seeds.derive(self.setting.seed, "adapters"))
        made: nn.Module = peft.get_peft_model(model, self.configure(peft, model)).base_model.model
        return made

    @abstractmethod
    def configure(self, peft: Any, model: nn.Module) -> Any:
        """Return peft's configuration of the adapters."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights with the adapters added to them."""
        return merged(self.model)


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers in a model's blocks."""
    inside = {layer for block in blocks_of(model) for layer in block.modules()}
    named = model.named_modules()
    return [name for name, layer in named if layer in inside and isinstance(layer, nn.Linear)]


def merged(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model with its adapters merged, by the plain model's names."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    plain = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            plain.set_submodule(name, layer.get_base_layer())
    return dict(plain.named_parameters())
