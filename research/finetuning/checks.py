"""Methods and frontiers, compared with what they are by definition."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import Tensor

from finetuning.analysis import curves, forgetting_ratio
from finetuning.methods import (
    LowRank,
    QuadraticPenalty,
    adamw,
    add_adapters,
    gated_adamw,
    interpolated,
    protection_along_directions,
)
from finetuning.model import GPT, SIZES, START, loss_of

__all__ = ["check"]


def check() -> None:
    """Compare penalty, gate, adapters, rotation and frontier with their definitions."""
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"])
    text = torch.randint(START, (4, SIZES["tiny"].context))
    importance = {name: torch.rand_like(param) ** 4 for name, param in model.named_parameters()}
    check_penalty(model, text, importance)
    check_gate(model, text, importance)
    check_adapters(model, text)
    check_rotation(model, text)
    check_frontier()


def check_penalty(model: GPT, text: Tensor, importance: dict[str, Tensor]) -> None:
    moved, start = copy.deepcopy(model), dict(model.named_parameters())
    penalty = QuadraticPenalty(moved, 7.0, importance)
    with torch.no_grad():
        for param in moved.parameters():
            param.add_(torch.randn_like(param))
    terms = [importance[n] * (p - start[n].detach()) ** 2 for n, p in moved.named_parameters()]
    whole = loss_of(moved, text) + 7.0 / 2 * sum(term.sum() for term in terms)
    expected = torch.autograd.grad(whole, list(moved.parameters()))
    loss_of(moved, text).backward()
    penalty.add_gradient()
    for param, grad in zip(moved.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)
    print("the penalty's gradient is that of the whole loss")


def check_gate(model: GPT, text: Tensor, importance: dict[str, Tensor]) -> None:
    ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    gate = gated_adamw(ours, 1e-2, 0.9, importance)
    base = adamw(plain.parameters(), 1e-2)
    mean = torch.cat([f.flatten() for f in importance.values()]).double().mean()
    for _ in range(3):
        for each, optimizer in ((ours, gate), (plain, base)):
            optimizer.zero_grad()
            loss_of(each, text).backward()
            before = [param.detach().clone() for param in each.parameters()]
            optimizer.step()
        with torch.no_grad():
            for (name, param), old in zip(plain.named_parameters(), before, strict=True):
                mask = 1 - torch.tanh(math.atanh(0.9) * importance[name].double() / mean) + 0.01
                param.copy_(old + mask * (param - old))
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for name, value in gate.importance().items():
        assert torch.equal(value, importance[name]), f"the importance of {name} moved"
    print("three gated steps of AdamW are those of the formula, and importance stays")


def check_adapters(model: GPT, text: Tensor) -> None:
    adapted = copy.deepcopy(model)
    params = add_adapters(adapted, 2)
    torch.testing.assert_close(adapted(text), model(text))
    loss_of(adapted, text).backward()
    with_grads = {param for param in adapted.parameters() if param.grad is not None}
    thin = {param for m in adapted.modules() if isinstance(m, LowRank) for param in (m.up, m.down)}
    assert with_grads == thin == set(params), "others than adapters learn, or not all of them"
    everything = list(adapted.parameters())
    with interpolated(everything, [torch.zeros_like(param) for param in everything], 0.5):
        torch.testing.assert_close(next(adapted.parameters()), next(model.parameters()) / 2)
    print("adapters begin at the model, and they alone learn")


def check_rotation(model: GPT, text: Tensor) -> None:
    tuned = copy.deepcopy(model)
    protection = protection_along_directions(tuned, text, None, 0)
    known = {name: protection.known[param] for name, param in tuned.named_parameters()}
    penalty = QuadraticPenalty(
        tuned,
        7.0,
        {name: one.importance for name, one in known.items()},
        {name: one.basis for name, one in known.items()},
    )
    start = [param.detach().clone() for param in tuned.parameters()]
    optimizer = protection.optimizer(adamw(tuned.parameters(), 1e-2))
    loss_of(tuned, text).backward()
    grads = {name: param.grad.clone() for name, param in tuned.named_parameters()}
    optimizer.step()
    # The first step of AdamW is the sign of the gradient: here of its coordinates.
    for (name, param), before in zip(tuned.named_parameters(), start, strict=True):
        basis = known[name].basis
        grad = grads[name] if basis is None else basis.into(grads[name])
        step = -1e-2 * grad / (grad.abs() + 1e-8)
        step = step if basis is None else basis.back(step, before)
        torch.testing.assert_close(param.detach(), before + step, rtol=1e-3, atol=1e-4)
    whole = torch.zeros(())
    for (name, param), before in zip(tuned.named_parameters(), start, strict=True):
        basis, offset = known[name].basis, param - before
        offset = offset if basis is None else basis.into(offset)
        whole = whole + 7.0 / 2 * (known[name].importance * offset**2).sum()
    expected = torch.autograd.grad(whole, list(tuned.parameters()))
    tuned.zero_grad(set_to_none=False)
    penalty.add_gradient()
    for param, grad in zip(tuned.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-3, atol=1e-6)
    ends = [param.detach().clone() for param in tuned.parameters()]
    with interpolated(list(tuned.parameters()), start, 0.25):
        for param, one, other in zip(tuned.parameters(), start, ends, strict=True):
            torch.testing.assert_close(param.detach(), 0.75 * one + 0.25 * other)
    assert all(torch.equal(p, q) for p, q in zip(tuned.parameters(), ends, strict=True))
    print("AdamW and the penalty work along directions, and interpolation is linear")


def check_frontier() -> None:
    table: dict[str, list[tuple[float, ...]]] = {  # new, old on a half, old on the other
        "start": [(3.0, 1.0, 1.0)],
        "adamw": [(2.0, 1.4, 1.4), (1.0, 3.0, 3.0), (2.5, 1.6, 1.6)],
        "gate": [(2.0, 1.2, 1.2), (1.5, 1.5, 1.5)],
        "lucky": [(2.0, 0.5, 2.0)],
    }
    rows = [
        {"method": method, "new_a": new, "new_b": new, "old_a": one, "old_b": other}
        for method, points in table.items()
        for new, one, other in points
    ]
    by_method = curves(rows, [0.25, 0.5, 0.75, 1.0])  # new loss 2.5, 2, 1.5, 1
    np.testing.assert_allclose(by_method["adamw"][2], [0.2, 0.4, 1.2, 2.0])
    np.testing.assert_allclose(by_method["gate"][2], [0.1, 0.2, 0.5, np.nan])
    np.testing.assert_allclose(by_method["lucky"][2], [0.375, 0.25, np.nan, np.nan])
    ratio = forgetting_ratio(by_method["gate"], by_method["adamw"])
    np.testing.assert_allclose(ratio, 0.8 / 1.8)
    print("frontiers, levels and ratios are those found by hand")
