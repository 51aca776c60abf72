"""Ballistic takes the steps of its formula, and says what it cannot do."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syngap.optim import Ballistic

STEPS = 20
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "fast": {"lr": 0.1, "beta": 0.9},
    "no-memory": {"lr": 0.05, "beta": 0.0},
    "rounded": {"lr": 0.05, "beta": 0.9, "eps": 0.5},
    "decay": {"lr": 0.05, "beta": 0.9, "weight_decay": 0.3},
    "climbing": {"lr": 0.05, "beta": 0.9, "maximize": True},
    "climbing-with-decay": {"lr": 0.05, "beta": 0.9, "maximize": True, "weight_decay": 0.3},
}


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2), (4,), ()]
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def gradients(step: int) -> list[Tensor]:
    """Of very different sizes; the last parameter has none at every third step."""
    generator = torch.Generator().manual_seed(100 + step)
    sizes = {(3, 2): 1.0, (4,): 1e-4, (): 1e3}
    return [
        size * torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape, size in sizes.items()
    ]


def follow(optimizer: Ballistic, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for index, (param, grad) in enumerate(zip(params, gradients(step), strict=True)):
            param.grad = None if index == 2 and step % 3 == 0 else grad.to(param)
        optimizer.step()


def by_loop(
    lr: float = 1e-3,
    beta: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> list[list[float]]:
    """The formula, one number at a time."""
    values = [param.detach().flatten().tolist() for param in parameters()]
    squares = [[0.0] * len(value) for value in values]
    for step in range(STEPS):
        for index, grad in enumerate(gradients(step)):
            if index == 2 and step % 3 == 0:
                continue
            for i, g in enumerate(grad.flatten().tolist()):
                g = -g if maximize else g
                squares[index][i] = beta * squares[index][i] + (1 - beta) * g * g
                values[index][i] *= 1 - lr * weight_decay
                values[index][i] -= lr * g / math.sqrt(squares[index][i] + eps)
    return values


@pytest.mark.parametrize("lr_as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_formula(
    name: str, dtype: torch.dtype, tolerance: float, lr_as_tensor: bool
) -> None:
    options = {"lr": 1e-3, **CASES[name]}
    if lr_as_tensor:
        options["lr"] = torch.tensor(options["lr"], dtype=dtype)
    params = parameters(dtype)
    follow(Ballistic(params, **options), params, range(STEPS))
    for param, expected in zip(params, by_loop(**CASES[name]), strict=True):
        found = torch.tensor(param.detach().flatten().tolist(), dtype=torch.float64)
        torch.testing.assert_close(
            found, torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_without_memory_every_step_has_the_same_length(size: float) -> None:
    param = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = Ballistic([param], lr=0.1, beta=0.0, eps=1e-20)
    param.grad = size * torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.tensor([-0.1, 0.1, -0.1]).double())


def test_decay_is_decoupled_from_the_gradient() -> None:
    """A weight whose gradient is zero shrinks by lr · weight_decay, whatever others' are."""
    param = nn.Parameter(torch.tensor([2.0, 2.0], dtype=torch.float64))
    optimizer = Ballistic([param], lr=0.1, beta=0.5, weight_decay=0.5)
    param.grad = torch.tensor([0.0, 1e6], dtype=torch.float64)
    optimizer.step()
    assert param[0].item() == pytest.approx(2.0 * 0.95, rel=1e-12)
    assert param[1].item() == pytest.approx(2.0 * 0.95 - 0.1 / math.sqrt(0.5), rel=1e-12)


def test_groups_have_their_own_options() -> None:
    slow, fast = parameters()[:2]
    optimizer = Ballistic([{"params": [slow]}, {"params": [fast], "lr": 0.5, "beta": 0.0}], lr=0.0)
    before = slow.detach().clone()
    slow.grad, fast.grad = torch.ones_like(slow), torch.ones_like(fast)
    moved = fast.detach() - 0.5
    optimizer.step()
    assert torch.equal(slow.detach(), before)
    torch.testing.assert_close(fast.detach(), moved, rtol=1e-7, atol=1e-7)


def test_closure_is_evaluated_with_gradients_and_its_loss_returned() -> None:
    param = nn.Parameter(torch.tensor([2.0]))
    optimizer = Ballistic([param], lr=0.1, beta=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (3 * param).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == 6.0
    assert param.item() == pytest.approx(1.9)
    assert optimizer.step() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "lr must be ≥ 0, got -0.1"),
        ({"lr": math.nan}, "lr must be ≥ 0, got nan"),
        ({"beta": 1.0}, r"beta must be in \[0, 1\), got 1.0"),
        ({"beta": -0.1}, r"beta must be in \[0, 1\), got -0.1"),
        ({"beta": math.nan}, r"beta must be in \[0, 1\), got nan"),
        ({"eps": 0.0}, "eps must be > 0, got 0.0"),
        ({"eps": math.nan}, "eps must be > 0, got nan"),
        ({"weight_decay": -1.0}, "weight_decay must be ≥ 0, got -1.0"),
        ({"weight_decay": math.nan}, "weight_decay must be ≥ 0, got nan"),
    ],
)
def test_bad_options_are_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ballistic(parameters(), **options)


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_gradients_it_cannot_divide_are_refused(kind: str) -> None:
    if kind == "sparse":
        param = nn.Parameter(torch.ones(3))
        param.grad = torch.eye(3)[0].to_sparse()
    else:
        param = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="dense real gradients"):
        Ballistic([param]).step()
    assert torch.equal(param.detach(), torch.ones_like(param))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_resuming_from_a_state_dict_is_bitwise() -> None:
    options = {"lr": 0.05, "beta": 0.9, "weight_decay": 0.1}
    params = parameters()
    optimizer = Ballistic(params, **options)
    follow(optimizer, params, range(7))
    resumed = copy.deepcopy(params)
    other = Ballistic(resumed)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert other.param_groups[0]["beta"] == 0.9

    follow(optimizer, params, range(7, STEPS))
    follow(other, resumed, range(7, STEPS))
    for param, again in zip(params, resumed, strict=True):
        assert torch.equal(param, again)


def test_a_parameter_without_gradient_stays_and_has_no_state() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = Ballistic([param], weight_decay=0.5)
    optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3))
    assert not optimizer.state
