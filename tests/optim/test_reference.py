"""The rule in one page takes the steps that SynGAP takes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from networks import ConvNet
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syngap import SynGAP
from syngap.optim import DEFAULTS, Defaults, reference
from syngap.optim.reference import Reference

STEPS = 60
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(16, 3),
    "deep": lambda: nn.Sequential(
        nn.Linear(16, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    ),
    "convolutions": lambda: nn.Sequential(nn.Unflatten(1, (1, 4, 4)), ConvNet()),
}
VALUES = {
    "defaults": DEFAULTS,
    "closed": Defaults(retention=0.9, consolidation=0.9, damping=1e-6, ambient=0.1),
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(10, 16, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (10,), generator=generator)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("network", MAKERS)
def test_the_reference_and_the_fast_path_take_the_same_steps(network: str, values: str) -> None:
    torch.manual_seed(0)
    slow = MAKERS[network]().double()
    fast = copy.deepcopy(slow)
    chosen = VALUES[values]
    labels = [torch.Generator().manual_seed(7) for _ in range(2)]
    rule = Reference(slow.parameters(), lr=0.1, values=chosen)
    optimizer = SynGAP(
        fast.parameters(),
        lr=0.1,
        retention=chosen.retention,
        consolidation=chosen.consolidation,
        damping=chosen.damping,
        ambient=chosen.ambient,
        every=1,
        generator=labels[1],
    )
    for step in range(STEPS):
        x, y = batch(step)
        logits = slow(x)
        rule.step(logits, cross_entropy(logits, y), labels[0])
        logits = fast(x)
        optimizer.zero_grad()
        optimizer.observe(logits)
        cross_entropy(logits, y).backward()
        optimizer.step()
    found = optimizer.importance()
    assert isinstance(found, list)
    for mine, its in zip(rule.importance, found, strict=True):
        assert_close(mine, its)
    for mine, its in zip(slow.parameters(), fast.parameters(), strict=True):
        assert_close(mine, its)


def assert_close(mine: Tensor, its: Tensor) -> None:
    scale = its.abs().max().item()  # of an entry near zero only so many digits are left
    torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12 * scale)


def test_the_comparison_sees_a_changed_rule() -> None:
    results = []
    for values in (DEFAULTS, replace(DEFAULTS, consolidation=DEFAULTS.consolidation + 1e-9)):
        torch.manual_seed(0)
        model = nn.Linear(16, 3).double()
        rule = Reference(model.parameters(), lr=0.1, values=values)
        for step in range(5):
            x, y = batch(step)
            logits = model(x)
            rule.step(logits, cross_entropy(logits, y), torch.Generator().manual_seed(step))
        results.append(model.weight.detach())
    with pytest.raises(AssertionError):
        assert_close(*results)


def test_the_reference_is_a_page() -> None:
    assert len(Path(reference.__file__).read_text(encoding="utf-8").splitlines()) <= 80
