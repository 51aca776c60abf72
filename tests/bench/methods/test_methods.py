"""Every method does what its paper says, never learns of tasks, and goes on where it stopped."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers import assert_identical, largest_difference, values_of
from learning import CASES, learner, made, network, picture_tasks, pictures, weights
from oracle import (
    Adam,
    Options,
    Oracle,
    Sgd,
    Values,
    gradient,
    log_probability,
    trainable,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from syngap import optim
from syngap.bench import methods
from syngap.bench.errors import UserError
from syngap.bench.memory import Memory
from syngap.bench.methods import Learner, Method
from syngap.bench.methods.states import restore
from syngap.bench.options import checked, defaults, signature
from syngap.bench.streams import Batch, Stream
from syngap.bench.training.checkpoint import pack, random_states, restore_random_states, unpack

INPUTS, CLASSES, ROWS = 5, 4, 6
MEMORY = ["er", "er_ace", "derpp", "agem", "cls_er", "scr", "ewcpp", "si", "mas", "lwf", "syngap"]
MEMORY += ["gated_er_ace", "gated_derpp"]
every_case = pytest.mark.parametrize("case", CASES)
every_method = pytest.mark.parametrize("name", sorted({name for name, _ in CASES.values()}))


# The definitions, in plain loops ------------------------------------------------------------------


class Precise(Learner):
    """In float64, where the library's own rounds logits to float32."""

    def _forward(self, x: Tensor, model: nn.Module) -> Tensor:
        logits: Tensor = model(seen(x))
        return logits


def seen(x: Tensor) -> Tensor:
    return x.double() / 255 - 0.5


def double_network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    return layers.double()


def arriving(steps: int, classes: Sequence[int] = range(CLASSES)) -> list[Batch]:
    """Batches of stored samples, no two of them alike."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for _ in range(steps):
        x = torch.randint(256, (ROWS, INPUTS), generator=generator).to(torch.uint8)
        pick = torch.randint(len(classes), (ROWS,), generator=generator)
        result.append(Batch(x, torch.tensor(classes)[pick]))
    return result


def key(x: Tensor) -> tuple[int, ...]:
    return tuple(x.flatten().tolist())


def mean_cross_entropy(logits: Tensor, labels: Tensor, among: Sequence[int] = ()) -> Tensor:
    """- mean of log p(label), where only the classes `among` compete; all where none are given."""
    columns = list(among) or list(range(logits.shape[1]))
    total = torch.zeros((), dtype=logits.dtype)
    for row, label in zip(logits, labels.tolist(), strict=True):
        total = total - log_probability(row[columns], columns.index(label))
    return total / len(logits)


class Plain:
    """theta - lr m, m = momentum m + (g + weight_decay theta)."""

    def __init__(self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        self.options = Options(lr, momentum=momentum, weight_decay=weight_decay)
        self.rule = Sgd()

    def __call__(self, name: str, theta: Tensor, g: Tensor) -> Tensor:
        return self.rule.update(name, theta, g, torch.ones_like(theta), self.options)


class Adaptive:
    """Kingma and Ba's algorithm 1 on g + weight_decay theta."""

    def __init__(
        self, lr: float, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        self.options, self.weight_decay = Options(lr), weight_decay
        self.rule = Adam(betas, eps=1e-8)

    def __call__(self, name: str, theta: Tensor, g: Tensor) -> Tensor:
        g = g + self.weight_decay * theta
        return self.rule.update(name, theta, g, torch.ones_like(theta), self.options)


class Projectile:
    """s = beta s + (1 - beta) g^2; theta - lr g / sqrt(s + 1e-8), and lr weight_decay theta off."""

    def __init__(self, lr: float, beta: float = 0.999, weight_decay: float = 0.0) -> None:
        self.lr, self.beta, self.weight_decay = lr, beta, weight_decay
        self.s: Values = {}

    def __call__(self, name: str, theta: Tensor, g: Tensor) -> Tensor:
        s = self.beta * self.s.get(name, torch.zeros_like(g)) + (1 - self.beta) * g**2
        self.s[name] = s
        step = self.lr * g / torch.sqrt(s + 1e-8)
        return theta - step - self.lr * self.weight_decay * theta


Update = Callable[[str, Tensor, Tensor], Tensor]


def descend(model: nn.Module, g: Values, update: Update) -> None:
    for name, theta in trainable(model).items():
        new = update(name, theta.detach().clone(), g[name])
        with torch.no_grad():
            theta.copy_(new)


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    moved = largest_difference(expected.parameters(), double_network().parameters())
    assert moved > 1e-2, "nothing was learned, so nothing was compared"
    torch.testing.assert_close(values_of(actual), values_of(expected), rtol=1e-9, atol=1e-11)


def method_of(name: str, **options: Any) -> Method:
    method = methods.registry.get(name)(Precise(double_network(), lambda x, _: x), **options)
    assert isinstance(method, Method)
    return method


def float_learner(seed: int = 4) -> Learner:
    return Learner(double_network().float(), lambda x, _: x.float() / 255 - 0.5, seed=seed)


def defaults_of(name: str) -> dict[str, Any]:
    return defaults(methods.registry.get(name))


class Draws:
    """What memories gave, call by call."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []
        self.asked: list[int] = []

    def one(self) -> dict[str, Tensor]:
        return self.found.pop(0)


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Draws:
    record, draw = Draws(), Memory.draw

    def recorded(self: Memory, count: int) -> dict[str, Tensor]:
        drawn = draw(self, count)
        record.asked.append(count)
        record.found.append(drawn)
        return drawn

    monkeypatch.setattr(Memory, "draw", recorded)
    return record


# Against the definitions --------------------------------------------------------------------------


PLAIN: dict[str, tuple[str, dict[str, Any], Callable[[], Update]]] = {
    "sgd": ("sgd", {"lr": 0.2}, lambda: Plain(0.2)),
    "sgd-decay": ("sgd", {"lr": 0.2, "weight_decay": 0.1}, lambda: Plain(0.2, 0, 0.1)),
    "sgdm": ("sgdm", {"lr": 0.2}, lambda: Plain(0.2, 0.9)),
    "sgdm-decay": (
        "sgdm",
        {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.1},
        lambda: Plain(0.2, 0.5, 0.1),
    ),
    "adam": ("adam", {"lr": 0.01}, lambda: Adaptive(0.01)),
    "adam-options": (
        "adam",
        {"lr": 0.01, "beta1": 0.5, "beta2": 0.7, "weight_decay": 0.1},
        lambda: Adaptive(0.01, (0.5, 0.7), 0.1),
    ),
    "ballistic": ("ballistic", {"lr": 0.001}, lambda: Projectile(0.001)),
    "ballistic-options": (
        "ballistic",
        {"lr": 0.01, "beta": 0.9, "weight_decay": 0.1},
        lambda: Projectile(0.01, 0.9, 0.1),
    ),
    "joint": (
        "joint",
        {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.1},
        lambda: Plain(0.2, 0.5, 0.1),
    ),
    "joint-adam": (
        "joint",
        {"optimizer": "adam", "lr": 0.01, "retrained": True},
        lambda: Adaptive(0.01),
    ),
    "joint-ballistic": (
        "joint",
        {"optimizer": "ballistic", "lr": 0.01},
        lambda: Projectile(0.01),
    ),
}


@pytest.mark.parametrize("case", PLAIN)
def test_a_method_without_memory_follows_its_formula_on_the_mean_cross_entropy(case: str) -> None:
    name, options, make = PLAIN[case]
    method, model, update = method_of(name, **options), double_network(), make()
    for batch in arriving(8):
        method.step(batch)
        loss = mean_cross_entropy(model(seen(batch.x)), batch.y)
        descend(model, gradient(loss, model), update)
    assert_same_weights(method.learner.model, model)


def assert_replay_is_honest(drawn: dict[str, Tensor], past: list[Batch], size: int) -> None:
    """Different samples that arrived earlier, as they were stored, with their own labels."""
    if not past:
        assert not drawn
        return
    label = {key(x): int(y) for batch in past for x, y in zip(batch.x, batch.y, strict=True)}
    keys = [key(x) for x in drawn["x"]]
    assert drawn["x"].dtype == torch.uint8
    assert len(set(keys)) == len(keys) == min(size, len(label))
    assert [label[one] for one in keys] == drawn["y"].tolist()


def with_replay(batch: Batch, drawn: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What arrives with what was drawn from the memory behind it."""
    if not drawn:
        return batch.x, batch.y
    return torch.cat([batch.x, drawn["x"]]), torch.cat([batch.y, drawn["y"]])


RULES: dict[str, tuple[dict[str, Any], Callable[[], Update]]] = {
    "sgd": (
        {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.1},
        lambda: Plain(0.2, 0.5, 0.1),
    ),
    "adam": ({"lr": 0.01, "weight_decay": 0.1}, lambda: Adaptive(0.01, weight_decay=0.1)),
    "ballistic": (
        {"lr": 0.01, "weight_decay": 0.1},
        lambda: Projectile(0.01, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("memory", ["reservoir", "balanced"])
def test_er_takes_one_mean_over_the_batch_and_what_it_drew(
    rule: str, memory: str, draws: Draws
) -> None:
    options, make = RULES[rule]
    method = method_of("er", optimizer=rule, buffer=8, replay=4, memory=memory, **options)
    model, update, batches = double_network(), make(), arriving(8)
    for step, batch in enumerate(batches):
        method.step(batch)
        drawn = draws.one()
        assert_replay_is_honest(drawn, batches[:step], 4)
        x, y = with_replay(batch, drawn)
        descend(model, gradient(mean_cross_entropy(model(seen(x)), y), model), update)
    assert not draws.found
    assert_same_weights(method.learner.model, model)


def test_er_ace_lets_what_arrives_compete_only_with_classes_of_its_batch(draws: Draws) -> None:
    method = method_of("er_ace", lr=0.2, buffer=8, replay=4)
    model, update = double_network(), Plain(0.2)
    batches = [*arriving(3, [0, 2]), *arriving(6, [1, 3])[3:]]
    for step, batch in enumerate(batches):
        method.step(batch)
        drawn = draws.one()
        assert_replay_is_honest(drawn, batches[:step], 4)
        present = sorted(set(batch.y.tolist()))
        assert len(present) == 2
        loss = mean_cross_entropy(model(seen(batch.x)), batch.y, among=present)
        if step > 0:
            loss = loss + mean_cross_entropy(model(seen(drawn["x"])), drawn["y"])
        descend(model, gradient(loss, model), update)
    assert not draws.found
    assert_same_weights(method.learner.model, model)


def test_derpp_adds_stored_logits_of_one_draw_and_labels_of_another(draws: Draws) -> None:
    method = method_of("derpp", lr=0.2, momentum=0.5, buffer=8, replay=4, alpha=0.3, beta=0.7)
    model, update, batches = double_network(), Plain(0.2, 0.5), arriving(8)
    said: dict[tuple[int, ...], Tensor] = {}
    different = 0
    for step, batch in enumerate(batches):
        method.step(batch)
        logits = model(seen(batch.x))
        loss = mean_cross_entropy(logits, batch.y)
        if step > 0:
            first, second = draws.one(), draws.one()
            for drawn in (first, second):
                assert_replay_is_honest(drawn, batches[:step], 4)
            different += not torch.equal(first["x"], second["x"])
            now, squares = model(seen(first["x"])), []
            for row, x in enumerate(first["x"]):
                squares += [(now[row, c] - said[key(x)][c]) ** 2 for c in range(CLASSES)]
            loss = loss + 0.3 * torch.stack(squares).sum() / len(squares)
            loss = loss + 0.7 * mean_cross_entropy(model(seen(second["x"])), second["y"])
        said.update({key(x): row.detach() for x, row in zip(batch.x, logits, strict=True)})
        descend(model, gradient(loss, model), update)
    assert not draws.found
    assert different > 4
    assert_same_weights(method.learner.model, model)


class Consolidating:
    """EWC++: the penalty's share of the gradient, and the Fisher that it is made of."""

    def __init__(self, model: nn.Module, strength: float, interval: int, retention: float) -> None:
        self.model, self.strength = model, strength
        self.interval, self.retention = interval, retention
        self.fisher = {name: torch.zeros_like(p) for name, p in trainable(model).items()}
        self.anchor = {name: p.detach().clone() for name, p in trainable(model).items()}
        self.recent: list[Values] = []

    def normalised(self) -> Values:
        """F between 0 and 1: one smallest and one largest value for the whole network."""
        everything = [value for f in self.fisher.values() for value in f.flatten().tolist()]
        low, high = min(everything), max(everything)
        if high == low:
            return {name: torch.zeros_like(f) for name, f in self.fisher.items()}
        return {name: (f - low) / (high - low) for name, f in self.fisher.items()}

    def penalty(self) -> Tensor:
        """strength * sum of F (theta - anchor)^2."""
        total = torch.zeros((), dtype=torch.float64)
        for name, f in self.normalised().items():
            total = total + (f * (trainable(self.model)[name] - self.anchor[name]) ** 2).sum()
        return self.strength * total

    def after_a_step(self, of_cross_entropy: Values) -> None:
        self.recent.append({name: g**2 for name, g in of_cross_entropy.items()})
        if len(self.recent) < self.interval:
            return
        for name in self.fisher:
            mean = sum(squares[name] for squares in self.recent) / self.interval
            self.fisher[name] = self.retention * self.fisher[name] + (1 - self.retention) * mean
        self.anchor = {name: p.detach().clone() for name, p in trainable(self.model).items()}
        self.recent = []


@pytest.mark.parametrize("buffer", [0, 8])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_ewcpp_pulls_towards_the_last_anchor_where_the_fisher_says(
    rule: str, buffer: int, draws: Draws
) -> None:
    options, make = RULES[rule]
    method = method_of(
        "ewcpp", **options, optimizer=rule, strength=0.8, interval=3, buffer=buffer, replay=4
    )
    model, update, batches = double_network(), make(), arriving(11)
    ewc = Consolidating(model, 0.8, interval=3, retention=0.1)
    pulled = 0.0
    for step, batch in enumerate(batches):
        method.step(batch)
        drawn = draws.one()
        assert_replay_is_honest(drawn, batches[:step] if buffer else [], 4)
        x, y = with_replay(batch, drawn)
        of_cross_entropy = gradient(mean_cross_entropy(model(seen(x)), y), model)
        of_penalty = gradient(ewc.penalty(), model)
        pulled += max(g.abs().max().item() for g in of_penalty.values())
        both = {name: of_cross_entropy[name] + of_penalty[name] for name in of_penalty}
        descend(model, both, update)
        ewc.after_a_step(of_cross_entropy)
    assert pulled > 0.01
    torch.testing.assert_close(method.fisher, list(ewc.fisher.values()), rtol=1e-9, atol=1e-11)
    assert_same_weights(method.learner.model, model)


def test_ewcpp_consolidates_as_in_the_paper_unless_told_otherwise() -> None:
    options = defaults_of("ewcpp")
    assert (options["interval"], options["retention"], options["buffer"]) == (50, 0.1, 0)


@pytest.mark.parametrize("strength", [1.0, 1e6])
def test_ewcpp_survives_an_interval_in_which_nothing_had_a_gradient(strength: float) -> None:
    """The Fisher is then the same everywhere, and its range no divisor."""
    pupil = float_learner()
    with torch.no_grad():
        pupil.model[2].bias.copy_(torch.tensor([1000.0, 0, 0, 0]))  # sure of class 0
    before = values_of(pupil.model)
    options = {"strength": strength, "interval": 1, "retention": 0.0}
    method = methods.registry.get("ewcpp")(pupil, **options)
    for _ in range(3):
        method.step(Batch(torch.zeros(2, INPUTS, dtype=torch.uint8), torch.tensor([0, 0])))
    assert_identical(values_of(pupil.model), before)


class Integrating:
    """Synaptic intelligence: what each parameter's path did for the loss, by squared distance."""

    def __init__(self, model: nn.Module, damping: float, retention: float) -> None:
        self.damping, self.retention = damping, retention
        self.sums = {name: torch.zeros_like(p) for name, p in trainable(model).items()}
        self.importance = {name: torch.zeros_like(p) for name, p in self.sums.items()}

    def observe(self, g: Values, before: Values, after: Values, _: nn.Module, x: Tensor) -> None:
        for name in self.sums:
            self.sums[name] = self.sums[name] - g[name] * (after[name] - before[name])

    def consolidate(self, moved: Values) -> None:
        for name, distance in moved.items():
            gained = self.sums[name] / (distance**2 + self.damping)
            summed = self.retention * self.importance[name] + gained
            self.importance[name] = torch.where(summed > 0, summed, torch.zeros_like(summed))
            self.sums[name] = torch.zeros_like(gained)


class Sensing:
    """Memory aware synapses: how much the squared length of the logits depends on a parameter."""

    def __init__(self, model: nn.Module, interval: int, retention: float) -> None:
        self.interval, self.retention = interval, retention
        self.recent: list[Values] = []
        self.importance = {name: torch.zeros_like(p) for name, p in trainable(model).items()}

    def observe(self, g: Values, b: Values, a: Values, before: nn.Module, x: Tensor) -> None:
        length = torch.stack([logit**2 for row in before(x) for logit in row]).sum() / len(x)
        self.recent.append({k: part.abs() for k, part in gradient(length, before).items()})

    def consolidate(self, moved: Values) -> None:
        for name in moved:
            mean = sum(seen_once[name] for seen_once in self.recent) / self.interval
            self.importance[name] = self.retention * self.importance[name] + mean
        self.recent = []


@pytest.mark.parametrize("retention", [1.0, 0.5])
@pytest.mark.parametrize("buffer", [0, 8])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["si", "mas"])
def test_importance_of_si_and_mas_pulls_towards_the_last_anchor(
    name: str, rule: str, buffer: int, retention: float, draws: Draws
) -> None:
    options, make = RULES[rule]
    own = {"strength": 0.3, "interval": 3, "retention": retention}
    own |= {"damping": 0.01} if name == "si" else {}
    method = method_of(name, **options, **own, optimizer=rule, buffer=buffer, replay=4)
    model, update, batches = double_network(), make(), arriving(11)
    measure: Integrating | Sensing = Sensing(model, 3, retention)
    if name == "si":
        measure = Integrating(model, 0.01, retention)
    anchor, pulled = copies(model), 0.0
    for step, batch in enumerate(batches):
        method.step(batch)
        drawn = draws.one()
        assert_replay_is_honest(drawn, batches[:step] if buffer else [], 4)
        x, y = with_replay(batch, drawn)
        of_loss = gradient(mean_cross_entropy(model(seen(x)), y), model)
        penalty = torch.zeros((), dtype=torch.float64)
        for key_, importance in measure.importance.items():
            penalty = penalty + (importance * (trainable(model)[key_] - anchor[key_]) ** 2).sum()
        of_penalty = gradient(0.3 * penalty, model)
        pulled += max(g.abs().max().item() for g in of_penalty.values())
        earlier, before = copy.deepcopy(model), copies(model)
        descend(model, {key_: of_loss[key_] + of_penalty[key_] for key_ in of_loss}, update)
        measure.observe(of_loss, before, copies(model), earlier, seen(x))
        if step % 3 == 2:
            now = copies(model)
            measure.consolidate({key_: now[key_] - anchor[key_] for key_ in now})
            anchor = now
    assert pulled > 0.01
    assert_same_weights(method.learner.model, model)


def copies(model: nn.Module) -> Values:
    return {name: p.detach().clone() for name, p in trainable(model).items()}


def test_mas_discards_the_sensitivity_of_a_step_that_is_undone() -> None:
    method = method_of("mas")
    method.loss(arriving(1)[0])
    method.undo()
    assert method.state_dict()["_sensitivity"] == []


def test_agem_takes_away_what_would_raise_the_loss_of_the_replayed_batch(draws: Draws) -> None:
    method = method_of("agem", lr=0.2, momentum=0.5, buffer=8, replay=4)
    model, update = double_network(), Plain(0.2, 0.5)
    batches = [*arriving(4, [0, 2]), *arriving(10, [1, 3])[4:]]
    projected = 0
    for step, batch in enumerate(batches):
        method.step(batch)
        drawn = draws.one()
        assert_replay_is_honest(drawn, batches[:step], 4)
        g = gradient(mean_cross_entropy(model(seen(batch.x)), batch.y), model)
        if step > 0:
            past = gradient(mean_cross_entropy(model(seen(drawn["x"])), drawn["y"]), model)
            product = sum((g[name] * past[name]).sum() for name in g)
            square = sum((past[name] ** 2).sum() for name in g)
            if product < 0:
                projected += 1
                g = {name: g[name] - product / square * past[name] for name in g}
                after = sum((g[name] * past[name]).sum() for name in g)
                assert abs(after) < 1e-12, "to first order, the replayed loss stays"
        descend(model, g, update)
    assert not draws.found
    assert 1 < projected < len(batches) - 1
    assert_same_weights(method.learner.model, model)


def test_agem_without_a_memory_is_sgd() -> None:
    agem, sgd = method_of("agem", lr=0.2, buffer=0), method_of("sgd", lr=0.2)
    for batch in arriving(8):
        agem.step(batch)
        sgd.step(batch)
    assert_same_weights(agem.learner.model, sgd.learner.model)


def unit(row: Tensor) -> Tensor:
    return row / torch.sqrt((row**2).sum())


def test_scr_attracts_samples_of_one_class(draws: Draws) -> None:
    method = method_of("scr", lr=0.2, temperature=0.5, buffer=8, replay=4)
    model, update, batches = double_network(), Plain(0.2), arriving(8)
    for step, batch in enumerate(batches):
        method.step(batch)
        drawn = draws.one()
        assert_replay_is_honest(drawn, batches[:step], 4)
        x, y = with_replay(batch, drawn)
        z = [unit(row) for row in model(seen(torch.cat([x, x])))]
        labels = y.tolist() * 2
        total = torch.zeros((), dtype=torch.float64)
        for i, one in enumerate(z):
            every = sum((one @ z[k] / 0.5).exp() for k in range(len(z)) if k != i)
            alike = [j for j in range(len(z)) if j != i and labels[j] == labels[i]]
            for j in alike:
                total = total - ((one @ z[j] / 0.5).exp() / every).log() / len(alike)
        descend(model, gradient(total / len(z), model), update)
    assert not draws.found
    assert_same_weights(method.learner.model, model)


def test_scr_names_the_class_whose_mean_is_nearest() -> None:
    method = method_of("scr", buffer=20, replay=4)
    for batch in arriving(3, [0, 2, 3]):
        method.step(batch)
    kept = method.memory.state_dict()["fields"]
    means = {}
    for label in set(kept["y"].tolist()):
        rows = method.learner.model(seen(kept["x"][kept["y"] == label]))
        means[label] = unit(torch.stack([unit(row) for row in rows]).sum(0) / len(rows))
    assert set(means) == {0, 2, 3}
    x = arriving(5)[-1].x
    answers = method.learner.evaluate(x).argmax(1).tolist()
    for row, answer in zip(method.learner.model(seen(x)), answers, strict=True):
        distances = {label: ((unit(row) - mean) ** 2).sum() for label, mean in means.items()}
        assert answer == min(distances, key=lambda label: distances[label])
    assert len(set(answers)) > 1


def test_scr_evaluates_before_it_has_samples_and_draws_nothing_for_it() -> None:
    method = method_of("scr", buffer=20, replay=4)
    assert method.learner.evaluate(arriving(1)[0].x).isfinite().all()
    method.step(arriving(1)[0])
    before = method.state_dict()["memory"]["generator"].clone()
    assert method.learner.evaluate(arriving(1)[0].x).isfinite().all()
    assert_identical(method.state_dict()["memory"]["generator"], before)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("scr", {"buffer": 0}, "buffer: got 0 with scr"),
        *(
            (name, {"average": 0.9, "teacher": 0.3}, f"teacher: got 0.3 with {name}")
            for name in ("scr", "lwf", "cls_er")
        ),
    ],
)
def test_options_that_a_method_has_no_use_for_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        method_of(name, **options)


# SynGAP -------------------------------------------------------------------------------------------


GATES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gate": {"retention": 0.5, "consolidation": 0.7, "damping": 1e-8, "ambient": 0.2},
    "momentum-and-decay": {"momentum": 0.5, "weight_decay": 0.1},
    "tensor": {"scope": "tensor"},
    "exact": {"estimator": "exact"},
    "empirical": {"estimator": "empirical"},
    "every-third": {"every": 3, "warmup": 0},
    "unbounded": {"bounded": False},
    "compact": {"compact": True},
    "directions": {"directions": True},
    "no-buffer": {"buffer": 0},
    "balanced": {"memory": "balanced"},
    "adam": {"optimizer": "adam", "weight_decay": 0.1, "consolidation": 0.7},
    "ballistic": {"optimizer": "ballistic", "consolidation": 0.7},
}


def gated(model: nn.Module, labels: torch.Generator, options: dict[str, Any]) -> optim.SynGAP:
    """The optimizer that a user would write down for these options."""
    own = {key: options[key] for key in ("momentum", "weight_decay") if key in options}
    names = ("retention", "consolidation", "damping", "ambient", "scope", "estimator", "every")
    names += ("warmup", "bounded", "compact", "directions")
    gate = {key: options[key] for key in names if key in options}
    gate |= {"generator": labels, "model": model}
    kind = options.get("optimizer", "sgd")
    if kind == "sgd":
        return optim.SynGAP(model.parameters(), lr=0.05, **own, **gate)
    bases = {"adam": torch.optim.Adam, "ballistic": optim.Ballistic}
    return optim.SynGAP.wrap(bases[kind](model.parameters(), lr=0.05, **own), **gate)


@pytest.mark.parametrize("case", GATES)
def test_syngap_is_er_with_the_optimizer_of_this_package_bit_for_bit(
    case: str, draws: Draws
) -> None:
    options = GATES[case]
    pupil = float_learner()
    method = methods.registry.get("syngap")(
        pupil, **{"lr": 0.05, "buffer": 8, "replay": 4} | options
    )
    model = double_network().float()
    optimizer = gated(model, float_learner().generator("labels"), options)
    for batch in arriving(12):
        method.step(batch)
        drawn = draws.one()
        x, y = with_replay(batch, drawn)
        optimizer.zero_grad()
        logits = model(x.float() / 255 - 0.5)
        optimizer.observe(logits, targets=y if options.get("estimator") == "empirical" else None)
        cross_entropy(logits, y).backward()
        optimizer.step()
    assert_identical(values_of(pupil.model), values_of(model))
    assert method.summary() == optimizer.summary()
    assert method.summary()


@pytest.mark.parametrize("case", ["defaults", "momentum-and-decay", "every-third", "directions"])
@pytest.mark.parametrize("loss", ["er_ace", "derpp"])
def test_a_gated_method_is_its_loss_with_the_optimizer_of_this_package_bit_for_bit(
    loss: str, case: str
) -> None:
    options, memory = GATES[case], {"buffer": 8, "replay": 4}
    gated_method = methods.registry.get(f"gated_{loss}")(
        float_learner(), lr=0.05, **memory, **options
    )
    plain = methods.registry.get(loss)(float_learner(), **memory)
    model = plain.learner.model
    optimizer = gated(model, float_learner().generator("labels"), options)
    predict = plain.learner.predict

    def observed(x: Tensor) -> Tensor:  # all samples of a step go through it once
        logits = predict(x)
        optimizer.observe(logits)
        return logits

    plain.learner.predict = observed
    for batch in arriving(12):
        gated_method.step(batch)
        optimizer.zero_grad()
        plain.loss(batch).backward()
        optimizer.step()
        plain.remember(batch)
    assert_identical(values_of(gated_method.learner.model), values_of(model))
    assert gated_method.summary() == optimizer.summary()


@pytest.mark.parametrize("loss", ["er", "er_ace", "derpp"])
def test_a_gated_method_with_its_gate_open_is_the_method_of_its_loss(loss: str) -> None:
    options = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.1, "buffer": 8, "replay": 4}
    options |= {"average": 0.7, "teacher": 0.3}
    own = {"alpha": 0.3, "beta": 0.7} if loss == "derpp" else {}
    plain = method_of(loss, **options, **own)
    name = "syngap" if loss == "er" else f"gated_{loss}"
    open_gate = method_of(name, **options, **own, consolidation=1e-14, ambient=0.0)
    for batch in arriving(8):
        plain.step(batch)
        open_gate.step(batch)
    assert_same_weights(open_gate.learner.model, plain.learner.model)


def test_every_option_of_the_gate_changes_what_syngap_learns() -> None:
    def learned(options: dict[str, Any]) -> Values:
        pupil = float_learner()
        method = methods.registry.get("syngap")(
            pupil, **{"lr": 0.05, "buffer": 8, "replay": 4} | options
        )
        for batch in arriving(12):
            method.step(batch)
        return values_of(pupil.model)

    plain = learned({})
    taught = {"average": 0.9, "teacher": 0.5}
    changes: list[dict[str, Any]] = [
        *({name: value} for name, value in GATES["gate"].items() if name != "damping"),
        {"damping": 2e-6},
        *({name: value} for name, value in GATES["momentum-and-decay"].items()),
        *(GATES[case] for case in GATES if case not in ("defaults", "gate", "momentum-and-decay")),
        {"replay": 2},
        taught,
        {**taught, "teacher_loss": "huber"},
        {**taught, "teacher_loss": "kl"},
        {**taught, "teacher_on": "all"},
    ]
    for options in changes:
        other = learned(options)
        assert any(not torch.equal(plain[name], other[name]) for name in plain), options
    untouched = set(signature(methods.registry.get("syngap"))) - {k for o in changes for k in o}
    assert untouched == {"lr"}


@pytest.mark.parametrize("bounded", [True, False])
def test_syngap_with_true_labels_follows_the_papers_rule_in_float64(
    bounded: bool, draws: Draws
) -> None:
    gate = {"retention": 0.8, "consolidation": 0.6, "damping": 1e-3, "ambient": 0.05}
    method = method_of(
        "syngap", lr=0.3, estimator="empirical", bounded=bounded, buffer=8, replay=4, **gate
    )
    model = double_network()
    options = Options(0.3, bounded=bounded, **gate)
    rule = Oracle(model, dict.fromkeys(trainable(model), options), estimator="empirical")
    for batch in arriving(6):
        method.step(batch)
        drawn = draws.one()
        x, y = with_replay(batch, drawn)
        rule.observe(seen(x), y, torch.ones_like(y, dtype=torch.bool))
        rule.step([mean_cross_entropy(model(seen(x)), y)])
    assert_same_weights(method.learner.model, model)


def test_directions_of_another_optimizer_are_refused() -> None:
    with pytest.raises(UserError, match="directions: true takes optimizer: sgd, got adam"):
        method_of("syngap", directions=True, optimizer="adam")


@pytest.mark.parametrize("name", [*MEMORY, "joint"])
def test_momentum_of_an_optimizer_that_has_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"momentum: got 0\.9 with adam"):
        method_of(name, optimizer="adam", momentum=0.9)


# What the memory keeps ----------------------------------------------------------------------------


class Recording(Learner):
    """Remembers what it said while learning."""

    said: list[Tensor]

    def predict(self, x: Tensor) -> Tensor:
        logits = super().predict(x)
        self.said = [*getattr(self, "said", []), logits.detach().clone()]
        return logits


@pytest.mark.parametrize("name", MEMORY)
def test_the_memory_keeps_samples_as_they_were_stored(name: str) -> None:
    """Augmented they are only when they are learned, and anew at each replay."""
    stream = pictures()
    assert stream.transform.augments
    method = methods.registry.get(name)(learner(stream), buffer=100, replay=4)
    for step in range(4):
        method.step(stream[step])
    kept = method.memory.state_dict()["fields"]
    assert kept["x"].dtype == torch.uint8
    assert_identical(kept["x"], torch.cat([stream[step].x for step in range(4)]))
    assert_identical(kept["y"], torch.cat([stream[step].y for step in range(4)]))


def test_derpp_keeps_what_the_network_said_when_the_augmented_sample_arrived() -> None:
    stream = pictures()
    pupil = Recording(network(), stream.transform)
    method = methods.registry.get("derpp")(pupil, buffer=100, replay=4)
    for step in range(4):
        method.step(stream[step])
    arrived = [said[: len(stream[step].y)] for step, said in enumerate(pupil.said)]
    assert_identical(method.memory.state_dict()["fields"]["logits"], torch.cat(arrived))


def test_logits_kept_by_derpp_carry_no_graph() -> None:
    method = method_of("derpp", buffer=100)
    method.step(arriving(1)[0])
    assert not method.memory.state_dict()["fields"]["logits"].requires_grad


def test_a_balanced_memory_holds_as_many_of_a_rare_class() -> None:
    method = method_of("er", buffer=8, memory="balanced")
    x = torch.zeros(40, INPUTS, dtype=torch.uint8)
    method.step(Batch(x, torch.zeros(40, dtype=torch.int64)))
    method.step(Batch(x[:4], torch.ones(4, dtype=torch.int64)))
    assert sorted(method.memory.state_dict()["fields"]["y"].tolist()) == [0] * 4 + [1] * 4


# The learner --------------------------------------------------------------------------------------


def test_a_network_sees_augmented_samples_while_learning_and_plain_ones_when_judged() -> None:
    stream = pictures()
    pupil = Learner(nn.Flatten(), stream.transform, seed=5)
    x = stream[0].x
    assert_identical(pupil.evaluate(x), stream.transform(x).flatten(1))
    first, second = pupil.predict(x), pupil.predict(x)
    assert not torch.equal(first, second)
    again = Learner(nn.Flatten(), stream.transform, seed=5)
    assert_identical([again.predict(x), again.predict(x)], [first, second])
    other = Learner(nn.Flatten(), stream.transform, seed=6)
    assert not torch.equal(other.predict(x), first)


def test_judging_changes_neither_the_network_nor_what_is_drawn_later() -> None:
    """Whether and when one evaluates makes no difference to what is learned."""
    stream = pictures()

    def learned(judged: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        method = made("syngap", learner(stream))
        for step in range(5):
            if judged:
                method.learner.evaluate(stream[0].x)
            method.step(stream[step])
        return method.state_dict()

    assert_identical(unpack(pack(learned(True))), unpack(pack(learned(False))))


def test_judging_is_in_evaluation_mode_and_learning_in_training_mode() -> None:
    modes: list[bool] = []

    class Telling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(self.training)
            if x.isnan().any():
                raise RuntimeError("nan")
            return super().forward(x)

    pupil = Learner(Telling(2, 3).eval(), lambda x, _: x)
    pupil.predict(torch.ones(1, 2))
    judged = pupil.evaluate(torch.ones(1, 2))
    pupil.predict(torch.ones(1, 2))
    with pytest.raises(RuntimeError):
        pupil.evaluate(torch.full((1, 2), math.nan))
    pupil.predict(torch.ones(1, 2))
    assert modes == [True, False, True, False, True]
    assert not judged.requires_grad


def test_frozen_parameters_are_not_learned() -> None:
    for case in CASES:
        stream = pictures()
        pupil = learner(stream)
        pupil.model[0].requires_grad_(False)
        assert pupil.parameters() == list(pupil.model[1:].parameters())
        before = {name: value.clone() for name, value in pupil.model[0].state_dict().items()}
        method = made(case, pupil)
        for step in range(4):
            method.step(stream[step])
        assert_identical(dict(pupil.model[0].state_dict()), before, case)


@pytest.mark.parametrize("case", ["er", "derpp", "syngap", "syngap-exact"])
def test_bf16_computes_low_and_keeps_parameters_and_logits_in_float32(case: str) -> None:
    stream = pictures()
    low, full = learner(stream, precision="bf16"), learner(stream)
    inside: list[torch.dtype] = []
    low.model[3].register_forward_hook(lambda *call: inside.append(call[2].dtype))
    judged = [pupil.evaluate(stream[0].x) for pupil in (low, full)]
    assert judged[0].dtype == torch.float32
    assert set(inside) == {torch.bfloat16}
    assert 0 < largest_difference(judged[:1], judged[1:]) < 0.05
    for pupil in (low, full):
        torch.manual_seed(0)
        method = made(case, pupil)
        for step in range(4):
            method.step(stream[step])
    assert {p.dtype for p in low.parameters()} == {torch.float32}
    assert largest_difference(low.parameters(), full.parameters()) > 0


# Tasks --------------------------------------------------------------------------------------------


def test_a_batch_has_samples_and_labels_and_nothing_else() -> None:
    assert Batch._fields == ("x", "y")
    assert set(inspect.signature(Method.step).parameters) == {"self", "batch"}


@every_case
def test_what_is_learned_first_does_not_depend_on_which_tasks_come_later(case: str) -> None:
    one = Stream(picture_tasks(tasks=(0, 0, 1, 1, 2, 2)), batch=3)
    other = Stream(picture_tasks(tasks=(0, 0, 2, 3, 1, 1)), batch=3)
    assert one.ends[0] == other.ends[0]
    states = []
    for stream in (one, other):
        torch.manual_seed(0)
        method = made(case, learner(stream))
        for step in range(stream.ends[0]):
            method.step(stream[step])
        states.append(unpack(pack(method.state_dict())))
    assert_identical(*states)


# Going on -----------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("cut", [0, 4])
def test_a_state_through_a_checkpoint_goes_on_bit_for_bit(case: str, cut: int) -> None:
    """Into a method that was made anew, from another seed and with other weights."""
    stream, steps, device = pictures(), 7, torch.device("cpu")
    torch.manual_seed(0)
    method = made(case, learner(stream))
    for step in range(cut):
        method.step(stream[step])
    kept = pack({"method": method.state_dict(), "random": random_states(device)})
    for step in range(cut, steps):
        method.step(stream[step])

    torch.manual_seed(99)
    other = made(case, learner(stream, seed=99))
    state = unpack(kept)
    other.load_state_dict(state["method"])
    restore_random_states(state["random"], device)
    for step in range(cut, steps):
        other.step(stream[step])

    assert_identical(weights(other), weights(method))
    assert_identical(
        unpack(pack([other.state_dict(), random_states(device)])),
        unpack(pack([method.state_dict(), random_states(device)])),
    )


def test_every_registered_method_is_among_the_cases() -> None:
    registered = {name: methods.registry.get(name) for name in methods.registry.names()}
    ours = {name for name, made in registered.items() if made.__module__.startswith("syngap.")}
    assert {name for name, _ in CASES.values()} == ours


class Keeping(Method):
    """A method of somebody else, which keeps all that may be kept."""

    def __init__(self, pupil: Learner) -> None:
        super().__init__(pupil)
        self.optimizer = torch.optim.SGD(pupil.parameters(), lr=0.1)
        self.count, self.share, self.name, self.sure = 0, 0.5, "before", False
        self.last: Tensor | None = None
        self.running = torch.zeros(3)
        self.chances = {"one": pupil.generator("one"), 2: pupil.generator("two")}
        self.history: list[Tensor] = []
        self.by_label: dict[int, Tensor] = {}
        self.pair = (torch.zeros(2), 0)
        self.pending: list[Tensor] | None = [torch.zeros(1)]
        self.notes: dict[str, int] | None = {"a": 1}
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def remember(self, batch: Batch) -> None:
        self.count, self.share, self.name, self.sure = self.count + 1, 0.25, "after", True
        self.last = batch.x.float()
        self.running += torch.rand(3, generator=self.chances["one"])
        self.running += torch.rand(3, generator=self.chances[2])
        self.history.append(torch.ones(self.count))
        self.by_label[int(batch.y[0])] = batch.x.clone()
        self.pair = (self.pair[0] + 1, self.count)
        self.pending, self.notes = None, None
        self.scheduler.step()


def attributes(method: Keeping) -> dict[str, Any]:
    plain = {name: value for name, value in vars(method).items() if name not in OBJECTS}
    drawn = {name: one.get_state() for name, one in method.chances.items()}
    return {**plain, "chances": drawn, "lr": method.optimizer.param_groups[0]["lr"]}


OBJECTS = ("learner", "optimizer", "chances", "scheduler")


def test_whatever_a_method_keeps_is_part_of_its_state() -> None:
    batches = arriving(5)

    def pupil(seed: int) -> Learner:
        return Learner(double_network().float(), lambda x, _: x.float(), seed=seed)

    method, other = Keeping(pupil(0)), Keeping(pupil(9))
    for batch in batches[:3]:
        method.step(batch)
    other.load_state_dict(unpack(pack(method.state_dict())))
    for one, two in zip(vars(method).values(), vars(other).values(), strict=True):
        assert type(one) is type(two)
    assert_identical(attributes(other), attributes(method))
    for batch in batches[3:]:
        method.step(batch)
        other.step(batch)
    assert_identical(attributes(other), attributes(method))
    assert_identical(weights(other), weights(method))


@pytest.mark.parametrize(
    ("value", "state"),
    [
        (torch.zeros(1), torch.ones(2)),
        (None, torch.ones(2)),
        ([], [torch.ones(2)]),
        ([torch.zeros(1)], [torch.ones(2)]),
        ({}, {"a": torch.ones(2)}),
        ({"a": torch.zeros(1)}, {"a": torch.ones(2)}),
        (None, {"a": [torch.ones(2)]}),
    ],
    ids=str,
)
def test_restored_tensors_come_to_the_device_wherever_they_are(value: Any, state: Any) -> None:
    meta = torch.device("meta")
    place = lambda part: part.to(meta) if isinstance(part, Tensor) else part  # noqa: E731
    if isinstance(value, list):
        value = [place(part) for part in value]
    elif isinstance(value, dict):
        value = {name: place(part) for name, part in value.items()}
    found = list(tensors(restore(place(value), state, meta)))
    assert [tensor.device for tensor in found] == [meta]


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        (lambda: None, r"attribute: a function cannot be kept"),
        ({"a": [1, object()]}, r"attribute\['a'\]\[1\]: a object cannot be kept"),
        ({1, 2}, r"attribute: a set cannot be kept"),
    ],
    ids=["function", "nested", "set"],
)
def test_what_cannot_be_kept_is_refused_by_its_name(kept: Any, named: str) -> None:
    method = method_of("sgd")
    method.attribute = kept  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=named):
        method.state_dict()


def test_the_state_of_another_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state of another method: memory, replay on one side"):
        method_of("sgd").load_state_dict(method_of("er").state_dict())


# Options ------------------------------------------------------------------------------------------


@every_method
def test_defaults_are_valid(name: str) -> None:
    allowed = signature(methods.registry.get(name))
    given = defaults_of(name)
    assert given.keys() == allowed.keys()
    assert checked(given, allowed, f"methods.{name}") == given
    assert method_of(name)  # and so says the constructor


@every_method
def test_every_option_is_documented_where_it_is_made(name: str) -> None:
    kind = methods.registry.get(name)
    if "__init__" not in vars(kind):
        kind = next(base for base in kind.__mro__ if "__init__" in vars(base))
    documented = re.findall(r"^ {4}(\**\w+):", inspect.getdoc(kind) or "", re.MULTILINE)
    own = [
        "**" * (parameter.kind is parameter.VAR_KEYWORD) + parameter.name
        for parameter in inspect.signature(kind).parameters.values()
    ]
    assert documented == own


def test_the_gate_has_the_defaults_of_the_optimizer() -> None:
    options = defaults_of("syngap")
    own = inspect.signature(optim.SynGAP.__init__).parameters
    names = ("retention", "consolidation", "damping", "ambient", "scope", "estimator", "every")
    for name in (*names, "warmup", "bounded", "compact"):
        assert options[name] == own[name].default, name
