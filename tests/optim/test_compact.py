"""Importance in bfloat16 follows its average, which bfloat16 by itself does not."""

from __future__ import annotations

import copy
import functools
import shutil
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from helpers import (
    MAKERS,
    Make,
    as_list,
    assert_go_on_alike,
    assert_identical,
    itself,
    network,
    params_of,
    prepare,
    train,
    values_of,
    wrapped,
)
from torch import Tensor
from torch.optim import SGD, AdamW

from syngap import SynGAP
from syngap.optim.compact import first_turn, next_turn, store, store_lists
from syngap.optim.update import Work, fold

CPU = torch.device("cpu")
ULP = 2**-7  # from a bfloat16 to the next, at most, relative to it


# Drift --------------------------------------------------------------------------------------------

SIZE, LOOKS = 384, 200
# Root mean square over elements, and error of the mean, at any time. Of what is averaged the noise
# is the root of (1 - retention): 10 %, 3 % and 1 %.
STEPS = {0.99: 10_000, 0.999: 20_000, 0.9999: 70_000}
ALLOWED = {0.99: (0.025, 0.02), 0.999: (0.045, 0.02), 0.9999: (0.055, 0.03)}


class Errors(NamedTuple):
    """Relative to the average in float64, one entry a time of looking."""

    each: Tensor
    mean: Tensor


def compactly(kept: Tensor, observed: Tensor, retention: float, turn: Tensor) -> None:
    """One fold of the optimizer's own."""
    next_turn(turn)
    work = Work({}, torch.zeros(()), 0.0, params=[torch.empty(0)], importances=[kept])
    work.values, work.squared, work.keep, work.turn = [observed], True, retention, turn.int()
    fold(work)


def naively(kept: Tensor, observed: Tensor, retention: float, turn: Tensor) -> None:
    """The same in float32, rounded to the nearest bfloat16."""
    kept.copy_(kept.float().mul_(retention).add_(observed, alpha=1 - retention))


@functools.cache
def errors(way: Any, retention: float) -> Errors:
    """Average squares of normal numbers of many sizes, which fall to a hundredth half way."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(SIZE, generator=generator).mul_(2).exp_()
    true = torch.zeros(SIZE, dtype=torch.float64)
    kept, turn = torch.zeros(SIZE, dtype=torch.bfloat16), first_turn(CPU)
    each, mean = [], []
    for look in range(LOOKS):
        scale = sizes if look < LOOKS // 2 else sizes / 100
        drawn = torch.randn(STEPS[retention] // LOOKS, SIZE, generator=generator)
        for observed in drawn.square_().mul_(scale):
            true.mul_(retention).add_(observed, alpha=1 - retention)
            way(kept, observed, retention, turn)
        found = kept.double()
        each.append((found / true - 1).square().mean().sqrt())
        # Every element counts alike here, or the few largest would be the mean.
        mean.append((found / true - 1).mean())
    return Errors(torch.stack(each), torch.stack(mean))


@pytest.mark.parametrize("retention", ALLOWED)
def test_importance_in_bfloat16_does_not_drift(retention: float) -> None:
    found = errors(compactly, retention)
    each, mean = ALLOWED[retention]
    assert found.each.max() < each
    assert found.mean.abs().max() < mean
    # Nor does it get worse in time.
    quarter = len(found.each) // 4
    assert found.each[-quarter:].mean() < 1.1 * found.each[quarter : 2 * quarter].mean()


@pytest.mark.parametrize("retention", [0.999])
def test_rounding_to_nearest_would_drift(retention: float) -> None:
    """The test above can fail."""
    found = errors(naively, retention)
    each, mean = ALLOWED[retention]
    assert found.each.max() > 3 * each
    assert found.mean.abs().max() > 3 * mean


def test_importance_without_scores_fades_as_it_should() -> None:
    start = torch.randn(1000, generator=torch.Generator().manual_seed(0)).exp()
    kept, turn = start.bfloat16(), first_turn(CPU)
    start = kept.double()
    for _ in range(5000):
        compactly(kept, torch.zeros(1000), 0.999, turn)
    ratio = kept.double() / (start * 0.999**5000)
    assert (ratio - 1).abs().max() < 0.2
    assert (ratio.mean() - 1).abs() < 0.1


# Rounding -----------------------------------------------------------------------------------------


def rounded(values: Tensor, turn: int) -> Tensor:
    kept = torch.empty_like(values, dtype=torch.bfloat16)
    store(values.clone(), kept, torch.tensor(turn, dtype=torch.int32))
    return kept


EDGES = [0.0, 1e-45, 1e-40, 1.0, 1.0 - 2**-24, 1.00390625, 3.38e38, 3.4028e38]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_go_to_one_of_their_neighbours_and_stay_finite(dtype: torch.dtype) -> None:
    values = torch.tensor([*EDGES, *([1e300] if dtype == torch.float64 else [])], dtype=dtype)
    largest = torch.finfo(torch.bfloat16).max
    for turn in (-32768, -25033, -1, 0, 1, 32767):
        found = rounded(values, turn)
        assert found.isfinite().all()
        assert (found >= 0).all()
        assert found[0] == 0
        expected = values.double().clamp(max=largest)
        assert ((found.double() - expected).abs() <= ULP * expected + 1e-40).all()


def test_what_bfloat16_can_tell_is_left_alone() -> None:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    for turn in range(-32767, 32768, 1111):
        assert_identical(rounded(values.float(), turn), values)


def test_over_all_turns_rounding_is_right_in_the_mean() -> None:
    value = torch.tensor([1.0 + 0.3 * ULP])
    turn, total = first_turn(CPU), 0.0
    for _ in range(2**16):
        next_turn(turn)
        total += rounded(value, int(turn)).item()
    assert int(turn) == 0
    assert total / 2**16 == pytest.approx(value.item(), rel=1e-6)


def test_lists_are_rounded_as_single_tensors() -> None:
    values = [torch.rand(50), torch.rand(3, 4), torch.tensor(EDGES)]
    kept = [torch.empty_like(value, dtype=torch.bfloat16) for value in values]
    for turn in (-32768, -7, 12345):
        store_lists([value.clone() for value in values], kept, torch.tensor(turn).int())
        assert_identical(kept, [rounded(value, turn) for value in values])


@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("default")  # inductor's own differ from version to version
def test_a_compiled_rounding_is_the_same_but_next_to_powers_of_two() -> None:
    """Above a power of two neighbours are twice as far away as below."""
    torch._dynamo.reset()
    compiled = torch.compile(store)
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 0.9 + 1.05
    values = torch.cat([values, torch.tensor([0.0])])
    kept = torch.empty(len(values), dtype=torch.bfloat16)
    for turn in (-32768, -7, 12345):
        compiled(values.clone(), kept, torch.tensor(turn).int())
        assert_identical(kept, rounded(values, turn))
        edges = torch.empty(len(EDGES), dtype=torch.bfloat16)
        compiled(torch.tensor(EDGES), edges, torch.tensor(turn).int())
        assert edges.isfinite().all()
        assert (edges >= 0).all()


# The optimizer ------------------------------------------------------------------------------------

# At rate zero, so that the same is observed whatever the gates.
FORMS: dict[str, Make] = {
    "plain": itself(lr=0.0),
    "foreach": itself(lr=0.0, foreach=True),
    "exact": itself(lr=0.0, estimator="exact"),
    "every-third": itself(lr=0.0, every=3, warmup=0),
    "capturable": itself(lr=0.0, capturable=True),
    "wrapped-sgd": wrapped(SGD, lr=0.0),
    "wrapped-adamw": wrapped(AdamW, lr=0.0),
}


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, torch.float32) for form in FORMS),
        *product(("foreach", "wrapped-adamw"), (torch.float64, torch.bfloat16)),
    ],
    ids=str,
)
def test_every_form_follows_the_average_in_full_precision(form: str, dtype: torch.dtype) -> None:
    """Parameters of other types have the same code behind them in every form."""
    make = FORMS[form]
    models = [network(dtype), network(dtype)]
    full, compact = make(models[0]), make(models[1], compact=True)
    for step in range(60):
        train(models[0], full, [step])
        train(models[1], compact, [step])
    pairs = list(zip(as_list(compact.importance()), as_list(full.importance()), strict=True))
    assert {found.dtype for found, _ in pairs} == {torch.bfloat16}
    errors = torch.cat([(found.double() / true - 1).flatten() for found, true in pairs])
    assert errors.abs().max() < 0.1
    assert errors.mean().abs() < 0.02
    for state, other in zip(compact.state.values(), full.state.values(), strict=True):
        assert_identical(state["mean"], other["mean"])  # the mean is not rounded
    for found, true in zip(as_list(compact.plasticity()), as_list(full.plasticity()), strict=True):
        assert found.dtype == true.dtype or dtype == torch.float64
        assert (found - true).abs().max() < 0.03
    known, true_summary = compact.summary(), full.summary()
    assert known.keys() == true_summary.keys()
    assert known["importance/mean"] == true_summary["importance/mean"]
    assert known["plasticity/mean"] == pytest.approx(true_summary["plasticity/mean"], abs=0.01)


def test_it_takes_half_the_bytes() -> None:
    sizes = []
    for compact in (False, True):
        model = network()
        optimizer = MAKERS["plain"](model, compact=compact)
        train(model, optimizer, range(2))
        kept = as_list(optimizer.importance())
        sizes.append(sum(value.numel() * value.element_size() for value in kept))
    assert sizes[0] == 2 * sizes[1]


def test_a_step_is_gated_by_what_is_kept() -> None:
    model = network()
    optimizer = SynGAP(model.parameters(), lr=0.5, compact=True)
    train(model, optimizer, range(3))
    prepare(model, optimizer, 3)
    before = values_of(model)
    optimizer.step()
    gates = as_list(optimizer.plasticity())
    for (name, old), param, gate in zip(before.items(), model.parameters(), gates, strict=True):
        torch.testing.assert_close(param.detach(), old - 0.5 * gate * param.grad, msg=name)


def test_plain_descent_behind_the_gate_is_the_same() -> None:
    model, other = network(), network()
    optimizer = SynGAP(model.parameters(), lr=0.1, compact=True)
    gated = SynGAP.wrap(SGD(other.parameters(), lr=0.1), compact=True)
    train(model, optimizer, range(10))
    train(other, gated, range(10))
    assert_identical(values_of(other), values_of(model))
    assert_identical(as_list(gated.importance()), as_list(optimizer.importance()))


def test_consolidate_rounds_to_nearest() -> None:
    inputs, found = torch.randn(64, 4), []
    for compact in (False, True):
        model = network()
        optimizer = SynGAP(model.parameters(), lr=0.1, compact=compact)
        torch.manual_seed(0)
        optimizer.consolidate(model, inputs)
        found.append(as_list(optimizer.importance()))
    for full, kept in zip(*found, strict=True):
        assert_identical(kept, full.bfloat16())


# States -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "wrapped-adamw"])
@pytest.mark.parametrize("compact", [False, True])
def test_a_state_goes_into_an_optimizer_of_the_other_precision(name: str, compact: bool) -> None:
    model, twin = network(), network()
    optimizer = MAKERS[name](model, compact=not compact)
    other = MAKERS[name](twin, compact=compact)
    train(model, optimizer, range(5))
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for found, saved in zip(
        as_list(other.importance()), as_list(optimizer.importance()), strict=True
    ):
        assert found.dtype == (torch.bfloat16 if compact else torch.float32)
        assert_identical(found, saved.to(found.dtype))
    for state in other.state.values():
        assert ("turn" in state) == compact
    before = values_of(twin)
    train(twin, other, range(5, 8))
    assert not any(torch.equal(value, before[key]) for key, value in values_of(twin).items())
    # And from there on it is resumed bit for bit.
    resumed = copy.deepcopy(twin)
    fresh = MAKERS[name](resumed, compact=compact)
    fresh.load_state_dict(copy.deepcopy(other.state_dict()))
    assert_go_on_alike((resumed, fresh), (twin, other), range(8, 12))


def test_turns_go_on_in_a_resumed_run() -> None:
    """Where they all began anew, rounding would begin to nearest, again and again."""
    model = network()
    optimizer = MAKERS["compact"](model)
    train(model, optimizer, range(3))
    turns = {int(state["turn"]) for state in optimizer.state.values()}
    assert turns == {-25033 * 3 + 2**16}
    fresh = MAKERS["compact"](network())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {int(state["turn"]) for state in fresh.state.values()} == turns


def test_a_group_added_late_takes_the_turns_of_its_own() -> None:
    model = network()
    optimizer = MAKERS["compact"](model, model[0].parameters())
    train(model, optimizer, range(2))
    optimizer.add_param_group({"params": model[2].parameters()})
    train(model, optimizer, range(2, 4))
    turns = [int(optimizer.state[param]["turn"]) for param in params_of(optimizer)]
    assert turns[0] == turns[1] != turns[2] == turns[3]


@pytest.mark.parametrize("compact", ["bfloat16", torch.bfloat16, 1, None], ids=str)
def test_anything_but_yes_or_no_is_refused(compact: Any) -> None:
    base = SGD(network().parameters(), lr=0.1)
    before = copy.deepcopy(base.state_dict())
    message = r"compact must be True \(importance in bfloat16\) or False .* got "
    with pytest.raises(ValueError, match=message):
        SynGAP(network().parameters(), lr=0.1, compact=compact)
    with pytest.raises(ValueError, match=message):
        SynGAP.wrap(base, compact=compact)
    assert_identical(base.state_dict(), before)
