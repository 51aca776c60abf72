"""`SynGAP.wrap` gates the update that another optimizer makes, and leaves that optimizer itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    GATE,
    as_list,
    assert_go_on_alike,
    assert_identical,
    defined_plasticity,
    largest_difference,
    network,
    params_of,
    prepare,
    train,
    values_of,
    wrapped,
)
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW, Optimizer, RMSprop, SparseAdam
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils._python_dispatch import TorchDispatchMode

from syngap import SynGAP

Base = Callable[[Any], Optimizer]

BASES: dict[str, Base] = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "sgd-foreach": lambda params: SGD(params, lr=0.1, foreach=True),
    "sgd-nesterov": lambda params: SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "sgd-decay": lambda params: SGD(params, lr=0.1, weight_decay=0.1),
    "adam": lambda params: Adam(params, lr=0.01),
    "adam-foreach": lambda params: Adam(params, lr=0.01, foreach=True),
    "adam-fused": lambda params: Adam(params, lr=0.01, fused=True),
    "adamw": lambda params: AdamW(params, lr=0.01, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda params: RMSprop(params, lr=0.01, momentum=0.5),
    # A copied Adafactor asks its groups for this key where there is a GPU, and has it not.
    "adafactor": lambda params: Adafactor([{"params": params, "capturable": False}], lr=0.01),
}
every_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


def gated(model: nn.Module, base: Base, **options: Any) -> Any:
    return SynGAP.wrap(base(model.parameters()), **{**GATE, **options})


@pytest.mark.parametrize("scope", ["network", "tensor"])
@every_base
def test_the_gate_is_on_the_update(base: Base, scope: str) -> None:
    """θ = θ_old + Ω (θ_new - θ_old), with the base's state as it would be without a gate."""
    model = network(torch.float64)
    optimizer = gated(model, base, scope=scope)
    for step in range(6):
        prepare(model, optimizer, step)
        before = values_of(model)
        free = copy.deepcopy(optimizer.base)
        for param, original in zip(params_of(free), model.parameters(), strict=True):
            param.grad = original.grad.clone()
        free.step()
        optimizer.step()
        gates = defined_plasticity(optimizer)
        expected = [
            old + gate * (new.detach() - old)
            for old, new, gate in zip(before.values(), params_of(free), gates, strict=True)
        ]
        assert largest_difference(model.parameters(), expected) < 1e-12
        assert min(gate.min() for gate in gates) < 0.3
        assert_identical(optimizer.base.state_dict(), free.state_dict() | groups_of(optimizer))


@pytest.mark.parametrize("together", [1, 40, 1 << 24])
@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("options", [{}, {"compact": True}, {"scope": "tensor"}], ids=str)
def test_lists_do_what_one_tensor_at_a_time_does(
    name: str, options: dict[str, Any], together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {"sgd": SGD, "adam": Adam}[name]
    monkeypatch.setattr("syngap.optim.update._TOGETHER", together)
    ended = []
    for foreach in (False, True):
        model = network()
        optimizer = gated(model, partial(kind, lr=0.01, foreach=foreach), **options)
        for step in range(5):
            prepare(model, optimizer, step)
            if step == 2:
                next(model.parameters()).grad = None
            optimizer.step()
        ended.append((values_of(model), optimizer.importance()))
    assert_identical(*ended)


def test_lists_take_few_calls_however_many_tensors_there_are() -> None:
    counts = []
    for layers in (2, 40):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        optimizer = gated(model, lambda params: AdamW(params, foreach=True))
        optimizer.consolidate(model, torch.randn(8, 3))
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
        with Calls() as calls:
            optimizer.step()
        counts.append(sum("foreach" in name for name in calls.names))
        assert not [name for name in calls.names if "sigmoid" in name and "foreach" not in name]
    assert counts[0] == counts[1] > 0


class Calls(TorchDispatchMode):
    """Notes the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def groups_of(optimizer: Any) -> dict[str, Any]:
    """The parameter groups alone, whose clock the gate advances."""
    return {"param_groups": optimizer.base.state_dict()["param_groups"]}


@every_base
def test_gradients_are_afterwards_what_they_were(base: Base) -> None:
    model = network()
    optimizer = gated(model, base)
    for step in range(3):
        prepare(model, optimizer, step)
        gradients = [param.grad for param in model.parameters()]
        before = [gradient.clone() for gradient in gradients]
        optimizer.step()
        pairs = zip(model.parameters(), gradients, strict=True)
        assert all(param.grad is gradient for param, gradient in pairs)
        assert_identical(gradients, before)


@every_base
def test_the_groups_are_the_bases_own_whatever_happens(base: Base) -> None:
    model = network()
    optimizer = gated(model, base)
    train(model, optimizer, range(2))
    twin, its = copy.deepcopy((model, optimizer))
    for subject, one in ((model, optimizer), (twin, its)):
        assert one.param_groups is one.base.param_groups
        one.load_state_dict(copy.deepcopy(one.state_dict()))
        assert one.param_groups is one.base.param_groups
        scheduler = ExponentialLR(one, gamma=0.5)
        rate = one.base.param_groups[0]["lr"]
        train(subject, one, [2])
        scheduler.step()
        assert one.base.param_groups[0]["lr"] == rate / 2


@every_base
def test_the_state_holds_gate_and_base_and_round_trips(base: Base) -> None:
    model = network()
    optimizer = gated(model, base)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    alone = optimizer.base.state_dict()
    for index, state in saved["state"].items():
        own = alone["state"].get(index, {})
        assert state.keys() == {"importance", "mean"} | {f"base.{key}" for key in own}
        assert_identical({key: state[f"base.{key}"] for key in own}, own)

    resumed = network()
    resumed.load_state_dict(model.state_dict())
    fresh = gated(resumed, base, consolidation=0.2)
    fresh.load_state_dict(saved)
    assert_identical(fresh.base.state_dict(), alone)
    assert_go_on_alike((resumed, fresh), (model, optimizer), range(3, 8))


def test_a_group_added_late_reaches_the_base_with_options_of_both() -> None:
    model = network()
    optimizer: Any = SynGAP.wrap(Adam(model[0].parameters(), lr=0.01), **GATE)
    train(model, optimizer, range(2))
    added = {"params": model[2].parameters(), "betas": (0.5, 0.9), "consolidation": 0.3}
    optimizer.add_param_group(added)
    assert len(optimizer.base.param_groups) == 2
    group = optimizer.base.param_groups[1]
    assert (group["betas"], group["consolidation"], group["lr"]) == ((0.5, 0.9), 0.3, 0.01)
    assert (group["retention"], group["steps"]) == (GATE["retention"], 2)
    train(model, optimizer, [2])
    steps = [optimizer.base.state[param]["step"].item() for param in params_of(optimizer)]
    assert steps == [3, 3, 1, 1]
    gates = as_list(optimizer.plasticity())
    assert largest_difference(gates, defined_plasticity(optimizer)) < 1e-5


def test_a_group_of_the_base_may_bring_options_of_the_gate() -> None:
    model = network()
    groups = [
        {"params": model[0].parameters(), "consolidation": 0.9},
        *[{"params": model[2].parameters()}],
    ]
    optimizer = wrapped(Adam, lr=0.01)(model, groups)
    assert [group["consolidation"] for group in optimizer.param_groups] == [0.9, 0.5]
    train(model, optimizer, range(3))
    gates = as_list(optimizer.plasticity())
    assert largest_difference(gates, defined_plasticity(optimizer)) < 1e-5


def test_names_of_named_parameters_stay() -> None:
    model = network()
    optimizer = SynGAP.wrap(Adam(model.named_parameters(), lr=0.01), **GATE)
    train(model, optimizer, range(2))
    assert optimizer.param_groups[0]["param_names"] == list(values_of(model))
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == list(values_of(model))


def test_the_bases_own_hooks_fire() -> None:
    model = network()
    base = SGD(model.parameters(), lr=0.1)
    fired = []
    base.register_step_pre_hook(lambda *_: fired.append("before"))
    base.register_step_post_hook(lambda *_: fired.append("after"))
    train(model, SynGAP.wrap(base, **GATE), [0])
    assert fired == ["before", "after"]


REFUSED: dict[str, Base] = {
    "LBFGS": LBFGS,
    "SparseAdam": lambda params: SparseAdam(list(params)),
    "SynGAP": lambda params: SynGAP(params, lr=0.1),
    "WrappedSynGAP": lambda params: SynGAP.wrap(SGD(params, lr=0.1)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_update_to_gate_is_refused(name: str) -> None:
    base = REFUSED[name](network().parameters())
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(ValueError, match=rf"{name} cannot be behind a gate"):
        SynGAP.wrap(base)
    assert_identical(base.state_dict(), before)


@pytest.mark.parametrize(
    "options",
    [{"consolidation": 1.0}, {"every": 0}, {"estimator": "exact"}, {"model": network()}],
    ids=lambda options: next(iter(options)),
)
def test_a_refused_wrap_leaves_the_base_as_it_was(options: dict[str, Any]) -> None:
    base = Adam(network().parameters(), lr=0.01)
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(ValueError, match=r"got|model"):
        SynGAP.wrap(base, **options)
    assert_identical(base.state_dict(), before)


def test_a_base_is_gated_once() -> None:
    base = Adam(network().parameters(), lr=0.01)
    SynGAP.wrap(base, consolidation=0.5)
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(ValueError, match="this Adam is behind a gate already"):
        SynGAP.wrap(base)
    assert_identical(base.state_dict(), before)


def test_a_bare_state_loaded_into_the_base_leaves_the_two_together() -> None:
    model = network()
    bare = Adam(model.parameters(), lr=0.05)
    F.cross_entropy(model(torch.randn(4, 4)), torch.tensor([0, 1, 2, 0])).backward()
    bare.step()
    optimizer = SynGAP.wrap(Adam(model.parameters(), lr=0.01), consolidation=0.5)
    optimizer.base.load_state_dict(bare.state_dict())
    assert optimizer.param_groups is optimizer.base.param_groups
    assert optimizer.param_groups[0]["consolidation"] == 0.5
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [param.clone() for param in model.parameters()]
    optimizer.step()
    assert_identical(list(model.parameters()), before)


class Rateless(Optimizer):
    """A base without a learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad)


class Failing(SGD):
    def step(self, closure: Any = None) -> Any:
        raise OSError("out of luck")


def test_a_base_needs_no_rate() -> None:
    model = network()
    optimizer = SynGAP.wrap(Rateless(model.parameters()))
    F.cross_entropy(model(torch.randn(4, 4)), torch.tensor([0, 1, 2, 0])).backward()
    with pytest.warns(UserWarning, match="no importance yet"):
        optimizer.step()


def test_a_step_that_fails_gives_the_gradients_back() -> None:
    model = network()
    optimizer = SynGAP.wrap(Failing(model.parameters(), lr=0.1))
    logits = model(torch.randn(4, 4))
    optimizer.observe(logits)
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 0])).backward()
    before = [param.grad.clone() for param in model.parameters()]
    with pytest.raises(OSError, match="luck"):
        optimizer.step()
    assert_identical([param.grad for param in model.parameters()], before)


def test_options_of_the_same_name_are_refused() -> None:
    class Damped(SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.defaults["damping"] = 0.5

    with pytest.raises(ValueError, match="Damped has options of its own called damping"):
        SynGAP.wrap(Damped(network().parameters()))


def test_states_of_the_two_kinds_are_not_mixed_up() -> None:
    kinds = {
        "SynGAP itself": SynGAP(network().parameters(), lr=0.1),
        r"SynGAP\.wrap\(AdamW\)": SynGAP.wrap(AdamW(network().parameters(), lr=0.1)),
        r"SynGAP\.wrap\(RMSprop\)": SynGAP.wrap(RMSprop(network().parameters(), lr=0.1)),
    }
    for kind, optimizer in kinds.items():
        before = copy.deepcopy(optimizer.state_dict())
        for other, saved in kinds.items():
            if other != kind:
                with pytest.raises(
                    ValueError, match=f"is of {other}, and this optimizer is {kind}"
                ):
                    optimizer.load_state_dict(saved.state_dict())
        assert_identical(optimizer.state_dict(), before)


def test_a_class_in_place_of_an_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes an optimizer that holds parameters.*got <class"):
        SynGAP.wrap(AdamW)  # type: ignore[arg-type]
