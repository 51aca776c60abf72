"""Bad input is met at the door: the error says what was given and allowed; nothing has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import (
    GATE,
    assert_identical,
    batch,
    itself,
    network,
    prepare,
    snapshot,
    train,
    values_of,
    wrapped,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.optim import SGD

from syngap import SynGAP

BOTH: dict[str, Callable[..., SynGAP]] = {"itself": itself(), "wrapped": wrapped(SGD, lr=0.1)}
both_kinds = pytest.mark.parametrize("make", BOTH.values(), ids=BOTH)


# Options ------------------------------------------------------------------------------------------

NAN = float("nan")
OPTIONS: list[tuple[str, Any, str]] = [
    *(("retention", value, r"\[0, 1\)") for value in (-0.1, 1.0, 1.5, NAN, torch.inf)),
    *(("consolidation", value, r"\(0, 1\)") for value in (-0.1, 0.0, 1.0, 2.0, NAN)),
    *((name, value, "≥ 0") for name in ("damping", "ambient") for value in (-1e-8, NAN, torch.inf)),
    *((name, "0.5", "number") for name in ("retention", "consolidation", "damping", "ambient")),
    ("retention", None, "number"),
    ("damping", True, "number"),
    ("scope", "layer", "'network' or 'tensor'"),
    ("scope", None, "'network' or 'tensor'"),
    *(("every", value, "whole number ≥ 1") for value in (0, -1, 1.5, 2.0, True, "2", None)),
    *(("warmup", value, "whole number ≥ 0") for value in (-1, 1.5, 2.0, True, "2", None)),
    ("estimator", "true", "'sampled', 'exact' or 'empirical'"),
    ("estimator", None, "'sampled', 'exact' or 'empirical'"),
]
OWN_OPTIONS: list[tuple[str, Any, str]] = [
    *(("lr", value, "≥ 0") for value in (-0.1, NAN, torch.inf, torch.tensor(-0.1))),
    ("lr", "0.1", "number"),
    *(("momentum", value, r"\[0, 1\)") for value in (-0.1, 1.0, NAN)),
    *(("weight_decay", value, "≥ 0") for value in (-0.1, NAN, torch.inf)),
]


def said(value: Any) -> str:
    """How a message gives a value."""
    return str(value.item() if isinstance(value, Tensor) else value)[:4]


@pytest.mark.parametrize(("name", "value", "allowed"), OPTIONS)
@both_kinds
def test_options_out_of_range(make: Any, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*{allowed}.*got '?{said(value)}"):
        make(network(), **{name: value})


@pytest.mark.parametrize(("name", "value", "allowed"), OWN_OPTIONS)
def test_own_options_out_of_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*{allowed}.*got .*{said(value)}"):
        itself()(network(), **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [row for row in OPTIONS if row[0] not in ("every", "warmup", "estimator")],
)
@both_kinds
def test_options_of_a_group_out_of_range(make: Any, name: str, value: Any, allowed: str) -> None:
    model = network()
    groups = [{"params": [model[0].weight]}, {"params": [model[0].bias], name: value}]
    with pytest.raises(ValueError, match=rf"{name} must be .*{allowed}.*got '?{said(value)}"):
        make(model, groups)
    optimizer = make(model, [model[0].weight])
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=rf"{name} must be .*{allowed}.*got '?{said(value)}"):
        optimizer.add_param_group({"params": [model[0].bias], name: value})
    assert_identical(snapshot(model, optimizer), before)


def gated_by(kind: str, model: nn.Module, /, **options: Any) -> SynGAP:
    """Made without the table's makers, which would pass the model by themselves."""
    if kind == "itself":
        return SynGAP(model.parameters(), lr=0.1, **options)
    return SynGAP.wrap(SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("kind", BOTH)
def test_exact_without_a_model(kind: str) -> None:
    with pytest.raises(ValueError, match=r"'exact' hooks .*pass model=, or use .*'sampled'"):
        gated_by(kind, network(), estimator="exact")


@pytest.mark.parametrize("estimator", ["sampled", "exact"])
@pytest.mark.parametrize("kind", BOTH)
def test_a_model_that_lacks_the_parameters(kind: str, estimator: str) -> None:
    with pytest.raises(ValueError, match=r"shape \(6, 4\) is not one of model's; pass the model"):
        gated_by(kind, network(), model=network(), estimator=estimator)


@both_kinds
def test_a_late_group_that_the_model_lacks(make: Any) -> None:
    model = network()
    optimizer = make(model, model=model)
    train(model, optimizer, range(2))
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"shape \(2,\) is not one of model's"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert_identical(snapshot(model, optimizer), before)
    train(model, optimizer, [2])


def test_lists_and_differentiable_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="foreach=True and differentiable=True"):
        itself()(network(), foreach=True, differentiable=True)


# Observations -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """What is given to `observe`, from a model and its input, and what is said of it."""

    prediction: Callable[[nn.Module, Tensor], Any]
    says: str
    error: type[Exception] = ValueError
    targets: Any = None
    mask: Any = None
    estimators: tuple[str, ...] = ("sampled", "exact", "empirical")


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def spoilt(value: float) -> Callable[[nn.Module, Tensor], Tensor]:
    def prediction(model: nn.Module, x: Tensor) -> Tensor:
        wrong = torch.zeros(8, 3)
        wrong[2, 1] = value
        return model(x) + wrong

    return prediction


def after_backward(model: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = model(x)
    params = list(model.parameters())
    torch.autograd.grad(logits.sum(), params)  # frees the graph as backward() does
    return logits


@torch.no_grad()
def without_graph(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


LABELS = torch.zeros(8, dtype=torch.long)
OBSERVATIONS: dict[str, Bad] = {
    "a list": Bad(lambda m, x: m(x).tolist(), r"logits \(a Tensor\) or .*got list", TypeError),
    "None": Bad(lambda m, x: None, "got NoneType", TypeError),
    "no graph": Bad(without_graph, "still has its graph.*no_grad", RuntimeError),
    "detached": Bad(lambda m, x: m(x).detach(), "still has its graph.*detach", RuntimeError),
    "NaN": Bad(spoilt(NAN), "finite, or -inf for classes ruled out, got 1 NaN or infinite of 24"),
    "infinite": Bad(
        spoilt(torch.inf), "finite, or -inf for classes ruled out, got 1 NaN or infinite of 24"
    ),
    "1-D": Bad(lambda m, x: m(x)[:, 0], r"shape \(N, C\).*got torch.float32 \(8,\)"),
    "0-D": Bad(lambda m, x: m(x).sum(), r"shape \(N, C\).*got torch.float32 \(\)"),
    "one class": Bad(lambda m, x: m(x)[:, :1], r"two classes.*got \(8, 1\).*Bernoulli"),
    "integers": Bad(lambda m, x: m(x).long(), r"floating point.*got torch.int64 \(8, 3\)"),
    "no rows": Bad(lambda m, x: m(x[:0]), r"N ≥ 1, got torch.float32 \(0, 3\)"),
    "mask of another shape": Bad(
        logits_of, r"mask .*shape \(8,\), got torch.bool \(7,\)", mask=torch.ones(7).bool()
    ),
    "mask that would spread": Bad(
        logits_of, r"mask .*shape \(8,\), got torch.bool \(1,\)", mask=torch.ones(1).bool()
    ),
    "mask of another type": Bad(
        logits_of, r"mask must be boolean .*got torch.float32 \(8,\)", mask=torch.ones(8)
    ),
    "mask that leaves nothing": Bad(
        logits_of, "leaves out every position", mask=torch.zeros(8).bool()
    ),
    "another model": Bad(lambda m, x: network()(x), "does not depend on any", RuntimeError),
    "after backward": Bad(after_backward, "before loss.backward", RuntimeError),
    "a distribution of another model": Bad(
        lambda m, x: Categorical(logits=network()(x)), "does not depend on any", RuntimeError
    ),
    "a distribution without graph": Bad(
        lambda m, x: Categorical(logits=without_graph(m, x)), "still has its graph", RuntimeError
    ),
    "a distribution without batch": Bad(
        lambda m, x: Normal(m(x).mean(), 1.0),
        r"batch dimension, got batch_shape \(\)",
        estimators=("sampled", "exact"),
    ),
    "a distribution and targets that would spread": Bad(
        lambda m, x: Normal(m(x)[:, :1], 1.0),
        r"targets must have shape \(8, 1\), got \(8,\)",
        targets=torch.zeros(8),
        estimators=("empirical",),
    ),
    "a distribution and a mask of another shape": Bad(
        lambda m, x: Categorical(logits=m(x)),
        r"mask .*shape \(8,\), got torch.bool \(7,\)",
        mask=torch.ones(7).bool(),
    ),
    "no targets": Bad(
        logits_of, r"'empirical' needs observe\(..., targets", estimators=("empirical",)
    ),
    "targets too large": Bad(
        logits_of, r"\[0, 3\) or be -100, got 3 to 3", targets=LABELS + 3, estimators=("empirical",)
    ),
    "targets too small": Bad(
        logits_of, r"\[0, 3\) or be -100, got -1 to", targets=LABELS - 1, estimators=("empirical",)
    ),
    "targets of another shape": Bad(
        logits_of,
        r"integer labels of shape \(8,\), got torch.int64 \(7,\)",
        targets=LABELS[:7],
        estimators=("empirical",),
    ),
    "targets of another type": Bad(
        logits_of,
        r"integer labels of shape \(8,\), got torch.float32 \(8,\)",
        targets=LABELS.float(),
        estimators=("empirical",),
    ),
    "targets that leave nothing": Bad(
        logits_of, "leaves out every", targets=LABELS - 100, estimators=("empirical",)
    ),
}
CASES = [
    pytest.param(bad, estimator, id=f"{estimator}-{name}")
    for name, bad in OBSERVATIONS.items()
    for estimator in bad.estimators
]


def observing(model: nn.Module, make: Any, estimator: str) -> SynGAP:
    """An optimizer in use, with something observed that waits for its step."""
    model_needed = {"model": model} if estimator == "exact" else {}
    optimizer: SynGAP = make(model, estimator=estimator, **model_needed)
    if estimator == "empirical":
        return optimizer
    train(model, optimizer, range(2))
    prepare(model, optimizer, 2)
    return optimizer


@pytest.mark.parametrize(("bad", "estimator"), CASES)
@both_kinds
def test_bad_observations(make: Any, bad: Bad, estimator: str) -> None:
    """A twin that never saw the bad call goes on alike, so what was pending is kept too."""
    model, twin = network(), network()
    optimizer, other = observing(model, make, estimator), observing(twin, make, estimator)
    targets = bad.targets
    if estimator == "empirical" and targets is None and "needs observe" not in bad.says:
        targets = LABELS
    before = snapshot(model, optimizer)
    prediction = bad.prediction(model, batch(9)[0])
    with pytest.raises(bad.error, match=bad.says):
        optimizer.observe(prediction, targets=targets, mask=bad.mask)
    assert_identical(snapshot(model, optimizer), before)

    for subject, one in ((model, optimizer), (twin, other)):
        if estimator == "empirical":
            one.observe(subject(batch(3)[0]), targets=LABELS)
            subject(batch(3)[0]).sum().backward()
        one.step()
    assert_identical(values_of(model), values_of(twin))
    assert_identical(optimizer.state_dict(), other.state_dict())


@both_kinds
def test_observing_with_everything_frozen(make: Any) -> None:
    model = network()
    optimizer = make(model)
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="every parameter of this optimizer is frozen"):
        optimizer.observe(model(batch(0)[0].requires_grad_()))


# States -------------------------------------------------------------------------------------------


def of_other_shape(make: Any) -> Any:
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))
    return made_and_trained(model, make(model))


def of_two_groups(make: Any) -> Any:
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    return made_and_trained(model, make(model, groups))


def of_fewer_parameters(make: Any) -> Any:
    model = network()
    return made_and_trained(model, make(model, model[0].parameters()))


def of_another_optimizer(make: Any) -> Any:
    return SGD(network().parameters(), lr=0.1, momentum=0.9).state_dict()


def made_and_trained(model: nn.Module, optimizer: SynGAP) -> Any:
    train(model, optimizer, range(2))
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("foreign", "says"),
    [
        (of_other_shape, r"importance of shape \(7, 4\) for a parameter of shape \(6, 4\).*grow"),
        (of_two_groups, r"groups of \[2, 2\] parameters, this optimizer of \[4\]"),
        (of_fewer_parameters, r"groups of \[2\] parameters, this optimizer of \[4\]"),
        (of_another_optimizer, r"not one of SynGAP: its groups lack retention; .* optimizer\.base"),
    ],
)
@both_kinds
def test_a_state_that_does_not_fit(make: Any, foreign: Any, says: str) -> None:
    model, twin = network(), network()
    optimizer, other = make(model), make(twin)
    for subject, one in ((model, optimizer), (twin, other)):
        train(subject, one, range(2))
        prepare(subject, one, 2)
    state_dict = foreign(make)
    given = copy.deepcopy(state_dict)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(state_dict)
    assert_identical(state_dict, given)
    assert_identical(snapshot(model, optimizer), before)
    for subject, one in ((model, optimizer), (twin, other)):
        one.step()
        train(subject, one, range(3, 5))
    assert_identical(values_of(model), values_of(twin))


def test_the_gate_of_these_tests_is_itself_allowed() -> None:
    """Else every row above would fail for the wrong reason."""
    for make in BOTH.values():
        assert make(network()).param_groups[0]["retention"] == GATE["retention"]
