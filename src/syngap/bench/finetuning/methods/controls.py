"""Controls: `protect` with one part made meaningless, and AdamW with as many more samples.

Where a control forgets as little as `protect`, that part is not what helps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from syngap.bench import seeds
from syngap.bench.finetuning.methods.method import Method
from syngap.bench.finetuning.methods.protect import Protect
from syngap.bench.finetuning.setting import Batch, Setting
from syngap.bench.options import Count
from syngap.optim.basis import Basis
from syngap.optim.knowledge import take_knowledge
from syngap.optim.moments import affordable_rank, basis_dtype, find_bases

__all__ = ["LargerBatch", "NoiseAnchors", "RandomDirections", "ShuffledImportance"]


class LargerBatch(Method):
    """AdamW with more new samples a step, in place of a teacher's anchors.

    Args:
        setting: the model and data.
        extra: so many more a step.
        **others: options of `Method`.
    """

    def __init__(self, setting: Setting, *, extra: Count = 16, **others: Any) -> None:
        super().__init__(setting, **others)
        self.extra = extra

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of the batch and the samples that are added."""
        more = self.setting.batch(self.extra, f"extra {self.steps}")
        both = zip(batch, more, strict=True)
        return super().loss(tuple(torch.cat([one, other]) for one, other in both))


class NoiseAnchors(Protect):
    """`protect` that knows noise: the numbers of the anchors, each at another place.

    Args:
        setting: the model, data and anchors.
        **options: those of `Protect`.
    """

    def known_inputs(self) -> Tensor:
        """Return the anchors' numbers in a random order."""
        anchors = self.setting.anchors
        order = torch.randperm(anchors.numel(), generator=_random(self.setting, "noise"))
        return anchors.flatten()[order.to(anchors.device)].view_as(anchors)


class GateControl(Protect):
    """`protect` with another gate.

    Args:
        setting: the model, data and anchors.
        teacher: whether there is a teacher beside it.
        **options: those of `Protect`.
    """

    def __init__(self, setting: Setting, *, teacher: bool = True, **options: Any) -> None:
        self.uses_teacher = teacher
        super().__init__(setting, **options)


class RandomDirections(GateControl):
    """`protect` along random orthogonal directions, with the importance that these have."""

    def change_knowledge(self) -> None:
        """Take importance again, along other directions."""
        random = _random(self.setting, "random directions")

        def find(*found: Any) -> dict[Tensor, Basis]:
            return {param: _replaced(basis, random) for param, basis in find_bases(*found).items()}

        params = list(self.model.parameters())
        known = take_knowledge(
            self.model,
            list(torch.split(self.known, 16)),
            rank=affordable_rank(params) if self.rank is None else self.rank,
            find=find,
            dtype=basis_dtype(params),
            predict=lambda inputs: self.setting.predict(self.model, inputs),
            generator=torch.Generator(self.setting.device).manual_seed(self.setting.seed),
        )
        self.protection.known.update(known)


class ShuffledImportance(GateControl):
    """`protect` whose importance is shuffled within each weight."""

    def change_knowledge(self) -> None:
        """Give each direction the importance of another one of its weight."""
        random = _random(self.setting, "shuffled importance")
        for known in self.protection.known.values():
            values = known.importance
            order = torch.randperm(values.numel(), generator=random).to(values.device)
            known.importance = values.flatten()[order].view_as(values)


def _random(setting: Setting, purpose: str) -> torch.Generator:
    return seeds.generator(setting.seed, purpose)


def _replaced(basis: Basis, random: torch.Generator) -> Basis:
    """Return as many random directions as a basis has on each side."""
    left, right = (
        None if side is None else _orthogonal(side, random) for side in (basis.left, basis.right)
    )
    return Basis(left, right)


def _orthogonal(like: Tensor, random: torch.Generator) -> Tensor:
    drawn = torch.randn(like.shape, generator=random, dtype=torch.float64)
    directions: Tensor = torch.linalg.qr(drawn)[0]
    return directions.to(like)
