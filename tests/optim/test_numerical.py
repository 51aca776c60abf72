"""Gradients that are not finite move nothing: they raise, or the step is skipped and counted."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    MAKERS,
    Make,
    as_list,
    assert_identical,
    batch,
    draws_of,
    network,
    params_of,
    prepare,
    snapshot,
    train,
    values_of,
    wrapped,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from syngap import SynGAP
from syngap.optim.errors import NotFiniteError

BAD = [math.nan, math.inf, -math.inf]
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def spoil(param: Tensor, bad: float) -> None:
    """One number is enough, wherever it is."""
    assert param.grad is not None
    param.grad.view(-1)[-1] = bad


# Raising ------------------------------------------------------------------------------------------


@every_maker
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_a_gradient_that_is_not_finite_raises_and_changes_nothing(
    make: Make, bad: float, which: int
) -> None:
    model, without = network(), network()
    optimizer, plain = make(model), make(without)
    train(model, optimizer, range(3))
    train(without, plain, range(3))
    prepare(model, optimizer, 100)
    spoil(params_of(optimizer)[which], bad)
    before = snapshot(model, optimizer)
    with pytest.raises(NotFiniteError, match=r"gradients of step 4 are not finite \(of \S+\)"):
        optimizer.step()
    after = snapshot(model, optimizer)
    del before["gradients"], after["gradients"]  # NaN is not equal to itself
    assert_identical(after, before)
    train(model, optimizer, range(3, 6))  # whoever catches it can go on
    train(without, plain, range(3, 6))
    assert_identical(values_of(model), values_of(without))
    assert_identical(optimizer.state_dict(), plain.state_dict())


def test_the_message_names_parameters_and_a_rate() -> None:
    model = network()
    optimizer = SynGAP(model.parameters(), lr=1e3, model=model)
    prepare(model, optimizer, 0)
    for param in model.parameters():
        spoil(param, math.nan)
    with pytest.raises(
        NotFiniteError, match=r"\(of 0.weight, 0.bias, 2.weight and 1 more\).* try 100\)"
    ):
        optimizer.step()


@every_maker
def test_large_gradients_are_no_reason_to_stop(make: Make) -> None:
    """Their norm overflows; they do not."""
    model = network()
    optimizer = make(model)
    prepare(model, optimizer, 0)
    for param in model.parameters():
        assert param.grad is not None
        param.grad.fill_(1e30)
    optimizer.step()
    assert all(param.isfinite().all() for param in model.parameters())


def test_a_parameter_that_is_frozen_may_have_any_gradient() -> None:
    model = network()
    optimizer = SynGAP(model.parameters(), lr=0.1)
    prepare(model, optimizer, 0)
    spoil(model[0].weight, math.nan)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_logits_that_are_not_finite_are_an_arithmetic_error_too() -> None:
    model = network()
    with pytest.raises(FloatingPointError, match="logits must be finite"):
        SynGAP(model.parameters(), lr=0.1).observe(model(batch(0)[0] * math.nan))


# Skipping -----------------------------------------------------------------------------------------

PLACES = ("inputs", "logits", "gradients", "scores")


def spoilt_step(model: nn.Module, optimizer: SynGAP, step: int, where: str, bad: float) -> None:
    """A step in which something is not finite."""
    x, y = batch(step)
    optimizer.zero_grad()
    logits = model(x * bad if where == "inputs" else x)
    if where == "logits":
        logits = logits * bad
    if where == "scores":  # the backward pass of observe overflows, and with it that of the loss
        logits.register_hook(lambda grad: grad * bad)
    with draws_of(step), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the importance of a batch was not finite")
        optimizer.observe(logits)
    F.cross_entropy(logits, y).backward()
    if where == "gradients":
        spoil(params_of(optimizer)[step % 4], bad)
    optimizer.step()


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(MAKERS)),
    st.lists(st.none() | st.tuples(st.sampled_from(PLACES), st.sampled_from(BAD)), max_size=9),
)
def test_skipped_steps_leave_no_trace_but_their_number(
    name: str, plan: list[tuple[str, float] | None]
) -> None:
    model, without = network(), network()
    optimizer, plain = (MAKERS[name](m, non_finite="skip") for m in (model, without))
    for step, fault in enumerate(plan):
        if fault is None:
            train(model, optimizer, [step])
            train(without, plain, [step])
        else:
            spoilt_step(model, optimizer, step, *fault)
        finite = [*model.parameters(), *as_list(optimizer.importance())]
        assert all(value.isfinite().all() for value in finite)
    assert optimizer.skipped == sum(fault is not None for fault in plan)
    assert_identical(values_of(model), values_of(without))
    counted = optimizer.state_dict()
    for group in counted["param_groups"]:
        assert group["skipped"] == optimizer.skipped
        group["skipped"] = 0
    assert_identical(counted, plain.state_dict())


@every_maker
def test_the_count_goes_where_the_optimizer_goes(make: Make) -> None:
    model = network()
    optimizer = make(model, non_finite="skip")
    train(model, optimizer, range(2))
    assert optimizer.summary()["skipped"] == 0
    spoilt_step(model, optimizer, 2, "gradients", math.nan)
    spoilt_step(model, optimizer, 3, "inputs", math.inf)
    assert optimizer.summary()["skipped"] == optimizer.skipped == 2
    assert "skipped" not in make(network()).summary()

    copied = copy.deepcopy(optimizer)
    assert copied.skipped == 2
    params_of(copied)[0].grad = torch.full_like(params_of(copied)[0], math.nan)
    copied.step()
    assert (copied.skipped, optimizer.skipped) == (3, 2)

    saved = optimizer.state_dict()
    fresh = make(network(), non_finite="skip")
    fresh.load_state_dict(saved)
    assert fresh.skipped == 2
    for group in saved["param_groups"]:  # as versions wrote it that did not count
        del group["skipped"]
    fresh.load_state_dict(saved)
    assert fresh.skipped == 0


def test_logits_that_are_not_finite_name_the_step_and_a_rate_to_try() -> None:
    model = network()
    optimizer = SynGAP(model.parameters(), lr=40.0)
    prepare(model, optimizer, 0)
    optimizer.step()
    logits = model(torch.full((2, model[0].in_features), math.nan))
    with pytest.raises(NotFiniteError, match=r"in step 2\. .*it is 40, try 4.*'skip'"):
        optimizer.observe(logits)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_what_was_observed_goes_with_the_gradients(policy: Any) -> None:
    model = network()
    optimizer = SynGAP(model.parameters(), lr=0.1, non_finite=policy)
    prepare(model, optimizer, 0)
    spoil(model[0].weight, math.nan)
    with contextlib.suppress(NotFiniteError):
        optimizer.step()
    model.zero_grad()  # which the optimizer does not hear of
    with pytest.warns(UserWarning, match="no importance yet"):
        optimizer.step()
    assert not any(value.any() for value in as_list(optimizer.importance()))


def test_a_group_that_comes_later_counts_as_the_others_do() -> None:
    for make in (MAKERS["plain"], MAKERS["wrapped-adamw"]):
        model = network()
        optimizer = make(model, model[0].parameters(), non_finite="skip")
        model[0].weight.grad = torch.full_like(model[0].weight, math.inf)
        optimizer.step()
        optimizer.add_param_group({"params": list(model[2].parameters())})
        assert {group["skipped"] for group in optimizer.param_groups} == {1}


# What is asked for --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["ignore", True, ""])
def test_an_unknown_policy_is_refused(policy: Any) -> None:
    for make in (MAKERS["plain"], MAKERS["wrapped-adamw"]):
        with pytest.raises(ValueError, match="non_finite must be 'raise', 'skip' or None"):
            make(network(), non_finite=policy)


def test_skipping_and_never_looking_exclude_each_other() -> None:
    capturable_adam = wrapped(torch.optim.Adam, capturable=True)
    for make, more in ((MAKERS["plain"], {"capturable": True}), (capturable_adam, {})):
        with pytest.raises(ValueError, match="nothing may be looked at"):
            make(network(), non_finite="skip", **more)


def test_nobody_looks_where_that_is_asked_for() -> None:
    for options in ({"non_finite": None}, {"capturable": True}):
        model = network()
        optimizer = SynGAP(model.parameters(), lr=0.1, **options)  # type: ignore[arg-type]
        prepare(model, optimizer, 0)
        spoil(model[0].weight, math.nan)
        optimizer.step()
        assert model[0].weight.isnan().any()


# GradScaler ---------------------------------------------------------------------------------------


def scaled_step(
    model: nn.Module,
    optimizer: SynGAP,
    scaler: torch.amp.GradScaler,
    step: int,
    change: Callable[[Tensor], Tensor] = lambda logits: logits,
    clip: bool = True,
) -> None:
    """The loop of docs/guide.md."""
    x, y = batch(step)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        logits = change(model(x))
        loss = F.cross_entropy(logits.float(), y)
    with draws_of(step):
        optimizer.observe(logits)
    scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    scaler.step(optimizer)
    scaler.update()


@every_maker
@pytest.mark.parametrize("clip", [True, False], ids=["unscaled before", "by scaler.step"])
def test_importance_and_steps_do_not_depend_on_the_scale(make: Make, clip: bool) -> None:
    """A power of two goes in and comes out again without a trace."""
    results = []
    for scale in (1.0, 2.0**10):
        model = network()
        optimizer = make(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for step in range(4):
            scaled_step(model, optimizer, scaler, step, clip=clip)
        results.append((values_of(model), optimizer.state_dict()))
    for (_, one), (_, other) in zip(
        results[0][0].items(), results[1][0].items(), strict=True
    ):  # float16 gradients below its smallest number are what scaling is for
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
    scores = [state["importance"] for state in results[0][1]["state"].values()]
    others = [state["importance"] for state in results[1][1]["state"].values()]
    for one, other in zip(scores, others, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=5e-2, atol=1e-3)


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("overflow", ["loss", "scaled loss", "logits", "scores"])
def test_overflow_in_float16_leaves_everything_as_it_was(overflow: str, policy: Any) -> None:
    model, without = network(), network()
    optimizer, plain = (
        MAKERS["momentum-and-decay"](m, non_finite=policy) for m in (model, without)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    other = torch.amp.GradScaler("cpu", init_scale=4.0)

    def too_large(logits: Tensor) -> Tensor:
        if overflow == "logits":
            return logits * 1e6  # in float16 that is infinite
        if overflow == "loss":
            return logits.float() * 1e38 * 10  # infinite in float32
        if overflow == "scores":
            logits.register_hook(lambda grad: grad * 1e6)
        return logits

    for step in range(4):
        if step == 2:
            before = snapshot(model, optimizer)
            if overflow == "scaled loss":
                scaler.update(2.0**127)
            refused = overflow in ("loss", "logits") and policy == "raise"
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "the importance of a batch was not finite")
                    scaled_step(model, optimizer, scaler, 100, too_large)
                assert not refused
            except NotFiniteError:
                assert refused
            after = snapshot(model, optimizer)
            del before["gradients"], after["gradients"]
            assert_identical(after, before)
            scaler.update(4.0)
        scaled_step(model, optimizer, scaler, step)
        scaled_step(without, plain, other, step)
    assert_identical(values_of(model), values_of(without))
    assert_identical(optimizer.state_dict(), plain.state_dict())
