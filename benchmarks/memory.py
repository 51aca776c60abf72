"""What a training step keeps and needs in memory, by component, beside torch's own optimizers.

ResNet-18 width 64 on 32 × 32 images. What is kept is counted tensor by tensor; what is needed for a
while is the highest sum of what torch allocated and freed since.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from cases import resnet18
from measure import machine, progress, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer
from torch.profiler import ProfilerActivity, profile

from syngap import SynGAP
from syngap.optim import GatedOptimizer

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
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    rows = []
    for name in OPTIMIZERS:
        progress(name)
        rows.append(row(name, args.batch, device))
    progress("")
    where = torch.cuda.get_device_name() if device.type == "cuda" else machine()
    header = ["MB", "state, bytes a parameter", "parameters", "gradients", "importance"]
    header += ["momentum, moments", "observe, over the gradient", "step, for a while"]
    table(
        f"Memory of training ResNet-18 width 64, batch {args.batch}, {where}",
        [*header, "peak of all"],
        rows,
    )


if __name__ == "__main__":
    main()
