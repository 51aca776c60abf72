"""A byte-level GPT of 11 M parameters, pre-trained on English and Python."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syngap.bench.finetuning.models.byte import GPT as PlainGPT
from syngap.bench.finetuning.models.byte import START, Size

__all__ = ["GPT", "MEDIUM", "START", "Size", "byte_windows", "load_or_pretrain", "read_bytes"]

MEDIUM = Size(width=384, layers=6, heads=6, context=256)


class GPT(PlainGPT):
    """The GPT of the comparison tool, in bfloat16 on a GPU."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            return super().forward(tokens).float()


def read_bytes(path: Path, device: torch.device) -> Tensor:
    """Return a text's bytes."""
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).to(device)


def byte_windows(text: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Return the token START and the `length` bytes after each offset."""
    windows = text[offsets[:, None] + torch.arange(length, device=text.device)].long()
    return nn.functional.pad(windows, (1, 0), value=START)


def pretrain(
    size: Size, texts: list[Tensor], *, steps: int = 4000, batch: int = 80, seed: int = 0
) -> GPT:
    """Return a model trained with AdamW on equal shares of the texts."""
    device = texts[0].device
    torch.manual_seed(seed)
    model = GPT(size).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=texts[0].is_cuda
    )
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1, (step + 1) / warmup) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        ),
    )
    order = torch.Generator(device).manual_seed(seed)
    share = batch // len(texts)
    for step in range(1, steps + 1):
        windows = []
        for text in texts:
            last = len(text) - size.context
            offsets = torch.randint(last, (share,), generator=order, device=device)
            windows.append(byte_windows(text, offsets, size.context))
        tokens = torch.cat(windows)
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 500 == 0:
            print(f"pre-training: step {step}, loss {loss.item():.3f}", flush=True)
    return model


def load_or_pretrain(path: Path, size: Size, texts: list[Tensor], steps: int, seed: int) -> GPT:
    """Return the model whose weights the file holds; if there is none, pre-train and write it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(pretrain(size, texts, steps=steps, seed=seed).state_dict(), partial)
        partial.replace(path)
    model = GPT(size).to(texts[0].device)
    model.load_state_dict(torch.load(path, weights_only=True, map_location=texts[0].device))
    return model
