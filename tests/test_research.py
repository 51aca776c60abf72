"""The method of research/ is the package's where its options say so, and averages as it says."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syngap.experiments.config import read
from syngap.methods import Learner, Method
from syngap.methods.derpp import DERpp
from syngap.methods.er import ER
from syngap.methods.er_ace import ERACE
from syngap.methods.syngap import SynGAP
from syngap.options import checked, signature
from syngap.streams import Batch

RESEARCH = Path(__file__).parents[1] / "research"
if not RESEARCH.is_dir():
    pytest.skip("there is no research/ beside the tests", allow_module_level=True)
sys.path.insert(0, str(RESEARCH / "src"))

from syngap_research.gated import GatedDERpp, GatedERACE  # noqa: E402
from syngap_research.metaplastic import Metaplastic  # noqa: E402

KEPT: dict[str, Any] = {"lr": 0.3, "buffer": 10, "replay": 4}


def learner() -> Learner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return Learner(model, lambda x, generator: x)


def learned(method: Method, steps: int = 30) -> list[list[Tensor]]:
    """Return the network's parameters after every step."""
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        method.step(Batch(torch.randn(6, 4), torch.randint(3, (6,))))
        found.append([value.detach().clone() for value in method.learner.model.parameters()])
    return found


@pytest.mark.parametrize(
    ("kind", "own", "options"),
    [
        (SynGAP, {"every": 1}, {}),
        (SynGAP, {"every": 1, "scope": "tensor"}, {"mean": "tensor"}),
        (ER, {}, {"rule": "none"}),
        (ERACE, {}, {"rule": "none", "loss": "ace"}),
        (DERpp, {}, {"rule": "none", "loss": "derpp"}),
        (GatedERACE, {"every": 1}, {"loss": "ace"}),
        (GatedDERpp, {"every": 1}, {"loss": "derpp"}),
    ],
)
def test_it_is_the_method_that_its_options_name(
    kind: type[Method], own: dict[str, Any], options: dict[str, Any]
) -> None:
    theirs = learned(kind(learner(), **KEPT, **own))[-1]
    ours = learned(Metaplastic(learner(), **KEPT, **options))[-1]
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_network_is_judged_by_the_mean_of_its_past() -> None:
    method = Metaplastic(learner(), **KEPT, rule="none", average=0.9)
    past = learned(method)
    weights = torch.tensor([0.9**age for age in reversed(range(len(past)))])
    weights /= weights.sum()
    x = torch.randn(5, 4)
    judged = learner()
    with torch.no_grad():
        for number, parameter in enumerate(judged.model.parameters()):
            values = torch.stack([step[number] for step in past])
            parameter.copy_((weights.view(-1, *[1] * parameter.dim()) * values).sum(0))
    torch.testing.assert_close(method.learner.evaluate(x), judged.evaluate(x))


def test_where_the_stream_opposes_replay_a_closed_gate_lets_replay_alone_through() -> None:
    method = Metaplastic(learner(), **KEPT, gated="opposed", ambient=0.0)
    learned(method, 3)
    shut = [torch.zeros_like(value) for value in method.importance]
    method._gate = lambda parameters: shut  # type: ignore[method-assign]
    batch = Batch(torch.randn(6, 4), torch.randint(3, (6,)))
    twin = copy.deepcopy(method)
    stream, replay, _ = twin._losses(batch)
    assert replay is not None
    theirs = torch.autograd.grad(replay, twin.learner.parameters(), retain_graph=True)
    ours = torch.autograd.grad(stream, twin.learner.parameters())
    method.learn(batch)
    for parameter, a, b in zip(method.learner.parameters(), ours, theirs, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, b + torch.where(a * b < 0, 0.0, a))
    assert any(bool((a * b < 0).any()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("path", sorted(RESEARCH.glob("*.yaml")), ids=lambda path: path.name)
def test_rows_of_its_experiments_can_be_made(path: Path) -> None:
    for row, options in read(str(path))["methods"].items():
        if options.get("method") == "metaplastic":
            given = {key: value for key, value in options.items() if key != "method"}
            Metaplastic(learner(), **checked(given, signature(Metaplastic), row))
