"""Any optimizer of torch for dense gradients has its finished update filtered: u - L((1-Ω)⊙LᵀuR)Rᵀ.

u is the update that the same optimizer makes without a gate, from the same weights and with the
state that the same gradients gave it. All is compared in float64, with the masks of the oracle.
"""

import inspect
from functools import cache
from typing import Any

import protect_oracle as oracle
import pytest
import torch
from protect_cases import CASES, Case, images, linears, random_gradients, traced
from protect_oracle import Gate, Rank
from torch import Tensor, nn
from torch.optim import Optimizer

import syngap

pytestmark = pytest.mark.xdist_group("oracle")  # whose traces are taken once
TOLERANCE = 1e-10
# One takes sparse gradients, the other calls the loss itself.
OTHERS = (torch.optim.SparseAdam, torch.optim.LBFGS)
OPTIMIZERS = [
    kind
    for _, kind in sorted(inspect.getmembers(torch.optim, inspect.isclass))
    if issubclass(kind, Optimizer) and kind is not Optimizer and kind not in OTHERS
]
# What brings more of an optimizer's state and rules into play than its defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "ASGD": {"t0": 1, "lambd": 0.1},
    "Adagrad": {"lr_decay": 0.1, "weight_decay": 0.1},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}
MATRICES = Case(
    "matrices",
    lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)),
    images(30, 6),
    linears("0", "2"),
    seed=2,
)
SHOWN: list[tuple[Case, Rank]] = [
    (next(case for case in CASES if case.name == "gpt_tied"), "full"),
    (next(case for case in CASES if case.name == "conv1d"), 2),
    (MATRICES, "full"),
]
PAIRS = [
    (kind, case, rank)
    for kind in OPTIMIZERS
    for case, rank in SHOWN
    if (kind.__name__ == "Muon") == (case is MATRICES)  # which takes matrices alone
]


@cache
def gate_of(case: Case, rank: Rank) -> Gate:
    return oracle.build_gate(*traced(case), rank=rank)


def made(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    return kind(model.parameters(), **{"lr": 0.1} | OPTIONS.get(kind.__name__, {}))


def give(model: nn.Module, gradients: dict[str, Tensor]) -> None:
    for name, param in model.named_parameters():
        param.grad = gradients[name].clone()


@torch.no_grad()
def filtered(gate: Gate, name: str, update: Tensor) -> Tensor:
    product = gate.products.get(name)
    if product is None:
        return gate.mask[name][0] * update
    parts = [
        oracle.filter_update(matrix, left, right, mask)
        for matrix, (left, right), mask in zip(
            oracle.as_matrices(product, update), gate.bases[name], gate.mask[name], strict=True
        )
    ]
    return torch.stack(parts).reshape(update.shape)


@pytest.mark.parametrize(
    ("kind", "case", "rank"), PAIRS, ids=[f"{kind.__name__}-{case.name}" for kind, case, _ in PAIRS]
)
def test_the_finished_update_is_filtered(kind: type[Optimizer], case: Case, rank: Rank) -> None:
    model, known = case.make()
    protection = syngap.protect(
        model, known, rank=rank, rotate=False, teacher=False, batch_size=case.batch_size
    )
    optimizer = protection.optimizer(made(kind, model))
    plain, _ = case.make()
    base = made(kind, plain)
    gate = gate_of(case, rank)
    for gradients in random_gradients(model, steps=4):
        before = {name: param.detach().clone() for name, param in plain.named_parameters()}
        give(model, gradients)
        give(plain, gradients)
        optimizer.step()
        base.step()
        for (name, param), other in zip(plain.named_parameters(), model.parameters(), strict=True):
            update = param.detach() - before[name]
            expected = filtered(gate, name, update)
            scale = max(1e-12, float(expected.abs().max()))
            difference = (other.detach() - before[name] - expected).abs().max()
            assert float(difference) <= TOLERANCE * scale, name
            with torch.no_grad():
                param.copy_(other)  # the next update is from the same weights
    fresh, _ = case.make()
    for param, old in zip(model.parameters(), fresh.parameters(), strict=True):
        assert not torch.equal(param, old)


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_weights_in_another_layout_take_the_same_steps(how: dict[str, bool], rotate: bool) -> None:
    """A fused kernel goes through memory as it lies."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(80, 3)
        ).double()
        model.to(memory_format=layout)  # type: ignore[call-overload]
        known = torch.randn(96, 3, 8, 8, dtype=torch.float64)
        protection = syngap.protect(model, known, teacher=False, rank="full", rotate=rotate)
        base = torch.optim.AdamW(model.parameters(), 1e-2, **how)  # type: ignore[arg-type]
        optimizer = protection.optimizer(base)
        for _ in range(3):
            optimizer.zero_grad()
            model(known[:8]).logsumexp(1).sum().backward()
            optimizer.step()
        results.append([param.detach().contiguous() for param in model.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
