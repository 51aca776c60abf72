"""Avalanche's loop takes the steps of a loop written by hand, and what mattered stays protected."""

from __future__ import annotations

import copy
import importlib.metadata
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    MAKERS,
    Make,
    as_list,
    assert_identical,
    itself,
    largest_difference,
    params_of,
    values_of,
    wrapped,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adafactor, Adam
from torch.utils.data import TensorDataset

from syngap import SynGAP
from syngap.optim.wrapped import WrappedSynGAP

with warnings.catch_warnings():  # of its own requirements
    warnings.simplefilter("ignore")
    pytest.importorskip("avalanche")

import dill
from avalanche.benchmarks import nc_benchmark
from avalanche.benchmarks.scenarios.supervised import class_incremental_benchmark
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.checkpointing import maybe_load_checkpoint, save_checkpoint
from avalanche.models import IncrementalClassifier, as_multitask
from avalanche.training.plugins import ReplayPlugin, SupervisedPlugin
from avalanche.training.supervised import Naive, Replay
from checkout import ROOT

from syngap.integrations.avalanche import SynGAPPlugin, SynGAPReplay

pytestmark = pytest.mark.filterwarnings("ignore:No loggers specified")
CLASSES, TASKS, BATCH, FEATURES = 6, 3, 10, 4
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


class Head(IncrementalClassifier):
    """Avalanche's, whose new rows are the same in every run."""

    def adaptation(self, experience: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().adaptation(experience)


class Network(nn.Module):
    def __init__(self, head: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 8), head(8)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).tanh())
        return logits


def network(head: Callable[[int], nn.Module] = Head) -> nn.Module:
    """A small classifier that grows, always with the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network(head)


def unmasked(features: int) -> nn.Module:
    return Head(features, masking=False)


def fixed(features: int) -> nn.Module:
    return nn.Linear(features, CLASSES)


def samples(count: int = 120) -> TensorDataset:
    """Points around the centres of their classes."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(count) % CLASSES
    centres = 3 * torch.randn(CLASSES, FEATURES, generator=generator)
    inputs = centres[labels] + torch.randn(count, FEATURES, generator=generator)
    data = TensorDataset(inputs, labels)
    data.targets = labels.tolist()  # type: ignore[attr-defined]  # by which Avalanche splits them
    return data


def benchmark() -> Any:
    """A stream of three experiences, two new classes in each."""
    data = as_classification_dataset(samples())
    return class_incremental_benchmark(
        {"train": data, "test": data}, num_experiences=TASKS, class_order=list(range(CLASSES))
    )


def seeded(make: Make, model: nn.Module, **options: Any) -> SynGAP:
    return make(model, generator=torch.Generator().manual_seed(5), **options)


def naive(
    model: nn.Module, optimizer: Any, *plugins: Any, kind: Any = Naive, **options: Any
) -> Any:
    return kind(
        model=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=BATCH,
        evaluator=None,
        plugins=[*plugins],
        **options,
    )


# The steps ----------------------------------------------------------------------------------------


def adapt(model: nn.Module, optimizer: SynGAP, experience: Any) -> None:
    """Let the head grow, as a user of the guide would."""
    if isinstance(model.head, Head):
        old = model.head.classifier
        model.head.adaptation(experience)
        new = model.head.classifier
        if new is not old:
            optimizer.grow(old.weight, new.weight)
            optimizer.grow(old.bias, new.bias)


def learn(model: nn.Module, optimizer: SynGAP, experience: Any) -> None:
    """The loop of the guide, through an experience in its order."""
    adapt(model.train(), optimizer, experience)
    samples = list(experience.dataset)
    for first in range(0, len(samples), BATCH):
        x, y = map(torch.stack, zip(*samples[first : first + BATCH], strict=True))
        logits = model(x)
        loss = cross_entropy(logits, y)
        optimizer.zero_grad()
        optimizer.observe(logits, targets=y)
        loss.backward()
        optimizer.step()


def look(model: nn.Module, optimizer: SynGAP, stream: Any) -> None:
    for experience in stream:
        adapt(model.eval(), optimizer, experience)


WAYS = {
    "trained alone": (False, False, False),
    "seen as a whole before": (True, False, False),
    "seen as a whole after each": (False, True, False),
    "seen as a whole all the time": (False, False, True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head", [fixed, Head])
@every_maker
def test_a_strategy_takes_the_steps_of_a_loop_by_hand(
    make: Make, head: Callable[[int], nn.Module], way: str
) -> None:
    before, after, always = WAYS[way]
    its, mine = network(head), network(head)
    strategy = naive(
        its, seeded(make, its), SynGAPPlugin(), eval_every=1 if always else -1, train_epochs=2
    )
    optimizer = seeded(make, mine)
    stream = benchmark()
    if before:
        strategy.eval(stream.test_stream)
    if before or always:
        look(mine, optimizer, stream.test_stream)
    for experience in stream.train_stream:
        strategy.train(experience, eval_streams=[stream.test_stream], shuffle=False)
        for _ in range(2):
            learn(mine, optimizer, experience)
        if after:
            strategy.eval(stream.test_stream)
            look(mine, optimizer, stream.test_stream)
    assert_identical(values_of(its), values_of(mine))
    assert_identical(as_list(strategy.optimizer.importance()), as_list(optimizer.importance()))
    assert_identical(strategy.optimizer.state_dict(), optimizer.state_dict())
    assert all(value.any() for value in as_list(optimizer.importance()))


def test_the_labels_reach_the_estimator_that_needs_them() -> None:
    its, mine = network(), network()
    make = itself(estimator="empirical")
    strategy, optimizer = naive(its, make(its), SynGAPPlugin()), make(mine)
    for experience in benchmark().train_stream:
        strategy.train(experience, shuffle=False)
        learn(mine, optimizer, experience)
    assert_identical(as_list(strategy.optimizer.importance()), as_list(optimizer.importance()))


# What Avalanche's make_optimizer drops ------------------------------------------------------------


class Look(SupervisedPlugin):
    """Notes what the optimizer knows when each experience ends, and when training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[dict[str, Any]] = []
        self.begins: list[dict[str, Any]] = []

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        self.begins.append(states_of(strategy))

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        self.ends.append(states_of(strategy))


def states_of(strategy: Any) -> dict[str, Any]:
    """What gate and base keep, by the parameter's name."""
    optimizer = strategy.optimizer
    base = getattr(optimizer, "base", None)
    return copy.deepcopy(
        {
            name: {**optimizer.state.get(param, {}), **(base.state.get(param, {}) if base else {})}
            for name, param in strategy.model.named_parameters()
        }
    )


KEPT = {
    "plain": (itself(), ["importance"]),
    "momentum": (itself(momentum=0.9), ["importance", "momentum_buffer"]),
    "wrapped-momentum": (wrapped(SGD, lr=0.1, momentum=0.9), ["importance", "momentum_buffer"]),
    "wrapped-adam": (wrapped(Adam, lr=0.01), ["importance", "exp_avg", "exp_avg_sq"]),
}
every_kept = pytest.mark.parametrize(("make", "keys"), KEPT.values(), ids=KEPT)


def trained(make: Make, *plugins: Any, head: Any = Head, **options: Any) -> tuple[Any, Look]:
    model, look = network(head), Look()
    strategy = naive(model, make(model), *plugins, look)
    for experience in benchmark().train_stream:
        strategy.train(experience, **options)
    return strategy, look


@every_kept
def test_old_rows_keep_their_state_and_new_ones_start_at_zero(make: Make, keys: list[str]) -> None:
    strategy, look = trained(make, SynGAPPlugin())
    for end, begin in zip(look.ends, look.begins[1:], strict=False):
        assert end["body.weight"].keys() == begin["body.weight"].keys()
        assert_identical(begin["body.weight"], end["body.weight"])
        for name in ("head.classifier.weight", "head.classifier.bias"):
            assert begin[name].keys() == end[name].keys()
            for key in keys:
                old = len(end[name][key])
                assert end[name][key].any()
                assert_identical(begin[name][key][:old], end[name][key])
                assert len(begin[name][key]) == old + 2
                assert not begin[name][key][old:].any()
    base = getattr(strategy.optimizer, "base", strategy.optimizer)
    assert {*strategy.optimizer.state, *base.state} == set(params_of(strategy.optimizer))


@pytest.mark.filterwarnings("ignore:SynGAP.step.. has no importance yet")
def test_avalanche_alone_drops_it() -> None:
    """Or the plugin would be more than is needed."""

    class Observing(SupervisedPlugin):
        def before_backward(self, strategy: Any, **kwargs: Any) -> None:
            strategy.optimizer.observe(strategy.mb_output)

    _, look = trained(itself(), Observing())
    assert look.ends[0]["head.classifier.weight"]["importance"].any()
    assert not look.begins[1]["head.classifier.weight"]


@every_kept
def test_a_reset_is_one_of_momentum(make: Make, keys: list[str]) -> None:
    _, look = trained(make, SynGAPPlugin(), reset_optimizer_state=True)
    for end, begin in zip(look.ends, look.begins[1:], strict=False):
        for name in end:
            assert begin[name].keys() == {"importance", "mean"}
            old = end[name]["importance"]
            assert_identical(begin[name]["importance"][: len(old)], old)
        assert set(keys) <= end["body.bias"].keys()


class Remaking(Naive):
    """Makes a new optimizer before each experience, as older Avalanche had it."""

    def make_optimizer(self, **kwargs: Any) -> None:
        self.optimizer = itself()(self.model)


def test_importance_goes_into_an_optimizer_made_anew() -> None:
    model, look = network(), Look()
    strategy = naive(model, itself()(model), SynGAPPlugin(), look, kind=Remaking)
    stream = benchmark()
    for experience in stream.train_stream:
        strategy.train(experience)
        strategy.eval(stream.test_stream)
    for end, begin in zip(look.ends, look.begins[1:], strict=False):
        for name in end:
            old = end[name]["importance"]
            assert old.any()
            assert_identical(begin[name]["importance"][: len(old)], old)


@pytest.mark.parametrize("seen", [False, True])
def test_importance_taken_before_training_is_kept(seen: bool) -> None:
    model, look, stream = network(unmasked), Look(), benchmark()
    optimizer = itself()(model)
    optimizer.consolidate(model, torch.randn(50, FEATURES))
    before = dict(zip(values_of(model), as_list(optimizer.importance()), strict=True))
    strategy = naive(model, optimizer, SynGAPPlugin(), look)
    if seen:
        strategy.eval(stream.test_stream)
        assert len(optimizer.importance()) == len(before)  # one head, the one that grew
    strategy.train(stream.train_stream[0])
    for name, importance in before.items():
        found = look.begins[0][name]["importance"]
        assert importance.any()
        assert_identical(found[: len(importance)], importance)


def test_the_optimizer_follows_a_model_that_grew_in_an_evaluation() -> None:
    strategy = SynGAPReplay(model=network(), lr=0.1, train_mb_size=BATCH, evaluator=None)
    stream, optimizer = benchmark(), strategy.optimizer
    strategy.train(stream.train_stream[0])
    before = copy.deepcopy(optimizer.importance())
    strategy.eval(stream.test_stream)
    assert list(map(id, params_of(optimizer))) == list(map(id, strategy.model.parameters()))
    for name, importance in optimizer.importance().items():
        assert before[name].any()
        assert_identical(importance[: len(before[name])], before[name])
        assert not importance[len(before[name]) :].any()
    assert len(importance) == CLASSES  # of the head's bias, the last


def test_state_that_cannot_grow_starts_afresh_and_importance_stays() -> None:
    """Adafactor keeps a row and a column, and what new rows mean for them is its own affair."""
    _, look = trained(wrapped(Adafactor, lr=0.01), SynGAPPlugin())
    head = "head.classifier.weight"
    assert "row_var" in look.ends[0][head]
    assert look.begins[1][head].keys() == {"importance", "mean"}
    assert look.begins[1][head]["importance"].any()
    assert_identical(look.begins[1]["body.weight"], look.ends[0]["body.weight"])


FOR_HEADS = {
    "plain": itself(),
    "exact": itself(estimator="exact"),
    "wrapped": wrapped(Adam, lr=0.01),
}


@pytest.mark.parametrize("make", FOR_HEADS.values(), ids=FOR_HEADS)
def test_heads_of_earlier_tasks_stay_protected_and_new_ones_learn(make: Make) -> None:
    model, look = as_multitask(network(fixed), "head"), Look()
    optimizer = make(model, model.named_parameters())
    strategy = naive(model, optimizer, SynGAPPlugin(), look)
    data = samples()
    stream = nc_benchmark(data, data, n_experiences=TASKS, task_labels=True, shuffle=False)
    for experience in stream.train_stream:
        strategy.train(experience)
    heads = [name for name in values_of(model) if "classifiers" in name]
    assert len(heads) == 2 * TASKS
    for end, begin in zip(look.ends, look.begins[1:], strict=False):
        assert_identical({name: begin[name] for name in end}, end)
    assert all(look.ends[-1][name]["importance"].any() for name in heads)
    assert {f"plasticity/{name}/mean" for name in heads} <= optimizer.summary().keys()


# Replay -------------------------------------------------------------------------------------------


def test_replayed_samples_are_observed() -> None:
    rows: list[int] = []

    def predict(strategy: Any) -> Tensor:
        rows.append(len(strategy.mb_output))
        output: Tensor = strategy.mb_output
        return output

    model = network()
    strategy = naive(model, itself()(model), SynGAPPlugin(predict), ReplayPlugin(mem_size=20))
    for experience in benchmark().train_stream[:2]:
        strategy.train(experience)
    assert rows == [BATCH] * 4 + [2 * BATCH] * 4


def test_the_strategy_is_replay_with_the_plugin() -> None:
    runs = []
    for kind in (SynGAPReplay, Replay):
        torch.manual_seed(3)
        model = network()
        if kind is SynGAPReplay:
            strategy = SynGAPReplay(
                model=model,
                lr=0.1,
                mem_size=20,
                gate={"consolidation": 0.5, "retention": 0.9},
                train_mb_size=BATCH,
                evaluator=None,
            )
        else:
            strategy = naive(model, itself()(model), SynGAPPlugin(), kind=Replay, mem_size=20)
        for experience in benchmark().train_stream:
            strategy.train(experience)
        runs.append((values_of(model), as_list(strategy.optimizer.importance())))
    assert_identical(runs[0], runs[1])
    assert (
        "plasticity/head.classifier.bias/mean"
        in SynGAPReplay(model=network(), lr=0.1).optimizer.summary()
    )


def test_the_strategy_takes_further_plugins_and_no_unknown_option() -> None:
    look = Look()
    strategy = SynGAPReplay(model=network(), lr=0.1, plugins=[look], evaluator=None)
    strategy.train(benchmark().train_stream[0])
    assert len(look.ends) == 1
    with pytest.raises(TypeError, match="train_mb_sise"):
        SynGAPReplay(model=network(), lr=0.1, train_mb_sise=4)


# Checkpoints --------------------------------------------------------------------------------------


def state_of(strategy: Any) -> Any:
    return values_of(strategy.model), strategy.optimizer.state_dict()


@pytest.mark.filterwarnings("ignore:Cannot locate reference to <class 'torch.optim")
@every_maker
def test_a_resumed_run_ends_as_one_that_went_on(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh() -> Any:
        model = network()
        return naive(model, seeded(make, model), SynGAPPlugin(), kind=Replay, mem_size=20)

    stream, whole, path = benchmark(), fresh(), tmp_path / "checkpoint"
    if isinstance(whole.optimizer, WrappedSynGAP):
        # Or neither it nor torch's own optimizers can be pickled: dill does not find their modules.
        monkeypatch.setitem(dill.settings, "byref", True)
    for experience in stream.train_stream[:-1]:
        whole.train(experience)
        whole.eval(stream.test_stream)
    save_checkpoint(whole, path)
    saved = copy.deepcopy(state_of(whole))
    whole.train(stream.train_stream[-1])

    torch.manual_seed(99)
    resumed, done = maybe_load_checkpoint(fresh(), path)
    assert done == TASKS - 1
    assert_identical(state_of(resumed), saved)
    resumed.train(stream.train_stream[-1])
    assert_identical(state_of(resumed), state_of(whole))
    assert largest_difference(saved[0].values(), values_of(whole.model).values()) > 0.01


# Wrong use ----------------------------------------------------------------------------------------


def test_another_optimizer_is_refused() -> None:
    model = network()
    strategy = naive(model, SGD(model.parameters(), lr=0.1), SynGAPPlugin())
    with pytest.raises(TypeError, match=r"SynGAP\(model.parameters\(\), lr=...\).*got SGD"):
        strategy.train(benchmark().train_stream[0])


def test_syngap_without_the_plugin_is_noticed() -> None:
    model = network()
    strategy = naive(model, itself()(model))
    with pytest.warns(UserWarning, match=r"no importance yet.*observe\(logits\)"):
        strategy.train(benchmark().train_stream[0])


class Both(Network):
    """Returns its features too."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        features = self.body(x).tanh()
        return {"logits": self.head(features), "features": features}


class OfBoth(Naive):
    def criterion(self) -> Tensor:
        return cross_entropy(self.mb_output["logits"], self.mb_y)


def test_an_output_that_is_no_prediction_is_refused_until_told_where_it_is() -> None:
    model = Both(Head)
    strategy = naive(model, itself()(model), SynGAPPlugin(), kind=OfBoth)
    experience = benchmark().train_stream[0]
    with pytest.raises(TypeError, match=r"Both returned a dict: .*predict=lambda strategy"):
        strategy.train(experience)
    for predict in (
        lambda strategy: strategy.mb_output["logits"],
        lambda strategy: Categorical(logits=strategy.mb_output["logits"]),
    ):
        strategy = naive(model, itself()(model), SynGAPPlugin(predict), kind=OfBoth)
        strategy.train(experience)
        assert all(value.any() for value in as_list(strategy.optimizer.importance()))


def test_an_old_avalanche_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "syngap.integrations.avalanche"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.5.0")
    with pytest.raises(ImportError, match=r"needs Avalanche 0\.6 or later, found 0\.5\.0: pip"):
        importlib.import_module(name)


# The example --------------------------------------------------------------------------------------


def test_the_example_keeps_its_claims(tmp_path: Path) -> None:
    script = ROOT / "examples" / "avalanche_replay.py"
    command = [sys.executable, "-W", "ignore", str(script)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "with SynGAP" in result.stdout
    assert not list(tmp_path.iterdir())
