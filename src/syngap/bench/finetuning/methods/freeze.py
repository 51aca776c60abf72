"""Freezing: the last blocks of the model learn, and a new head where there is one."""

from __future__ import annotations

from typing import Any

from torch import nn

from syngap.bench.errors import UserError
from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.setting import Setting
from syngap.bench.options import Count

__all__ = ["Freeze", "blocks_of"]


class Freeze(Method):
    """AdamW on the last blocks.

    Args:
        setting: the model and data.
        blocks: so many learn.
        **others: options of `Method`.
    """

    def __init__(self, setting: Setting, *, blocks: Count = 1, **others: Any) -> None:
        self.blocks = blocks
        super().__init__(setting, **others)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Freeze all but the last blocks and a new head."""
        model.requires_grad_(False)
        for block in blocks_of(model)[-self.blocks :]:
            block.requires_grad_(True)
        for name in self.setting.new_parameters:
            model.get_parameter(name).requires_grad_(True)
        return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: its longest list of modules of one class."""
    lists = [
        list(module.children())
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    alike = [found for found in lists if len({type(module) for module in found}) == 1]
    if not alike:
        raise UserError(f"freeze: {type(model).__name__} has no list of blocks")
    return max(alike, key=len)
