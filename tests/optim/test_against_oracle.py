"""Ten steps of SynGAP are ten steps of the paper's rule written in plain loops."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import NETWORKS, dictated
from oracle import Adam, Options, Oracle, Sgd, Values, trainable
from torch import Tensor, nn
from torch.distributions import Categorical

from syngap import SynGAP
from syngap.optim.scores import sample_labels

pytestmark = pytest.mark.xdist_group("oracle")  # whose steps are computed once
STEPS = 10  # importance is refreshed twice where that is done every third step after five
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}


@dataclass(frozen=True)
class Case:
    """One way to use the optimizer: group options, optimizer options, and what a step sees."""

    group: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    second_group: Mapping[str, Any] | None = None
    batches: tuple[int, ...] = (5,)
    masked: bool = False
    silent: frozenset[int] = frozenset()

    def options(self, model: nn.Module) -> dict[str, Options]:
        """The options of each trainable parameter; a second group has every other parameter."""
        first = {"lr": 0.1, "retention": 0.9, **self.group}
        groups = [first, {**first, **(self.second_group or {})}]
        names = [name for name, _ in model.named_parameters()]
        return {name: Options(**groups[i % 2]) for i, name in enumerate(names)}

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        if self.second_group is None:
            return [{"params": parameters}]
        return [{"params": parameters[::2]}, {"params": parameters[1::2], **self.second_group}]


CASES = {
    "defaults": Case(group={"retention": 0.999}),
    "tensor-scope": Case(settings={"scope": "tensor"}),
    "momentum-and-decay": Case(group={"lr": 0.03, "momentum": 0.9, "weight_decay": 0.02}),
    "every-third-step": Case(settings={"every": 3, "warmup": 0}),
    "every-third-after-five": Case(settings={"every": 3, "warmup": 5}),
    "two-observes": Case(batches=(6, 4), group={"consolidation": 0.4}),
    "groups": Case(
        group={"consolidation": 0.6, "ambient": 0.001},
        second_group={"lr": 0.02, "consolidation": 0.2, "retention": 0.5, "momentum": 0.5},
    ),
    "groups-tensor-scope": Case(
        settings={"scope": "tensor"},
        second_group={"consolidation": 0.5, "retention": 0.5, "damping": 1e-3},
    ),
    "unbounded": Case(settings={"bounded": False}),
    "damped": Case(group={"damping": 0.01, "consolidation": 0.8}),
    "masked": Case(masked=True, batches=(5, 4)),
    "some-steps-unobserved": Case(silent=frozenset({0, 1, 4, 5, 8})),
}
OBSERVED = ("defaults", "tensor-scope", "two-observes", "masked")
WRAPPED_CASES = {
    "momentum-and-decay": CASES["momentum-and-decay"],
    "adam": Case(group={"lr": 0.003, "consolidation": 0.5}),
}
BASES: dict[str, Callable[[], Sgd | Adam]] = {"adam": Adam}  # of the oracle; Sgd for the others


@dataclass(frozen=True)
class Batch:
    x: Tensor
    targets: Tensor
    labels: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Trajectory:
    """What the oracle was given, and where it went."""

    batches: list[list[Batch]]
    parameters: list[Values]
    importance: Values
    plasticity: Values


def as_input(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def draw(network: str, model: nn.Module, rows: int, masked: bool, g: torch.Generator) -> Batch:
    """A random batch, random targets, and labels drawn from the model's own prediction."""
    x = NETWORKS[network].inputs(rows, g)
    with torch.no_grad():
        probabilities = model(as_input(x, torch.float64)).softmax(-1)
    shape, classes = probabilities.shape[:-1], probabilities.shape[-1]
    labels = torch.multinomial(probabilities.reshape(-1, classes), 1, generator=g).reshape(shape)
    mask = torch.ones(shape, dtype=torch.bool)
    if masked:
        mask = torch.rand(shape, generator=g) < 0.6
        mask.view(-1)[0] = True
    return Batch(x, torch.randint(classes, shape, generator=g), labels, mask)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def oracle_of(network: str, case_name: str, estimator: str) -> Oracle:
    case = {**CASES, **WRAPPED_CASES}[case_name]
    settings = dict(case.settings)
    group = {**case.group, "bounded": settings.pop("bounded", True)}
    model = NETWORKS[network].build().double()
    options = Case(group=group, second_group=case.second_group).options(model)
    pooled = NETWORKS[network].pooled
    base = BASES.get(case_name, Sgd)()
    return Oracle(model, options, estimator=estimator, pooled=pooled, base=base, **settings)


@functools.cache
def oracle_trajectory(network: str, case_name: str, estimator: str) -> Trajectory:
    case = {**CASES, **WRAPPED_CASES}[case_name]
    oracle = oracle_of(network, case_name, estimator)
    generator = torch.Generator().manual_seed(1)
    seen: list[list[Batch]] = []
    parameters: list[Values] = []
    for step in range(STEPS):
        seen.append([])
        losses = []
        for rows in case.batches:
            batch = draw(network, oracle.model, rows, case.masked, generator)
            seen[-1].append(batch)
            x = as_input(batch.x, torch.float64)
            if step not in case.silent:
                labels = batch.targets if estimator == "empirical" else batch.labels
                oracle.observe(x, labels, batch.mask)
            losses.append(loss_of(oracle.model(x), batch.targets))
        oracle.step(losses)
        parameters.append({name: p.detach().clone() for name, p in trainable(oracle.model).items()})
    return Trajectory(seen, parameters, oracle.importance, oracle.plasticity())


@dataclass
class Subject:
    """The optimizer under test, with its network."""

    model: nn.Module
    optimizer: Any
    case: Case

    def follow(self, trajectory: Trajectory) -> Iterator[Values]:
        """Take the trajectory's batches with the trajectory's labels; give the parameters."""
        dtype = next(self.model.parameters()).dtype
        for step, batches in enumerate(trajectory.batches):
            self.optimizer.zero_grad()
            for batch in batches:
                logits = self.model(as_input(batch.x, dtype))
                if step not in self.case.silent:
                    self.optimizer.observe(
                        dictated(Categorical(logits=logits), batch.labels),
                        targets=batch.targets,
                        mask=batch.mask if self.case.masked else None,
                    )
                loss_of(logits, batch.targets).backward()
            self.optimizer.step()
            yield {name: p.detach() for name, p in trainable(self.model).items()}

    def gate(self) -> tuple[Values, Values]:
        """Importance and plasticity of the trainable parameters by name."""
        name_of = {p: name for name, p in self.model.named_parameters()}
        ordered = [name_of[p] for group in self.optimizer.param_groups for p in group["params"]]
        found: list[Values] = []
        for values in (self.optimizer.importance(), self.optimizer.plasticity()):
            named = values if isinstance(values, dict) else dict(zip(ordered, values, strict=True))
            found.append({name: named[name] for name in trainable(self.model)})
        return found[0], found[1]


Wrapper = Callable[[list[dict[str, Any]], Case], Any]


def subject_of(
    network: str,
    case_name: str,
    estimator: str,
    dtype: torch.dtype = torch.float64,
    *,
    wrapper: Wrapper | None = None,
    generator: torch.Generator | None = None,
) -> Subject:
    case = {**CASES, **WRAPPED_CASES}[case_name]
    model = NETWORKS[network].build().to(dtype)
    groups = case.param_groups(model)
    settings = {**case.settings, "estimator": estimator, "generator": generator}
    if estimator == "exact":
        settings["model"] = model
    if wrapper is None:
        optimizer = SynGAP(groups, **{"lr": 0.1, "retention": 0.9, **case.group}, **settings)
    else:
        gate = {k: v for k, v in case.group.items() if k not in ("lr", "momentum", "weight_decay")}
        base = wrapper(groups, case)
        optimizer = SynGAP.wrap(base, **{"retention": 0.9, **gate}, **settings)
    return Subject(model, optimizer, case)


def assert_same(actual: Values, expected: Values, tolerance: float, where: str) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        error = (actual[name].double() - expected[name]).abs().max().item()
        assert error <= tolerance, f"{where}, {name}: off by {error:.1e}"


def assert_follows(subject: Subject, trajectory: Trajectory, tolerance: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which warnings are given is another test's promise
        for step, parameters in enumerate(subject.follow(trajectory)):
            assert_same(parameters, trajectory.parameters[step], tolerance, f"after step {step}")
    importance, plasticity = subject.gate()
    assert_same(importance, trajectory.importance, tolerance, "importance")
    assert_same(plasticity, trajectory.plasticity, 10 * tolerance, "plasticity")


def combinations() -> Iterator[Any]:
    """Networks, estimators, cases and types of numbers.

    What an update does with its scores is the same code for every network: such cases are tried on
    two of them, one in float32 too. What is observed depends on the network: those cases are tried
    on all.
    """
    for network, estimator, case in product(NETWORKS, ("sampled", "exact"), CASES):
        for name, dtype in DTYPES.items():
            if dtype == torch.float64:
                wanted = case in OBSERVED or network in ("mlp", "conv-batchnorm")
            else:
                wanted = case == "defaults" or network == "conv-batchnorm"
            if wanted:
                described = f"{network}-{estimator}-{case}-{name}"
                yield pytest.param(network, estimator, case, dtype, id=described)


@pytest.mark.parametrize(("network", "estimator", "case", "dtype"), list(combinations()))
def test_many_steps_are_the_papers(
    network: str, estimator: str, case: str, dtype: torch.dtype
) -> None:
    trajectory = oracle_trajectory(network, case, estimator)
    assert_follows(subject_of(network, case, estimator, dtype), trajectory, TOLERANCE[dtype])


@pytest.mark.parametrize("network", NETWORKS)
def test_empirical_is_the_sampled_rule_on_true_labels(network: str) -> None:
    trajectory = oracle_trajectory(network, "defaults", "empirical")
    assert_follows(subject_of(network, "defaults", "empirical"), trajectory, 1e-10)


@pytest.mark.parametrize("estimator", ["sampled", "exact"])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_comparison_would_notice_another_mask(network: str, estimator: str) -> None:
    """The steps tell the estimators apart, and a slightly different gate."""
    trajectory = oracle_trajectory(network, "tensor-scope", estimator)
    for other_case, other_estimator in (("tensor-scope", "empirical"), ("defaults", estimator)):
        subject = subject_of(network, other_case, other_estimator)
        with pytest.raises(AssertionError, match="off by"):
            assert_follows(subject, trajectory, 1e-5)


@pytest.mark.parametrize("network", NETWORKS)
def test_exact_warns_exactly_where_it_falls_back(network: str) -> None:
    trajectory = oracle_trajectory(network, "defaults", "exact")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in subject_of(network, "defaults", "exact").follow(trajectory):
            pass
    said = " ".join(str(warning.message) for warning in caught)
    pooled = NETWORKS[network].pooled
    assert bool(caught) == bool(pooled), said
    assert all(name in said for name in pooled), said


def assert_walk_together(
    oracle: Oracle,
    subject: Subject,
    network: str,
    observe: Callable[[Tensor, Batch], Tensor],
    prepare: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> None:
    """Steps of both on the same batches; ``observe`` tells which labels were drawn."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        prepare(oracle.model, step)
        prepare(subject.model, step)
        batch = draw(network, oracle.model, 5, False, generator)
        x = as_input(batch.x, torch.float64)
        logits = subject.model(x)
        subject.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            labels = observe(logits, batch)
        loss_of(logits, batch.targets).backward()
        subject.optimizer.step()

        oracle.observe(x, labels, batch.mask)
        oracle.step([loss_of(oracle.model(x), batch.targets)])
        expected = {name: p.detach() for name, p in trainable(oracle.model).items()}
        actual = {name: p.detach() for name, p in trainable(subject.model).items()}
        assert_same(actual, expected, 1e-10, f"after step {step}")
    assert_same(subject.gate()[0], oracle.importance, 1e-10, "importance")


@pytest.mark.parametrize("estimator", ["sampled", "exact"])
@pytest.mark.parametrize("network", ["mlp", "conv-batchnorm", "transformer"])
def test_labels_of_plain_logits_are_those_of_the_generator(network: str, estimator: str) -> None:
    oracle = oracle_of(network, "tensor-scope", estimator)
    generator, same = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    subject = subject_of(network, "tensor-scope", estimator, generator=generator)

    def observe(logits: Tensor, batch: Batch) -> Tensor:
        subject.optimizer.observe(logits)
        return sample_labels(logits.detach(), same)

    assert_walk_together(oracle, subject, network, observe)


@pytest.mark.parametrize("estimator", ["sampled", "exact"])
def test_a_head_out_of_use_stays_and_its_importance_fades(estimator: str) -> None:
    oracle = oracle_of("mlp", "momentum-and-decay", estimator)
    subject = subject_of("mlp", "momentum-and-decay", estimator)

    def observe(logits: Tensor, batch: Batch) -> Tensor:
        subject.optimizer.observe(dictated(Categorical(logits=logits), batch.labels))
        return batch.labels

    def take_turns(model: nn.Module, step: int) -> None:
        model.spare_in_use = step // 3 % 2 == 0

    assert_walk_together(oracle, subject, "mlp", observe, take_turns)


def test_labels_are_drawn_from_the_prediction() -> None:
    draws = 40_000
    logits = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.5]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    labels = sample_labels(logits.expand(draws, 2, 3), generator)
    assert labels.shape == (draws, 2)
    frequency = F.one_hot(labels, 3).double().mean(0)
    p = logits.softmax(-1)
    deviations = (frequency - p).abs() / (p * (1 - p) / draws).sqrt()
    assert deviations.max() < 4.5
    together = (labels[:, 0] == 1) & (labels[:, 1] == 0)
    assert abs(together.double().mean() - p[0, 1] * p[1, 0]) < 4.5 * (0.25 / draws) ** 0.5


# Wrapping another optimizer -----------------------------------------------------------------------


def sgd(groups: list[dict[str, Any]], case: Case) -> torch.optim.Optimizer:
    known = ("lr", "momentum", "weight_decay")
    groups = [{k: v for k, v in group.items() if k in ("params", *known)} for group in groups]
    chosen = {k: v for k, v in case.group.items() if k in known}
    return torch.optim.SGD(groups, **{"lr": 0.1, **chosen})


def adam(groups: list[dict[str, Any]], case: Case) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=case.group["lr"], eps=Adam.eps)


@pytest.mark.parametrize("estimator", ["sampled", "exact"])
@pytest.mark.parametrize("network", NETWORKS)
def test_wrapped_sgd_is_the_papers_rule_bitwise(network: str, estimator: str) -> None:
    trajectory = oracle_trajectory(network, "tensor-scope", estimator)
    itself = subject_of(network, "tensor-scope", estimator)
    wrapped = subject_of(network, "tensor-scope", estimator, wrapper=sgd)
    before = {name: p.detach().clone() for name, p in trainable(wrapped.model).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = zip(wrapped.follow(trajectory), itself.follow(trajectory), strict=True)
        for parameters, by_itself in pairs:
            _, plasticity = wrapped.gate()
            for name, p in trainable(wrapped.model).items():
                expected = before[name]
                if p.grad is not None:
                    expected = expected.add(plasticity[name] * p.grad, alpha=-0.1)
                assert torch.equal(parameters[name], expected), name
                assert torch.equal(parameters[name], by_itself[name]), name
                before[name] = parameters[name].clone()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("case", "wrapper"), [("momentum-and-decay", sgd), ("adam", adam)])
@pytest.mark.parametrize("estimator", ["sampled", "exact"])
@pytest.mark.parametrize("network", NETWORKS)
def test_wrapped_optimizer_moves_by_its_gated_update(
    network: str, estimator: str, case: str, wrapper: Wrapper, dtype: torch.dtype
) -> None:
    """For SGD with momentum and decay this is the oracle of SynGAP with the same."""
    trajectory = oracle_trajectory(network, case, estimator)
    subject = subject_of(network, case, estimator, dtype, wrapper=wrapper)
    assert_follows(subject, trajectory, TOLERANCE[dtype])
