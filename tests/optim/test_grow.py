"""`grow` lets a head gain rows: what was learned keeps its protection, what is new is free."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import (
    MAKERS,
    Make,
    as_list,
    assert_identical,
    defined_plasticity,
    itself,
    largest_difference,
    network,
    params_of,
    snapshot,
    train,
    values_of,
    wrapped,
)
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam

from syngap import SynGAP

every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
KEPT = {
    "plain": (itself(), ["importance"]),
    "momentum": (itself(momentum=0.9), ["importance", "momentum_buffer"]),
    "wrapped-momentum": (wrapped(SGD, lr=0.1, momentum=0.9), ["importance", "momentum_buffer"]),
    "wrapped-adam": (
        wrapped(Adam, lr=0.01, amsgrad=True),
        ["importance", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
    ),
}


def larger_head(model: nn.Sequential, classes: int = 5) -> tuple[nn.Linear, nn.Linear]:
    """Give the model a head of more rows that begins with the old ones; return old and new."""
    old, new = model[2], nn.Linear(6, classes)
    with torch.no_grad():
        new.weight[: len(old.weight)] = old.weight
        new.bias[: len(old.bias)] = old.bias
    model[2] = new
    return old, new


def grown(make: Make, steps: int = 4, **options: Any) -> tuple[nn.Sequential, SynGAP]:
    model = network()
    optimizer = make(model, **options)
    train(model, optimizer, range(steps))
    old, new = larger_head(model)
    optimizer.grow(old.weight, new.weight)
    optimizer.grow(old.bias, new.bias)
    return model, optimizer


def entries_of(optimizer: SynGAP, param: Tensor) -> dict[str, Tensor]:
    """All tensors that gate and base keep for a parameter."""
    base = getattr(optimizer, "base", None)
    found = dict(optimizer.state[param])
    return found | dict(base.state[param]) if base else found


@pytest.mark.parametrize("name", KEPT)
def test_old_entries_keep_their_state_and_new_ones_start_at_zero(name: str) -> None:
    make, keys = KEPT[name]
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(4))
    head, untouched = model[2], copy.deepcopy(entries_of(optimizer, model[0].weight))
    before = [copy.deepcopy(entries_of(optimizer, param)) for param in (head.weight, head.bias)]
    old, new = larger_head(model)
    optimizer.grow(old.weight, new.weight)
    optimizer.grow(old.bias, new.bias)
    for was, param in zip(before, (new.weight, new.bias), strict=True):
        now = entries_of(optimizer, param)
        assert now.keys() == was.keys()
        for key in keys:
            assert now[key].shape == param.shape
            assert was[key].any()
            assert_identical(now[key][:3], was[key])
            assert not now[key][3:].any()
        if "step" in was:
            assert_identical(now["step"], was["step"])
    assert_identical(entries_of(optimizer, model[0].weight), untouched)
    assert not {old.weight, old.bias} & set(optimizer.state)
    assert [p.shape for p in params_of(optimizer)] == [p.shape for p in model.parameters()]


@every_maker
def test_the_mean_counts_the_new_entries(make: Make) -> None:
    _, optimizer = grown(make)
    found = as_list(optimizer.plasticity())
    assert largest_difference(found, defined_plasticity(optimizer)) < 1e-5
    for gate in found[2:]:
        assert gate[3:].min() > 1.0  # new rows are free


@every_maker
def test_training_goes_on_after_growth(make: Make) -> None:
    model, optimizer = grown(make)
    before, importance = values_of(model), as_list(optimizer.importance())
    train(model, optimizer, range(4, 8))
    after = values_of(model)
    assert all((after[name] != before[name]).any() for name in after)
    pairs = list(zip(as_list(optimizer.importance()), importance, strict=True))
    assert all(not torch.equal(now, then) for now, then in pairs)
    assert all(now[3:].all() for now, _ in pairs[2:])
    found = as_list(optimizer.plasticity())
    assert largest_difference(found, defined_plasticity(optimizer)) < 1e-5


@every_maker
def test_the_first_step_after_growth_is_that_of_an_optimizer_made_so(make: Make) -> None:
    """Growing is the same as having had rows all along that were never of any use."""
    model, optimizer = grown(make)
    twin = copy.deepcopy(model)
    made = make(twin)
    made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(4, 8))
    train(twin, made, range(4, 8))
    assert_identical(values_of(twin), values_of(model))
    assert_identical(made.state_dict(), optimizer.state_dict())


@every_maker
def test_names_follow_the_model(make: Make) -> None:
    model = network()
    optimizer = make(model, model=model)
    train(model, optimizer, range(4))
    old, new = larger_head(model)
    optimizer.grow(old.weight, new.weight)
    optimizer.grow(old.bias, new.bias)
    for found in (optimizer.importance(), optimizer.plasticity()):
        assert isinstance(found, dict)
        assert {name: value.shape for name, value in found.items()} == {
            name: param.shape for name, param in model.named_parameters()
        }
    assert "plasticity/2.weight/mean" in optimizer.summary()


def test_exact_hooks_the_new_head_once() -> None:
    model, optimizer = grown(MAKERS["exact"])
    assert len(model[2]._forward_hooks) == len(model[0]._forward_hooks) == 1
    train(model, optimizer, [4])  # a parameter that fell back would warn
    found = optimizer.importance()
    assert isinstance(found, dict)
    assert found["2.weight"][3:].all()


@every_maker
def test_a_dimension_other_than_the_first_may_grow(make: Make) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(4))
    before = as_list(optimizer.importance())[0]
    old, new = model[0], nn.Linear(5, 6)
    new.bias = old.bias
    model[0] = new
    optimizer.grow(old.weight, new.weight)
    after = as_list(optimizer.importance())[0]
    assert_identical(after[:, :4], before)
    assert not after[:, 4:].any()
    found = as_list(optimizer.plasticity())
    assert largest_difference(found, defined_plasticity(optimizer)) < 1e-5


def refused(model: nn.Sequential) -> dict[str, tuple[Tensor, Tensor]]:
    head = model[2]
    return {
        "smaller": (head.weight, nn.Parameter(torch.zeros(2, 6))),
        "smaller in one dimension": (head.weight, nn.Parameter(torch.zeros(5, 5))),
        "of another rank": (head.weight, nn.Parameter(torch.zeros(18))),
        "of another rank, larger": (head.bias, nn.Parameter(torch.zeros(3, 6))),
        "for an unknown one": (nn.Parameter(torch.zeros(3, 6)), nn.Parameter(torch.zeros(5, 6))),
        "for a copy": (copy.deepcopy(head.weight), nn.Parameter(torch.zeros(5, 6))),
        "already there": (head.bias, model[0].bias),
    }


@pytest.mark.parametrize("case", refused(network()))
@every_maker
def test_what_cannot_take_the_place_is_refused_and_nothing_changes(make: Make, case: str) -> None:
    model, twin = network(), network()
    optimizer, other = make(model), make(twin)
    for subject, one in ((model, optimizer), (twin, other)):
        train(subject, one, range(4))
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"parameter of this optimizer|got \(.*\) for \("):
        optimizer.grow(*refused(model)[case])
    assert_identical(snapshot(model, optimizer), before)
    train(model, optimizer, range(4, 6))
    train(twin, other, range(4, 6))
    assert_identical(values_of(model), values_of(twin))


@every_maker
def test_a_parameter_that_the_model_does_not_hold_is_refused(make: Make) -> None:
    model = network()
    optimizer = make(model, model=model)
    train(model, optimizer, range(4))
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="not a parameter of model"):
        optimizer.grow(model[2].weight, nn.Parameter(torch.zeros(5, 6)))
    assert_identical(snapshot(model, optimizer), before)


def test_state_that_is_not_shaped_like_its_parameter_is_refused() -> None:
    """Adafactor keeps a row and a column; what new rows mean for them is its own affair."""
    model = network()
    optimizer = wrapped(Adafactor, lr=0.01)(model)
    train(model, optimizer, range(2))
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"row_var has shape \(3, 1\) for old \(3, 6\)"):
        optimizer.grow(model[2].weight, nn.Parameter(torch.zeros(5, 6)))
    assert_identical(snapshot(model, optimizer), before)


def test_modules_in_place_of_parameters_are_refused() -> None:
    old, new = nn.Linear(4, 2), nn.Linear(4, 3)
    optimizer = SynGAP(old.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"two parameters, such as old\.weight.*Linear and Linear"):
        optimizer.grow(old, new)  # type: ignore[arg-type]


def test_a_head_replaced_without_grow_is_noticed_by_observe() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = SynGAP(model.parameters(), lr=0.1, model=model)
    model[1] = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"is not one of model's.*grow\(\)"):
        optimizer.observe(model(torch.randn(5, 3)))
