"""A byte-level GPT in five sizes, its loss, and the text that it samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from syngap.bench.finetuning.models.byte import START, Block

__all__ = ["GPT", "SIZES", "START", "Size", "loss_of", "sample_text"]


@dataclass(frozen=True)
class Size:
    """A model's shape, and the highest learning rate of its pre-training."""

    width: int
    layers: int
    heads: int
    context: int
    rate: float


SIZES = {
    "tiny": Size(8, 1, 2, 32, 1e-2),
    "mini": Size(64, 3, 4, 128, 5e-3),  # for a CPU
    "small": Size(128, 4, 4, 256, 3e-3),
    "medium": Size(384, 6, 6, 256, 1e-3),
    "large": Size(768, 14, 12, 256, 5e-4),
}


class GPT(nn.Module):
    """Predicts each byte of a text from those before it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(START + 1, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, START, bias=False)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                residual = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * size.layers) if residual else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of every byte and of one more after the last, up to the context."""
        tokens = pad(text, (1, 0), value=START)[:, : len(self.positions.weight)]
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    """Return the mean loss in nats per byte."""
    return cross_entropy(model(text).flatten(0, 1).float(), text.flatten())


@torch.no_grad()
def sample_text(model: nn.Module, context: int, count: int, device: torch.device) -> Tensor:
    """Return texts that the model samples from the start token, at temperature 1."""
    text = torch.empty(count, 0, dtype=torch.long, device=device)
    for _ in range(context):
        chances = model(text)[:, -1].float().softmax(-1)
        text = torch.cat([text, torch.multinomial(chances, 1)], 1)
    return text
