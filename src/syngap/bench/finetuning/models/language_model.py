"""A language model as the comparison sees it, and what models are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["LanguageModel", "Making", "Share", "ShareFolder", "Shared"]


@dataclass(frozen=True)
class Shared:
    """Tensors that several runs use.

    Args:
        tensors: by name.
        seconds: that it took to make them.
    """

    tensors: Mapping[str, Tensor]
    seconds: float


class Share(Protocol):
    """Gives tensors that are made once, by the first run to need them."""

    def __call__(
        self, name: str, make: Callable[[], Mapping[str, Tensor]], *, any_seed: bool = False
    ) -> Shared:
        """Return the tensors of this name.

        Args:
            name: of the tensors.
            make: makes them.
            any_seed: whether they are the same for all seeds, as they depend on the model alone.
        """


ShareFolder: TypeAlias = Callable[[str, Callable[[Path], None]], Path]
"""From a name and what fills a folder to the folder: filled once, the same for all seeds."""


Source = TypeVar("Source")


@dataclass(frozen=True)
class Making(Generic[Source]):
    """What a model is made from.

    Args:
        source: texts or images, what it knows among them, for a model that is trained here.
        seed: of its training.
        device: where it is to be.
        data: the folder that models are in.
        share: keeps tensors that are made once for all runs.
        share_folder: likewise keeps a folder; None keeps none.
    """

    source: Source
    seed: int
    device: torch.device
    data: Path | None
    share: Share
    share_folder: ShareFolder | None = None


@dataclass(frozen=True)
class LanguageModel:
    """A language model before tuning.

    Args:
        model: takes tokens (N, T).
        logits: from the model and tokens to logits (N, T, tokens) of the tokens that follow.
        encode: from a text to its tokens.
        start: the token that every window begins with.
        context: how many tokens a window has after it.
    """

    model: nn.Module
    logits: Callable[[nn.Module, Tensor], Tensor]
    encode: Callable[[str], Tensor]
    start: int
    context: int
