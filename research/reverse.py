"""Where it fails: a model that sorts learns to reverse, with symbols of its own or with the same.

A small transformer sorts eight digits after an S, then learns to reverse eight symbols after an R,
without the old task: digits again, or letters. Exact answers in per cent, old and new.
"""

from __future__ import annotations

import argparse
import copy
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syngap import protect
from syngap.protection import Protection

LENGTH, WIDTH = 8, 96
SORT, REVERSE, ANSWER = 20, 21, 22  # tokens; 0 to 9 are digits, 10 to 19 letters


def texts(task: str, count: int, generator: torch.Generator) -> Tensor:
    query = torch.randint(10, (count, LENGTH), generator=generator)
    query += 10 * (task == "letters")
    answers = query.sort(1).values if task == "sort" else query.flip(1)
    first = torch.full((count, 1), SORT if task == "sort" else REVERSE)
    return torch.cat([first, query, torch.full_like(first, ANSWER), answers], 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(23, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(2 * LENGTH + 2, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 23)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.places[: text.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.look, self.gather = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.look(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.gather(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.widen(self.between(x))))


def answers_of(model: nn.Module, text: Tensor) -> Tensor:
    return model(text[:, :-1])[:, LENGTH + 1 :]


@torch.no_grad()
def right(model: nn.Module, task: str) -> float:
    text = texts(task, 500, torch.Generator().manual_seed(99))
    found = answers_of(model, text).argmax(-1)
    return 100 * float((found == text[:, LENGTH + 2 :]).all(1).float().mean())


def learn(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: str,
    steps: int,
    protection: Protection | None = None,
) -> None:
    source = torch.Generator().manual_seed(7)
    for _ in range(steps):
        text = texts(task, 64, source)
        logits = answers_of(model, text)
        loss = cross_entropy(logits.flatten(0, 1), text[:, LENGTH + 2 :].flatten())
        if protection is not None:
            loss = loss + protection.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fine_tuned(begun: nn.Module, task: str, lr: float, steps: int, parts: str) -> nn.Module:
    model = copy.deepcopy(begun)
    protection = protect(
        model,
        texts("sort", 256, torch.Generator().manual_seed(3)),
        gate="gate" in parts,
        teacher="teacher" in parts,
        rank="full",
        predict=lambda text: answers_of(model, text),
    )
    base = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    learn(model, protection.optimizer(base), task, steps, protection)
    return model


def interpolated(begun: nn.Module, ended: nn.Module, kept: float) -> nn.Module:
    """Return the fine-tuned model interpolated with the start; 1 keeps all of the change."""
    model = copy.deepcopy(ended)
    with torch.no_grad():
        for param, start in zip(model.parameters(), begun.parameters(), strict=True):
            param.lerp_(start, 1 - kept)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for seed in args.seeds:
        torch.manual_seed(seed)
        begun = Model()
        learn(begun, torch.optim.AdamW(begun.parameters(), lr=1e-3), "sort", 1500)
        for task in ("digits", "letters"):
            start = (right(begun, "sort"), right(begun, task))
            found.setdefault((task, "before"), []).append(start)
            for lr, steps in ((1e-3, 450), (3e-3, 150)):
                for parts in ("AdamW", "gate", "teacher", "gate and teacher"):
                    ended = fine_tuned(begun, task, lr, steps, parts)
                    for kept in (1.0, 0.85, 0.7):
                        name = f"{parts} at {lr:g}, {steps} steps"
                        name += f", keeping {kept:.0%}" if kept < 1 else ""
                        model = interpolated(begun, ended, kept)
                        both = (right(model, "sort"), right(model, task))
                        found.setdefault((task, name), []).append(both)
                        print(
                            f"seed {seed}, {task}, {name}: {both[0]:.0f}, {both[1]:.0f}", flush=True
                        )
    print("\n| sorts digits, and learns to reverse | " + " | ".join(("digits", "letters")) + " |")
    print("|---|---:|---:|")
    for name in dict.fromkeys(name for _, name in found):
        cells = []
        for task in ("digits", "letters"):
            old, new = (fmean(each) for each in zip(*found[task, name], strict=True))
            cells.append(f"{old:.0f}, {new:.0f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
