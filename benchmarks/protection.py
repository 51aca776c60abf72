"""What protection costs: time and memory of a step, against AdamW's in the same run.

python benchmarks/protection.py [--device cuda] [--sizes 15M,135M,270M,1.3B] [--batch 16]
Models have the shapes of stories15M, SmolLM2-135M, Gemma-3-270M (as a Llama) and a Llama of 1.3 B,
and random weights, which cost what trained ones do. All variants are in memory, and take some steps
each in turn, so that a machine whose speed changes changes it for all of them. Times are medians
over these turns; on a CPU one thread, in seconds of its CPU. Memory, of a GPU alone, is a variant's
own, with what CUDA graphs keep for themselves; that of the set-up is without the state that AdamW
makes later. Without transformers a decoder of the same shapes takes the Llama's place, which has no
rotary positions. LoRA is peft's, and left out where peft is not installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import re
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from measure import machine, table
from memory import Decoder, Sizes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syngap import protect
from syngap.bench.finetuning.loop import memory_of_graphs

LORA: dict[str, Any] = {"r": 32, "lora_alpha": 64, "target_modules": "all-linear"}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "AdamW": None,
    "LoRA, rank 32": LORA,
    "gate": {"teacher": False},
    "gate, all directions, filtered": {"teacher": False, "rank": "full", "rotate": False},
    "gate, all directions, rotated": {"teacher": False, "rank": "full", "rotate": True},
    "gate, a quarter of the inputs' directions": {"teacher": False, "rank": 0.25},
    "teacher": {"gate": False},
    "gate and teacher, as by default": {},
    "gate and teacher, at each 2nd step": {"every": 2},
    "gate and teacher, at each 4th step": {"every": 4},
    "gate and teacher, all directions": {"rank": "full"},
    "gate and teacher, 32 anchors": {"anchors": 32},
}
TURN = 4  # steps of a variant at a time, a multiple of every `every`
SIZES: dict[str, dict[str, Any]] = {
    "15M": {"vocab_size": 32_000, "hidden_size": 288, "intermediate_size": 768}
    | {"num_hidden_layers": 6, "num_attention_heads": 6},
    "135M": {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536}
    | {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
    "270M": {"vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048, "head_dim": 256}
    | {"num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1},
    "1.3B": {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5504}
    | {"num_hidden_layers": 24, "num_attention_heads": 16, "tie_word_embeddings": False},
}


def make_model(size: str, layers: int | None, device: torch.device) -> nn.Module:
    options = {"tie_word_embeddings": True, "use_cache": False} | SIZES[size]
    if layers is not None:
        options["num_hidden_layers"] = layers
    torch.manual_seed(0)
    if not is_installed("transformers"):
        with device:
            model = Decoder(decoder_sizes(**options))
        for param in model.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.02)  # as a Llama's: no prediction is certain
        return model
    from transformers import LlamaConfig, LlamaForCausalLM

    with device:
        return LlamaForCausalLM(LlamaConfig(**options))


def decoder_sizes(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    tie_word_embeddings: bool,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    use_cache: bool = False,
) -> Sizes:
    """Return the shapes of a Llama with these options."""
    return Sizes(
        width=hidden_size,
        layers=num_hidden_layers,
        heads=num_attention_heads,
        key_heads=num_key_value_heads or num_attention_heads,
        head=head_dim or hidden_size // num_attention_heads,
        hidden=intermediate_size,
        vocabulary=vocab_size,
        tied=tie_word_embeddings,
    )


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def now(device: torch.device) -> float:
    """Return seconds of the CPU, which other programs lengthen little, or of a GPU's clock."""
    if device.type == "cpu":
        return time.process_time()
    synchronize(device)
    return time.perf_counter()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Trained:
    """A model with one way to train it."""

    def __init__(self, options: dict[str, Any] | None, args: argparse.Namespace) -> None:
        self.device, self.turns = torch.device(args.device), list[float]()
        self.waits = args.wait
        before = start_of_memory(self.device)
        self.model = make_model(args.size, args.layers, self.device)
        words = SIZES[args.size]["vocab_size"]
        tokens = torch.randint(words, (args.known, args.length), device=self.device)
        if options is LORA:
            from peft import LoraConfig, get_peft_model

            self.model, options = get_peft_model(self.model, LoraConfig(**LORA)), None
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [param for param in self.model.parameters() if param.requires_grad],
            lr=1e-5,
            fused=True,
        )
        self.penalty: Callable[[], Tensor | float] = lambda: 0.0
        began = now(self.device)
        if options is not None:
            protection = protect(self.model, tokens, predict=self.logits, **options)
            optimizer = protection.optimizer(optimizer)
            self.penalty = protection.loss
        self.setup = now(self.device) - began if options is not None else 0.0
        self.setup_memory = largest_memory(self.device) - before
        self.optimizer = optimizer
        self.tokens = torch.randint(words, (args.batch, args.length), device=self.device)
        self.turn()  # lets the optimizer make its state
        start_of_memory(self.device)
        self.turn()
        self.memory = largest_memory(self.device) - before
        self.turns.clear()

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            output = self.model(tokens)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits

    def turn(self) -> None:
        began = now(self.device)
        for _ in range(TURN):
            penalty = self.penalty()
            logits = self.logits(self.tokens)[:, :-1].flatten(0, 1)
            loss = penalty + cross_entropy(logits.float(), self.tokens[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.waits:
                loss.item()
        self.turns.append((now(self.device) - began) / TURN)
        self.optimizer.zero_grad()  # gradients do not wait in memory while others take their turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", default="135M", help=f"of {', '.join(SIZES)}, with commas")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--known", type=int, default=256)
    parser.add_argument("--turns", type=int, default=12, help=f"of {TURN} steps")
    parser.add_argument("--wait", action="store_true", help="read the loss at each step")
    parser.add_argument("--only", help="variants whose name has this regular expression, and AdamW")
    args = parser.parse_args()
    on_gpu = torch.device(args.device).type == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    print(__doc__)
    print(torch.cuda.get_device_name() if on_gpu else machine())
    for package in ("transformers", "peft"):
        if not is_installed(package):
            print(f"{package} is not installed.")
    for size in args.sizes.split(","):
        compare(argparse.Namespace(**vars(args) | {"size": size}))


def compare(args: argparse.Namespace) -> None:
    """Print the table of one model."""
    wanted = [name for name in VARIANTS if not args.only or re.search(args.only, name)]
    names = ["AdamW", *(name for name in wanted if name != "AdamW")]
    if not (is_installed("peft") and is_installed("transformers")):
        names = [name for name in names if VARIANTS[name] is not LORA]
    warm = {"size": "15M", "layers": 1, "known": 8}
    Trained({"batch_size": 8}, argparse.Namespace(**vars(args) | warm))
    trained = {name: Trained(VARIANTS[name], args) for name in names}
    for _ in range(args.turns):
        for each in trained.values():
            each.turn()
    base, rows = trained["AdamW"], []
    for name, each in trained.items():
        ratios = sorted(mine / its for mine, its in zip(each.turns, base.turns, strict=True))
        middle = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        rows.append(
            [
                name,
                f"{median(each.turns) * 1e3:.1f}",
                f"{median(ratios):.2f} ({middle[0]:.2f} to {middle[1]:.2f})",
                shown(each.memory, 1),
                shown(each.memory / base.memory if base.memory else 0.0, 2),
                shown(each.setup, 1),
                shown(each.setup / median(base.turns), 0),
                shown(each.setup_memory, 1),
            ]
        )
    head = ["", "ms a step", "ratio (middle half)", "GiB", "ratio", "set-up s", "AdamW's steps"]
    count = sum(param.numel() for param in base.model.parameters()) / 1e6
    what = f"{count:,.0f} M parameters, {args.batch} × {args.length} tokens"
    table(f"{what}, {args.known} known texts", [*head, "set-up GiB"], rows)


def shown(value: float, digits: int) -> str:
    """Return a number as text; a dash where nothing was measured."""
    return f"{value:.{digits}f}" if value else "–"


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
