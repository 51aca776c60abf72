"""Averaged weights: the average by definition, what is judged, and no part of training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learning import learner, pictures, weights
from torch import Tensor
from torch.func import functional_call

from syngap import methods
from syngap.methods import Method
from syngap.streams import Stream

KINDS: dict[str, dict[str, Any]] = {
    "er": {"buffer": 9, "replay": 4},
    "er_ace": {"buffer": 9, "replay": 4},
    "derpp": {"buffer": 9, "replay": 4},
    "ewcpp": {"interval": 3, "strength": 0.5},
    "syngap": {"buffer": 9, "replay": 4},
    "joint": {"optimizer": "adam", "lr": 0.01},
}


def trained(
    kind: str, steps: int, **options: Any
) -> tuple[Method, Stream, list[dict[str, Tensor]]]:
    """Return a method after some steps, and what its newest weights were after each."""
    stream = pictures()
    torch.manual_seed(7)  # dropout
    pupil = learner(stream)
    method = methods.registry.get(kind)(pupil, **KINDS[kind], **options)
    path = []
    for step in range(steps):
        method.step(stream[step])
        path.append({name: v.clone() for name, v in pupil.model.state_dict().items()})
    return method, stream, path


def averaged(path: list[dict[str, Tensor]], retention: float) -> dict[str, Tensor]:
    """Return Σ α^(n-i) θᵢ / Σ α^(n-i), of whole numbers the newest."""
    shares = [retention ** (len(path) - 1 - step) for step in range(len(path))]
    found = {}
    for name, newest in path[-1].items():
        if newest.is_floating_point():
            parts = [share * at[name].double() for share, at in zip(shares, path, strict=True)]
            newest = torch.stack(parts).sum(0) / sum(shares)
        found[name] = newest
    return found


@pytest.mark.parametrize("steps", [1, 2, 9])
@pytest.mark.parametrize("retention", [0.3, 0.99])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_average_of_what_the_weights_were(
    kind: str, retention: float, steps: int
) -> None:
    method, _, path = trained(kind, steps, average=retention)
    expected = averaged(path, retention)
    found = method.learner.judged.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name].double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_it_changes_nothing_of_training(kind: str) -> None:
    with_it, _, path = trained(kind, 7, average=0.9)
    without, _, plain = trained(kind, 7)
    assert all(torch.equal(path[-1][name], value) for name, value in plain[-1].items())
    assert without.learner.judged is without.learner.model
    assert with_it.learner.model.training
    assert all(p.requires_grad for p in with_it.learner.model.parameters())


def test_it_is_what_is_judged() -> None:
    method, stream, path = trained("er", 7, average=0.9)
    x = stream.test.samples.take(torch.arange(5))
    expected = {name: value.to(path[-1][name].dtype) for name, value in averaged(path, 0.9).items()}
    model = method.learner.model.eval()
    with torch.no_grad():
        logits = functional_call(model, expected, (stream.transform(x, None),))
        newest = model(stream.transform(x, None))
    model.train()
    torch.testing.assert_close(method.learner.evaluate(x), logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits, newest, rtol=1e-2)
    assert method.learner.model.training


def test_before_the_first_step_the_network_itself_is_judged() -> None:
    method, stream, _ = trained("er", 0, average=0.9)
    plain, _, _ = trained("er", 0)
    x = stream.test.samples.take(torch.arange(5))
    assert torch.equal(method.learner.evaluate(x), plain.learner.evaluate(x))


def test_it_must_stay_finite_too() -> None:
    method, _, _ = trained("er", 3, average=0.9)
    assert all(value.isfinite().all() for value in method.lasting())
    next(method.learner.judged.parameters()).data.fill_(torch.inf)
    assert not all(value.isfinite().all() for value in method.lasting())


def test_a_state_without_it_does_not_fit() -> None:
    with_it, _, _ = trained("er", 3, average=0.9)
    without, _, _ = trained("er", 3)
    with pytest.raises(KeyError, match="average"):
        with_it.load_state_dict(without.state_dict())


def test_it_goes_on_from_its_state() -> None:
    whole, stream, _ = trained("syngap", 9, average=0.9)
    half, _, _ = trained("syngap", 5, average=0.9)
    state, chance = half.state_dict(), torch.get_rng_state()
    again, _, _ = trained("syngap", 0, average=0.9)
    again.load_state_dict(state)
    torch.set_rng_state(chance)
    for step in range(5, 9):
        again.step(stream[step])
    ours, theirs = weights(again), weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
