"""A teacher on replay: its formula in plain loops, what it sees, and what it leaves alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_identical
from learning import learner, pictures
from oracle import Options, Oracle, gradient, log_probability, trainable
from test_methods import (
    CLASSES,
    Draws,
    Plain,
    arriving,
    assert_same_weights,
    descend,
    double_network,
    draws,  # noqa: F401  (a fixture)
    key,
    mean_cross_entropy,
    seen,
)
from torch import Tensor, nn

from syngap.bench import methods, seeds
from syngap.bench.errors import UserError
from syngap.bench.methods import Learner, Method
from syngap.bench.methods.average import Average, lag_note
from syngap.bench.methods.teacher import Teacher
from syngap.bench.streams import Batch

RETENTION, STRENGTH, RATE, REPLAY = 0.6, 0.4, 0.2, 4
REPLAYING = ["er", "er_ace", "derpp", "syngap"]


# The definition, in plain loops -------------------------------------------------------------------


class Precise(Learner):
    """In float64, where the library's own rounds logits to float32."""

    def _forward(self, x: Tensor, model: nn.Module) -> Tensor:
        logits: Tensor = model(x)
        return logits


class PreciseAverage(Average):
    """In float64, where the library's own rounds the newest weights' share to float32."""

    def __init__(self, model: nn.Module, retention: float) -> None:
        super().__init__(model, retention)
        self.source, self.path, self.retention = model, [], retention

    def follow(self, labels: Tensor | None = None) -> None:
        self.path.append(copied(self.source))
        self._weight.mul_(self.retention).add_(1 - self.retention)
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.copy_(averaged(self.path, self.retention)[name])


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def averaged(path: list[dict[str, Tensor]], retention: float) -> dict[str, Tensor]:
    """Σ α^(n-i) θᵢ / Σ α^(n-i)."""
    shares = [retention ** (len(path) - 1 - step) for step in range(len(path))]
    return {
        name: sum(share * at[name] for share, at in zip(shares, path, strict=True)) / sum(shares)
        for name in path[0]
    }


def mean_squared_error(now: Tensor, then: Tensor) -> Tensor:
    squares = [(a - b) ** 2 for a, b in zip(now.flatten(), then.flatten(), strict=True)]
    return torch.stack(squares).sum() / len(squares)


def mean_bounded_error(now: Tensor, then: Tensor) -> Tensor:
    """Mean of d² where logits differ by d ≤ 1, and of 2 d - 1 where they differ by more."""
    sizes = [(a - b).abs() for a, b in zip(now.flatten(), then.flatten(), strict=True)]
    return torch.stack([d**2 if d <= 1 else 2 * d - 1 for d in sizes]).sum() / len(sizes)


def mean_divergence(now: Tensor, then: Tensor) -> Tensor:
    """Mean over samples of Σ p (log p - log q), p being the average's."""
    total = torch.zeros((), dtype=now.dtype)
    for new, old in zip(now, then, strict=True):
        for label in range(CLASSES):
            log_p, log_q = log_probability(old, label), log_probability(new, label)
            total = total + log_p.exp() * (log_p - log_q)
    return total / len(now)


DIVERGENCES = {"mse": mean_squared_error, "huber": mean_bounded_error, "kl": mean_divergence}


class ByHand:
    """A method's loss with its teacher's pull, one sample after the other, in float64."""

    def __init__(self, name: str, loss: str, on: str) -> None:
        self.name, self.on = name, on
        self.divergence: Callable[[Tensor, Tensor], Tensor] = DIVERGENCES[loss]
        self.model, self.average = double_network(), double_network()
        self.path: list[dict[str, Tensor]] = []
        self.said: dict[tuple[int, ...], Tensor] = {}
        self.pulled = 0.0

    def loss(self, batch: Batch, drawn: list[dict[str, Tensor]]) -> Tensor:
        own = self.own_loss(batch, drawn)
        if 1 - RETENTION ** len(self.path) < 0.5:
            return own
        return own + STRENGTH * self.pull(batch, drawn)

    def pull(self, batch: Batch, drawn: list[dict[str, Tensor]]) -> Tensor:
        taught = [*([batch.x] if self.on == "all" else []), *(past["x"] for past in drawn)]
        if not taught:
            return torch.zeros((), dtype=torch.float64)
        x = seen(torch.cat(taught))
        pull = self.divergence(self.model(x), self.average(x).detach())
        self.pulled += pull.item()
        return pull

    def own_loss(self, batch: Batch, drawn: list[dict[str, Tensor]]) -> Tensor:
        logits = self.model(seen(batch.x))
        if self.name == "er_ace":
            present = sorted(set(batch.y.tolist()))
            loss = mean_cross_entropy(logits, batch.y, among=present)
            for past in drawn:
                loss = loss + mean_cross_entropy(self.model(seen(past["x"])), past["y"])
            return loss
        if self.name == "derpp":
            loss = mean_cross_entropy(logits, batch.y)
            if drawn:
                stored = torch.stack([self.said[key(x)] for x in drawn[0]["x"]])
                loss = loss + 0.1 * mean_squared_error(self.model(seen(drawn[0]["x"])), stored)
                replayed = self.model(seen(drawn[1]["x"]))
                loss = loss + 0.5 * mean_cross_entropy(replayed, drawn[1]["y"])
            self.said.update({key(x): row.detach() for x, row in zip(batch.x, logits, strict=True)})
            return loss
        x, y = self.together(batch, drawn)
        return mean_cross_entropy(self.model(seen(x)), y)

    def together(self, batch: Batch, drawn: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        return (
            torch.cat([batch.x, *(past["x"] for past in drawn)]),
            torch.cat([batch.y, *(past["y"] for past in drawn)]),
        )

    def follow(self) -> None:
        self.path.append(copied(self.model))
        with torch.no_grad():
            for name, value in self.average.named_parameters():
                value.copy_(averaged(self.path, RETENTION)[name])


def taught(name: str, pupil: Learner, **options: Any) -> Method:
    options = {"lr": RATE, "buffer": 8, "replay": REPLAY, "average": RETENTION} | options
    method = methods.registry.get(name)(pupil, **{"teacher": STRENGTH} | options)
    assert isinstance(method, Method)
    return method


@pytest.mark.parametrize("loss", DIVERGENCES)
def test_of_the_teachers_losses_all_but_the_squared_error_pull_no_harder_than_a_bound(
    loss: str,
) -> None:
    """The gradient of the squared error grows with the difference: a high rate then diverges."""
    strongest = []
    for size in (10.0, 1000.0):
        pupil = Precise(double_network(), lambda x, _: x)
        method = taught("er", pupil, teacher_loss=loss, teacher_on="all")
        assert method.teacher is not None
        for _ in range(3):
            pupil.follow()
        with torch.no_grad():
            for param in pupil.model.parameters():
                param.mul_(size)  # the average stays behind
        logits = method.teacher.predict(torch.randn(4, 5, dtype=torch.float64))
        (pull,) = torch.autograd.grad(method.teacher.pull(arriving=0), logits)
        strongest.append(float(pull.abs().max()))
    bounded = strongest[1] <= 2 * STRENGTH
    assert bounded == (loss != "mse")


@pytest.mark.parametrize("on", ["replay", "all"])
@pytest.mark.parametrize("loss", DIVERGENCES)
@pytest.mark.parametrize("name", REPLAYING)
def test_a_teacher_adds_strength_times_the_divergence_from_the_average(
    name: str,
    loss: str,
    on: str,
    draws: Draws,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("syngap.bench.methods.descent.Average", PreciseAverage)
    gate: dict[str, Any] = {"retention": 0.8, "consolidation": 0.3, "damping": 1e-6}
    own: dict[str, Any] = {"lr": RATE}
    if name == "syngap":
        own = {"lr": 4 * RATE, "estimator": "empirical", "every": 1, **gate}
    pupil = Precise(double_network(), lambda x, _: seen(x))
    method = taught(name, pupil, teacher_loss=loss, teacher_on=on, **own)
    hand = ByHand(name, loss, on)
    rule = Oracle(
        hand.model,
        dict.fromkeys(trainable(hand.model), Options(own["lr"], ambient=0.01, **gate)),
        estimator="empirical",
    )
    update = Plain(RATE)
    for batch in [*arriving(3, [0, 2]), *arriving(8, [1, 3])[3:]]:
        method.step(batch)
        drawn = [past for past in draws.found if past]
        draws.found.clear()
        if name == "syngap":
            x, y = hand.together(batch, drawn)
            rule.observe(seen(x), y, torch.ones_like(y, dtype=torch.bool))
            rule.step([hand.loss(batch, drawn)])
        else:
            descend(hand.model, gradient(hand.loss(batch, drawn), hand.model), update)
        hand.follow()
    assert hand.pulled > 0.01, "the teacher never disagreed, so nothing was compared"
    assert_same_weights(pupil.model, hand.model)
    assert_same_weights(pupil.evaluated_model, hand.average)


# Methods that are taught by averages of their own -------------------------------------------------


@pytest.fixture
def precise_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where the library's own rounds the newest weights' share to float32."""

    def approach(self: Average, share: Tensor) -> None:
        for old, new in zip(self.model.parameters(), self._source.parameters(), strict=True):
            old.add_(share * (new - old))

    monkeypatch.setattr(Average, "_approach", approach)


def as_network(path: list[dict[str, Tensor]], retention: float) -> nn.Sequential:
    """The average of what the weights were; a new network where there were none."""
    model = double_network()
    if path:
        model.load_state_dict(averaged(path, retention))
    return model


def double_learner(seed: int = 0) -> Learner:
    return Precise(double_network(), lambda x, _: seen(x), seed=seed)


@pytest.mark.parametrize("buffer", [0, 8])
@pytest.mark.usefixtures("precise_averages")
def test_lwf_adds_the_cross_entropy_of_what_the_average_of_the_weights_answers(
    buffer: int,
    draws: Draws,  # noqa: F811
) -> None:
    own = {"strength": 0.7, "temperature": 2.0, "retention": 0.8, "warmup": 4}
    pupil = double_learner()
    method = methods.registry.get("lwf")(pupil, lr=RATE, buffer=buffer, replay=REPLAY, **own)
    model, update = double_network(), Plain(RATE)
    path: list[dict[str, Tensor]] = []
    for step, batch in enumerate([*arriving(3, [0, 2]), *arriving(8, [1, 3])[3:]]):
        method.step(batch)
        drawn = draws.one()
        x, y = batch
        if buffer and step:
            x, y = torch.cat([x, drawn["x"]]), torch.cat([y, drawn["y"]])
        logits = model(seen(x))
        loss = mean_cross_entropy(logits, y)
        if step >= 4:
            earlier = as_network(path, 0.8)(seen(x)).detach()
            for new, old in zip(logits / 2, earlier / 2, strict=True):
                for label in range(CLASSES):
                    answer = log_probability(old, label).exp()
                    loss = loss - 0.7 * answer * log_probability(new, label) / len(x)
        descend(model, gradient(loss, model), update)
        path.append(copied(model))
    assert_same_weights(pupil.model, model)
    assert_same_weights(method.earlier.model, as_network(path, 0.8))
    assert pupil.evaluated_model is pupil.model


@pytest.mark.parametrize(("stable", "plastic"), [(0.6, 0.8), (0.9, 0.4)])
@pytest.mark.usefixtures("precise_averages")
def test_cls_er_pulls_replayed_logits_towards_the_surer_of_two_averages(
    stable: float,
    plastic: float,
    draws: Draws,  # noqa: F811
) -> None:
    own = {"average": 0.8, "update": stable, "plastic": 0.5, "plastic_update": plastic}
    own |= {"strength": 0.9}
    pupil = double_learner(seed=3)
    method = methods.registry.get("cls_er")(
        pupil, lr=RATE, buffer=8, replay=REPLAY, warmup=4, **own
    )
    chances = {name: seeds.generator(3, f"{name} average") for name in ("stable", "plastic")}
    retention, probability = {"stable": 0.8, "plastic": 0.5}, {"stable": stable, "plastic": plastic}
    paths: dict[str, list[dict[str, Tensor]]] = {"stable": [], "plastic": []}
    model, update = double_network(), Plain(RATE)
    taught_by = []
    batches = [*arriving(5, [0, 2]), *arriving(14, [1, 3])[5:]]
    for step, batch in enumerate(batches):
        method.step(batch)
        drawn = draws.one()
        x, y = batch
        if step:
            x, y = torch.cat([x, drawn["x"]]), torch.cat([y, drawn["y"]])
        loss = mean_cross_entropy(model(seen(x)), y)
        if step and min(map(len, paths.values())) >= 4:
            now, targets = model(seen(drawn["x"])), []
            said = {k: as_network(p, retention[k])(seen(drawn["x"])) for k, p in paths.items()}
            for row, label in enumerate(drawn["y"].tolist()):
                sure = {k: log_probability(said[k][row], label) for k in said}
                taught_by.append("stable" if sure["stable"] > sure["plastic"] else "plastic")
                targets.append(said[taught_by[-1]][row].detach())
            loss = loss + 0.9 * mean_squared_error(now, torch.stack(targets))
        descend(model, gradient(loss, model), update)
        for name, chance in chances.items():
            if torch.rand((), generator=chance) < probability[name]:
                paths[name].append(copied(model))
    assert set(taught_by) == {"stable", "plastic"}
    assert max(map(len, paths.values())) < len(batches)
    assert_same_weights(pupil.model, model)
    assert_same_weights(method.plastic.model, as_network(paths["plastic"], 0.5))
    assert_same_weights(pupil.evaluated_model, as_network(paths["stable"], 0.8))


@pytest.mark.parametrize("retention", [0.3, 0.9, 0.9999])
def test_an_average_knows_how_many_updates_it_has_had(retention: float) -> None:
    average = Average(nn.Linear(1, 1), retention)
    for updates in range(60):
        assert average.has_seen(updates)
        assert not average.has_seen(updates + 1) or retention**updates < 1e-11
        average.follow()
    assert Average(nn.Linear(1, 1), 0.5).has_seen(1000).item() is False


# What the teacher sees ----------------------------------------------------------------------------


def watched(module: nn.Module) -> list[Tensor]:
    """What a network is given from now on, call by call."""
    given: list[Tensor] = []
    module.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].detach().clone()))
    return given


@pytest.mark.parametrize("on", ["replay", "all"])
@pytest.mark.parametrize("name", [*REPLAYING, "agem"])
def test_the_teacher_sees_the_same_augmented_samples_as_the_network(name: str, on: str) -> None:
    stream = pictures()
    assert stream.transform.augments
    pupil = learner(stream)
    method = taught(name, pupil, teacher_on=on)
    network, teacher = watched(pupil.model), watched(pupil.evaluated_model)
    for step in range(5):
        method.step(stream[step])
    lengths = [len(stream[step].y) for step in range(5)]
    expected = [x if on == "all" else x[n:] for x, n in zip(network, lengths, strict=True)]
    assert_identical(teacher, [x for x in expected if len(x)])
    assert len(teacher) == (5 if on == "all" else 4)  # nothing is replayed in the first step


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_teacher_judges_in_evaluation_mode_without_gradient_in_the_same_precision(
    precision: Any,
) -> None:
    stream = pictures()
    pupil = learner(stream, precision=precision)
    method = taught("er", pupil)
    modes: list[tuple[bool, bool, torch.dtype]] = []
    for model in (pupil.model, pupil.evaluated_model):
        model[-1].register_forward_hook(
            lambda layer, _, logits: modes.append(
                (layer.training, logits.requires_grad, logits.dtype)
            )
        )
    method.step(stream[0])
    method.step(stream[1])
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    assert modes == [(True, True, kind), (True, True, kind), (False, False, kind)]
    assert all(p.grad is None and not p.requires_grad for p in pupil.evaluated_model.parameters())


def test_the_teacher_draws_no_random_numbers_of_its_own() -> None:
    """So a strength that is next to nothing learns next to the same."""
    stream, states = pictures(), []
    for strength in (0.0, 1e-12):
        torch.manual_seed(7)
        pupil = learner(stream)
        method = taught("er", pupil, teacher=strength)
        for step in range(8):
            method.step(stream[step])
        states.append((pupil.model.state_dict(), torch.get_rng_state(), pupil.state_dict()))
    for one, other in zip(states[0][0].values(), states[1][0].values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert_identical(states[0][1], states[1][1])
    assert_identical(states[0][2]["augmentation"], states[1][2]["augmentation"])


# What it needs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*REPLAYING, "agem", "ewcpp", "si", "mas"])
def test_a_teacher_without_an_average_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"teacher: got 0\.4 without an average.*set average"):
        taught(name, learner(pictures()), average=0.0)


@pytest.mark.parametrize("name", [*REPLAYING, "agem", "ewcpp", "si", "mas"])
def test_a_teacher_on_replay_without_a_memory_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"teacher: got 0\.4 on replay with buffer 0.*all"):
        taught(name, learner(pictures()), buffer=0)
    method = taught(name, learner(pictures()), buffer=0, teacher_on="all")
    method.step(pictures()[0])


def test_a_state_from_before_there_were_teachers_still_fits() -> None:
    """Checkpoints of earlier versions hold every attribute that ER had, and no teacher."""
    method = taught("er", learner(pictures()), teacher=0.0)
    assert set(method.state_dict()) == {"learner", "optimizer", "memory", "replay"}


def test_a_step_that_is_undone_leaves_nothing_with_the_teacher() -> None:
    stream = pictures()
    method = taught("er", learner(stream))
    method.loss(stream[0])  # type: ignore[attr-defined]
    method.undo()
    with pytest.raises(RuntimeError, match=r"calls self\.predict"):
        method.teacher.pull(0)  # type: ignore[attr-defined]


# Averages that are long for their tasks -----------------------------------------------------------


@pytest.mark.parametrize(
    ("retention", "ends", "share"),
    [(0.99, [137, 274], "25"), (0.99, [400, 479, 900], "45"), (0.999, [395, 790], "67")],
)
def test_an_average_that_lags_behind_a_whole_task_warns_once_and_says_what_fits(
    retention: float, ends: list[int], share: str
) -> None:
    note = lag_note(retention, ends, "methods.er.average")
    assert re.match(rf"methods.er.average: {retention} .*{share} %", note)
    fitting = float(note.split("compare with ")[1].split()[0])
    assert lag_note(fitting, ends) == ""


@pytest.mark.parametrize(
    ("retention", "ends"), [(0.99, [395, 790]), (0.999, [3950]), (0.0, [1, 2])]
)
def test_nothing_is_said_of_an_average_that_fits_its_tasks(
    retention: float, ends: list[int]
) -> None:
    assert lag_note(retention, ends) == ""


def test_a_young_average_whose_logits_overflow_does_not_teach() -> None:
    """The running statistics of a new network can make them infinite."""
    stream = pictures()
    made = learner(stream)
    made.average = Average(made.model, 0.9)
    made.follow()
    with torch.no_grad():
        for parameter in made.average.model.parameters():
            parameter.fill_(torch.inf)
    teacher = Teacher(made, 1.0, "mse", "all")
    teacher.predict(stream[0].x)
    pull = teacher.pull(arriving=0)
    pull.backward()
    assert pull.item() == 0.0
    assert all(bool((p.grad == 0).all()) for p in made.parameters() if p.grad is not None)
