"""The mask stays within its bounds, falls with importance, and keeps its digits far out."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from syngap.optim import linear_plasticity, plasticity

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}
JUST_BELOW_ONE = math.nextafter(1.0, 0.0)

importances = st.floats(0, 1e30) | st.floats(0, 1e-30)
means = importances
dampings = st.sampled_from([0.0, 1e-300, 1e-16, 1.0, 1e3]) | st.floats(0, 1e3)
consolidations = st.floats(0, 1, exclude_min=True, exclude_max=True) | st.sampled_from(
    [5e-324, 1e-30, 0.1, 0.5, 0.9, JUST_BELOW_ONE]
)
ambients = st.sampled_from([0.0, 0.01, 1.0]) | st.floats(0, 10)
dtypes = st.sampled_from(DTYPES)


def in_type(values: list[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@given(
    st.lists(importances, min_size=1, max_size=9),
    means,
    consolidations,
    dampings,
    ambients,
    dtypes,
    st.booleans(),
)
def test_mask_is_finite_and_within_its_bounds(
    values: list[float],
    mean: float,
    consolidation: float,
    damping: float,
    ambient: float,
    dtype: torch.dtype,
    mean_as_tensor: bool,
) -> None:
    importance = in_type(values, dtype)
    before = importance.clone()
    mask = plasticity(
        importance,
        torch.tensor(mean) if mean_as_tensor else mean,
        consolidation=consolidation,
        damping=damping,
        ambient=ambient,
    )
    # The bounds as floats of this type: rounding never takes a mask past a rounded bound.
    computed_in = torch.float64 if dtype == torch.float64 else torch.float32
    lowest, highest = torch.tensor([0.0, 1.0], dtype=computed_in).add(ambient).to(dtype)
    assert mask.dtype == dtype
    assert mask.shape == importance.shape
    assert torch.isfinite(mask).all()
    assert (mask >= lowest).all()
    assert (mask <= highest).all()
    assert torch.equal(importance, before)


@given(
    st.lists(importances, min_size=2, max_size=64),
    means,
    consolidations,
    dampings,
    ambients,
    dtypes,
)
def test_mask_never_rises_with_importance(
    values: list[float],
    mean: float,
    consolidation: float,
    damping: float,
    ambient: float,
    dtype: torch.dtype,
) -> None:
    mask = plasticity(
        in_type(sorted(values), dtype),
        mean,
        consolidation=consolidation,
        damping=damping,
        ambient=ambient,
    ).double()
    # Rounding of the last digit differs between torch's kernels for many numbers and for few.
    last_digits = 2 * EPS[dtype] * mask[:-1]
    assert (mask[1:] <= mask[:-1] + last_digits).all()


@given(st.floats(1e-3, 40), st.floats(1e-3, 1), st.sampled_from([torch.float64, torch.float32]))
def test_mask_falls_where_floats_can_tell(z: float, further: float, dtype: torch.dtype) -> None:
    """At c (F + λ) = z, a thousandth more of importance is seen."""
    importance = in_type([z, z * (1 + further)], dtype)
    # With τ = tanh 1 and no damping to speak of, c F is F.
    near, far = plasticity(
        importance, 1.0, consolidation=math.tanh(1.0), damping=0.0, ambient=0.0
    ).tolist()
    assert far < near


@given(means, consolidations, dampings, ambients, st.sampled_from([torch.float64, torch.float32]))
def test_at_mean_importance_the_gate_is_closed_by_consolidation(
    mean: float, consolidation: float, damping: float, ambient: float, dtype: torch.dtype
) -> None:
    at_mean = torch.tensor(mean, dtype=dtype)
    mask = plasticity(
        at_mean, at_mean, consolidation=consolidation, damping=damping, ambient=ambient
    )
    # 1 - τ itself has few digits left for τ near one.
    expected = math.exp(math.log1p(-consolidation)) + ambient
    assert mask.item() == pytest.approx(expected, rel=64 * EPS[dtype], abs=8 * EPS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("consolidation", [0.25, 0.5, 0.984375])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_no_importance_is_mean_importance(
    shape: tuple[int, ...], consolidation: float, dtype: torch.dtype
) -> None:
    nothing = torch.zeros(shape, dtype=dtype)
    mask = plasticity(nothing, 0.0, consolidation=consolidation, damping=0.0, ambient=0.0)
    expected = torch.full(shape, 1 - consolidation, dtype=dtype)
    torch.testing.assert_close(mask, expected, rtol=32 * EPS[dtype], atol=0.0)


@given(
    st.lists(st.floats(0, 8), min_size=1, max_size=9), st.floats(0.125, 8), consolidations, ambients
)
def test_half_precision_is_rounded_once(
    values: list[float], mean: float, consolidation: float, ambient: float
) -> None:
    importance = in_type(values, torch.bfloat16)
    options = {"consolidation": consolidation, "ambient": ambient}
    for function in (plasticity, linear_plasticity):
        half = function(importance, mean, **options)
        assert torch.equal(half, function(importance.float(), mean, **options).bfloat16())


def one_minus_tanh(z: Decimal) -> Decimal:
    return 2 / ((2 * z).exp() + 1)


@given(st.floats(0, 300), st.floats(1e-3, 1e3), st.floats(0.01, 0.99), st.floats(0, 10))
def test_mask_is_one_minus_tanh_to_twelve_digits(
    z: float, mean: float, consolidation: float, damping: float
) -> None:
    """Relative digits, also where the mask is 1e-260."""
    slope = math.atanh(consolidation) / (mean + damping)
    importance = max(z / slope - damping, 0.0)
    mask = plasticity(
        torch.tensor(importance, dtype=torch.float64),
        mean,
        consolidation=consolidation,
        damping=damping,
        ambient=0.0,
    ).item()
    with localcontext() as context:
        context.prec = 60
        tau = Decimal(consolidation)
        exact_slope = ((1 + tau) / (1 - tau)).ln() / 2 / (Decimal(mean) + Decimal(damping))
        expected = one_minus_tanh(exact_slope * (Decimal(importance) + Decimal(damping)))
        assert abs(Decimal(mask) / expected - 1) < Decimal("1e-12")


@pytest.mark.parametrize("z", [10.0, 15.0, 20.0, 30.0, 40.0])
def test_digits_survive_where_one_minus_tanh_is_zero(z: float) -> None:
    importance = torch.tensor(z)
    mask = plasticity(importance, 1.0, consolidation=math.tanh(1.0), damping=0.0, ambient=0.0)
    assert 1 - torch.tanh(importance) == 0
    assert mask.item() == pytest.approx(2 * math.exp(-2 * z), rel=1e-5)


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=9),
    st.floats(1e-3, 1e3),
    st.floats(0.01, 0.99),
    st.floats(0, 10),
    ambients,
)
def test_linear_mask_is_its_formula(
    values: list[float], mean: float, consolidation: float, damping: float, ambient: float
) -> None:
    mask = linear_plasticity(
        in_type(values, torch.float64),
        mean,
        consolidation=consolidation,
        damping=damping,
        ambient=ambient,
    )
    slope = math.atanh(consolidation) / (mean + damping)
    for found, value in zip(mask.tolist(), values, strict=True):
        fall = slope * (value + damping)
        assert found == pytest.approx(1 - fall + ambient, rel=1e-12, abs=1e-12 * (1 + fall))


@given(st.floats(1e-3, 1e3), st.floats(0.01, 0.99), st.floats(0, 1), st.floats(1.01, 1e3))
def test_linear_mask_turns_negative_and_the_bounded_one_does_not(
    mean: float, consolidation: float, ambient: float, beyond: float
) -> None:
    """From where the line crosses zero on, it would climb the loss."""
    crossing = (1 + ambient) * mean / math.atanh(consolidation)
    importance = torch.tensor([crossing * beyond, crossing / beyond], dtype=torch.float64)
    options = {"consolidation": consolidation, "damping": 0.0, "ambient": ambient}
    after, before = linear_plasticity(importance, mean, **options).tolist()
    assert after < 0 < before
    assert (plasticity(importance, mean, **options) >= ambient).all()
