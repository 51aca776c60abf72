"""A GPT over bytes, of any size, trained here on the old texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from syngap.bench import seeds
from syngap.bench.errors import UserError
from syngap.bench.finetuning.models.language_model import LanguageModel, Making
from syngap.bench.finetuning.texts import Texts
from syngap.bench.options import Count, Positive

__all__ = ["GPT", "START", "Block", "Size", "byte_model", "byte_tokens"]

START = 256  # the token before the first byte of a window


@dataclass(frozen=True)
class Size:
    """A model's shape."""

    width: int
    layers: int
    heads: int
    context: int


class Block(nn.Module):
    """Causal attention and a perceptron, each after a norm and around a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        after: Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return after


class GPT(nn.Module):
    """Predicts, after each token, the next byte; a text begins with the token START."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(START + 1, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, START, bias=False)
        for param in self.parameters():
            if param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (N, T, bytes) of the byte after each token."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def byte_tokens(text: str) -> Tensor:
    """Return the bytes of a text.

    Examples:
        >>> byte_tokens("aß")
        tensor([ 97, 195, 159])
    """
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def byte_model(
    making: Making[Texts],
    *,
    width: Count = 384,
    layers: Count = 6,
    heads: Count = 6,
    context: Count = 256,
    pretrain: Count = 4000,
    pretrain_batch: Count = 80,
    pretrain_lr: Positive = 1e-3,
) -> LanguageModel:
    """Return a GPT that was trained on equal shares of the old texts.

    Args:
        making: texts, seed and device.
        width: of the hidden states.
        layers: blocks of attention and a perceptron.
        heads: of the attention.
        context: bytes that it sees.
        pretrain: steps of its training.
        pretrain_batch: windows a step.
        pretrain_lr: highest rate; it rises for a twentieth of the steps and then falls.
    """
    if width % heads:
        raise UserError(f"heads: got {heads}, which does not divide the width {width}")
    size = Size(width, layers, heads, context)

    def train() -> Mapping[str, Tensor]:
        return _pretrain(making, size, pretrain, pretrain_batch, pretrain_lr).state_dict()

    model = GPT(size).to(making.device)
    model.load_state_dict(dict(making.share("start", train).tensors))
    return LanguageModel(model, lambda model, tokens: model(tokens), byte_tokens, START, context)


def _pretrain(making: Making[Texts], size: Size, steps: int, batch: int, lr: float) -> GPT:
    device = making.device
    sources = [making.source.kinds[kind].train for kind in making.source.old]
    texts = [byte_tokens(source).to(device) for source in sources if source]
    torch.manual_seed(seeds.derive(making.seed, "pre-trained weights"))
    model = GPT(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup_and_cosine(steps))
    order = seeds.generator(making.seed, "pre-training")
    share = max(1, batch // len(texts))
    for _ in range(steps):
        windows = []
        for text in texts:
            offsets = torch.randint(len(text) - size.context, (share, 1), generator=order)
            windows.append(text[(offsets + torch.arange(size.context)).to(device)])
        tokens = nn.functional.pad(torch.cat(windows), (1, 0), value=START)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model


def _warmup_and_cosine(steps: int) -> Callable[[int], float]:
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        return min(1, (step + 1) / warmup) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))

    return factor
