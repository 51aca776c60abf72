"""Where it gains nothing: old and new inputs that use other entries, which AdamW hardly confuses.

An MLP learns to read eight entries, then eight others, without the old ones. Accuracy in per cent,
old and new, of each seed.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syngap import protect
from syngap.protection import Protection


def batch(count: int, new: bool) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 16)
    x[:, 8:] *= new
    x[:, :8] *= 0.3 if new else 1.0
    read = x[:, 8:] if new else x[:, :8]
    return x, read.reshape(count, 4, 2).sum(2).argmax(1)


def learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    new: bool,
    steps: int,
    protection: Protection | None = None,
) -> None:
    for _ in range(steps):
        x, y = batch(64, new)
        loss = cross_entropy(model(x), y)
        if protection is not None:
            loss = loss + protection.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def right(model: nn.Module) -> str:
    shares = []
    for new in (False, True):
        x, y = batch(4000, new)
        shares.append(100 * float((model(x).argmax(1) == y).float().mean()))
    return ", ".join(f"{share:.0f}" for share in shares)


def main() -> None:
    found: dict[str, list[str]] = {}
    for seed in range(3):
        torch.manual_seed(seed)
        begun = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        learn(begun, torch.optim.AdamW(begun.parameters(), lr=3e-3), False, 800)
        found.setdefault("before", []).append(right(begun))
        for lr in (1e-3, 3e-3, 9e-3):
            for kind in ("AdamW", "gate", "gate and teacher"):
                model, known = copy.deepcopy(begun), batch(256, False)[0]
                optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
                parts = {"gate": "gate" in kind, "teacher": "teacher" in kind}
                protection = protect(model, known, rank="full", **parts)
                learn(model, protection.optimizer(optimizer), True, 200, protection)
                found.setdefault(f"{kind} at {lr:g}", []).append(right(model))
                protection.interpolate(0.85)
                found.setdefault(f"{kind} at {lr:g}, keeping 85 %", []).append(right(model))
    for name, each in found.items():
        print(f"| {name} | {' | '.join(each)} |")


if __name__ == "__main__":
    main()
