"""A parameter without entries, such as a head that has no classes yet, changes nothing."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from helpers import (
    MAKERS,
    Make,
    as_list,
    assert_identical,
    network,
    params_of,
    prepare,
    train,
    values_of,
    wrapped,
)
from torch import Tensor, nn
from torch.optim import SGD, Adam

from syngap import SynGAP

ALL = MAKERS | {
    "wrapped-sgd-momentum": wrapped(SGD, lr=0.1, momentum=0.9),
    "wrapped-amsgrad": wrapped(Adam, lr=0.01, amsgrad=True),
}
every_maker = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


class TwoHeads(nn.Module):
    """A network with a second head, of no classes at first."""

    def __init__(self, classes: int = 0) -> None:
        super().__init__()
        self.body = network()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: nothing to initialise
            self.extra = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.body(x), self.extra(x)], dim=1)


def reload(optimizer: SynGAP) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@every_maker
def test_the_others_take_the_steps_that_they_take_without_it(make: Make) -> None:
    plain, model = network(), TwoHeads()
    alone, optimizer = make(plain), make(model)
    for subject, its in ((plain, alone), (model, optimizer)):
        train(subject, its, range(4))
        reload(its)
        train(subject, its, range(4, 7))
    for name, value in values_of(plain).items():
        assert_identical(values_of(model)[f"body.{name}"], value)
    assert all(math.isfinite(value) for value in optimizer.summary().values())


@every_maker
def test_classes_that_come_later_are_learned(make: Make) -> None:
    model = TwoHeads()
    optimizer = make(model)
    train(model, optimizer, range(3))
    reload(optimizer)
    before = as_list(optimizer.importance())
    old, model.extra = model.extra, nn.Linear(4, 2)
    optimizer.grow(old.weight, model.extra.weight)
    optimizer.grow(old.bias, model.extra.bias)
    grown = as_list(optimizer.importance())
    assert_identical(grown[:4], before[:4])
    assert not any(value.any() for value in grown[4:])
    start = values_of(model)
    train(model, optimizer, range(3, 6))
    reload(optimizer)
    train(model, optimizer, range(6, 8))
    for name, value in values_of(model).items():
        assert value.isfinite().all()
        assert not torch.equal(value, start[name]), name
    assert all(value.any() for value in as_list(optimizer.importance())[4:])


@every_maker
def test_a_head_without_classes_may_be_replaced_by_another_one(make: Make) -> None:
    model = TwoHeads()
    optimizer = make(model)
    train(model, optimizer, range(2))
    old, model.extra = model.extra, TwoHeads().extra
    optimizer.grow(old.weight, model.extra.weight)
    optimizer.grow(old.bias, model.extra.bias)
    train(model, optimizer, range(2, 5))
    assert all(value.isfinite().all() for value in values_of(model).values())


@pytest.mark.parametrize("name", ["plain", "tensor-scope", "compact", "foreach", "wrapped-adamw"])
def test_an_optimizer_of_nothing_else_steps(name: str) -> None:
    model = TwoHeads()
    optimizer = ALL[name](model.extra)
    for step in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there is nothing to observe
            for param in params_of(optimizer):
                param.grad = torch.zeros_like(param)
            optimizer.step()
        reload(optimizer)
        assert optimizer.param_groups[0]["steps"] == step + 1
    prepare(model, optimizer, 2)
    optimizer.step()
