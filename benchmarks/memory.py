"""What training keeps and needs in memory, by component: SynGAP beside torch's own, and `protect`.

The first table is ResNet-18 width 64 on 32 × 32 images. What is kept is counted tensor by tensor;
what is needed for a while is the highest sum of what torch allocated and freed since.

The second is a step of `protect`, measured in the same way.

The others are of `protect`, by `plan_memory`: on a GPU, float32 weights, AdamW, 256 known texts of
256 tokens, without activations and what a step needs for a while. The last has the state of
torchao's AdamW in 8 and 4 bits, counted tensor by tensor.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from cases import resnet18
from measure import machine, progress, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

from syngap import SynGAP, protect
from syngap.optim import GatedOptimizer
from syngap.optim.moments import affordable_rank
from syngap.protection import MemoryPlan, plan_memory, recomputed

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler tells when it starts and stops
RATE = 0.01
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda model: SGD(model.parameters(), lr=RATE),
    "SGD, momentum": lambda model: SGD(model.parameters(), lr=RATE, momentum=0.9),
    "Adam": lambda model: Adam(model.parameters(), lr=RATE),
    "SynGAP": lambda model: SynGAP(model.parameters(), lr=RATE),
    "SynGAP, compact": lambda model: SynGAP(model.parameters(), lr=RATE, compact=True),
    "SynGAP, exact": lambda model: SynGAP(
        model.parameters(), lr=RATE, estimator="exact", model=model
    ),
}


def peak(case: Callable[[], object], device: torch.device) -> int:
    """Return how many bytes `case` allocates at its peak, over what was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        case()
    events = recorded.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    allocated = highest = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        allocated += change
        highest = max(highest, allocated)
    return highest


def size(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors; of a quantised one, those of its codes, scales and table."""
    total = 0
    for each in tensors:
        if hasattr(each, "__tensor_flatten__"):  # its own numel and type are not what it stores
            names, _ = each.__tensor_flatten__()
            total += size(getattr(each, name) for name in names)
        elif isinstance(each, Tensor):
            total += each.numel() * each.element_size()
    return total


def row(name: str, batch: int, device: torch.device) -> list[str]:
    """Return the bytes of each component, in the order of the table's header."""
    torch.manual_seed(0)
    model = resnet18().to(device)
    params = list(model.parameters())
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(100, (batch,), device=device)
    cross_entropy(model(x), y).backward()  # what a first pass keeps for later ones does not count
    model.zero_grad()
    base = peak(lambda: cross_entropy(model(x), y).backward(), device)
    gradients = size(param.grad for param in params)
    model.zero_grad()
    optimizer = OPTIMIZERS[name](model)

    def learn() -> None:
        logits = model(x)
        loss = cross_entropy(logits, y)
        if isinstance(optimizer, GatedOptimizer):
            optimizer.observe(logits)
        loss.backward()

    def train() -> None:
        learn()
        optimizer.step()
        optimizer.zero_grad()

    train()  # makes the states
    observed = peak(learn, device) - base
    step = peak(optimizer.step, device)
    optimizer.zero_grad()
    whole = peak(train, device)
    state = [(key, t) for kept in optimizer.state.values() for key, t in kept.items()]
    importance = size(t for key, t in state if key == "importance")
    other = size(t for key, t in state) - importance
    kept = size(params) + importance + other
    extra = observed if isinstance(optimizer, GatedOptimizer) else 0
    columns = [size(params), gradients, importance, other, extra, step, kept + whole]
    each = (importance + other) / sum(param.numel() for param in params)
    return [name, f"{each:.1f}", *(f"{value / 1e6:.0f}" for value in columns)]


# protect ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Those of a decoder: Llama's, or with `extra_norms` Gemma-3's."""

    width: int
    layers: int
    heads: int
    key_heads: int
    head: int
    hidden: int
    vocabulary: int
    tied: bool = False
    extra_norms: bool = False


MODELS = {
    "SmolLM2-135M": Sizes(576, 30, 9, 3, 64, 1536, 49_152, tied=True),
    "Gemma-3-270M": Sizes(640, 18, 4, 1, 256, 2048, 262_144, tied=True, extra_norms=True),
    "Llama 1.3 B": Sizes(2048, 24, 16, 16, 128, 5504, 32_000),
    "Llama 7 B": Sizes(4096, 32, 32, 32, 128, 11_008, 32_000),
}
RANKS = ("full", 0.25, 0.1)
TEXTS = (256, 256)
LARGEST, CARDS = "Llama 7 B", 8
ONE_CARD, SOME = "Llama 1.3 B", 0.25


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.width
        outer, inner = sizes.heads * sizes.head, sizes.key_heads * sizes.head
        self.query = nn.Linear(width, outer, bias=False)
        self.key = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(width, inner, bias=False)
        self.out = nn.Linear(outer, width, bias=False)
        self.gate = nn.Linear(width, sizes.hidden, bias=False)
        self.up = nn.Linear(width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 + 2 * sizes.extra_norms))
        own = [nn.RMSNorm(sizes.head) for _ in range(2)] if sizes.extra_norms else []
        self.head_norms = nn.ModuleList(own)

    def forward(self, x: Tensor) -> Tensor:
        first, second, *after = self.norms
        rows = first(x)
        parts = [
            layer(rows).unflatten(-1, (-1, self.sizes.head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        for place, norm in enumerate(self.head_norms):  # of queries and keys
            parts[place] = norm(parts[place])
        mixed = scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        mixed = self.out(mixed.transpose(1, 2).flatten(2))
        x = x + (after[0](mixed) if after else mixed)
        rows = second(x)
        found: Tensor = self.down(silu(self.gate(rows)) * self.up(rows))
        return x + (after[1](found) if after else found)


class Decoder(nn.Module):
    """The shapes of a language model; positions, which have no weights, are left out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.table = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.table(tokens))))
        return logits


@cache
def planned(name: str, rank: Any, processes: int = 1) -> MemoryPlan:
    """Return what `protect` will take of a model that has shapes alone."""
    progress(f"{name}, rank {rank}")
    with torch.device("meta"):
        model = Decoder(MODELS[name])
        texts = torch.zeros(TEXTS, dtype=torch.long)
    return plan_memory(model, texts, rank=rank, device="cuda", processes=processes)


def plan_tables() -> None:
    """Print bytes a parameter of all models, and GB a card of the largest."""
    rows, parts = [], list[str]()
    for name in MODELS:
        with torch.device("meta"):
            default = affordable_rank(list(Decoder(MODELS[name]).parameters()), "cuda")
        for rank in RANKS:
            plan = planned(name, rank)
            there = plan.on_device()
            parts = list(there)
            sizes = [*there.values(), sum(there.values()), plan.moments]
            label = f"{name}, rank {rank}{' (default)' if rank == default else ''}"
            each = [f"{size / plan.numel:.2f}" for size in sizes]
            rows.append([label, *each, f"{sizes[-2] / 1e9:.1f}"])
    head = [*parts, "together", "set-up: moments", "together, GB"]
    table("protect on one GPU, bytes a parameter", ["", *head], rows)
    rows = []
    for rank in RANKS:
        plan = planned(LARGEST, rank, CARDS)
        there = plan.on_device()
        sizes = [*there.values(), sum(there.values()), sum(plan.on_cpu().values()), plan.moments]
        rows.append([f"rank {rank}", *(f"{size / 1e9:.1f}" for size in sizes)])
    head = [*parts, "together", "on the CPU", "set-up: moments"]
    table(f"{LARGEST} with FSDP2 on {CARDS} cards, GB in each process", ["", *head], rows)


def state_size(kind: Callable[..., Optimizer], model: nn.Module) -> int:
    """Return the bytes of what an optimizer keeps after a step, counted tensor by tensor."""
    optimizer = kind(model.parameters(), lr=RATE)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, for each shape
        optimizer.step()
    optimizer.zero_grad()
    return size(value for state in optimizer.state.values() for value in state.values())


def state_table() -> None:
    """Print what a model takes with AdamW's state in fewer bits."""
    try:
        from torchao.optim import AdamW4bit, AdamW8bit
    except ImportError:
        print("\nAdamW's state in 8 bits is left out: torchao is not installed", flush=True)
        return
    rows, plan = [], planned(ONE_CARD, SOME)
    there = plan.on_device()
    trained = there["weights"] + there["gradients"]
    others = sum(there.values()) - there["AdamW's moments"]
    with torch.device("meta"):
        model = Decoder(MODELS[ONE_CARD])
    for kind in (AdamW, AdamW8bit, AdamW4bit):
        state = state_size(kind, model)
        sizes = [trained + state, others + state, there["weights"] + plan.moments]
        each = f"{state / plan.numel:.2f}"
        rows.append([kind.__name__, each, *(f"{size / 1e9:.1f}" for size in sizes)])
    head = ["state, bytes a parameter", "without protect, GB", "with protect, GB", "set-up, GB"]
    made = f"AdamW's state counted, torchao {version('torchao')}"
    table(f"{ONE_CARD} on one GPU, rank {SOME}, {made}", ["", *head], rows)


# A small decoder, whose activations take little against its weights.
SMALL = Sizes(width=384, layers=6, heads=6, key_heads=6, head=64, hidden=1024, vocabulary=512)
SHAPE = (4, 32)
WAYS: dict[str, dict[str, Any] | None] = {
    "AdamW": None,
    "gate, rank 0.25": {"teacher": False, "rank": 0.25},
    "teacher, its gradient taken at once": {"gate": False},
    "teacher, its blocks run again": {"gate": False},
    "gate and teacher, blocks run again": {"rank": 0.25},
}


def step_table(device: torch.device, where: str) -> None:
    """Print what a step needs for a while, beyond what stays between steps."""
    rows, limit = [], recomputed.LARGE
    for name, options in WAYS.items():
        progress(name)
        recomputed.LARGE = 0 if "run again" in name else limit
        rows.append([name, *(f"{each:.1f}" for each in step_peaks(options, device))])
    recomputed.LARGE = limit
    progress("")
    head = ["bytes a parameter", "a whole step, for a while", "optimizer.step alone"]
    table(f"protect, a small decoder, {SHAPE[0]} × {SHAPE[1]} tokens, {where}", head, rows)


def step_peaks(options: dict[str, Any] | None, device: torch.device) -> list[float]:
    """Return bytes a parameter of a whole step, and of the optimizer's part of it."""
    torch.manual_seed(0)
    with device:
        model = Decoder(SMALL)
        tokens, known = (torch.randint(512, (count, SHAPE[1])) for count in (SHAPE[0], 64))
    optimizer: Optimizer = AdamW(model.parameters(), lr=RATE, fused=True)
    protection = None
    if options is not None:
        protection = protect(model, known, every=1, anchors=SHAPE[0], **options)
        optimizer = protection.optimizer(optimizer)

    def learn() -> None:
        penalty = protection.loss() if protection else 0.0
        loss = penalty + cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()

    def train() -> None:
        learn()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # states, masks, and a CUDA graph where there is one
        train()
    whole = peak(train, device)
    learn()
    numbers = sum(param.numel() for param in model.parameters())
    return [each / numbers for each in (whole, peak(optimizer.step, device))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--protect", action="store_true", help="what protect takes, alone")
    args = parser.parse_args()
    device = torch.device(args.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else machine()
    if not args.protect:
        optimizer_table(args.batch, device, where)
    step_table(device, where)
    plan_tables()
    state_table()


def optimizer_table(batch: int, device: torch.device, where: str) -> None:
    rows = []
    for name in OPTIMIZERS:
        progress(name)
        rows.append(row(name, batch, device))
    progress("")
    header = ["MB", "state, bytes a parameter", "parameters", "gradients", "importance"]
    header += ["momentum, moments", "observe, over the gradient", "step, for a while"]
    table(
        f"Memory of training ResNet-18 width 64, batch {batch}, {where}",
        [*header, "peak of all"],
        rows,
    )


if __name__ == "__main__":
    main()
