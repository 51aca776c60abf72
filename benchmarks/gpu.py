"""Milliseconds of a whole training step on a GPU, eager and captured in a CUDA graph.

ResNet-18 width 64 on 32 × 32 images, bfloat16 autocast, channels last. A step is forward, loss,
importance (SynGAP), backward and update.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from cases import resnet18
from measure import captured, table
from torch.nn import functional

from syngap import SynGAP

Step = Callable[[], None]


def make(name: str, batch: int, capturable: bool) -> Step:
    """Return a training step over fixed memory."""
    torch.manual_seed(0)
    model = resnet18().cuda().to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(100, (batch,), device="cuda")
    rate = torch.tensor(0.01, device="cuda") if capturable else 0.01
    optimizer: torch.optim.Optimizer
    if name == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    elif name == "Adam, fused":
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True, capturable=capturable)
    else:
        estimator = "exact" if "exact" in name else "sampled"
        optimizer = SynGAP(
            model.parameters(),
            lr=rate,
            capturable=capturable,
            estimator=estimator,
            every=1,
            model=model,
        )

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(x)
        loss = functional.cross_entropy(logits.float(), y)
        optimizer.zero_grad(set_to_none=True)
        if isinstance(optimizer, SynGAP) and "without" not in name:
            optimizer.observe(logits)
        loss.backward()
        optimizer.step()

    if "without" in name:  # importance from one batch, then none: what a refresh now and then costs
        with torch.autocast("cuda", torch.bfloat16):
            optimizer.observe(model(x))
        optimizer.step()
    return step


def milliseconds(step: Step, rounds: int, inner: int) -> float:
    for _ in range(10):
        step()
    measured = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            step()
        end.record()
        end.synchronize()
        measured.append(start.elapsed_time(end) / inner)
    return statistics.median(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--inner", type=int, default=20)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    names = ["SGD", "Adam, fused", "SynGAP", "SynGAP without observe", "SynGAP, exact"]
    measured = {}
    for name in names:
        eager = milliseconds(make(name, args.batch, False), args.rounds, args.inner)
        graph = milliseconds(captured(make(name, args.batch, True)), args.rounds, args.inner)
        measured[name] = (eager, graph)
    base = measured["SGD"]
    table(
        f"ms a training step, batch {args.batch}, bf16 autocast, "
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        ["", "eager", "× SGD", "captured", "× SGD"],
        [
            [name, f"{e:.2f}", f"{e / base[0]:.2f}", f"{c:.2f}", f"{c / base[1]:.2f}"]
            for name, (e, c) in measured.items()
        ],
    )


if __name__ == "__main__":
    main()
