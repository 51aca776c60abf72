"""What runs share: text, pre-trained models, importance; the first process to need it makes it."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from finetuning.data import collect_text, describe, windows
from finetuning.methods import adamw
from finetuning.model import GPT, SIZES, loss_of, sample_text
from finetuning.records import locked
from syngap import SynGAP

__all__ = ["Cache"]


class Cache:
    """The cache folder of one size of batches and texts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        args.cache.mkdir(parents=True, exist_ok=True)
        self._texts: dict[str, dict[str, Tensor]] = {}

    def path(self, name: str) -> Path:
        return self.args.cache / f"{name}.safetensors"

    def model_name(self, size: str, old: str, seed: int) -> str:
        """Return the name of a pre-trained model, which begins that of all that is made of it."""
        args = self.args
        return f"{size}-{old}-{args.megabytes:g}MB-{args.pretrain}x{args.batch}-seed{seed}"

    def _load_or_make(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        path = self.path(name)
        with locked(path):
            if not path.exists():
                began, partial = time.monotonic(), path.with_suffix(".part")
                save_file(make(), partial)
                partial.replace(path)
                print(f"made {name} in {time.monotonic() - began:.1f} s", flush=True)
        return load_file(path, str(self.device))

    # Text

    def text(self, domain: str) -> dict[str, Tensor]:
        """Return the train and the test text of a domain, as bytes."""
        if domain not in self._texts:
            size = self.args.megabytes
            text = self._load_or_make(f"{domain}-{size:g}MB", lambda: collect_text(domain, size))
            self._texts[domain] = text
            describe(domain, {name: part.cpu() for name, part in text.items()})
        return self._texts[domain]

    def batches(self, domain: str, size: str, steps: int, seed: int) -> Iterator[Tensor]:
        text, context = self.text(domain)["train"], SIZES[size].context
        order = torch.Generator().manual_seed(seed)
        offsets = torch.randint(len(text) - context, (steps, self.args.batch), generator=order)
        return (windows(text, row, context) for row in offsets.to(text.device))

    def test_halves(self, domain: str, size: str) -> list[Tensor]:
        """Return windows of the two halves of a domain's test text, evenly spread over each."""
        context, count = SIZES[size].context, self.args.windows
        halves = []
        for half in self.text(domain)["test"].chunk(2):
            offsets = torch.linspace(0, len(half) - context - 1, count, device=self.device)
            halves.append(windows(half, offsets.long(), context))
        return halves

    def own_text(self, size: str, old: str, seed: int) -> Tensor:
        """Return texts that the pre-trained model samples itself."""
        count, context = self.args.samples, SIZES[size].context

        def make() -> dict[str, Tensor]:
            model = self.model(size, old, seed)
            torch.manual_seed(seed)
            return {"text": sample_text(model, context, count, self.device)}

        return self._load_or_make(f"{self.model_name(size, old, seed)}-text{count}", make)["text"]

    def _old_text(self, size: str, old: str, seed: int) -> Tensor:
        """Return as many texts that the model was trained on."""
        text, context = self.text(old)["train"], SIZES[size].context
        torch.manual_seed(seed)
        offsets = torch.randint(len(text) - context, (self.args.samples,), device=self.device)
        return windows(text, offsets, context)

    # Models

    def model(self, size: str, old: str, seed: int) -> GPT:
        """Return a new copy of the pre-trained model."""
        model, name = self._initial(size, seed), self.model_name(size, old, seed)
        model.load_state_dict(self._load_or_make(name, lambda: self._pretrain(size, old, seed)))
        return model

    def _initial(self, size: str, seed: int) -> GPT:
        torch.manual_seed(seed)
        with self.device:
            return GPT(SIZES[size])

    def _pretrain(self, size: str, old: str, seed: int) -> dict[str, Tensor]:
        steps, model = self.args.pretrain, self._initial(size, seed)
        optimizer = adamw(model.parameters(), SIZES[size].rate, 0.1)
        warmup = max(1, steps // 20)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(
                (step + 1) / warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
            ),
        )
        for text in self.batches(old, size, steps, seed):
            optimizer.zero_grad()
            loss_of(model, text).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        return model.state_dict()

    # Importance

    def importance(self, source: str, size: str, old: str, seed: int) -> dict[str, Tensor]:
        """Return the Fisher information of each parameter, per byte, by name.

        Args:
            source: "own" samples of the model, old "data", or "even": everywhere the mean of "own".
            size: of the model.
            old: the domain that it was trained on.
            seed: of its training.
        """
        if source == "even":
            own = self.importance("own", size, old, seed)
            mean = sum(f.sum() for f in own.values()) / sum(f.numel() for f in own.values())
            return {name: mean.expand_as(f) for name, f in own.items()}
        count = self.args.samples
        name = f"{self.model_name(size, old, seed)}-{source}{count}"
        return self._load_or_make(name, lambda: self._measure(source, size, old, seed))

    def _measure(self, source: str, size: str, old: str, seed: int) -> dict[str, Tensor]:
        model = self.model(size, old, seed)
        samples = self.own_text if source == "own" else self._old_text
        text = samples(size, old, seed)
        torch.manual_seed(seed)
        gate = SynGAP.wrap(adamw(model.parameters(), 0.0), model=model)
        gate.consolidate(model, text, batch_size=1)
        return {name: f.contiguous() for name, f in gate.importance().items()}
