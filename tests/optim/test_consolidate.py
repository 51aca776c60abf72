"""`consolidate` measures what a model knows, protects it at once, and leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
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
    is_compact,
    itself,
    largest_difference,
    network,
    snapshot,
    train,
    values_of,
    wrapped,
)
from networks import NETWORKS, dictated
from oracle import exact_diagonal, sampled_diagonal
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.optim import SGD

from syngap import SynGAP

every_maker = pytest.mark.parametrize("make", CONSOLIDATING.values(), ids=CONSOLIDATING)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


# What it measures ---------------------------------------------------------------------------------


def trained_networks(name: str) -> tuple[nn.Module, Tensor]:
    """A float64 network in train mode, whose running statistics are not the initial ones."""
    model = NETWORKS[name].build().double()
    x = NETWORKS[name].inputs(10, torch.Generator().manual_seed(0))
    x = x.double() if x.is_floating_point() else x
    with torch.no_grad():
        model(x)
    return model, x


@pytest.mark.filterwarnings("ignore:estimator='exact' takes the one-backward estimate")
@pytest.mark.parametrize("name", ["mlp", "conv-batchnorm", "transformer", "frozen-backbone"])
@pytest.mark.parametrize("kind", ["itself", "wrapped"])
def test_exact_is_the_mean_of_per_sample_squares(name: str, kind: str) -> None:
    """Of all samples alike, however they are cut into batches."""
    model, x = trained_networks(name)
    make = itself(estimator="exact") if kind == "itself" else wrapped(SGD, lr=0.1)
    optimizer = make(model, estimator="exact", model=model)
    optimizer.consolidate(model, x[:1])  # which the next one replaces
    labels = torch.randint(3, model(x).shape[:-1], generator=generator())

    def predict(rows: slice) -> Categorical:
        return dictated(Categorical(logits=model(x[rows])), labels[rows])

    optimizer.consolidate(model, [slice(0, 4), slice(4, 8), slice(8, 10)], predict=predict)
    model.eval()
    expected = exact_diagonal(model, x, labels, torch.ones_like(labels, dtype=torch.bool))
    found = optimizer.importance()
    assert isinstance(found, dict)
    assert expected.keys() <= found.keys()
    for parameter in expected.keys() - NETWORKS[name].pooled:
        error = (found[parameter] - expected[parameter]).abs().max()
        assert error < 1e-10, parameter


@pytest.mark.parametrize("estimator", ["sampled", "empirical"])
def test_others_average_the_squares_of_batches_by_their_length(estimator: str) -> None:
    """No labels are asked for, so "empirical" draws them as "sampled" does."""
    model, x = trained_networks("mlp")
    optimizer = itself(estimator=estimator)(model)
    labels = torch.randint(3, (10,), generator=generator())
    rows = [slice(0, 4), slice(4, 8), slice(8, 10)]

    def predict(some: slice) -> Categorical:
        return dictated(Categorical(logits=model(x[some])), labels[some])

    optimizer.consolidate(model, rows, predict=predict)
    all_count = torch.ones(10, dtype=torch.bool)
    parts = [sampled_diagonal(model, x[some], labels[some], all_count[some]) for some in rows]
    for name, value in zip(values_of(model), as_list(optimizer.importance()), strict=True):
        expected = (4 * parts[0][name] + 4 * parts[1][name] + 2 * parts[2][name]) / 10
        assert (value - expected).abs().max() < 1e-10, name


@every_maker
def test_it_replaces_what_was_there_and_the_rest_stays(make: Make) -> None:
    model, own = network(), generator()
    optimizer = make(model, generator=own)
    train(model, optimizer, range(2))  # a refresh at every third step is not due now
    before = copy.deepcopy(optimizer.state_dict())
    fresh = make(model, generator=torch.Generator().set_state(own.get_state()))
    for one in (optimizer, fresh):
        one.consolidate(model, batch(7, rows=20)[0])
    assert_identical(as_list(optimizer.importance()), as_list(fresh.importance()))
    measured = ("importance", "mean")
    after = copy.deepcopy(optimizer.state_dict())
    for saved in (before, after):
        for state in saved["state"].values():
            for key in measured:
                del state[key]
    assert_identical(after, before)


@every_maker
def test_later_observations_fade_it(make: Make) -> None:
    model = network(torch.float64)
    optimizer = make(model, generator=generator())
    optimizer.consolidate(model, batch(0, model[0].weight)[0])
    before, compact = as_list(optimizer.importance()), is_compact(optimizer)
    with torch.no_grad():
        for value in optimizer.state.values():
            mean = value["importance"].double().mean().item()
            assert value["mean"] == pytest.approx(mean, rel=2**-8 if compact else 1e-12)
    train(model, optimizer, [0])
    kept = 0.9**3 if make is MAKERS["every-third"] else 0.9 - 2**-7 * compact
    pairs = zip(as_list(optimizer.importance()), before, strict=True)
    assert all((now >= kept * then - 1e-15).all() for now, then in pairs)


# What it leaves alone -----------------------------------------------------------------------------


class Moody(nn.Module):
    """Parts whose modes, buffers and random numbers a careless pass would change."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.settled = nn.BatchNorm1d(3).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.settled(self.body(self.drop(self.norm(x))))


class StoppedHalfWayError(Exception):
    """What the tests raise where a user's code might."""


def inputs_that_stop() -> Iterator[Tensor]:
    yield batch(0)[0]
    raise StoppedHalfWayError


def stop(*_: Any) -> Any:
    raise StoppedHalfWayError


def noisy(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A prediction that uses up random numbers."""
    return lambda x: model(x + torch.randn_like(x))


WAYS: dict[str, tuple[type[BaseException] | None, Callable[[SynGAP, nn.Module], None]]] = {
    "to-the-end": (None, lambda optimizer, model: optimizer.consolidate(model, batch(0)[0])),
    "with-noise": (
        None,
        lambda optimizer, model: optimizer.consolidate(model, batch(0)[0], predict=noisy(model)),
    ),
    "stopped-by-inputs": (
        StoppedHalfWayError,
        lambda optimizer, model: optimizer.consolidate(model, inputs_that_stop()),
    ),
    "stopped-by-prediction": (
        StoppedHalfWayError,
        lambda optimizer, model: optimizer.consolidate(model, batch(0)[0], predict=stop),
    ),
    "stopped-by-progress": (
        StoppedHalfWayError,
        lambda optimizer, model: optimizer.consolidate(
            model, batch(0)[0], batch_size=2, progress=stop
        ),
    ),
    "stopped-by-bad-values": (
        ValueError,
        lambda optimizer, model: optimizer.consolidate(
            model, [batch(0)[0], torch.full((2, 4), torch.nan)]
        ),
    ),
}


@pytest.mark.parametrize("way", WAYS)
@every_maker
def test_everything_else_is_as_it_was(make: Make, way: str) -> None:
    model = Moody()
    own = generator()
    optimizer = make(model, generator=own)
    train(model, optimizer, range(2))
    modes = [module.training for module in model.modules()]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    before = snapshot(model, optimizer)
    random_state, own_state = torch.get_rng_state(), own.get_state()
    error, consolidate = WAYS[way]
    if error is None:
        consolidate(optimizer, model)
    else:
        with pytest.raises(error) as held:
            consolidate(optimizer, model)

    assert [module.training for module in model.modules()] == modes
    assert True in modes
    assert False in modes
    assert_identical(dict(model.named_buffers()), buffers)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(own.get_state(), own_state)
    after = snapshot(model, optimizer)
    for kept in ("values", "gradients", "members"):
        assert_identical(after[kept], before[kept])
    if error is not None:
        assert held.value is not None  # a traceback that is kept keeps nothing else open
        assert_identical(after, before)
        train(model, optimizer, range(2, 5))
    else:
        assert largest_difference(after["importance"], before["importance"]) > 0


@every_maker
def test_without_batches_it_says_so_and_keeps_the_importance(make: Make) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, [0])
    before = snapshot(model, optimizer)
    for nothing in ([], iter(()), torch.zeros(0, 4)):
        with pytest.raises(ValueError, match=r"at least one batch|N ≥ 1"):
            optimizer.consolidate(model, nothing)
        assert_identical(snapshot(model, optimizer), before)


# What it takes ------------------------------------------------------------------------------------


class Answer(nn.Module):
    """A model with several arguments, whose output has its logits inside, as transformers' do."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return SimpleNamespace(logits=self.body(x * scale), attentions=None)


class Dictionary(Answer):
    """One whose output is a plain dictionary."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        return vars(super().forward(x, scale))


def consolidated(
    inputs: Callable[[Tensor], Any], kind: type[Answer] = Answer, **options: Any
) -> list[Tensor]:
    model = network()
    optimizer = SynGAP(model.parameters(), lr=0.1, generator=generator(), **GATE)
    optimizer.consolidate(kind(model), inputs(batch(0, rows=10)[0]), **options)
    return as_list(optimizer.importance())


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: list(x.split(4)),
    "tuples": lambda x: [(part / 2, 2.0) for part in x.split(4)],
    "lists-of-arguments": lambda x: [[part / 2, 2.0] for part in x.split(4)],
    "dicts": lambda x: [{"scale": 2.0, "x": part / 2} for part in x.split(4)],
    "generator": lambda x: (part for part in x.split(4)),
    "data-loader": lambda x: torch.utils.data.DataLoader(x, batch_size=4),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_batches_come_in_any_form(form: Callable[[Tensor], Any]) -> None:
    expected = consolidated(lambda x: x, batch_size=4)
    assert_identical(consolidated(form), expected)
    assert largest_difference(consolidated(lambda x: x, batch_size=5), expected) > 0


def test_outputs_with_logits_inside_are_understood_and_others_refused() -> None:
    expected = consolidated(lambda x: x, batch_size=4)
    assert_identical(consolidated(lambda x: x, Dictionary, batch_size=4), expected)
    model = network()
    optimizer = SynGAP(model.parameters(), lr=0.1, **GATE)
    loss, logits = torch.ones(()), torch.ones(4, 3)
    for outcome, hint in (
        ({"scores": 1}, "pass predict=, a function"),
        ((1, 2), r"model\(batch\)\[0\]"),
        ((logits, loss), r"model\(batch\)\[0\]"),
        ((loss, logits), r"model\(batch\)\[1\], and inputs without labels"),
    ):
        with pytest.raises(TypeError, match=hint):
            optimizer.consolidate(model, torch.ones(4, 4), predict=lambda x, o=outcome: o)


def test_predict_takes_the_place_of_the_model() -> None:
    model = network()
    optimizer = SynGAP(model.parameters(), lr=0.1, generator=generator(), **GATE)
    pairs = [(part, "its label") for part in batch(0, rows=10)[0].split(4)]
    optimizer.consolidate(model, pairs, predict=lambda pair: model(pair[0]))
    expected = consolidated(lambda x: x, batch_size=4)
    assert_identical(as_list(optimizer.importance()), expected)


@pytest.mark.parametrize(
    ("form", "total"), [(FORMS["list"], 3), (FORMS["data-loader"], 3), (FORMS["generator"], None)]
)
def test_progress_hears_of_each_batch(form: Callable[[Tensor], Any], total: int | None) -> None:
    heard: list[tuple[int, int | None]] = []
    consolidated(form, progress=lambda done, of: heard.append((done, of)))
    assert heard == [(1, total), (2, total), (3, total)]
    heard.clear()
    consolidated(lambda x: x, batch_size=4, progress=lambda done, of: heard.append((done, of)))
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_any_form_of_caller_is_served_without_gradients() -> None:
    """Also under `no_grad`, as evaluation code often is."""
    model = network()
    optimizer = SynGAP(model.parameters(), lr=0.1, generator=generator(), **GATE)
    with torch.no_grad():
        optimizer.consolidate(model, batch(0, rows=10)[0], batch_size=4)
    assert_identical(as_list(optimizer.importance()), consolidated(lambda x: x, batch_size=4))


# What it is for -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["itself", "wrapped"])
def test_a_pretrained_model_is_protected_from_its_first_step(kind: str) -> None:
    """Important weights move a small part of what SGD moves them, unimportant ones all of it."""
    old, new = batch(0, rows=256)[0], batch(1, rows=32)
    pretrained = network()
    teacher = SGD(pretrained.parameters(), lr=0.5)
    labels = (old @ torch.randn(4, 3, generator=generator())).argmax(1)
    for _ in range(100):
        teacher.zero_grad()
        F.cross_entropy(pretrained(old), labels).backward()
        teacher.step()

    def moved(protect: bool) -> tuple[Tensor, Tensor | None]:
        model = network()
        model.load_state_dict(pretrained.state_dict())
        importance = None
        optimizer: Any = SGD(model.parameters(), lr=0.1)
        if protect:
            make = itself(lr=0.1) if kind == "itself" else wrapped(SGD, lr=0.1)
            optimizer = make(model, generator=generator())
            optimizer.consolidate(model, old)
            importance = torch.cat([value.flatten() for value in as_list(optimizer.importance())])
        F.cross_entropy(model(new[0]), new[1]).backward()
        optimizer.step()
        pairs = zip(model.parameters(), pretrained.parameters(), strict=True)
        return torch.cat([(p - q).detach().abs().flatten() for p, q in pairs]), importance

    protected, importance = moved(protect=True)
    free, _ = moved(protect=False)
    assert importance is not None
    ratio = protected / free.clamp(min=1e-12)
    order = importance.argsort()
    tenth = len(order) // 10
    assert ratio[order[-tenth:]].median() < 0.4
    assert ratio[order[:tenth]].median() > 0.9


def test_buffers_that_count_in_eval_mode_are_put_back() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counting()
    optimizer = SynGAP(model.parameters(), lr=0.1)
    optimizer.consolidate(model, torch.randn(64, 4))
    assert model.calls == 0


def test_pairs_with_labels_are_answered_with_the_inputs_alone() -> None:
    model = nn.Linear(4, 3)
    optimizer = SynGAP(model.parameters(), lr=0.1)
    pairs = [(torch.randn(8, 4), torch.zeros(8))]
    with pytest.raises(TypeError, match=r"2 parts of a batch.*pass \[x for x, y in inputs\]"):
        optimizer.consolidate(model, pairs)
    optimizer.consolidate(model, [x for x, y in pairs])
    optimizer.consolidate(model, pairs, predict=lambda batch: model(batch[0]))
