"""Averaged weights: the average by definition, what is judged, and no part of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learning import beginning, learner, network, pictures, weights
from notebook import Notebook
from safetensors.torch import load_file
from tiny import job
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from syngap.bench import methods
from syngap.bench.errors import UserError
from syngap.bench.landscapes.landscape import landscape
from syngap.bench.landscapes.path import train_with_snapshots
from syngap.bench.methods import Learner, Method
from syngap.bench.methods.average import AutomaticAverage, Average
from syngap.bench.runner.local import run_here
from syngap.bench.runner.run import method_factory, stream_of
from syngap.bench.store.folder_reader import read_run
from syngap.bench.store.folder_writer import FolderJournal
from syngap.bench.streams import Batch, Stream
from syngap.bench.training import train

KINDS: dict[str, dict[str, Any]] = {
    "er": {"buffer": 9, "replay": 4},
    "er_ace": {"buffer": 9, "replay": 4},
    "derpp": {"buffer": 9, "replay": 4},
    "ewcpp": {"interval": 3, "strength": 0.5},
    "si": {"interval": 3, "strength": 0.5},
    "mas": {"interval": 3},
    "lwf": {"retention": 0.7, "warmup": 2},
    "agem": {"buffer": 9, "replay": 4},
    "scr": {"buffer": 9, "replay": 4},
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
    found = method.learner.evaluated_model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name].double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_it_changes_nothing_of_training(kind: str) -> None:
    with_it, _, path = trained(kind, 7, average=0.9)
    without, _, plain = trained(kind, 7)
    assert all(torch.equal(path[-1][name], value) for name, value in plain[-1].items())
    assert without.learner.evaluated_model is without.learner.model
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
    assert all(value.isfinite().all() for value in method.finite_tensors())
    next(method.learner.evaluated_model.parameters()).data.fill_(torch.inf)
    assert not all(value.isfinite().all() for value in method.finite_tensors())


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


# Its own length -----------------------------------------------------------------------------------


def chosen_by_itself(path: list[dict[str, Tensor]], labels: list[set[int]]) -> dict[str, Tensor]:
    """Return the average over a sixth of the longest run of steps without a new class."""
    average = {name: value.double() for name, value in path[0].items()}
    for step in range(1, len(path)):
        runs, arrived = [0], {*labels[0]}
        for each in labels[1 : step + 1]:
            runs.append(0 if each - arrived else runs[-1] + 1)
            arrived |= each
        share = max(1 / 500, 6 / (max(runs) + 6))
        for name, value in path[step].items():
            average[name] = average[name] + share * (value.double() - average[name])
    return average


@pytest.mark.parametrize("kind", ["er", "si", "derpp", "joint"])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_auto_spans_a_sixth_of_the_longest_run_without_a_new_class(kind: str, steps: int) -> None:
    method, stream, path = trained(kind, steps, average="auto")
    labels = [{*stream[step].y.tolist()} for step in range(steps)]
    assert steps < 9 or 2 < sum(bool(each - labels[0]) for each in labels) < 9
    found = method.learner.evaluated_model.state_dict()
    for name, value in chosen_by_itself(path, labels).items():
        if found[name].is_floating_point():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)


def test_auto_spans_at_most_five_hundred_steps() -> None:
    model = nn.Linear(1, 1, bias=False)
    average, labels = AutomaticAverage(model), torch.tensor([3])
    with torch.no_grad():
        model.weight.zero_()
        for _ in range(4000):
            average.follow(labels)
        model.weight.fill_(1.0)
        average.follow(labels)
    assert average.model.weight.item() == pytest.approx(1 / 500)


def test_auto_without_labels_says_what_it_needs() -> None:
    with pytest.raises(RuntimeError, match=r"follow\(batch\.y\)"):
        AutomaticAverage(nn.Linear(1, 1)).follow()


# Networks that are hard to average ----------------------------------------------------------------


class Odd(nn.Module):
    """A mask that never was finite, and a buffer that each pass puts a new tensor in place of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.shift = 0.5 * self.shift + 0.5 * x.detach().mean(0)
        logits: Tensor = self.layer(x - self.shift)
        return logits + self.mask


def test_masks_stay_and_new_buffers_are_followed() -> None:
    torch.manual_seed(0)
    model = Odd()
    method = methods.registry.get("er")(Learner(model, lambda x, generator: x), average=0.5)
    shifts = []
    for _ in range(5):
        method.step(Batch(torch.randn(4, 2) + 3, torch.tensor([0, 1, 0, 1])))
        shifts.append(model.shift.clone())
    judged = method.learner.evaluated_model
    assert torch.equal(judged.mask, model.mask)
    shares = torch.tensor([0.5**age for age in reversed(range(5))])
    expected = (shares[:, None] * torch.stack(shifts)).sum(0) / shares.sum()
    torch.testing.assert_close(judged.shift, expected)
    assert not method.learner.evaluate(torch.randn(4, 2)).isnan().any()


def test_a_network_that_cannot_be_copied_is_refused() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.raw = nn.Parameter(torch.ones(2))
            self.used = 2 * self.raw  # not a leaf, which deepcopy refuses

    with pytest.raises(UserError, match="average: the network cannot be copied"):
        Average(Computed(), 0.9)


def test_another_method_does_not_inherit_it() -> None:
    pupil = Learner(network(), lambda x, generator: x.float())
    kind = methods.registry.get("er")
    kind(pupil, average=0.9)
    assert pupil.evaluated_model is not pupil.model
    kind(pupil)
    assert pupil.evaluated_model is pupil.model
    methods.registry.get("scr")(pupil)
    assert pupil.classifier is not None
    kind(pupil)
    assert pupil.classifier is None


# Runs ---------------------------------------------------------------------------------------------

AVERAGED = ("methods.er.average=0.9", "training.evaluate_every=1")


def test_a_run_keeps_the_network_that_it_was_judged_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[FolderJournal] = []
    monkeypatch.setattr(FolderJournal, "alive", lambda self: heard.append(self))
    run = job(tmp_path / "er-0", *AVERAGED)
    run_here(run)
    stream = stream_of(run.config, None)
    method = method_factory(run.config, stream, torch.device("cpu"))()
    kept = load_file(tmp_path / "er-0" / "checkpoint" / "weights.safetensors")
    assert method.learner.average is not None
    method.learner.average.model.load_state_dict(kept)
    right = []
    for task in range(stream.tasks):
        of = (stream.test.task == task).nonzero().flatten()
        said = method.learner.evaluate(stream.test.samples.take(of)).argmax(1)
        right.append(100 * float((said == stream.test.labels[of]).float().mean()))
    assert read_run(tmp_path / "er-0").accuracy[-1] == pytest.approx(right, abs=1e-3)
    assert len(heard) > 2 * len(stream)  # at each step, and while it is judged after it


def test_logits_that_overflow_are_those_of_the_newest_network() -> None:
    stream = pictures()
    begin = beginning("er-average", stream)

    def spoilt() -> Method:
        method = begin()
        with torch.no_grad():
            method.learner.parameters()[-2].fill_(3e38)  # the head's weights, finite still
        return method

    with pytest.raises(FloatingPointError, match="the logits of step"):
        train(stream, spoilt, Notebook())


def test_a_landscape_is_that_of_the_averaged_network(tmp_path: Path) -> None:
    config = job(tmp_path, *AVERAGED).config
    found = landscape(config, None, points=2, samples=10**6)
    stream = stream_of(config, None)
    pupil, kept = train_with_snapshots(
        stream, method_factory(config, stream, torch.device("cpu")), _quiet
    )
    last = kept[stream.ends[1]]
    assert all(torch.equal(last[name], v) for name, v in pupil.evaluated_model.state_dict().items())
    batches = [stream[step] for step in range(stream.ends[0] // config.stream.options["epochs"])]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    newest = float(cross_entropy(pupil.evaluate(x, newest=True), y))
    for name, step in (
        ("initialisation", 0),
        ("task 1", stream.ends[0]),
        ("task 2", stream.ends[1]),
    ):
        pupil.evaluated_model.load_state_dict(kept[step])
        loss = float(cross_entropy(pupil.evaluate(x), y))
        assert found.losses_at_points[name] == pytest.approx(loss, rel=1e-4), name
    assert abs(loss - newest) > 1e-3


def _quiet(what: str, done: int, of: int) -> None: ...
