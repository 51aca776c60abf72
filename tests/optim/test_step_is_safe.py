"""Finite gradients give finite parameters, whatever the model observed and however steep it is."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import importance_of, labelled, observed
from torch import Tensor, nn

from syngap import SynGAP

WIDTH, CLASSES, ROWS = 3, 4, 6
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
NEAR_ONE = math.nextafter(1.0, 0.0)


class Steep(nn.Module):
    """A large weight that a small one takes back: moderate logits, scores of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, CLASSES)

    def tilt(self, exponent: float, generator: torch.Generator) -> None:
        """Scores of the second layer are then about 10**exponent, of the first its inverse."""
        with torch.no_grad():
            for layer, size in ((self.first, 10.0**exponent), (self.second, 10.0**-exponent)):
                for param in layer.parameters():
                    param.copy_(torch.randn(param.shape, generator=generator) * size)
            self.second.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def is_sound(values: list[Tensor] | dict[str, Tensor]) -> bool:
    tensors = values.values() if isinstance(values, dict) else values
    return all(bool(torch.isfinite(value).all()) and bool((value >= 0).all()) for value in tensors)


# Squares of float32 overflow from 10**19.26 on, which is where mistakes would be.
exponents = st.floats(-30, 30) | st.floats(18.5, 19.5)
options = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-3, 1.0, 10.0]),
        "retention": st.sampled_from([0.0, 0.9, 0.999, NEAR_ONE]),
        "consolidation": st.sampled_from([5e-324, 1e-12, 0.1, 0.9, 1 - 1e-12, NEAR_ONE]),
        "damping": st.sampled_from([0.0, 1e-300, 1e-16, 1.0, 1e3]),
        "ambient": st.sampled_from([0.0, 0.01, 1.0]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "scope": st.sampled_from(["network", "tensor"]),
        "estimator": st.sampled_from(["sampled", "exact"]),
        "foreach": st.booleans(),
        "capturable": st.booleans(),
    }
)


@settings(max_examples=150)
@given(
    options,
    st.lists(st.tuples(exponents, exponents), min_size=1, max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31),
)
def test_parameters_stay_finite_and_move_no_further_than_plain_descent(
    chosen: dict[str, Any],
    steps: list[tuple[float, float]],
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Each step: weights that make scores of one size, and gradients of another."""
    generator = torch.Generator().manual_seed(seed)
    model = Steep().to(dtype)
    params = list(model.parameters())
    optimizer = SynGAP(params, model=model, **chosen)
    for of_scores, of_gradients in steps:
        model.tilt(of_scores, generator)
        x = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.observe(labelled(model(x)))
            for param in params:
                noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.grad = (noise * 10.0**of_gradients).to(dtype)
            before = [param.detach().clone() for param in params]
            optimizer.step()

        assert is_sound(optimizer.importance())
        assert is_sound(optimizer.plasticity())
        for param, old in zip(params, before, strict=True):
            assert torch.isfinite(param).all()
            plain = optimizer.state[param].get("momentum_buffer", param.grad).double()
            farthest = chosen["lr"] * (1 + chosen["ambient"]) * plain.abs()
            last_digits = 4 * torch.finfo(dtype).eps * (farthest + old.double().abs())
            way = param.detach().double() - old.double()
            assert (way.abs() <= farthest + last_digits).all()
            assert (way * plain <= last_digits * plain.abs()).all()


# Observations that overflow -----------------------------------------------------------------------


def steady(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Tensor]:
    """A layer that answers every input with equal logits: its input alone sizes its scores."""
    model = nn.Linear(WIDTH, CLASSES).to(dtype)
    nn.init.zeros_(model.weight)
    return model, torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def optimizer_for(model: nn.Module, estimator: str, **chosen: Any) -> SynGAP:
    return SynGAP(
        model.parameters(), lr=0.0, retention=0.75, estimator=estimator, model=model, **chosen
    )


TOO_LARGE = {torch.float32: 1e25, torch.float64: 1e180, torch.bfloat16: 1e25}
both_estimators = pytest.mark.parametrize("estimator", ["sampled", "exact"])
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=["f64", "f32", "bf16"])


@both_estimators
@every_type
def test_importance_that_overflows_is_left_out_and_said_once(
    estimator: str, dtype: torch.dtype
) -> None:
    model, x = steady(dtype)
    optimizer = optimizer_for(model, estimator)
    before = observed(optimizer, model(x))
    mask = [value.clone() for value in optimizer.plasticity().values()]  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="not finite and is left out"):
        after = observed(optimizer, model(x * TOO_LARGE[dtype]))
    again = observed(optimizer, model(x * TOO_LARGE[dtype]))  # a second warning would be an error
    for name, value in before.items():
        assert value.any()
        assert torch.equal(after[name], value)
        assert torch.equal(again[name], value)
    for value, old in zip(optimizer.plasticity().values(), mask, strict=True):  # type: ignore[union-attr]
        assert torch.equal(value, old)


@both_estimators
def test_importance_that_overflows_does_not_spoil_what_else_was_observed(estimator: str) -> None:
    model, x = steady()
    alone, among = optimizer_for(model, estimator), optimizer_for(model, estimator)
    expected = observed(alone, model(x))
    with pytest.warns(UserWarning, match="not finite and is left out"):
        among.observe(labelled(model(x * TOO_LARGE[torch.float32])))
    found = observed(among, model(x))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@both_estimators
@every_type
def test_captured_importance_that_overflows_counts_as_zero(
    estimator: str, dtype: torch.dtype
) -> None:
    """Nothing may wait for a value there, so nothing is said; tensors count one by one."""
    model, x = steady(dtype)
    optimizer = optimizer_for(model, estimator, capturable=True)
    before = observed(optimizer, model(x))
    after = observed(optimizer, model(x * TOO_LARGE[dtype]))
    assert torch.equal(after["weight"], before["weight"] * 0.75)
    # The bias saw the same scores twice.
    torch.testing.assert_close(after["bias"], before["bias"] * 1.75)


@both_estimators
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_logits_that_are_not_finite_are_refused_or_count_zero(estimator: str, bad: float) -> None:
    model, x = steady()
    spoiled = x.clone()
    spoiled[1, 1] = bad

    careful = optimizer_for(model, estimator)
    before = observed(careful, model(x))
    with pytest.raises(ValueError, match=r"logits must be finite, .*got 4 NaN or infinite of 24"):
        careful.observe(model(spoiled))
    careful.step()
    assert all(torch.equal(importance_of(careful)[name], before[name]) for name in before)

    captured = optimizer_for(model, estimator, capturable=True)
    observed(captured, model(x))
    captured.observe(model(spoiled))
    captured.step()
    assert is_sound(captured.importance())


# Logits far out -----------------------------------------------------------------------------------

FAR = {
    "one-certain-class": [1e4, -1e4, -1e4, -1e4],
    "two-certain-classes": [1e4, 1e4, -1e4, -1e4],
    "all-far-up": [1e4, 1e4, 1e4, 1e4],
    "all-far-down": [-1e4, -1e4, -1e4, -1e4],
    "one-far-down": [0.0, 0.0, 0.0, -1e4],
}


@both_estimators
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=["f64", "f32", "bf16", "f16"])
@pytest.mark.parametrize("name", FAR)
def test_far_logits_give_a_finite_importance(name: str, dtype: torch.dtype, estimator: str) -> None:
    model, x = steady(dtype)
    with torch.no_grad():
        model.bias.copy_(torch.tensor(FAR[name]))
    optimizer = optimizer_for(
        model, estimator, damping=0.0, generator=torch.Generator().manual_seed(0)
    )
    optimizer.observe(model(x))
    optimizer.step()
    importance = importance_of(optimizer)
    assert is_sound(importance)
    assert is_sound(optimizer.plasticity())
    likely = torch.tensor(FAR[name]).double().softmax(0)
    uncertain = (likely > 0) & (likely < 1)
    assert not importance["bias"][~uncertain].any()
    if estimator == "exact":  # sums of scores may also cancel
        assert importance["bias"][uncertain].all()
