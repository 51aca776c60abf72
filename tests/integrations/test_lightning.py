"""Lightning's loop takes the steps of a loop written by hand, and resumes where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    MAKERS,
    Make,
    as_list,
    assert_identical,
    batch,
    itself,
    largest_difference,
    network,
    values_of,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from syngap import SynGAP

lightning = pytest.importorskip("lightning")

from lightning.fabric.utilities.exceptions import MisconfigurationException  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers.logger import Logger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from packaging.version import Version  # noqa: E402

from syngap.integrations.lightning import SynGAPCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{said}")
    for said in (
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        "The '(train|val)_dataloader' does not have many workers",
        "`training_step` returned `None`",
        "Checkpoint directory .* exists and is not empty",
        "You're resuming from a checkpoint that ended before the epoch ended",
    )
]
STEPS = 8
draws_once = pytest.mark.skipif(
    Version(lightning.__version__) < Version("2.5.5"),
    reason="earlier versions draw the order of an epoch twice on resuming",
)
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


class Classifier(lightning.LightningModule):
    """What a user writes; `observes` is whether the line is there."""

    def __init__(self, make: Make = MAKERS["plain"], *, observes: bool = True) -> None:
        super().__init__()
        self.net = network()
        self.make = partial(make, generator=torch.Generator().manual_seed(5))
        self.observes = observes
        self.losses: list[Tensor] = []

    def training_step(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, y = given
        logits = self.net(x)
        if self.observes:
            self.optimizers().observe(logits)
        loss = cross_entropy(logits, y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Optimizer:
        return self.make(self.net)


def batches() -> DataLoader[Any]:
    return DataLoader([batch(step) for step in range(STEPS)], batch_size=None)


def trainer(*callbacks: Any, **options: Any) -> Any:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    return lightning.Trainer(callbacks=[*callbacks], **{**quiet, **options})


def fitted(
    module: lightning.LightningModule, callback: Any = None, **options: Any
) -> tuple[lightning.LightningModule, SynGAP]:
    """Train a module for an epoch; return it with its optimizer."""
    its = trainer(callback or SynGAPCallback(), **options)
    its.fit(module, batches())
    return module, its.optimizers[0]


# The steps ----------------------------------------------------------------------------------------


def by_hand(
    make: Make,
    *,
    accumulate: int = 1,
    clip: Callable[..., Any] | None = None,
    autocast: torch.dtype | None = None,
    scaler: Any = None,
) -> tuple[nn.Module, SynGAP]:
    """The loop of the guide, with what Lightning's options mean written out."""
    model = network()
    optimizer = make(model, generator=torch.Generator().manual_seed(5))
    for index, (x, y) in enumerate(batches()):
        with torch.autocast("cpu", autocast) if autocast else nullcontext():
            logits = model(x)
            loss = cross_entropy(logits, y) / accumulate
        if index % accumulate == 0:
            optimizer.zero_grad()
        optimizer.observe(logits)
        (scaler.scale(loss) if scaler else loss).backward()
        if (index + 1) % accumulate and index + 1 < STEPS:
            continue
        if scaler:
            scaler.unscale_(optimizer)
        if clip:
            clip(model.parameters())
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return model, optimizer


def assert_same(
    module: tuple[lightning.LightningModule, SynGAP], model: tuple[nn.Module, SynGAP]
) -> None:
    assert_identical(values_of(module[0].net), values_of(model[0]))
    assert_identical(as_list(module[1].importance()), as_list(model[1].importance()))
    assert all(value.any() for value in as_list(model[1].importance()))


CLIP = 0.05  # below most gradients of this task
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it comes": ({}, {}),
    "clipped by norm": (
        {"gradient_clip_val": CLIP},
        {"clip": partial(nn.utils.clip_grad_norm_, max_norm=CLIP)},
    ),
    "clipped by value": (
        {"gradient_clip_val": CLIP, "gradient_clip_algorithm": "value"},
        {"clip": partial(nn.utils.clip_grad_value_, clip_value=CLIP)},
    ),
    "accumulated, the last in part": ({"accumulate_grad_batches": 3}, {"accumulate": 3}),
    "bf16": ({"precision": "bf16-mixed"}, {"autocast": torch.bfloat16}),
    "all at once": (
        {"gradient_clip_val": CLIP, "accumulate_grad_batches": 3, "precision": "bf16-mixed"},
        {
            "clip": partial(nn.utils.clip_grad_norm_, max_norm=CLIP),
            "accumulate": 3,
            "autocast": torch.bfloat16,
        },
    ),
}


@pytest.mark.parametrize(("of_trainer", "of_loop"), OPTIONS.values(), ids=OPTIONS)
@every_maker
def test_automatic_optimization_takes_the_steps_of_a_loop_by_hand(
    make: Make, of_trainer: dict[str, Any], of_loop: dict[str, Any]
) -> None:
    model, optimizer = by_hand(make, **of_loop)
    assert_same(fitted(Classifier(make), **of_trainer), (model, optimizer))
    if of_loop:
        assert largest_difference(model.parameters(), by_hand(make)[0].parameters()) > 1e-5


def scaler(start: float) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=start)


def scaled(start: float) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler(start))


@every_maker
def test_the_scale_of_a_float16_loss_is_not_in_the_importance(make: Make) -> None:
    found = [fitted(Classifier(make), plugins=[scaled(2.0**power)]) for power in (4, 10)]
    importance = [as_list(optimizer.importance()) for _, optimizer in found]
    # The steps differ by rounding, and with them where importance is taken.
    for small, large in zip(*importance, strict=True):
        torch.testing.assert_close(small, large, rtol=0.02, atol=1e-4)
    loop = by_hand(make, autocast=torch.float16, scaler=scaler(2.0**10))
    assert_same(found[1], loop)


class ByHand(Classifier):
    """The same steps with manual optimization."""

    automatic_optimization = False

    def training_step(self, given: tuple[Tensor, Tensor]) -> None:
        x, y = given
        optimizer = self.optimizers()
        logits = self.net(x)
        optimizer.zero_grad()
        optimizer.observe(logits)
        self.manual_backward(cross_entropy(logits, y))
        optimizer.step()


@pytest.mark.parametrize("kind", [Classifier, ByHand])
def test_a_step_that_the_scaler_skips_leaves_importance_alone(kind: type[Classifier]) -> None:
    too_large = 2.0**20  # and halved at each step that is skipped
    module, optimizer = fitted(kind(), plugins=[scaled(too_large)])
    loop = by_hand(MAKERS["plain"], autocast=torch.float16, scaler=scaler(too_large))
    assert 0 < optimizer.param_groups[0]["steps"] < STEPS
    assert_same((module, optimizer), loop)


def test_the_output_of_a_submodule_is_observed_without_a_line() -> None:
    for options in ({}, {"accumulate_grad_batches": 3}):
        plain = fitted(Classifier(), **options)
        watched = fitted(Classifier(observes=False), SynGAPCallback(output_of="net"), **options)
        assert_same(watched, (plain[0].net, plain[1]))


class Looking(Classifier):
    """Runs its network more often than it learns from it."""

    def training_step(self, given: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            self.net(given[0])
        return super().training_step(given)

    def on_train_epoch_end(self) -> None:
        self.net(batch(99)[0])


def test_only_an_output_that_is_learned_from_is_observed() -> None:
    plain = fitted(Classifier(), max_epochs=2)
    watched = fitted(Looking(observes=False), SynGAPCallback(output_of="net"), max_epochs=2)
    assert_same(watched, (plain[0].net, plain[1]))


class Skipping(Classifier):
    """Returns no loss for one batch, which then takes no part."""

    def training_step(self, given: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(given)
        return None if batch_idx == 3 else loss


def test_a_batch_without_a_loss_is_not_observed() -> None:
    _, optimizer = fitted(Skipping(), accumulate_grad_batches=STEPS)
    model = network()
    fresh = MAKERS["plain"](model, generator=torch.Generator().manual_seed(5))
    for index, (x, _) in enumerate(batches()):
        if index != 3:
            fresh.observe(model(x))
    fresh.step()
    assert_identical(as_list(optimizer.importance()), as_list(fresh.importance()))


class Manual(Classifier):
    """Two optimizers of one network's layers, in turn."""

    def __init__(self, *, observes: bool = True) -> None:
        super().__init__(observes=observes)
        self.automatic_optimization = False

    def training_step(self, given: tuple[Tensor, Tensor]) -> None:
        x, y = given
        for optimizer in self.optimizers():
            logits = self.net(x)
            optimizer.zero_grad()
            if self.observes:
                optimizer.observe(logits)
            cross_entropy(logits, y).backward()  # which Lightning knows nothing of
            optimizer.step()

    def configure_optimizers(self) -> list[Optimizer]:
        return [self.make(self.net, self.net[layer].parameters()) for layer in (0, 2)]


def test_manual_optimization_takes_the_steps_of_a_loop_by_hand() -> None:
    model = network()
    generator = torch.Generator().manual_seed(5)
    both = [
        MAKERS["plain"](model, model[layer].parameters(), generator=generator) for layer in (0, 2)
    ]
    for x, y in batches():
        for optimizer in both:
            logits = model(x)
            optimizer.zero_grad()
            optimizer.observe(logits)
            cross_entropy(logits, y).backward()
            optimizer.step()
    its = trainer(SynGAPCallback())
    module = Manual()
    its.fit(module, batches())
    for found, expected in zip(its.optimizers, both, strict=True):
        assert_identical(as_list(found.importance()), as_list(expected.importance()))
    assert_identical(values_of(module.net), values_of(model))


class Halves(ByHand):
    """Accumulates two halves of a batch within a step."""

    def training_step(self, given: tuple[Tensor, Tensor]) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for x, y in zip(*(part.chunk(2) for part in given), strict=True):
            logits = self.net(x)
            if self.observes:
                optimizer.observe(logits)
            self.manual_backward(cross_entropy(logits, y))
        optimizer.step()


def test_each_output_is_observed_once() -> None:
    plain = fitted(Halves())
    watched = fitted(Halves(observes=False), SynGAPCallback(output_of="net"))
    assert_same(watched, (plain[0].net, plain[1]))


# Several processes -------------------------------------------------------------------------------


class Labelled(Classifier):
    """Takes importance from the true labels, so that nothing depends on what is drawn."""

    def __init__(self) -> None:
        super().__init__(itself(estimator="empirical"))

    def training_step(self, given: tuple[Tensor, Tensor]) -> Tensor:
        x, y = given
        logits = self.net(x)
        self.optimizers().observe(logits, targets=y)
        return cross_entropy(logits, y)

    def train_dataloader(self) -> DataLoader[Any]:
        data = TensorDataset(*batch(0, rows=64))
        processes = self.trainer.world_size
        mine = DistributedSampler(data, processes, self.global_rank, shuffle=False)
        return DataLoader(data, batch_size=8 // processes, sampler=mine)


def test_two_processes_take_the_importance_of_the_whole_batch(tmp_path: Path) -> None:
    found = []
    for processes in (1, 2):
        saving = ModelCheckpoint(tmp_path / str(processes), filename="end")
        several = {"devices": processes, "strategy": "ddp_fork"} if processes > 1 else {}
        its = trainer(saving, SynGAPCallback(), accumulate_grad_batches=2, **several)
        its.fit(Labelled())
        found.append(torch.load(saving.best_model_path, weights_only=True))
    alone, together = (one["optimizer_states"][0]["state"] for one in found)
    for index, state in alone.items():
        assert state["importance"].any()
        torch.testing.assert_close(together[index]["importance"], state["importance"])


# Stopping and resuming ----------------------------------------------------------------------------


class Dropping(Classifier):
    """Draws labels and what it drops from torch's own generator, as the order of the data does."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.Dropout(0.3))
        self.make = MAKERS["plain"]


def shuffled() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*batch(0, rows=64)), batch_size=8, shuffle=True)


class Stateful(DataLoader[Any]):
    """A loader that knows where it is, so that Lightning can resume within an epoch."""

    def __init__(self) -> None:
        super().__init__([batch(step) for step in range(STEPS)], batch_size=None)
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        for step in range(self.done % STEPS, STEPS):
            self.done = step + 1
            yield batch(step)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]


@pytest.mark.parametrize(
    ("kind", "data", "often", "at"),
    [
        (Classifier, batches, {"every_n_epochs": 2}, 2 * STEPS),
        pytest.param(Dropping, shuffled, {"every_n_epochs": 2}, 2 * STEPS, marks=draws_once),
        (Classifier, Stateful, {"every_n_train_steps": 2 * STEPS + 3}, 2 * STEPS + 3),
    ],
    ids=["own generator", "torch's generator", "within an epoch"],
)
def test_resumed_is_as_if_it_had_gone_on(
    kind: type[Classifier],
    data: Callable[[], Any],
    often: dict[str, int],
    at: int,
    tmp_path: Path,
) -> None:
    def run(**options: Any) -> tuple[Classifier, Any]:
        module = kind()
        saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **often)
        its = trainer(saving, SynGAPCallback(), max_epochs=4)
        its.fit(module, data(), **options)
        return module, its.optimizers[0]

    torch.manual_seed(0)
    whole, optimizer = run()
    torch.manual_seed(1)  # another process knows nothing of the first
    resumed, its = run(ckpt_path=tmp_path / f"step={at}.ckpt")
    assert 0 < at < len(whole.losses)
    assert_identical(resumed.losses, whole.losses[at:])
    assert_identical(values_of(resumed.net), values_of(whole.net))
    assert_identical(its.state_dict(), optimizer.state_dict())


class Kept(Classifier):
    """Makes its optimizer once, so that a second fit goes on with its importance."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = self.make(self.net)

    def configure_optimizers(self) -> Optimizer:
        return self.optimizer


def test_an_optimizer_made_once_keeps_importance_from_fit_to_fit() -> None:
    module, whole = Kept(), Kept()
    for _ in range(2):
        fitted(module)
    fitted(whole, max_epochs=2)
    assert_same((module, module.optimizer), (whole.net, whole.optimizer))


def test_an_optimizer_made_anew_for_a_second_fit_is_noticed() -> None:
    module, _ = fitted(Classifier())
    with pytest.warns(UserWarning, match="make the optimizer once, in __init__"):
        fitted(module)


# Bad use ------------------------------------------------------------------------------------------


class Plain(Classifier):
    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters())


@pytest.mark.parametrize(
    ("module", "callback", "message"),
    [
        (
            partial(Plain, observes=False),
            SynGAPCallback,
            "no SynGAP optimizer.* gave AdamW: return",
        ),
        (
            partial(Classifier, observes=False),
            partial(SynGAPCallback, output_of="nett"),
            "output_of='nett'.* no submodule of Classifier, which has net",
        ),
        (Manual, partial(SynGAPCallback, output_of="net"), "one SynGAP optimizer, got 2"),
    ],
    ids=["no SynGAP", "no such submodule", "two for one output"],
)
def test_wrong_use_is_refused_before_training(
    module: Callable[[], Classifier], callback: Callable[[], Any], message: str
) -> None:
    made = module()
    with pytest.raises(MisconfigurationException, match=message):
        fitted(made, callback())
    assert not made.losses


@pytest.mark.filterwarnings("ignore:SynGAP.step.. has no importance yet")
@pytest.mark.parametrize(
    ("module", "where"),
    [(Classifier, "in training_step, or"), (Manual, "in training_step before manual_backward")],
)
def test_a_module_that_never_observes_is_stopped_at_its_first_step(
    module: type[Classifier], where: str
) -> None:
    with pytest.raises(MisconfigurationException, match=f"observe.logits. {where}"):
        fitted(module(observes=False))


class BesideLightning(Classifier):
    """Observes by the optimizer itself, where the callback does not see it."""

    def training_step(self, given: tuple[Tensor, Tensor]) -> Tensor:
        self.optimizers(use_pl_optimizer=False).observe(self.net(given[0]))
        return super().training_step(given)


@pytest.mark.filterwarnings("ignore:SynGAP.step.. has no importance yet")
def test_an_observation_that_zero_grad_discards_is_noticed() -> None:
    with (
        pytest.warns(UserWarning, match="zero_grad.. discarded"),
        pytest.raises(MisconfigurationException, match=r"self\.optimizers"),
    ):
        fitted(BesideLightning(observes=False))


class TooLate(Classifier):
    """Observes when the backward pass is over, and the next batch throws it away."""

    def on_after_backward(self) -> None:
        self.optimizers().observe(self.net(batch(0)[0]))


@pytest.mark.filterwarnings("ignore:SynGAP.step.. has no importance yet")
def test_an_observation_that_comes_too_late_is_noticed() -> None:
    with pytest.raises(MisconfigurationException, match="has observed nothing yet"):
        fitted(TooLate(observes=False))


def test_a_batch_is_not_observed_twice() -> None:
    with pytest.raises(MisconfigurationException, match="observes already"):
        fitted(Classifier(), SynGAPCallback(output_of="net"))


@pytest.mark.parametrize("module", [Classifier, Manual])
def test_observing_without_the_callback_is_refused(module: type[Classifier]) -> None:
    with pytest.raises(RuntimeError, match=r"add SynGAPCallback\(\)"):
        trainer().fit(module(), batches())


def test_forgetting_the_callback_at_a_second_fit_is_refused() -> None:
    """Then there is importance already, and no other message would come."""
    made = Kept()
    trainer(SynGAPCallback()).fit(made, batches())
    with pytest.raises(RuntimeError, match=r"add SynGAPCallback\(\)"):
        trainer().fit(made, batches())


def test_two_callbacks_are_one_too_many() -> None:
    with pytest.raises(MisconfigurationException, match="two SynGAPCallback"):
        trainer(SynGAPCallback(), SynGAPCallback()).fit(Classifier(), batches())


class Validated(Classifier):
    """Uses one function for training and for validation, which has no graph."""

    def validation_step(self, given: tuple[Tensor, Tensor]) -> None:
        self.training_step(given)


def test_observing_in_validation_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a prediction that still has its graph"):
        trainer(SynGAPCallback()).fit(Validated(), batches(), batches())


class Consolidated(Classifier):
    """Takes its importance before training, and none in it."""

    def on_fit_start(self) -> None:
        self.optimizers().consolidate(self.net, batch(99)[0])


def test_importance_taken_before_training_is_enough() -> None:
    _, optimizer = fitted(Consolidated(observes=False))
    model = network()
    expected = MAKERS["plain"](model, generator=torch.Generator().manual_seed(5))
    expected.consolidate(model, batch(99)[0])
    assert_identical(as_list(optimizer.importance()), as_list(expected.importance()))


class Certain(Classifier):
    """Observes predictions that leave nothing open, which have no importance."""

    def training_step(self, given: tuple[Tensor, Tensor]) -> Tensor:
        self.optimizers().observe(1e6 * self.net(given[0]))
        return super().training_step(given)


def test_importance_of_zero_is_not_taken_for_a_missing_observation() -> None:
    module, optimizer = fitted(Certain(observes=False), max_steps=2)
    assert optimizer.summary()["importance/mean"] == 0
    assert len(module.losses) == 2


class Failing(Classifier):
    def training_step(self, given: tuple[Tensor, Tensor]) -> Tensor:
        super().training_step(given)
        raise RuntimeError("broken")


@pytest.mark.parametrize("kind", [Classifier, Failing])
def test_nothing_is_left_behind(kind: type[Classifier]) -> None:
    module = kind(observes=False)
    its = trainer(SynGAPCallback(output_of="net"))
    with pytest.raises(RuntimeError, match="broken") if kind is Failing else nullcontext():
        its.fit(module, batches())
    assert not module.net._forward_hooks
    (stand_in,) = its.strategy._lightning_optimizers
    assert not {"observe", "zero_grad", "consolidate"} & vars(stand_in).keys()


# Looking ------------------------------------------------------------------------------------------


class Notes(Logger):
    """A logger that keeps what it is given."""

    name, version = "notes", 0

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[int, dict[str, float]]] = []
        self.losses: list[int] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if any(key.startswith("plasticity") for key in metrics):
            self.given.append((step or 0, metrics))
        elif "loss" in metrics:
            self.losses.append(step or 0)

    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        pass


class Logged(Classifier):
    """Logs its loss by Lightning."""

    def training_step(self, given: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().training_step(given)
        self.log("loss", loss)
        return loss


def test_plasticity_by_layer_reaches_the_logger_with_the_losses() -> None:
    notes = Notes()
    named = Logged(lambda model, **options: MAKERS["plain"](model, model=model, **options))
    _, optimizer = fitted(
        named, logger=notes, log_every_n_steps=2, accumulate_grad_batches=2, max_epochs=2
    )
    assert [step for step, _ in notes.given] == notes.losses == [1, 3, 5, 7]
    assert notes.given[-1][1] == optimizer.summary()
    assert {"plasticity/0.weight/q05", "plasticity/2.bias/mean"} <= notes.given[0][1].keys()


def test_summaries_of_two_optimizers_are_told_apart() -> None:
    notes = Notes()
    trainer(SynGAPCallback(), logger=notes, log_every_n_steps=STEPS).fit(Manual(), batches())
    ((_, written), *_) = notes.given
    assert written["importance/mean/optimizer-0"] != written["importance/mean/optimizer-1"]


def test_no_summary_is_written_where_none_is_wanted() -> None:
    notes = Notes()
    fitted(Classifier(), SynGAPCallback(summaries=False), logger=notes, log_every_n_steps=1)
    assert not notes.given
