"""Any optimizer of torch for dense gradients has its finished update filtered: u - L((1-Ω)⊙LᵀuR)Rᵀ.

u is the update that the same optimizer makes without a gate, from the same weights and with the
state that the same gradients gave it. All is compared in float64, with the masks of the oracle.
"""

import copy
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
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import syngap
from syngap.optim import update_forms

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


# What else an optimizer holds -----------------------------------------------------------------


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


KNOWN = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


def mask_of(optimizer: Any, param: Tensor) -> Tensor:
    gate = optimizer.gate
    (group,) = (group for group in gate.groups if any(each is param for each in group["params"]))
    found: Tensor = gate.mask(group, param, gate.importance_of(param), gate.network_mean())
    return found


def alone(model: nn.Sequential, protection: Any) -> tuple[Any, Tensor]:
    first = model[0].weight
    return protection.optimizer(torch.optim.AdamW([first])), first


def beside_others(model: nn.Sequential, protection: Any) -> tuple[Any, Tensor]:
    others = nn.Linear(100, 100)
    params = [*model.parameters(), *others.parameters()]
    return protection.optimizer(torch.optim.AdamW(params)), model[0].weight


def with_a_grown_head(model: nn.Sequential, protection: Any) -> tuple[Any, Tensor]:
    old, model[2] = model[2], nn.Linear(6, 1000)
    with torch.no_grad():
        model[2].weight[:3].copy_(old.weight)
        model[2].bias[:3].copy_(old.bias)
    protection.grow(old.weight, model[2].weight)
    protection.grow(old.bias, model[2].bias)
    return protection.optimizer(torch.optim.AdamW(model.parameters())), model[0].weight


def with_others_frozen(model: nn.Sequential, protection: Any) -> tuple[Any, Tensor]:
    model[2].requires_grad_(False)
    return protection.optimizer(torch.optim.AdamW(model.parameters())), model[0].weight


def added_to(gated: bool) -> Any:
    def added(model: nn.Sequential, protection: Any) -> tuple[Any, Tensor]:
        base = torch.optim.AdamW(model[2].parameters())
        optimizer = protection.optimizer(base)
        (optimizer if gated else base).add_param_group({"params": [model[0].weight]})
        return optimizer, model[0].weight

    return added


def after_loading(model: nn.Sequential, protection: Any) -> tuple[Any, Tensor]:
    first = protection.optimizer(torch.optim.AdamW(model.parameters()))
    optimizer = protection.optimizer(torch.optim.AdamW(model.parameters()))
    optimizer.load_state_dict(first.state_dict())
    model[2].requires_grad_(False)
    return optimizer, model[0].weight


HOLDINGS = {
    "a parameter alone": alone,
    "parameters of a loss": beside_others,
    "a head that grew": with_a_grown_head,
    "others are frozen": with_others_frozen,
    "a group that came later": added_to(gated=True),
    "a group of the base that came later": added_to(gated=False),
    "a state was loaded": after_loading,
}


@pytest.mark.parametrize("name", HOLDINGS)
def test_a_mask_follows_from_what_is_known_alone(name: str) -> None:
    model = network()
    protection = syngap.protect(model, KNOWN, teacher=False)
    every = protection.optimizer(torch.optim.AdamW(model.parameters()))
    expected = mask_of(every, model[0].weight)
    assert 0.05 < expected.mean() < 0.95
    assert torch.equal(mask_of(*HOLDINGS[name](model, protection)), expected)


def test_masks_follow_what_is_observed_afterwards() -> None:
    model = network()
    protection = syngap.protect(model, KNOWN, teacher=False)
    optimizer = protection.optimizer(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(100 * KNOWN)
        optimizer.observe(logits)
        logits.logsumexp(1).mean().backward()
        optimizer.step()
    gate = optimizer.gate
    sums = [gate.importance_of(param).sum() for param in model.parameters()]
    mean = sum(sums) / sum(param.numel() for param in model.parameters())
    torch.testing.assert_close(gate.network_mean(), mean)
    again = protection.optimizer(torch.optim.AdamW(model.parameters()))
    again.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(again.gate.network_mean(), mean)


def test_masks_of_a_resumed_run_are_the_same_but_for_rounding() -> None:
    """The same inputs may give other roundings: with other threads, or on a GPU."""
    model, others = network(), nn.Linear(100, 100)
    protection = syngap.protect(model, KNOWN, teacher=False)
    first, second = (
        protection.optimizer(torch.optim.AdamW([*model.parameters(), *others.parameters()]))
        for _ in range(2)
    )
    expected, saved = mask_of(first, model[0].weight), first.state_dict()
    for state in saved["state"].values():
        state["mean"] = state["mean"] * (1 + 1e-6)
    second.load_state_dict(saved)
    torch.testing.assert_close(mask_of(second, model[0].weight), expected, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_with_a_group_that_came_later_is_resumed(gated: bool, steps: int) -> None:
    def made() -> tuple[nn.Sequential, Any]:
        model = network()
        protection = syngap.protect(model, KNOWN, teacher=False)
        base = torch.optim.AdamW(model[2].parameters())
        optimizer = protection.optimizer(base)
        (optimizer if gated else base).add_param_group({"params": [*model[0].parameters()]})
        return model, optimizer

    def step(model: nn.Sequential, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(KNOWN).logsumexp(1).mean().backward()
        optimizer.step()

    (model, optimizer), (other, resumed) = made(), made()
    for _ in range(steps):
        step(model, optimizer)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer)
    step(other, resumed)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("when", ["before", "after"])
def test_parameters_that_were_frozen_at_protect_are_warned_of(when: str) -> None:
    model = network()
    model[0].requires_grad_(False)
    protection = syngap.protect(model, KNOWN, teacher=False)
    if when == "before":
        model[0].requires_grad_(True)
        with pytest.warns(UserWarning, match="frozen at syngap.protect"):
            protection.optimizer(torch.optim.AdamW(model.parameters()))
        return
    optimizer = protection.optimizer(torch.optim.AdamW(model.parameters()))
    model[0].requires_grad_(True)
    model(KNOWN).logsumexp(1).mean().backward()
    with pytest.warns(UserWarning, match="frozen at syngap.protect"):
        optimizer.step()


def trained(kind: type[Optimizer], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
    model.double()
    protection = syngap.protect(model, KNOWN.double(), teacher=False, rotate=True)
    optimizer = protection.optimizer(kind(model.parameters(), **{"lr": 0.1} | options))
    for _ in range(3):
        optimizer.zero_grad()
        model(KNOWN.double()).logsumexp(1).mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind is not torch.optim.Adagrad])
def test_rotated_steps_leave_the_weights_out_only_where_these_do_not_matter(
    kind: type[Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"weight_decay": 0.0} if "weight_decay" in inspect.signature(kind).parameters else {}
    found = trained(kind, **options)
    monkeypatch.setattr(update_forms, "_needs_weights", lambda base, work: True)
    expected = trained(kind, **options)
    for param, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=1e-9, atol=1e-12)


def test_hooks_of_all_optimizers_run_once_and_see_the_weights() -> None:
    model = network()
    protection = syngap.protect(model, KNOWN, teacher=False)
    optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), weight_decay=0.0))
    seen: list[tuple[str, float]] = []

    def look(when: str) -> Any:
        return lambda *_: seen.append((when, float(model[0].weight.detach().norm())))

    before = float(model[0].weight.detach().norm())
    handles = [
        register_optimizer_step_pre_hook(look("before")),
        register_optimizer_step_post_hook(look("after")),
    ]
    try:
        model(KNOWN).logsumexp(1).mean().backward()
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [("before", before), ("after", float(model[0].weight.detach().norm()))]


def test_a_base_whose_moments_are_along_directions_refuses_others() -> None:
    model = network()
    bare = torch.optim.AdamW(model.parameters())
    model(KNOWN).logsumexp(1).mean().backward()
    bare.step()
    saved = bare.state_dict()
    protection = syngap.protect(model, KNOWN, teacher=False)
    base = torch.optim.AdamW(model.parameters())
    optimizer = protection.optimizer(base)
    for load in (base.load_state_dict, optimizer.load_state_dict):
        with pytest.raises(ValueError, match=r"before protection\.optimizer\(base\)"):
            load(saved)
    loaded = torch.optim.AdamW(model.parameters())
    loaded.load_state_dict(saved)
    assert not protection.optimizer(loaded).param_groups[0]["rotated"]
    copy.copy(optimizer).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"before protection\.optimizer\(base\)"):
        copy.deepcopy(optimizer).base.load_state_dict(saved)
