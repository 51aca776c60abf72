"""What every method and the loop need of a run: a model, batches, anchors, and what to measure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from syngap.bench.errors import UserError
from syngap.bench.finetuning.point import Halves
from syngap.bench.options import Count

__all__ = ["TEST_BATCH", "Anchors", "Batch", "Measured", "Precision", "Setting"]

Precision: TypeAlias = Literal["fp32", "bf16"]
Batch: TypeAlias = tuple[Tensor, ...]
"""Tensors with a row for each example: windows of text, two texts, or images and labels."""
TEST_BATCH = 64  # examples


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """The options of `anchors`: unlabelled inputs by which methods remember what a model knows.

    Args:
        source: "own" samples of a language model, "text" of the kind that the task says is known,
            or known "images". Left out, it is the first that the task has.
        count: how many.
        prompt: what own samples begin with; None is the token that begins a text.
    """

    source: Literal["own", "text", "images"] = "own"
    count: Count = 256
    prompt: str | None = None


@dataclass(frozen=True)
class Measured:
    """What an evaluation of a model finds; each number on both halves of the test data.

    Args:
        new: the loss on what is learned.
        old: what is kept of each old kind, that of the anchors first; lower is better, and its
            rise from the start is forgetting.
        exact: share of right answers on what is learned; None where there are none to give.
        old_exact: likewise by old kind.
    """

    new: Halves
    old: Mapping[str, Halves]
    exact: Halves | None = None
    old_exact: Mapping[str, Halves] | None = None


class Setting(ABC):
    """A model before tuning, and what methods may use.

    Args:
        start: the model; methods train a copy.
        seed: of the run.
        device: where all of it is.
        precision: of the forward pass.

    Attributes:
        new_parameters: names of parameters that know nothing yet, as those of a new head. Every
            method trains them, and they are not interpolated with the start.
        shared_seconds: what it took to make the own samples, where they were used.
        got_seconds: what it took here to get them, made or read.
    """

    new_parameters: frozenset[str] = frozenset()

    def __init__(
        self, start: nn.Module, seed: int, device: torch.device, precision: Precision
    ) -> None:
        self.start, self.seed, self.device = start, seed, device
        self._precision = precision
        self.shared_seconds = self.got_seconds = 0.0

    @abstractmethod
    def batch(self, count: int, purpose: str) -> Batch:
        """Return examples to learn; which follows from the seed and the purpose alone."""

    @abstractmethod
    def old_batch(self, count: int, purpose: str) -> Batch:
        """Return true old examples of the known kind, drawn likewise."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""

    @property
    @abstractmethod
    def anchors(self) -> Tensor:
        """The inputs that every method remembers the model by."""

    @abstractmethod
    def predict(self, model: nn.Module, inputs: Tensor) -> Tensor | Distribution:
        """Return what a model predicts for anchors: logits as it gives them, or a distribution."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> Measured:
        """Return what a model has learned and kept."""

    @property
    def own(self) -> Tensor:
        """Texts that the model wrote before tuning."""
        raise UserError(f"{type(self.start).__name__} writes no texts, so it has no own samples")

    def autocast(self) -> torch.autocast:
        """Return the context of a forward pass."""
        enabled = self._precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)
