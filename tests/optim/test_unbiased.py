"""Averaged over the labels the model may draw, the estimate of importance is the Fisher diagonal.

Nothing is sampled: every assignment of labels to the predictions of a tiny batch is tried, and the
estimates that the optimizer makes of them are weighted with their probabilities.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from networks import dictated
from oracle import (
    Outcomes,
    Values,
    bernoulli_outcomes,
    categorical_outcomes,
    fisher_diagonal,
    predictions,
    trainable,
    unit_normal_outcomes,
    zeros,
)
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Normal

from syngap import SynGAP


class BatchNormNet(nn.Module):
    """Two inputs, three hidden units under BatchNorm (train mode), logits."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.uniform_(self.norm.bias, -0.5, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.hidden(x))))


def plain(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))


def unit_normal(outputs: Tensor) -> Distribution:
    return Normal(outputs, torch.ones_like(outputs))


@dataclass(frozen=True)
class Case:
    """A network, the shape of its input, and the family its output is read as."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    outcomes: Outcomes = categorical_outcomes
    family: Callable[[Tensor], Distribution] = lambda outputs: Categorical(logits=outputs)
    event_dim: int = 1  # of the output, for one prediction: 1 for logits, 0 for scalars

    def build(self) -> tuple[nn.Module, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return self.make().double(), torch.randn(self.shape, dtype=torch.float64)


CASES = {
    "logits": Case(plain(3), (4, 2)),
    "logits-batchnorm": Case(BatchNormNet, (4, 2)),
    "token-logits": Case(plain(2), (2, 3, 2)),
    "bernoulli": Case(
        plain(2), (3, 2), bernoulli_outcomes, lambda outputs: Bernoulli(logits=outputs), 0
    ),
    "bernoulli-batchnorm": Case(
        BatchNormNet, (3, 2), bernoulli_outcomes, lambda outputs: Bernoulli(logits=outputs), 0
    ),
    "normal": Case(plain(1), (4, 2), unit_normal_outcomes, unit_normal, 0),
}


def definition(case: Case, hold_statistics: bool) -> Values:
    model, x = case.build()
    return fisher_diagonal(model, x, case.outcomes, case.event_dim, hold_statistics)


def expectation(case: Case, estimator: str) -> tuple[Values, int]:
    """The mean of the optimizer's estimate over all labels, and the number of predictions."""
    model, x = case.build()
    optimizer = SynGAP(
        model.parameters(), lr=0.0, retention=0.0, estimator=estimator, every=1, model=model
    )
    each = [
        case.outcomes(output.detach())
        for output, _ in predictions(model, x, case.event_dim, hold_statistics=False)
    ]
    mean, total = zeros(model), 0.0
    for assignment in itertools.product(*each):
        probability = math.prod(p for _, p, _ in assignment)
        outputs = model(x)
        labels = torch.tensor([label for label, _, _ in assignment], dtype=torch.float64)
        labels = labels.reshape(outputs.shape[: outputs.dim() - case.event_dim])
        if case.event_dim:
            labels = labels.long()
        optimizer.zero_grad()
        optimizer.observe(dictated(case.family(outputs), labels))
        optimizer.step()
        for name, estimate in optimizer.importance().items():
            mean[name] += probability * estimate
        total += probability
    assert total == pytest.approx(1, abs=1e-12)
    return mean, len(each)


def distance(a: Values, b: Values) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("estimator", ["sampled", "exact"])
def test_mean_over_every_labelling_is_the_fisher_diagonal(estimator: str, case: str) -> None:
    """With BatchNorm, ``exact`` is of the Fisher that takes the batch statistics as constants."""
    mean, count = expectation(CASES[case], estimator)
    fisher = definition(CASES[case], hold_statistics=estimator == "exact")
    assert distance(mean, fisher) < 1e-12
    # The equality says something: the same estimate without the factor N is far from it.
    assert distance({name: value / count for name, value in mean.items()}, fisher) > 1e-3


def test_holding_batch_statistics_makes_another_fisher() -> None:
    case = CASES["logits-batchnorm"]
    held, through = definition(case, hold_statistics=True), definition(case, hold_statistics=False)
    assert distance(held, through) > 1e-3


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.event_dim])
def test_true_labels_do_not_give_the_fisher_diagonal(case: str) -> None:
    model, x = CASES[case].build()
    optimizer = SynGAP(
        model.parameters(), lr=0.0, retention=0.0, estimator="empirical", model=model
    )
    logits = model(x)
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator)
    optimizer.observe(logits, targets=targets)
    optimizer.step()
    for hold_statistics in (False, True):
        fisher = definition(CASES[case], hold_statistics)
        assert distance(optimizer.importance(), fisher) > 1e-3


@pytest.mark.parametrize("estimator", ["sampled", "exact"])
def test_an_event_of_several_dimensions_is_one_prediction(estimator: str) -> None:
    """A distribution over vectors: M counts the vectors, and the scores are theirs."""
    model, x = Case(plain(2), (4, 2)).build()
    optimizer = SynGAP(
        model.parameters(), lr=0.0, retention=0.0, estimator=estimator, every=1, model=model
    )
    mean = zeros(model)
    signs = list(itertools.product((-1.0, 1.0), repeat=8))
    for sign in signs:
        outputs = model(x)
        labels = outputs.detach() + torch.tensor(sign, dtype=torch.float64).reshape(4, 2)
        optimizer.zero_grad()
        optimizer.observe(dictated(Independent(unit_normal(outputs), 1), labels))
        optimizer.step()
        for name, estimate in optimizer.importance().items():
            mean[name] += estimate / len(signs)
    per_coordinate = fisher_diagonal(model, x, unit_normal_outcomes, 0, hold_statistics=False)
    assert distance(mean, {name: 2 * value for name, value in per_coordinate.items()}) < 1e-12
    assert trainable(model).keys() == mean.keys()
