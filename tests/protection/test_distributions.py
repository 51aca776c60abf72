"""Every distribution of torch is protected, or refused at once where a teacher needs its KL."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.distributions import Distribution, Independent, Normal, Poisson, kl_divergence
from torch.distributions import kl as torch_kl

import syngap

# Of outputs (N, 3): each gives a distribution a sample, or three.
KINDS: dict[str, Callable[[Tensor], Distribution]] = {
    "bernoulli": lambda y: distributions.Bernoulli(logits=y),
    "beta": lambda y: distributions.Beta(y.exp(), 1.5),
    "binomial": lambda y: distributions.Binomial(5, logits=y),
    "categorical": lambda y: distributions.Categorical(logits=y),
    "cauchy": lambda y: distributions.Cauchy(y, 1.0),
    "dirichlet": lambda y: distributions.Dirichlet(y.exp()),
    "exponential": lambda y: distributions.Exponential(y.exp()),
    "gamma": lambda y: distributions.Gamma(y.exp(), 1.0),
    "geometric": lambda y: distributions.Geometric(logits=y),
    "gumbel": lambda y: distributions.Gumbel(y, 1.0),
    "half normal": lambda y: distributions.HalfNormal(y.exp()),
    "laplace": lambda y: distributions.Laplace(y, 1.0),
    "log normal": lambda y: distributions.LogNormal(y, 1.0),
    "mixture": lambda y: distributions.MixtureSameFamily(
        distributions.Categorical(logits=y), Normal(y, 1.0)
    ),
    "multinomial": lambda y: distributions.Multinomial(4, logits=y),
    "multivariate normal": lambda y: distributions.MultivariateNormal(y, torch.eye(3)),
    "negative binomial": lambda y: distributions.NegativeBinomial(3.0, logits=y),
    "normal": lambda y: Normal(y, 0.5),
    "poisson": lambda y: Poisson(y.exp()),
    "student t": lambda y: distributions.StudentT(4.0, y, 1.0),
    "student t of three": lambda y: Independent(distributions.StudentT(4.0, y, 1.0), 1),
    "pareto": lambda y: distributions.Pareto(1.0, y.exp()),
    "pareto, learned scale": lambda y: distributions.Pareto(y.exp(), 2.0),
    "uniform": lambda y: distributions.Uniform(y, y + y.exp()),
    "von mises": lambda y: distributions.VonMises(y, 1.0),
    "wishart": lambda y: distributions.Wishart(
        torch.tensor(40.0), covariance_matrix=torch.diag_embed(y.exp())
    ),
    "weibull": lambda y: distributions.Weibull(y.exp(), 2.0),  # learned transforms
    "scaled normal": lambda y: distributions.TransformedDistribution(
        Normal(y, 1.0), distributions.AffineTransform(0.0, torch.full((3,), 2.0))
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def network() -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(32, 4)


def is_computed(value: Callable[[], Tensor]) -> bool:
    try:
        value()
    except NotImplementedError:
        return False
    return True


def train(model: nn.Module, known: Tensor, protection: Any) -> None:
    optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    for _ in range(2):
        optimizer.zero_grad()
        (protection.loss() + model(known).square().mean()).backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Singular sample")  # of Wishart in single precision
@every_kind
def test_every_distribution_is_protected_or_refused_before_anything_is_done(kind: str) -> None:
    model, known = network()
    prediction, other = (KINDS[kind](model(known) + shift) for shift in (0.0, 0.1))
    has_kl = is_computed(lambda: kl_divergence(prediction, other))
    is_infinite = has_kl and bool(kl_divergence(prediction, other).isinf().any())
    has_entropy = is_computed(prediction.entropy)
    before, calls = copy.deepcopy(model.state_dict()), list[int]()

    def predict(batch: Tensor) -> Distribution:
        calls.append(1)
        return KINDS[kind](model(batch))

    if not has_kl or is_infinite:
        why = "is infinite as soon" if is_infinite else "no KL divergence.*or register one"
        words = rf"{type(prediction).__name__}.* {why}"
        random = torch.random.get_rng_state()
        for gate in (True, False):
            calls.clear()
            with pytest.raises(TypeError, match=words):
                syngap.protect(model, known, predict=predict, gate=gate)
            assert len(calls) == 1
        assert torch.equal(torch.random.get_rng_state(), random)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
    protection = syngap.protect(model, known, predict=predict, teacher=has_kl and not is_infinite)
    train(model, known, protection)
    report, text = protection.report(), str(protection.report())
    assert (report.kl is not None) == has_kl == ("KL(before" in text)
    assert (report.loss_before is not None) == has_entropy
    assert (report.loss_now is not None) == (has_kl and has_entropy) == ("cross-entropy" in text)
    assert "Weights moved" in text
    assert "None" not in text
    if report.kl is not None and has_kl and has_entropy:
        assert report.loss_before is not None
        assert report.kl > 0
        assert report.loss_now == pytest.approx(report.loss_before + report.kl)


def test_classes_that_are_left_out_are_no_reason_to_refuse() -> None:
    """As actions that are not allowed: their probability is 0, and stays so."""
    model, known = network()

    def predict(batch: Tensor) -> Distribution:
        chances = model(batch).softmax(-1)
        return distributions.Categorical(probs=torch.nn.functional.pad(chances, (0, 1)))

    protection = syngap.protect(model, known, predict=predict)
    train(model, known, protection)
    assert 0 < protection.report().kl < 1


def test_the_refusal_names_what_is_inside() -> None:
    model, known = network()
    with pytest.raises(TypeError, match="Independent of StudentT, of which"):
        syngap.protect(
            model, known, predict=lambda batch: KINDS["student t of three"](model(batch))
        )


class Counts(Poisson):
    """A distribution of one's own."""


class Other(distributions.StudentT):
    """A distribution of one's own that torch has no KL of."""


def test_a_registered_divergence_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kl, "_KL_REGISTRY", dict(torch_kl._KL_REGISTRY))
    monkeypatch.setattr(torch_kl, "_KL_MEMOIZE", {})
    model, known = network()

    def predict(batch: Tensor) -> Distribution:
        return Other(4.0, model(batch), 1.0)

    with pytest.raises(TypeError, match="Other, of which torch has no KL"):
        syngap.protect(model, known, predict=predict)
    torch_kl.register_kl(Other, Other)(lambda p, q: (p.loc - q.loc).square())
    protection = syngap.protect(model, known, predict=predict)
    train(model, known, protection)
    assert protection.report().kl > 0


def test_a_subclass_has_the_divergence_of_its_class() -> None:
    model, known = network()
    protection = syngap.protect(model, known, predict=lambda batch: Counts(model(batch).exp()))
    train(model, known, protection)
    report = protection.report()
    assert report.kl > 0
    assert report.loss_before is None
    assert report.loss_now is None
