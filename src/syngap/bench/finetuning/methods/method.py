"""What every fine-tuning method has: a copy of the model, an optimizer, a loss, a state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from syngap.bench import seeds
from syngap.bench.finetuning.setting import Batch, Setting
from syngap.bench.options import Positive

__all__ = ["Method"]


class Method:
    """AdamW on the loss of what is new; subclasses change the loss, the optimizer or both.

    Whatever a method draws follows from the seed and the number of the step, so that its state is
    the weights, the optimizer's state and that number.

    Args:
        setting: the model, data and anchors.
        lr: learning rate.

    Attributes:
        refused: why a method cannot work with some data, by the key of these data in YAML.
    """

    refused: ClassVar[Mapping[str, str]] = {}

    def __init__(self, setting: Setting, *, lr: Positive = 1e-3) -> None:
        self.setting, self.lr, self.steps = setting, lr, 0
        torch.manual_seed(seeds.derive(setting.seed, "set-up"))  # a distribution draws by itself
        self.model: nn.Module = self.prepare(copy.deepcopy(setting.start))
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = self.make_optimizer(trained)

    @classmethod
    def check(cls) -> None:
        """Refuse, by a UserError, where something is missing that the method needs."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model to train, made from a copy of the start."""
        return model

    def make_optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer of the trained parameters."""
        fused = self.setting.device.type == "cuda"
        return torch.optim.AdamW(params, self.lr, weight_decay=0.0, fused=fused)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a step."""
        return self.setting.loss(self.model, batch)

    def step(self, batch: Batch, warmup: float = 1.0) -> None:
        """Learn from a batch, with `warmup` times the learning rate."""
        self.model.train()
        torch.manual_seed(seeds.derive(self.setting.seed, f"step {self.steps}"))  # dropout
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * warmup
        self.optimizer.zero_grad()
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        self.change_gradients()
        self.optimizer.step()
        self.steps += 1

    def change_gradients(self) -> None:
        """Change what the optimizer is about to use; nothing here."""

    def next_rows(self, inputs: Tensor, count: int) -> Tensor:
        """Return the rows of this step: all rows in an order of their own, again and again."""
        places = range(self.steps * count, (self.steps + 1) * count)
        return torch.stack([inputs[self._place(place, len(inputs))] for place in places])

    def _place(self, number: int, size: int) -> int:
        rounds, place = divmod(number, size)
        order = seeds.generator(self.setting.seed, f"rows {rounds}")
        return int(torch.randperm(size, generator=order)[place])

    def weights(self) -> Mapping[str, Tensor]:
        """Return the trained weights by the names that the start has."""
        return dict(self.model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        return {
            "steps": self.steps,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a method that was made in the same way."""
        self.steps = state["steps"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
