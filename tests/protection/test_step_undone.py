"""Whatever is raised in a step, wherever in it, the weights and gradients are what they were."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_identical
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import syngap

MAKE_BASE: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda params: AdamW(params, lr=0.02, weight_decay=0.1),
    "adam": lambda params: Adam(params, lr=0.02),
    "sgd": lambda params: SGD(params, lr=0.05),
}
FORMS: dict[str, dict[str, Any]] = {
    "rotated": {"rank": "full", "rotate": True},
    "filtered": {"rank": "full", "rotate": False},
    "low-rank": {"rank": 2, "rotate": False},
}
KNOWN = torch.randn(40, 4, generator=torch.Generator().manual_seed(3))


class Interrupt(BaseException):
    """As KeyboardInterrupt, or an error of memory."""


class InterruptAt(TorchDispatchMode):
    """Raises once, at the n-th operation of torch."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.left -= 1
        if self.left == -1:
            raise Interrupt
        return func(*args, **(kwargs or {}))


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.01}]


def with_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(KNOWN).logsumexp(1).mean().backward()


def content(model: nn.Module) -> list[Tensor]:
    params = list(model.parameters())
    grads = [param.grad for param in params if param.grad is not None]
    assert len(grads) == len(params)
    return [each.detach().clone() for each in (*params, *grads)]


def copy_of(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    subject, copied = copy.deepcopy((model, optimizer))
    for param, own in zip(subject.parameters(), model.parameters(), strict=True):
        assert own.grad is not None
        param.grad = own.grad.clone()
    return subject, copied


def interrupt_everywhere(model: nn.Module, optimizer: Optimizer) -> int:
    """Interrupt copies of the next step at each operation, and return how many there are.

    The last one notes the end of a step for torch's profiler, when the step is done.
    """
    with_gradients(model, optimizer)
    twin, whole = copy_of(model, optimizer)
    before = content(twin)
    whole.step()
    undone, done = 0, 0
    for number in range(10_000):
        subject, copied = copy_of(model, optimizer)
        mode = InterruptAt(number)
        try:
            with mode:
                copied.step()
        except Interrupt:
            is_undone = torch.equal(before[0], content(subject)[0])
            assert_identical(content(subject), before if is_undone else content(twin))
            undone, done = undone + is_undone, done + (not is_undone)
            copied.step()  # and training can go on
            assert all(bool(param.isfinite().all()) for param in subject.parameters())
        else:
            assert done <= 1
            return undone
    raise AssertionError("the step does not end")


@pytest.mark.parametrize("base", ["adamw", "adam"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_interrupted_step_of_a_protected_model_changes_nothing(
    form: dict[str, Any], base: str
) -> None:
    model = make_model()
    protection = syngap.protect(model, KNOWN, teacher=False, **form)
    optimizer = protection.optimizer(MAKE_BASE[base](groups_of(model)))
    with_gradients(model, optimizer)
    optimizer.step()
    assert interrupt_everywhere(model, optimizer) > 10


@pytest.mark.parametrize("base", MAKE_BASE)
def test_an_interrupted_step_of_a_gated_optimizer_changes_nothing(base: str) -> None:
    model = make_model()
    optimizer = syngap.SynGAP.wrap(MAKE_BASE[base](groups_of(model)))
    optimizer.consolidate(model, KNOWN)
    with_gradients(model, optimizer)
    optimizer.step()
    assert interrupt_everywhere(model, optimizer) > 10


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_hooks_of_the_base_see_weights_and_gradients_of_before_and_after(
    form: dict[str, Any],
) -> None:
    """As those of an average of the weights; within a step they are in other coordinates."""
    model = make_model()
    protection = syngap.protect(model, KNOWN, teacher=False, **form)
    base = MAKE_BASE["adam"](model.parameters())
    seen: list[list[Tensor]] = []
    base.register_step_pre_hook(lambda *_: seen.append(content(model)))
    base.register_step_post_hook(lambda *_: seen.append(content(model)))
    optimizer = protection.optimizer(base)
    with_gradients(model, optimizer)
    before = content(model)
    optimizer.step()
    assert_identical(seen, [before, content(model)])
    optimizer.step()
    assert len(seen) == 4


FREE = {"sgd": lambda params: SGD(params, 0.1), "adamw": lambda params: AdamW(params, 0.1)}


@pytest.mark.parametrize("base", FREE)
def test_gradients_that_a_hook_puts_in_place_go_through_the_gate(base: str) -> None:
    """As one that clips or averages them."""

    def step(change: Callable[[nn.Module], None], *, hooked: bool) -> list[Tensor]:
        model = make_model()
        inner = FREE[base](model.parameters())
        optimizer = syngap.SynGAP.wrap(inner, consolidation=0.999, ambient=0.0)
        optimizer.consolidate(model, KNOWN)
        with_gradients(model, optimizer)
        if hooked:
            inner.register_step_pre_hook(lambda *_: change(model))
        else:
            change(model)
        optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    def replace(model: nn.Module) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad = 0.5 * param.grad

    assert_identical(step(replace, hooked=True), step(replace, hooked=False))


def test_a_hook_that_fails_leaves_no_gradient_in_memory() -> None:
    model = make_model()
    inner = SGD(model.parameters(), 0.1)
    optimizer = syngap.SynGAP.wrap(inner)
    optimizer.consolidate(model, KNOWN)
    with_gradients(model, optimizer)
    kept = [weakref.ref(param.grad) for param in model.parameters()]
    inner.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    optimizer.zero_grad()
    assert not [each for each in kept if each() is not None]


def test_a_hook_may_change_the_arguments_of_a_step_as_in_torch() -> None:
    model = make_model()
    seen: list[tuple[bool, Any]] = []

    class Noting(SGD):
        def step(self, closure: Any = None, *, note: Any = None) -> Any:
            seen.append((torch.is_grad_enabled(), note))
            return super().step(closure)

    base = Noting(model.parameters(), 0.1)
    modes: list[bool] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        modes.append(torch.is_grad_enabled())
        return args, kwargs | {"note": 7}

    base.register_step_pre_hook(before)
    base.register_step_post_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    optimizer = syngap.SynGAP.wrap(base)
    optimizer.consolidate(model, KNOWN)
    with_gradients(model, optimizer)
    optimizer.step()
    assert [note for _, note in seen] == [7]
    assert modes == [True, True]
