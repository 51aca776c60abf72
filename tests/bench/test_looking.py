"""What can be looked at is right, cheap to look at, and a warning says what helps."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    CONSOLIDATING,
    GATE,
    MAKERS,
    Make,
    as_list,
    assert_identical,
    batch,
    defined_plasticity,
    itself,
    largest_difference,
    network,
    prepare,
    train,
    values_of,
    wrapped,
)
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from syngap import SynGAP

every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
both_kinds = pytest.mark.parametrize(
    "make", [itself(), wrapped(SGD, lr=0.1)], ids=["itself", "wrapped"]
)


# Importance and plasticity ------------------------------------------------------------------------


@every_maker
def test_with_a_model_they_go_by_name_and_without_in_parameter_order(make: Make) -> None:
    named, plain = network(), network()
    with_model = make(named, reversed(list(named.parameters())), model=named)
    train(named, with_model, range(3))
    found = {"importance": with_model.importance(), "plasticity": with_model.plasticity()}
    for values in found.values():
        assert isinstance(values, dict)
        assert list(values) == list(reversed(values_of(named)))
        assert all(values[name].shape == p.shape for name, p in named.named_parameters())
    if make is MAKERS["exact"]:
        return  # which has a model always
    without = make(plain, reversed(list(plain.parameters())))
    train(plain, without, range(3))
    for kind, values in found.items():
        listed = getattr(without, kind)()
        assert isinstance(listed, list)
        assert_identical(listed, list(values.values()))


@every_maker
def test_plasticity_is_the_gate_by_its_definition(make: Make) -> None:
    model = network(torch.float64)
    optimizer = make(model)
    train(model, optimizer, range(5))
    gates = as_list(optimizer.plasticity())
    close = 1e-6 if make is MAKERS["compact"] else 1e-12
    assert largest_difference(gates, defined_plasticity(optimizer)) < close
    assert max(gate.max() for gate in gates) <= 1 + optimizer.param_groups[0]["ambient"]
    assert min(gate.min() for gate in gates) >= optimizer.param_groups[0]["ambient"]


@every_maker
def test_looking_changes_nothing(make: Make) -> None:
    model, unseen = network(), network()
    optimizer, other = make(model), make(unseen)
    for step in range(4):
        for look in (optimizer.importance, optimizer.plasticity, optimizer.summary):
            look()
            prepare(model, optimizer, step)
            look()
        optimizer.step()
        train(unseen, other, [step])
    assert_identical(values_of(model), values_of(unseen))
    assert_identical(optimizer.state_dict(), other.state_dict())


# Summary ------------------------------------------------------------------------------------------


def quantile(values: Tensor, share: float) -> float:
    """The least of the values that has this share of them at or below it."""
    ordered = sorted(values.flatten().tolist())
    return next(v for i, v in enumerate(ordered, start=1) if i >= share * len(ordered))


def described(name: str, gates: Tensor) -> dict[str, float]:
    shares = {f"{name}/q{round(100 * share):02d}": share for share in (0.05, 0.5, 0.95)}
    quantiles = {key: quantile(gates, share) for key, share in shares.items()}
    return {f"{name}/mean": gates.mean().item(), **quantiles}


def expected_summary(optimizer: SynGAP, names: list[str], trained: list[bool]) -> dict[str, float]:
    importance = as_list(optimizer.importance())
    gates = defined_plasticity(optimizer)

    def counted(values: list[Tensor]) -> Tensor:
        pairs = zip(values, trained, strict=True)
        return torch.cat([value.flatten() for value, counts in pairs if counts])

    mean = counted(importance).mean().item()
    expected = {"importance/mean": mean, **described("plasticity", counted(gates))}
    for name, value, gate in zip(names, importance, gates, strict=True):
        expected |= {f"importance/{name}/mean": value.mean().item()}
        expected |= described(f"plasticity/{name}", gate)
    damping = optimizer.param_groups[0]["damping"]
    return expected | {"importance/mean_over_damping": mean / damping if damping else math.inf}


@pytest.mark.parametrize("options", [{}, {"damping": 0.0}, {"damping": 1e-3}], ids=str)
@pytest.mark.parametrize("frozen", [False, True], ids=["all-trained", "some-frozen"])
@pytest.mark.parametrize("named", [False, True], ids=["by-index", "by-name"])
@every_maker
def test_a_summary_is_right(make: Make, named: bool, frozen: bool, options: dict[str, Any]) -> None:
    model = network(torch.float64)
    names = list(values_of(model))
    if make is MAKERS["exact"] or named:
        options = {**options, "model": model}
    else:
        names = [str(index) for index in range(4)]
    optimizer = make(model, **options)
    train(model, optimizer, range(3))
    model[0].bias.requires_grad_(not frozen)
    summary = optimizer.summary()
    expected = expected_summary(optimizer, names, [True, not frozen, True, True])
    assert summary.keys() == expected.keys()
    assert {type(value) for value in summary.values()} == {float}
    # A mean that is kept does not follow what rounding to two bytes does to its importance.
    close = 0.01 if make is MAKERS["compact"] else 1e-10
    for key, value in expected.items():
        assert summary[key] == pytest.approx(value, rel=close), key


@every_maker
def test_a_summary_before_the_first_step_is_of_a_gate_that_is_the_same_everywhere(
    make: Make,
) -> None:
    model = network()
    optimizer = make(model, model=model)
    summary = optimizer.summary()
    assert summary["importance/mean"] == summary["importance/mean_over_damping"] == 0.0
    same = {value for key, value in summary.items() if key.startswith("plasticity/")}
    assert len(same) == 1
    assert same.pop() == pytest.approx(1 - GATE["consolidation"] + 0.01)


def wide_network() -> nn.Sequential:
    """Tensors of 4096, 1024, 64 and 16 values."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 16))


def observed_once(model: nn.Module, make: Make) -> SynGAP:
    optimizer = make(model)
    optimizer.observe(model(torch.randn(32, 64)))
    F.cross_entropy(model(torch.randn(32, 64)), torch.zeros(32, dtype=torch.long)).backward()
    optimizer.step()
    return optimizer


def test_large_tensors_count_by_all_their_values() -> None:
    optimizer = observed_once(wide_network(), itself())
    gates = torch.cat([gate.flatten() for gate in defined_plasticity(optimizer)])
    summary = optimizer.summary()
    assert summary["plasticity/mean"] == pytest.approx(gates.mean().item(), abs=0.02)
    for share, key in ((0.05, "q05"), (0.5, "q50"), (0.95, "q95")):
        exact = [gates.quantile(share + away).item() for away in (-0.04, 0.04)]
        assert exact[0] <= summary[f"plasticity/{key}"] <= exact[1]


class Sizes(TorchDispatchMode):
    """Notes how many values each operation makes anew, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.made.setdefault(str(func), []).append(result.numel())
        return result


@both_kinds
def test_a_summary_gates_at_most_1024_values_of_a_tensor(make: Make) -> None:
    optimizer = observed_once(wide_network(), make)
    with Sizes() as sizes:
        optimizer.summary()
    gated = [n for name, made in sizes.made.items() if "sigmoid" in name for n in made]
    assert sorted(gated) == [16, 64, 1024, 1024]
    assert max(n for made in sizes.made.values() for n in made) <= 4 * 1024


# Warnings -----------------------------------------------------------------------------------------


def steps_without_warning(run: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()


@both_kinds
def test_damping_far_above_importance_warns_once_with_a_remedy_that_helps(make: Make) -> None:
    model = network()
    optimizer = make(model, damping=1.0)
    with pytest.warns(UserWarning, match="far above the mean importance") as caught:
        train(model, optimizer, [0])
    assert len(caught) == 1
    steps_without_warning(lambda: train(model, optimizer, range(1, 6)))

    remedy = re.search(r"set damping below (\S+)$", str(caught[0].message))
    assert remedy is not None
    helped = network()
    changed = make(helped, damping=0.99 * float(remedy[1]))
    steps_without_warning(lambda: train(helped, changed, range(6)))
    spread = changed.summary()
    assert spread["plasticity/q95"] - spread["plasticity/q05"] > 0.1


@both_kinds
def test_damping_is_not_blamed_where_every_score_is_zero(make: Make) -> None:
    """No damping below the mean would help: the predictions are certain."""
    model = network()
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.copy_(torch.tensor([1e4, 0.0, 0.0]))
    optimizer = make(model)
    steps_without_warning(lambda: train(model, optimizer, range(2)))
    assert optimizer.summary()["importance/mean"] == 0.0


def step_unobserved(model: nn.Module, optimizer: SynGAP, step: int = 0) -> None:
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


@every_maker
def test_stepping_without_ever_observing_warns_once(make: Make) -> None:
    model = network()
    optimizer = make(model)
    with pytest.warns(UserWarning, match=r"no importance yet.*observe\(logits\).*consolidate\(\)"):
        step_unobserved(model, optimizer)
    steps_without_warning(lambda: step_unobserved(model, optimizer, 1))


@every_maker
def test_observing_first_ends_that_warning(make: Make) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, [0])
    steps_without_warning(lambda: step_unobserved(model, optimizer))


@pytest.mark.parametrize("make", CONSOLIDATING.values(), ids=CONSOLIDATING)
def test_consolidating_first_ends_that_warning(make: Make) -> None:
    model = network()
    optimizer = make(model)
    optimizer.consolidate(model, batch(0)[0])
    steps_without_warning(lambda: step_unobserved(model, optimizer))


@every_maker
def test_a_step_without_observing_keeps_the_importance(make: Make) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(3))
    before, values = as_list(optimizer.importance()), values_of(model)
    summary = optimizer.summary()
    step_unobserved(model, optimizer)
    assert_identical(as_list(optimizer.importance()), before)
    assert optimizer.summary() == summary
    assert all(not torch.equal(p, values[name]) for name, p in model.named_parameters())


@every_maker
def test_resuming_does_not_warn(make: Make) -> None:
    """Loaded importance counts as observed."""
    model, resumed = network(), network()
    optimizer, fresh = make(model), make(resumed)
    train(model, optimizer, range(3))
    fresh.load_state_dict(optimizer.state_dict())
    steps_without_warning(lambda: step_unobserved(resumed, fresh))


def test_a_summary_is_right_where_columns_differ() -> None:
    """Evenly spaced values of a 1024 × 784 matrix would all come from one column."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = SynGAP(model.parameters(), lr=0.1, consolidation=0.5, model=model)
    x = torch.rand(64, 784) * torch.linspace(0, 1, 784)
    x[:, 0] = 0.0
    optimizer.consolidate(model, x)
    summary, masks = optimizer.summary(), optimizer.plasticity()
    assert isinstance(masks, dict)
    mask = masks["0.weight"].flatten()
    assert abs(summary["plasticity/0.weight/mean"] - mask.mean()) < 0.03
    for name, quantile in (("q05", 0.05), ("q50", 0.5), ("q95", 0.95)):
        true = mask[::7].quantile(quantile)
        assert abs(summary[f"plasticity/0.weight/{name}"] - true) < 0.05


def test_looking_after_a_head_was_replaced_says_grow() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = SynGAP(model.parameters(), lr=0.1, model=model)
    model[1] = nn.Linear(4, 3)
    for look in (optimizer.importance, optimizer.plasticity, optimizer.summary):
        with pytest.raises(ValueError, match=r"shape \(2, 4\) is not one of model's.*grow\(\)"):
            look()


def test_damping_far_above_one_tensor_warns_where_each_counts_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.mul_(1e-6)  # so little of the first layer's input gets through
    optimizer = SynGAP(model.parameters(), lr=0.1, scope="tensor", damping=1e-8)
    logits = model(torch.randn(8, 3))
    optimizer.observe(logits)
    logits.sum().backward()
    with pytest.warns(UserWarning, match="damping 1e-08 is far above the mean importance"):
        optimizer.step()


def test_a_summary_uses_the_names_of_named_parameters() -> None:
    model = nn.Linear(3, 2)
    summary = SynGAP(model.named_parameters(), lr=0.1).summary()
    assert {"importance/weight/mean", "plasticity/bias/q50"} <= summary.keys()
