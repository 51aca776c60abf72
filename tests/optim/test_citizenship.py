"""Every form of the optimizer does what users of `torch.optim` rely on."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    GATE,
    MAKERS,
    Make,
    as_list,
    assert_identical,
    batch,
    defined_plasticity,
    draws_of,
    every_of,
    is_compact,
    itself,
    largest_difference,
    network,
    params_of,
    prepare,
    snapshot,
    train,
    values_of,
    wrapped,
)
from networks import NETWORKS
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_map_only

from syngap import SynGAP

every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
every_name = pytest.mark.parametrize("name", MAKERS)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# The first backward pass of a process on a GPU may say that it had to make a context.
on_cuda = [needs_cuda, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_cuda)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


# Parameter groups ---------------------------------------------------------------------------------


@every_maker
def test_options_of_a_group_act_on_its_parameters_alone(make: Make) -> None:
    """Each group goes where all would go with its options, so the mean spans the groups."""
    own = {"lr": 0.02, "consolidation": 0.9}
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), **own}]
    everyone, everyone_with_own = network(), network()
    for subject, optimizer in (
        (model, make(model, groups)),
        (everyone, make(everyone)),
        (everyone_with_own, make(everyone_with_own, **own)),
    ):
        train(subject, optimizer, [0])
    assert_identical(values_of(model[0]), values_of(everyone[0]))
    assert_identical(values_of(model[2]), values_of(everyone_with_own[2]))
    assert largest_difference(everyone.parameters(), everyone_with_own.parameters()) > 1e-3


@every_maker
def test_the_mean_spans_groups_unless_it_is_each_tensors_own(make: Make) -> None:
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = make(model, groups)
    train(model, optimizer, range(4))
    found = as_list(optimizer.plasticity())
    assert largest_difference(found, defined_plasticity(optimizer)) < 1e-5


@every_name
def test_a_group_added_late_starts_free_and_in_step(name: str) -> None:
    model = network()
    optimizer = MAKERS[name](model, model[0].parameters())
    train(model, optimizer, range(2))
    before = as_list(optimizer.importance())
    assert min(value.max() for value in before) > 0
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05, "consolidation": 0.3})

    after = as_list(optimizer.importance())
    assert_identical(after[:2], before)
    assert all(not value.any() for value in after[2:])
    added = optimizer.param_groups[1]
    assert (added["lr"], added["consolidation"]) == (0.05, 0.3)
    assert added["steps"] == optimizer.param_groups[0]["steps"] == 2
    assert added["retention"] == GATE["retention"]

    started = values_of(model[2])
    train(model, optimizer, [2, 3])  # of every third step, 3 is one
    assert all(value.any() for value in as_list(optimizer.importance())[2:])
    assert all(not torch.equal(p, started[key]) for key, p in model[2].named_parameters())
    assert {group["steps"] for group in optimizer.param_groups} == {4}


@every_maker
@pytest.mark.parametrize(
    "refused",
    [
        {"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]},
        {"params": [nn.Parameter(torch.zeros(2))], "consolidation": 1.0},
        {"params": [nn.Parameter(torch.zeros(2))], "lr": -0.1},
    ],
    ids=["complex", "consolidation", "lr"],
)
def test_a_refused_group_is_not_added(make: Make, refused: dict[str, Any]) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(2))
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="got"):
        optimizer.add_param_group(dict(refused))
    assert_identical(snapshot(model, optimizer), before)
    train(model, optimizer, [2])


# Learning-rate schedulers -------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "step": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.1),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one-cycle": lambda optimizer: OneCycleLR(
        optimizer, max_lr=0.2, total_steps=6, cycle_momentum=False
    ),
}


def test_a_scheduler_that_cycles_momentum_reaches_the_base() -> None:
    model = network()
    optimizer = SynGAP.wrap(AdamW(model.parameters(), lr=0.01), **GATE)
    schedule = OneCycleLR(optimizer, max_lr=0.2, total_steps=6)
    train(model, optimizer, range(1))
    first = optimizer.base.param_groups[0]["betas"]
    schedule.step()
    assert optimizer.base.param_groups[0]["betas"] != first


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
@every_maker
def test_schedulers_change_the_step(
    make: Make, schedule: Callable[[Optimizer], LRScheduler]
) -> None:
    model, by_hand = network(), network()
    optimizer, manual = make(model), make(by_hand)
    twin = SGD(network().parameters(), lr=optimizer.param_groups[0]["lr"])
    scheduler, twins = schedule(optimizer), schedule(twin)
    rates = []
    for step in range(5):
        rates.append(twin.param_groups[0]["lr"])
        manual.param_groups[0]["lr"] = rates[-1]
        train(model, optimizer, [step])
        train(by_hand, manual, [step])
        assert_identical(values_of(model), values_of(by_hand), f"after step {step}")
        twin.step()
        twins.step()
        scheduler.step()
    assert len(set(rates)) > 2


# Closures and hooks -------------------------------------------------------------------------------


@every_maker
def test_a_closure_is_evaluated_once_with_gradients_and_its_loss_returned(make: Make) -> None:
    model, without = network(), network()
    optimizer, plain = make(model), make(without)
    for step in range(4):
        calls = []

        def closure(step: int = step, calls: list[bool] = calls) -> Tensor:
            calls.append(torch.is_grad_enabled())
            return prepare(model, optimizer, step)

        with torch.no_grad():
            returned = optimizer.step(closure)
        assert calls == [True]
        loss = prepare(without, plain, step)
        plain.step()
        assert_identical(returned, loss)
        assert_identical(values_of(model), values_of(without))
    assert_identical(as_list(optimizer.importance()), as_list(plain.importance()))


@every_maker
def test_hooks_fire_once(make: Make) -> None:
    model = network()
    optimizer = make(model)
    fired: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: fired.append(name)

    optimizer.register_step_pre_hook(note("before step"))
    optimizer.register_step_post_hook(note("after step"))
    optimizer.register_state_dict_pre_hook(note("before saving"))
    optimizer.register_state_dict_post_hook(note("after saving"))
    optimizer.register_load_state_dict_pre_hook(note("before loading"))
    optimizer.register_load_state_dict_post_hook(note("after loading"))
    train(model, optimizer, [0])
    optimizer.load_state_dict(optimizer.state_dict())
    events = ("step", "saving", "loading")
    assert fired == [f"{when} {event}" for event in events for when in ("before", "after")]


@every_maker
def test_a_hook_may_replace_the_state_that_is_loaded(make: Make) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    before, masks = as_list(optimizer.importance()), as_list(optimizer.plasticity())

    def halve(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {
            index: kept | {"importance": kept["importance"] / 2}
            for index, kept in state_dict["state"].items()
        }
        return state_dict | {"state": state}

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.load_state_dict(saved)
    assert_identical(as_list(optimizer.importance()), [value / 2 for value in before])
    # The mask is a function of importance, so halving all of it changes nothing.
    close = {"rtol": 1e-2, "atol": 1e-3} if is_compact(optimizer) else {"rtol": 1e-5, "atol": 1e-6}
    for mask, same in zip(as_list(optimizer.plasticity()), masks, strict=True):
        torch.testing.assert_close(mask, same, **close)


# Saving, copying ----------------------------------------------------------------------------------


def saved_and_loaded(content: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_maker
def test_resume_is_bitwise(make: Make, dtype: torch.dtype, device: str) -> None:
    """After four steps, of which a refresh at every third is in mid-phase."""
    model = network(dtype, device)
    optimizer = make(model)
    train(model, optimizer, range(4))
    saved = saved_and_loaded([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, range(4, 9))

    resumed = network(dtype, device)
    fresh = make(resumed, lr=0.7, consolidation=0.2)
    resumed.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    wide = torch.bfloat16 if is_compact(optimizer) else wide
    assert {value.dtype for value in as_list(fresh.importance())} == {wide}
    train(resumed, fresh, range(4, 9))
    assert_identical(snapshot(resumed, fresh)["values"], values_of(model))
    assert_identical(fresh.state_dict(), optimizer.state_dict())


@every_maker
def test_resume_into_an_optimizer_that_was_in_use_is_bitwise(make: Make) -> None:
    """Nothing of the earlier use is left, a pending observation included."""
    model, used = network(), network()
    optimizer, other = make(model), make(used)
    train(model, optimizer, range(3))
    train(used, other, range(10, 16))
    prepare(used, other, 16)
    used.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for subject, its in ((model, optimizer), (used, other)):
        x, y = batch(3)
        subject.zero_grad()
        F.cross_entropy(subject(x), y).backward()
        its.step()
        train(subject, its, range(4, 8))
    assert_identical(values_of(used), values_of(model))


@every_maker
def test_resume_is_bitwise_for_a_network_in_channels_last(make: Make) -> None:
    """A file keeps values and no order in memory; in another order sums end in other digits."""

    def pictures() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(3, 40, 5), nn.Tanh(), nn.Flatten(), nn.Linear(640, 5))
        return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def learn(model: nn.Module, optimizer: SynGAP, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            logits = model(torch.randn(6, 3, 8, 8))
            optimizer.zero_grad()
            optimizer.observe(logits)
            F.cross_entropy(logits, torch.arange(6) % 5).backward()
            optimizer.step()

    model = pictures()
    optimizer = make(model)
    learn(model, optimizer, range(4))
    kept = tree_map_only(Tensor, lambda v: v.contiguous().clone(), optimizer.state_dict())
    resumed = pictures()
    resumed.load_state_dict(model.state_dict())
    fresh = make(resumed)
    fresh.load_state_dict(kept)
    for param in resumed.parameters():
        orders = {v.stride() for v in fresh.state[param].values() if v.shape == param.shape}
        assert orders <= {param.stride()}
    for subject, its in ((model, optimizer), (resumed, fresh)):
        learn(subject, its, range(4, 9))
    assert_identical(values_of(resumed), values_of(model))


@every_maker
def test_loading_gives_no_state_to_what_had_none(make: Make) -> None:
    model, other = network(), network()
    optimizer, loaded = make(model), make(other)
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.state_dict()["state"] == optimizer.state_dict()["state"]
    assert len(loaded.state) == 0


@every_maker
def test_loading_copies_the_importance(make: Make) -> None:
    model, other = network(), network()
    optimizer, loaded = make(model), make(other)
    train(model, optimizer, range(4))
    loaded.load_state_dict(optimizer.state_dict())
    before = as_list(optimizer.importance())
    train(other, loaded, range(4, 8))
    assert_identical(as_list(optimizer.importance()), before)


@every_maker
def test_saving_changes_nothing(make: Make) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(2))
    kept = {param: list(state) for param, state in optimizer.state.items()}
    optimizer.state_dict()
    assert {param: list(state) for param, state in optimizer.state.items()} == kept


@pytest.mark.parametrize("device", DEVICES)
@every_maker
def test_loaded_state_lands_on_the_parameters_device(make: Make, device: str) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(4))
    saved = saved_and_loaded([model.state_dict(), optimizer.state_dict()], map_location="cpu")
    other = network(device=device)
    loaded = make(other)
    other.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    for kept in loaded.state.values():
        assert {value.device.type for value in kept.values()} == {device}
    assert_identical(as_list(loaded.importance()), as_list(optimizer.importance()))
    train(other, loaded, range(4, 7))
    assert all(value.isfinite().all() for value in values_of(other).values())


class TwoDevices(nn.Module):
    """A layer on the CPU and one on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, _, self.second = network()
        self.second.to("cuda")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).to("cuda")).cpu()


@needs_cuda
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@every_maker
def test_parameters_on_two_devices_share_an_optimizer(make: Make) -> None:
    model = TwoDevices()
    optimizer = make(model, generator=torch.Generator().manual_seed(0))
    before = values_of(model)
    train(model, optimizer, range(4))
    devices = [param.device for param in model.parameters()]
    importance = as_list(optimizer.importance())
    assert [value.device for value in importance] == devices
    found = [value.cpu() for value in as_list(optimizer.plasticity())]
    assert largest_difference(found, defined_plasticity(optimizer)) < 1e-5
    assert all(not torch.equal(value, before[name]) for name, value in values_of(model).items())
    assert optimizer.summary()["importance/mean"] > 0


@every_maker
def test_a_copied_optimizer_goes_on_alike_and_apart(make: Make) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(3))
    prepare(model, optimizer, 3)  # what was observed is copied with the rest
    twin = copy.deepcopy(optimizer)
    before = values_of(model)
    for original, its_copy in zip(params_of(optimizer), params_of(twin), strict=True):
        assert original is not its_copy
        its_copy.grad = original.grad.clone()
    twin.step()
    assert_identical(values_of(model), before)
    optimizer.step()
    assert_identical(params_of(twin), params_of(optimizer))
    assert_identical(as_list(twin.importance()), as_list(optimizer.importance()))


def deep(pair: Any) -> Any:
    return copy.deepcopy(pair)


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("copier", [deep, pickled])
@every_maker
def test_model_and_optimizer_copied_together_go_on_alike_and_apart(
    make: Make, copier: Callable[[Any], Any]
) -> None:
    model = network()
    optimizer = make(model, generator=torch.Generator().manual_seed(5))
    train(model, optimizer, range(4))
    twin, its = copier((model, optimizer))
    before = snapshot(model, optimizer)
    train(twin, its, range(4, 8))
    assert_identical(snapshot(model, optimizer), before)
    train(model, optimizer, range(4, 8))
    assert_identical(values_of(twin), values_of(model))
    assert_identical(its.state_dict(), optimizer.state_dict())
    assert largest_difference(before["values"].values(), values_of(model).values()) > 1e-3


def test_a_hooked_model_can_be_averaged() -> None:
    model = network()
    optimizer = MAKERS["exact"](model)
    averaged = AveragedModel(model)
    seen = []
    for step in range(4):
        train(model, optimizer, [step])
        averaged.update_parameters(model)
        averaged(batch(step)[0]).sum().backward()
        seen.append(values_of(model))
    for name, param in averaged.module.named_parameters():
        mean = torch.stack([values[name] for values in seen]).mean(0)
        torch.testing.assert_close(param.detach(), mean)
    alone = network()
    train(alone, MAKERS["exact"](alone), range(4))
    assert_identical(values_of(model), values_of(alone))


# Gradients that are absent, frozen, cleared -------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@every_maker
def test_zero_grad_clears_gradients_and_the_observation(make: Make, set_to_none: bool) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(3))
    before = as_list(optimizer.importance())
    loss = prepare(model, optimizer, 3)
    assert loss > 0
    optimizer.zero_grad(set_to_none=set_to_none)
    gradients = [param.grad for param in model.parameters()]
    if set_to_none:
        assert gradients == [None] * 4
    else:
        assert not any(gradient.any() for gradient in gradients)
    optimizer.step()
    assert_identical(as_list(optimizer.importance()), before)


@every_maker
def test_frozen_from_the_start_means_untouched_and_uncounted(make: Make) -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = make(model)
    before = values_of(model[0])
    train(model, optimizer, range(4))
    assert_identical(values_of(model[0]), before)
    assert not any(value.any() for value in as_list(optimizer.importance())[:2])
    assert all(value.any() for value in as_list(optimizer.importance())[2:])
    found = as_list(optimizer.plasticity())[2:]
    assert largest_difference(found, defined_plasticity(optimizer)[2:]) < 1e-5


@pytest.mark.parametrize("when", ["between steps", "with gradients", "with zero gradients"])
@every_maker
def test_frozen_half_way_means_untouched_and_uncounted(make: Make, when: str) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(3))
    if when == "between steps":
        optimizer.zero_grad()
    elif when == "with zero gradients":
        optimizer.zero_grad(set_to_none=False)
    else:
        prepare(model, optimizer, 3)
    gradients = [copy.deepcopy(param.grad) for param in model[0].parameters()]
    model[0].requires_grad_(False)
    values, importance = values_of(model[0]), as_list(optimizer.importance())[:2]
    for step in range(3, 7):
        x, y = batch(step)
        logits = model(x)
        if step > 3 or when != "with gradients":
            optimizer.observe(logits)
        model[2].zero_grad()
        F.cross_entropy(logits, y).backward()
        optimizer.step()
    assert_identical(values_of(model[0]), values)
    assert_identical(as_list(optimizer.importance())[:2], importance)
    assert_identical([param.grad for param in model[0].parameters()], gradients)
    found = as_list(optimizer.plasticity())[2:]
    assert largest_difference(found, defined_plasticity(optimizer)[2:]) < 1e-5


@every_maker
def test_thawed_parameters_go_on_where_they_were(make: Make) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(3))
    model[0].requires_grad_(False)
    train(model, optimizer, range(3, 6))
    model[0].requires_grad_(True)
    values, importance = values_of(model[0]), as_list(optimizer.importance())
    train(model, optimizer, range(6, 9))
    moved = values_of(model[0])
    assert all(not torch.equal(moved[key], values[key]) for key in values)
    pairs = zip(as_list(optimizer.importance()), importance, strict=True)
    assert all(not torch.equal(now, then) for now, then in pairs)
    found = as_list(optimizer.plasticity())
    assert largest_difference(found, defined_plasticity(optimizer)) < 1e-5


@every_maker
def test_freezing_everything_after_observing_moves_nothing(make: Make) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer, range(3))
    prepare(model, optimizer, 3)
    model.requires_grad_(False)
    values, importance = values_of(model), as_list(optimizer.importance())
    optimizer.step()
    assert_identical(values_of(model), values)
    assert_identical(as_list(optimizer.importance()), importance)


class TwoHeads(nn.Module):
    """A second head that only some forward passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()
        self.second = nn.Linear(6, 3)
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body[0](x))
        return self.body[2](h) + self.second(h) if self.both else self.body[2](h)


@every_name
def test_without_a_gradient_a_parameter_stays_and_its_importance_fades(name: str) -> None:
    model = TwoHeads()
    optimizer = MAKERS[name](model)
    train(model, optimizer, range(3))
    model.both = False
    values, before = values_of(model.second), as_list(optimizer.importance())[4:]
    train(model, optimizer, [3])
    assert_identical(values_of(model.second), values)
    for now, then in zip(as_list(optimizer.importance())[4:], before, strict=True):
        assert then.any()
        close = 2**-7 if is_compact(optimizer) else 1e-6
        torch.testing.assert_close(now, then * 0.9 ** every_of(name), rtol=close, atol=0)
    found = as_list(optimizer.plasticity())
    assert largest_difference(found, defined_plasticity(optimizer)) < 1e-5


# Precision ----------------------------------------------------------------------------------------


class SeveralTypes(nn.Module):
    """A layer each of float64, float32 and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(4, 6, dtype=torch.float64)
            self.second = nn.Linear(6, 6, dtype=torch.float32)
            self.third = nn.Linear(6, 3, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.third(torch.tanh(self.second(h.float())).bfloat16()).float()


@every_maker
def test_parameters_of_several_types_share_an_optimizer(make: Make) -> None:
    model = SeveralTypes()
    optimizer = make(model)
    before = values_of(model)
    train(model, optimizer, range(4))
    saved = saved_and_loaded([model.state_dict(), optimizer.state_dict()])
    for name, value in values_of(model).items():
        assert value.dtype == before[name].dtype
        if "weight" in name:  # a gated step of a bias may be below the resolution of bfloat16
            assert not torch.equal(value, before[name])
    importance = as_list(optimizer.importance())
    wide = [torch.float64] * 2 + [torch.float32] * 4
    wide = [torch.bfloat16] * 6 if is_compact(optimizer) else wide
    assert [value.dtype for value in importance] == wide
    found = as_list(optimizer.plasticity())
    assert largest_difference(found, defined_plasticity(optimizer)) < 1e-5

    resumed = SeveralTypes()
    fresh = make(resumed)
    resumed.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    train(model, optimizer, range(4, 9))
    train(resumed, fresh, range(4, 9))
    assert_identical(values_of(resumed), values_of(model))


def train_scaled(
    model: nn.Module, optimizer: SynGAP, scaler: torch.amp.GradScaler, step: int, spoil: bool
) -> None:
    x, y = batch(step)
    optimizer.zero_grad()
    logits = model(x)
    with draws_of(step):
        optimizer.observe(logits)
    scaler.scale(F.cross_entropy(logits, y)).backward()
    if spoil:
        params_of(optimizer)[0].grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()


@every_maker
def test_a_step_that_the_scaler_skips_changes_nothing(make: Make) -> None:
    """Scales are powers of two, so the run is bitwise the one that never saw the spoilt batch."""
    model, without = network(), network()
    optimizer, plain = make(model), make(without)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        if step in (2, 3):
            before = snapshot(model, optimizer)
            train_scaled(model, optimizer, scaler, 100 + step, spoil=True)
            after = snapshot(model, optimizer)
            del before["gradients"], after["gradients"]
            assert_identical(after, before)
        train_scaled(model, optimizer, scaler, step, spoil=False)
        train(without, plain, [step])
    assert scaler.get_scale() == 256.0
    assert_identical(values_of(model), values_of(without))
    assert_identical(optimizer.state_dict(), plain.state_dict())


@every_maker
def test_importance_under_autocast_is_float32_and_close(make: Make) -> None:
    model, full = network(), network()
    optimizer, plain = make(model), make(full)
    for subject, its, enabled in ((model, optimizer, True), (full, plain, False)):
        x, y = batch(0, rows=64)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            logits = subject(x)
            assert logits.dtype == (torch.bfloat16 if enabled else torch.float32)
            with draws_of(0):
                its.observe(logits)
            loss = F.cross_entropy(logits, y)
        loss.backward()
        its.step()
    low, high = as_list(optimizer.importance()), as_list(plain.importance())
    assert {value.dtype for value in low} == {value.dtype for value in high}
    assert is_compact(optimizer) or low[0].dtype == torch.float32
    one, other = (torch.cat([value.flatten() for value in f]) for f in (low, high))
    assert F.cosine_similarity(one, other, dim=0) > 0.99
    assert largest_difference(model.parameters(), full.parameters()) < 5e-3


# Speed --------------------------------------------------------------------------------------------

# AdamW alone, compiled, is off by this much too: compiling switches it to its capturable form.
COMPILED_TOLERANCE = {"wrapped-adamw": 5e-6}
# All operations of an update are in these; of "directions" only what is traced is looked at, since
# making a program of it takes seconds.
INDUCED = ("momentum-and-decay", "compact", "wrapped-adamw")


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")),
    reason="torch.compile needs a C++ compiler",
)
@pytest.mark.filterwarnings("default")  # inductor's own differ from version to version
@pytest.mark.parametrize("name", [*INDUCED, "directions"])
def test_a_compiled_step_is_the_same_and_is_not_compiled_again(name: str) -> None:
    """With momentum and with AdamW there is all that a plain step does, and more."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    rate = torch.tensor(0.01)
    model, eager = network(), network()
    optimizer, plain = MAKERS[name](model, lr=rate), MAKERS[name](eager, lr=rate)
    compiler = CompileCounterWithBackend("inductor" if name in INDUCED else "aot_eager")
    compiled = torch.compile(optimizer.step, backend=compiler)
    compiled_after = []
    for step in range(10):
        rate.fill_(0.1 / (1 + step))
        prepare(model, optimizer, step)
        compiled()
        compiled_after.append(compiler.frame_count)
        train(eager, plain, [step])
    assert compiled_after[0] >= 1
    # Unobserved steps, a base optimizer that has its state, and a refresh of importance that is
    # k steps old are programs of their own, as is a refresh of directions.
    settled = 3 if name == "directions" else every_of(name)
    assert compiled_after[settled:] == [compiled_after[settled]] * (10 - settled)
    tolerance = COMPILED_TOLERANCE.get(name, 1e-6)
    assert largest_difference(model.parameters(), eager.parameters()) < tolerance
    found = as_list(optimizer.importance())
    assert largest_difference(found, as_list(plain.importance())) < 1e-6


@every_maker
def test_channels_last_gives_the_same_steps_and_its_format_to_importance(make: Make) -> None:
    build = NETWORKS["conv-batchnorm"].build
    models = [build(), build().to(memory_format=torch.channels_last)]
    optimizers = [make(model) for model in models]
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        x = torch.randn(8, 1, 5, 5, generator=generator)
        y = torch.randint(3, (8,), generator=generator)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            logits = model(x)
            with draws_of(step):
                optimizer.observe(logits)
            F.cross_entropy(logits, y).backward()
            optimizer.step()
    assert largest_difference(models[1].parameters(), models[0].parameters()) < 1e-5
    found = [as_list(optimizer.importance()) for optimizer in optimizers]
    assert largest_difference(found[1], found[0]) < 1e-5
    strides = [param.stride() for param in models[1].parameters()]
    assert strides != [param.stride() for param in models[0].parameters()]
    if make is MAKERS["directions"]:
        return  # there importance is of matrices
    kept = optimizers[1].importance()
    owned = kept.values() if isinstance(kept, dict) else kept
    assert [value.stride() for value in owned] == strides


FOREACH_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tensor-scope": {"scope": "tensor"},
    "unbounded": {"bounded": False, "consolidation": 0.1},
    "unbounded-tensor-scope": {"bounded": False, "consolidation": 0.1, "scope": "tensor"},
    "weight-decay": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "momentum-and-decay": {"momentum": 0.9, "weight_decay": 0.1, "maximize": True, "lr": 0.01},
    "tensor-lr": {"lr": torch.tensor(0.1, dtype=torch.float64)},
    "exact": {"estimator": "exact"},
    "every-second": {"every": 2, "warmup": 0},
    "damped": {"damping": 1e-3},
}


@pytest.mark.parametrize("options", FOREACH_CASES.values(), ids=FOREACH_CASES)
def test_lists_of_tensors_take_the_steps_of_single_ones(options: dict[str, Any]) -> None:
    """A head that half of the steps leave out has neither gradient nor score."""
    torch.manual_seed(0)
    models = [TwoHeads().double()]
    models.append(copy.deepcopy(models[0]))
    optimizers = [
        itself(**options, foreach=foreach)(model)
        for model, foreach in zip(models, (False, True), strict=True)
    ]
    for step in range(10):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.both = step % 2 == 0
            train(model, optimizer, [step])
    assert largest_difference(models[1].parameters(), models[0].parameters()) < 1e-12
    found = [as_list(optimizer.importance()) for optimizer in optimizers]
    assert largest_difference(found[1], found[0]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_maker
def test_a_learning_rate_may_be_a_tensor(make: Make, dtype: torch.dtype) -> None:
    """And changing it in place changes the next step."""
    model, by_number = network(dtype), network(dtype)
    rate = torch.tensor(0.05, dtype=dtype)
    optimizer, plain = make(model, lr=rate), make(by_number, lr=rate.item())
    train(model, optimizer, range(5))
    train(by_number, plain, range(5))
    rate.fill_(0.02)
    plain.param_groups[0]["lr"] = rate.item()
    train(model, optimizer, range(5, 10))
    train(by_number, plain, range(5, 10))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert largest_difference(model.parameters(), by_number.parameters()) < tolerance


# What it does not take ----------------------------------------------------------------------------


class SparseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x).mean(1))


@pytest.mark.parametrize("call", ["observe", "step"])
@pytest.mark.filterwarnings("ignore:estimator='exact' takes the one-backward estimate")
@pytest.mark.filterwarnings("ignore:SynGAP.step.. has no importance yet")
@every_maker
def test_sparse_gradients_are_refused_and_nothing_changes(make: Make, call: str) -> None:
    model = SparseNet()
    optimizer = make(model)
    logits = model(torch.tensor([[0, 1], [1, 3]]))
    if call == "step":
        F.cross_entropy(logits, torch.tensor([0, 1])).backward()
    before = values_of(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"dense .* got torch.sparse_coo"):
        optimizer.observe(logits) if call == "observe" else optimizer.step()
    assert_identical((values_of(model), optimizer.state_dict()), before)


@every_maker
def test_complex_parameters_are_refused(make: Make) -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    before = values_of(model)
    with pytest.raises(ValueError, match=r"real parameters, got torch.complex64 .*view_as_real"):
        make(model)
    assert_identical(values_of(model), before)


# Directions ---------------------------------------------------------------------------------------


DIRECTIONS: dict[str, tuple[Callable[..., Make], dict[str, Any]]] = {
    "plain": (itself, {}),
    "momentum": (itself, {"momentum": 0.9}),
    "tensor-scope": (itself, {"scope": "tensor"}),
    "foreach": (itself, {"foreach": True}),
    "exact": (itself, {"estimator": "exact"}),
    "wrapped-sgd": (partial(wrapped, SGD), {"lr": 0.1}),
    "wrapped-adamw": (partial(wrapped, AdamW), {"lr": 0.1, "weight_decay": 0.0}),
}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_maximize_first_steps_the_other_way(name: str) -> None:
    form, options = DIRECTIONS[name]
    down, up = network(torch.float64), network(torch.float64)
    started = values_of(down)
    train(down, form(**options, maximize=False)(down), [0])
    train(up, form(**options, maximize=True)(up), [0])
    lower, upper = values_of(down), values_of(up)
    for key, start in started.items():
        torch.testing.assert_close(upper[key] - start, start - lower[key], rtol=0, atol=1e-14)
        assert not torch.equal(lower[key], start)


DIFFERENTIABLE_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum-and-decay": {"momentum": 0.9, "weight_decay": 0.1},
    "maximize": {"maximize": True},
    "tensor-scope": {"scope": "tensor"},
}


@pytest.mark.parametrize("options", DIFFERENTIABLE_CASES.values(), ids=DIFFERENTIABLE_CASES)
def test_a_later_loss_has_a_gradient_through_differentiable_steps(options: dict[str, Any]) -> None:
    """With respect to a scale of the initial weights, the gates being constants."""
    generator = torch.Generator().manual_seed(0)
    initial = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(3, (8,), generator=generator)
    gates: list[Tensor] = []

    def unrolled(scale: Tensor) -> Tensor:
        """Two steps by the optimizer; it observes before the first."""
        gates.clear()
        weight = initial * scale
        optimizer = SynGAP([weight], lr=0.5, differentiable=True, **GATE, **options)
        for step in range(2):
            loss = F.cross_entropy(x @ weight, y)
            (weight.grad,) = torch.autograd.grad(loss, weight, create_graph=True)
            if step == 0:
                with draws_of(0):
                    optimizer.observe(x @ weight)
            optimizer.step()
            gates.append(as_list(optimizer.plasticity())[0])
        return F.cross_entropy(x @ weight, y)

    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(unrolled(scale), scale)

    def by_definition(scale: float) -> float:
        weight = initial * scale
        momentum = torch.zeros_like(weight)
        sign = -1.0 if options.get("maximize") else 1.0
        for gate in gates:
            weight = weight.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(x @ weight, y), weight)
            decayed = sign * gradient + options.get("weight_decay", 0.0) * weight
            momentum = options.get("momentum", 0.0) * momentum + decayed
            weight = weight - 0.5 * gate * momentum
        return F.cross_entropy(x @ weight, y).item()

    assert by_definition(1.3) == pytest.approx(unrolled(scale).item(), rel=1e-12)
    width = 1e-5
    expected = (by_definition(1.3 + width) - by_definition(1.3 - width)) / (2 * width)
    assert found.item() == pytest.approx(expected, rel=1e-7)
    assert abs(expected) > 1e-3


def test_the_table_has_the_forms_that_differ() -> None:
    """Two makers that took the same steps would be one row too many."""
    trajectories = {}
    for name, make in MAKERS.items():
        model = network()
        train(model, make(model), range(5))
        trajectories[name] = list(model.parameters())
    alike = {frozenset(pair) for pair in (("plain", "foreach"), ("plain", "wrapped-sgd"))}
    alike.add(frozenset(("foreach", "wrapped-sgd")))
    for one, other in itertools.combinations(MAKERS, 2):
        difference = largest_difference(trajectories[one], trajectories[other])
        assert (difference < 1e-6) == (frozenset((one, other)) in alike), (one, other)


def test_a_state_of_a_version_with_fewer_options_is_filled_up() -> None:
    model = network()
    optimizer = MAKERS["plain"](model)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        del group["bounded"]
    other = MAKERS["plain"](copy.deepcopy(model))
    other.load_state_dict(saved)
    assert_identical(as_list(other.importance()), as_list(optimizer.importance()))
    assert other.param_groups[0]["bounded"] is True


def test_importance_changed_by_hand_takes_its_mean_along() -> None:
    model = network()
    optimizer = MAKERS["plain"](model)
    train(model, optimizer, range(3))
    masks = as_list(optimizer.plasticity())
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["importance"] *= 100
    optimizer.load_state_dict(saved)
    for mask, same in zip(as_list(optimizer.plasticity()), masks, strict=True):
        torch.testing.assert_close(mask, same, rtol=1e-5, atol=1e-6)


def test_a_warning_points_at_the_line_that_caused_it() -> None:
    model = network()
    optimizer = SynGAP(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="no importance yet") as caught:
        optimizer.step()
    assert [record.filename for record in caught] == [__file__]


def test_large_tensors_cut_into_pieces_take_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for piece in (1 << 19, 5):
        monkeypatch.setattr("syngap.optim.update._PIECE", piece)
        for scope in ("network", "tensor"):
            model = network()
            optimizer = itself(scope=scope, momentum=0.9, weight_decay=0.01)(model)
            model[0].bias.requires_grad_(False)
            train(model, optimizer, range(4))
            results.append((list(model.parameters()), as_list(optimizer.importance())))
    for whole, pieces in zip(results[:2], results[2:], strict=True):
        for kept, cut in zip(whole, pieces, strict=True):
            for a, b in zip(kept, cut, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
