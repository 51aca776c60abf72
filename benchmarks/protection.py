"""What protection costs: time and memory of a step, against AdamW's in the same run.

python benchmarks/protection.py [--device cuda] [--layers 30] [--batch 16]
The model has the shape of SmolLM2-135M and random weights, which cost what trained ones do. All
variants are in memory, and take some steps each in turn, so that a machine whose speed changes
changes it for all of them. Times are medians over these turns. Memory is a variant's own, with what
CUDA graphs keep for themselves; that of the set-up is without the state that AdamW makes later.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from syngap import protect
from syngap.bench.finetuning.loop import memory_of_graphs

VARIANTS: dict[str, dict[str, Any] | None] = {
    "AdamW": None,
    "gate": {"teacher": False},
    "gate, all directions, filtered": {"teacher": False, "rank": "full", "rotate": False},
    "gate, all directions, rotated": {"teacher": False, "rank": "full", "rotate": True},
    "gate, a quarter of the inputs' directions": {"teacher": False, "rank": 0.25},
    "teacher": {"gate": False},
    "gate and teacher, as by default": {},
    "gate and teacher, at each 2nd step": {"every": 2},
    "gate and teacher, all directions": {"rank": "full"},
    "gate and teacher, 32 anchors": {"anchors": 32},
}
TURN = 4  # steps of a variant at a time, a multiple of every `every`


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
        self.device, self.turns = torch.device(args.device), list[float]()
        self.waits = args.wait
        before = start_of_memory(self.device)
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
        self.setup_memory = largest_memory(self.device) - before
        self.optimizer = optimizer
        self.tokens = torch.randint(49152, (args.batch, args.length), device=self.device)
        self.turn()  # lets the optimizer make its state
        start_of_memory(self.device)
        self.turn()
        self.memory = largest_memory(self.device) - before
        self.turns.clear()

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits: Tensor = self.model(tokens).logits
        return logits

    def turn(self) -> None:
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(TURN):
            penalty = self.penalty()
            logits = self.logits(self.tokens)[:, :-1].flatten(0, 1)
            loss = penalty + cross_entropy(logits.float(), self.tokens[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.waits:
                loss.item()
        synchronize(self.device)
        self.turns.append((time.perf_counter() - began) / TURN)
        self.optimizer.zero_grad()  # gradients do not wait in memory while others take their turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--known", type=int, default=256)
    parser.add_argument("--turns", type=int, default=12, help=f"of {TURN} steps")
    parser.add_argument("--wait", action="store_true", help="read the loss at each step")
    parser.add_argument("--only", help="variants whose name has this regular expression, and AdamW")
    args = parser.parse_args()
    wanted = [name for name in VARIANTS if not args.only or re.search(args.only, name)]
    names = ["AdamW", *(name for name in wanted if name != "AdamW")]
    Trained({"batch_size": 8}, argparse.Namespace(**vars(args) | {"layers": 1, "known": 8}))  # warm
    trained = {name: Trained(VARIANTS[name], args) for name in names}
    for _ in range(args.turns):
        for each in trained.values():
            each.turn()
    base = trained["AdamW"]
    print(f"{'':44} ms a step  ratio (middle half)   GiB  ratio  set-up s  AdamW's steps  its GiB")
    for name, each in trained.items():
        ratios = sorted(mine / its for mine, its in zip(each.turns, base.turns, strict=True))
        middle = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(
            f"{name:44} {median(each.turns) * 1e3:9.1f}  {median(ratios):5.2f} "
            f"({middle[0]:.2f} to {middle[1]:.2f}) {shown(each.memory, 6)} "
            f"{shown(each.memory / base.memory if base.memory else 0.0, 6, 2)} {each.setup:9.1f} "
            f"{each.setup / median(base.turns):14.0f} {shown(each.setup_memory, 8)}",
            flush=True,
        )


def shown(value: float, width: int, digits: int = 1) -> str:
    """Return a number as text; a dash where nothing was measured."""
    return f"{value:{width}.{digits}f}" if value else "–".rjust(width)


def start_of_memory(device: torch.device) -> float:
    """Return what is in the memory of a GPU now, in GiB, and watch the largest from here on."""
    gc.collect()
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    return (torch.cuda.memory_allocated() + memory_of_graphs(device)) / 2**30


def largest_memory(device: torch.device) -> float:
    """Return the largest memory of a GPU since it was last asked, in GiB."""
    if device.type != "cuda":
        return 0.0
    return (torch.cuda.max_memory_allocated() + memory_of_graphs(device)) / 2**30


if __name__ == "__main__":
    main()
