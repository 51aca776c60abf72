"""The lines that the README shows for fine-tuning, pasted after a model that was trained."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from checkout import ROOT
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F  # as the README has it


def lines_of_the_readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if "syngap.protect(" in block]
    return found


def digits(*, transposed: bool, test: bool) -> tuple[Tensor, Tensor]:
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    upright = images.float().view(-1, 8, 8) / 16
    x = (upright.transpose(1, 2) if transposed else upright).flatten(1)
    chosen = (torch.arange(len(x)) % 4 == 0) == test
    return x[chosen], labels[chosen]


def batches(x: Tensor, y: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    rows = (torch.randint(len(x), (64,)) for _ in range(count))
    return [(x[chosen], y[chosen]) for chosen in rows]


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def accuracy(model: nn.Module, *, transposed: bool) -> float:
    x, y = digits(transposed=transposed, test=True)
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def test_the_lines_of_the_readme_keep_what_a_model_knew(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    old, new = (digits(transposed=transposed, test=False) for transposed in (False, True))
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    train(model, batches(*old, 1000))
    known, new_data = old[0][:256], batches(*new, 500)
    plain = train(copy.deepcopy(model), new_data)

    names = {"torch": torch, "F": F, "model": model, "known": known, "new_data": new_data}
    exec(lines_of_the_readme(), names)

    printed = capsys.readouterr().out
    assert printed.startswith("On known inputs: KL(before || now)")
    assert "Protected by: gate, teacher." in printed
    assert accuracy(model, transposed=False) > max(0.9, accuracy(plain, transposed=False) + 0.2)
    assert accuracy(model, transposed=True) > 0.6


def test_the_lines_are_few() -> None:
    assert len(lines_of_the_readme().splitlines()) <= 11
