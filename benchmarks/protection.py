"""What protection costs: time and memory of a step, against AdamW's in the same run.

python benchmarks/protection.py [--device cuda] [--layers 30] [--batch 16]
The model has the shape of SmolLM2-135M and random weights, which cost what trained ones do. Times
are means over steps, of all variants in turn.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from syngap import protect

VARIANTS: dict[str, dict[str, Any] | None] = {
    "AdamW": None,
    "gate, rotated": {"teacher": False, "rank": "full", "rotate": True},
    "gate, filtered": {"teacher": False, "rank": "full", "rotate": False},
    "gate, a quarter of the inputs' directions": {"teacher": False, "rank": 0.25},
    "teacher": {"gate": False},
    "gate and teacher, as by default": {},
    "gate and teacher, 8 anchors at each step": {"anchors": 8, "every": 1},
    "gate and teacher, 8 anchors at each 2nd": {"anchors": 8, "every": 2},
    "AdamW again": None,
}


def make_model(layers: int, device: torch.device) -> nn.Module:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Trained:
    """A model with one way to train it."""

    def __init__(self, options: dict[str, Any] | None, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.model = make_model(args.layers, self.device)
        tokens = torch.randint(49152, (args.known, args.length), device=self.device)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), 1e-5, fused=self.device.type == "cuda"
        )
        self.penalty: Callable[[], Tensor | float] = lambda: 0.0
        synchronize(self.device)
        began = time.perf_counter()
        if options is not None:
            protection = protect(self.model, tokens, predict=self.logits, **options)
            optimizer = protection.optimizer(optimizer)
            self.penalty = protection.loss
        synchronize(self.device)
        self.setup = time.perf_counter() - began
        self.optimizer = optimizer

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits: Tensor = self.model(tokens).logits
        return logits

    def step(self, tokens: Tensor) -> float:
        synchronize(self.device)
        began = time.perf_counter()
        penalty = self.penalty()
        logits = self.logits(tokens)[:, :-1].flatten(0, 1)
        loss = penalty + cross_entropy(logits.float(), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        synchronize(self.device)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--known", type=int, default=256)
    parser.add_argument("--steps", type=int, default=32, help="a multiple of every `every`")
    parser.add_argument("--only", help="variants whose name has this regular expression, and AdamW")
    args = parser.parse_args()
    wanted = [name for name in VARIANTS if not args.only or re.search(args.only, name)]
    print(f"{'':44} ms a step  ratio  GiB  ratio  set-up s  in AdamW's steps  its GiB")
    base: tuple[float, float] | None = None
    for name in ("AdamW", *(name for name in wanted if name != "AdamW")):
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trained = Trained(VARIANTS[name], args)
        needed = largest_memory(args.device)
        tokens = torch.randint(49152, (args.batch, args.length), device=args.device)
        for _ in range(4):
            trained.step(tokens)
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = mean(trained.step(tokens) for _ in range(args.steps))
        memory = largest_memory(args.device)
        base = base or (seconds, memory)
        print(
            f"{name:44} {seconds * 1e3:9.1f} {seconds / base[0]:6.2f} {memory:5.1f} "
            f"{memory / base[1]:5.2f} {trained.setup:9.1f} {trained.setup / base[0]:17.0f} "
            f"{needed:8.1f}",
            flush=True,
        )
        del trained
        gc.collect()  # a protection and what predicts hold each other


def largest_memory(device: str) -> float:
    """Return the largest memory of a GPU since it was last asked, in GiB."""
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 1.0


if __name__ == "__main__":
    main()
