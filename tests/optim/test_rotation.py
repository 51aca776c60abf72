"""Weights along directions: the model stays what it is, and a gate closes directions."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from helpers import has_forward_hooks
from safetensors.torch import load, save
from torch import nn
from torch.distributions import Normal
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from syngap import SynGAP, plasticity, rotate, unrotate
from syngap.optim.rotation import Rotation
from syngap.optim.scores import sample_labels


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7, dtype=dtype), nn.Tanh(), nn.Linear(7, 3, bias=False, dtype=dtype)
    )


def known(count: int = 40, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(count, 5, dtype=dtype) @ torch.randn(5, 5, dtype=dtype)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("sides", ["both", "inputs"])
def test_the_model_computes_what_it_did_and_gets_its_weights_back(sides):
    model, x = network(), known()
    parameters, before, plain = list(model.parameters()), copy.deepcopy(model), model(x)
    assert rotate(model, x, sides=sides) == ["0", "2"]
    torch.testing.assert_close(model(x), plain, rtol=1e-12, atol=1e-12)
    assert set(model.parameters()) == set(parameters)
    turn = model[0].parametrizations.weight[0]
    assert (turn.outer is None, turn.inner is None) == (sides == "inputs", False)
    turned = model[0].parametrizations.weight.original
    assert (turned - before[0].weight).abs().max() > 0.1
    assert unrotate(model) == ["0", "2"]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(before.state_dict())
    for mine, wanted in zip(model.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def moments(model: nn.Sequential, x: torch.Tensor, batch: int) -> dict[str, list[torch.Tensor]]:
    """Return B and A of both layers, one sample after the other, from the definition."""
    labels = generator()
    found = {name: [torch.zeros(()), torch.zeros(())] for name in ("0", "2")}
    for part in x.split(batch):
        drawn = sample_labels(model(part), labels)
        for row, label in zip(part, drawn, strict=True):
            values = {"0": row}
            outputs = {"0": model[0](row).detach().requires_grad_()}
            values["2"] = model[1](outputs["0"])
            outputs["2"] = model[2](values["2"])
            score = outputs["2"].log_softmax(0)[label]
            deltas = torch.autograd.grad(score, list(outputs.values()))
            for name, delta in zip(outputs, deltas, strict=True):
                entered = values[name].detach()
                found[name][0] = found[name][0] + torch.outer(delta, delta)
                found[name][1] = found[name][1] + torch.outer(entered, entered)
    return found


def test_directions_are_eigenvectors_of_both_moments():
    model, x = network(), known()
    wanted = moments(copy.deepcopy(model), x, batch=16)
    rotate(model, x, batch_size=16, generator=generator())
    for name, (outer, inner) in wanted.items():
        turn = model.get_submodule(name).parametrizations.weight[0]
        for moment, ways in ((outer, turn.outer), (inner, turn.inner)):
            eye = torch.eye(len(ways), dtype=ways.dtype)
            torch.testing.assert_close(ways.T @ ways, eye, rtol=0, atol=1e-12)
            seen = ways.T @ moment @ ways
            lengths = seen.diagonal()
            assert (seen - lengths.diag()).abs().max() < 1e-9 * lengths.max()
            assert (lengths.diff() > -1e-9).all()


def test_a_gated_step_is_one_along_directions():
    model, x = network(), known()
    y = torch.randint(3, (len(x),))
    optimizer = SynGAP.wrap(
        torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0), consolidation=0.9
    )  # made before: parameters stay the same objects
    rotate(model, x, generator=generator())
    optimizer.consolidate(model, x)
    turn = model[2].parametrizations.weight[0]
    start = model[2].weight.detach().clone()
    cross_entropy(model(x), y).backward()
    gradient = model[2].parametrizations.weight.original.grad.clone()
    importance = optimizer.importance()
    mean = sum(f.sum() for f in importance) / sum(f.numel() for f in importance)
    optimizer.step()
    moved = turn.outer.T @ (model[2].weight.detach() - start) @ turn.inner
    mask = plasticity(importance[-1], mean, consolidation=0.9)
    wanted = -0.1 * mask * gradient / (gradient.abs() + 1e-8)  # AdamW's first step
    torch.testing.assert_close(moved, wanted, rtol=1e-6, atol=1e-9)


def learned_beside(turned: bool) -> tuple[float, float]:
    """Return how far old and new answers are from right, after learning the new ones.

    Old inputs lie along (1, 1), new ones along (1, -1): both use both weights, in ways that do not
    meet.
    """
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 1.0]]))
    old, new = torch.tensor([[[1.0, 1.0]], [[1.0, -1.0]]], dtype=torch.float64)
    before = model(old).detach()

    def predict(x: torch.Tensor) -> Normal:
        return Normal(model(x)[:, 0], torch.ones((), dtype=torch.float64))

    if turned:
        rotate(model, old.repeat(8, 1), predict=predict, generator=generator())
    optimizer = SynGAP(model.parameters(), lr=0.1, consolidation=0.99, ambient=0.0)
    optimizer.consolidate(model, old.repeat(8, 1), predict=predict)
    both = torch.cat([new + 0.3 * old, new])  # new inputs with a little of the old ones
    for _ in range(400):
        optimizer.zero_grad()
        (model(both) - 2.0).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(old) - before).abs()), float((model(new) - 2.0).abs())


def test_what_old_inputs_do_not_use_is_free():
    old, new = learned_beside(turned=True)
    assert old < 0.05
    assert new < 0.4
    by_weights, _ = learned_beside(turned=False)
    assert by_weights > 5 * old


def test_frozen_shared_and_turned_weights_stay():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(6, 4)
            self.frozen, self.free = nn.Linear(4, 4), nn.Linear(4, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.tokens.weight
            self.frozen.requires_grad_(False)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            return self.head(self.free(self.frozen(self.tokens(text))))

    torch.manual_seed(0)
    model, text = Tied(), torch.randint(6, (8, 5))
    plain = model(text)
    assert rotate(model, text) == ["free"]
    torch.testing.assert_close(model(text), plain)
    with pytest.raises(ValueError, match="rotated already"):
        rotate(model, text)
    assert unrotate(model) == ["free"]
    assert unrotate(model) == []


@pytest.mark.parametrize("original", [True, False])
def test_a_copy_and_its_original_are_unrotated_apart(original):
    model, x = network(), known()
    plain = model(x)
    rotate(model, x)
    other = copy.deepcopy(model)
    first, second = (model, other) if original else (other, model)
    unrotate(first)
    torch.testing.assert_close(second(x), plain, rtol=1e-12, atol=1e-12)
    unrotate(second)
    torch.testing.assert_close(second(x), plain, rtol=1e-12, atol=1e-12)
    assert type(first[0]) is type(second[0]) is nn.Linear


def directions(model: nn.Module, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Return V and U of every layer after `rotate`."""
    rotate(model, x, generator=generator(), **options)
    return [buffer.abs() for name, buffer in model.named_buffers() if "parametrizations" in name]


def test_what_works_in_place_behind_a_layer_changes_nothing():
    turns = []
    for inplace in (False, True):
        model = network()
        model[1] = nn.ReLU(inplace=inplace)
        turns.append(directions(model, known()))
    torch.testing.assert_close(*turns, rtol=1e-6, atol=1e-6)


def test_rows_that_no_prediction_depends_on_are_left_out():
    turns, text = [], known(36).view(12, 3, 5)
    for padded in (False, True):
        model = network()
        batch = nn.functional.pad(text, (0, 0, 0, 4), value=9.0) if padded else text
        turns.append(directions(model, batch, predict=lambda x, model=model: model(x)[:, :3]))
    torch.testing.assert_close(*turns, rtol=1e-6, atol=1e-6)


def test_checkpointed_layers_and_inputs_by_keyword():
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            between = checkpoint(self.inner[:2], x, use_reentrant=False)
            return self.inner[2](input=between)

    torch.testing.assert_close(
        directions(Saving(), known()), directions(network(), known()), rtol=1e-6, atol=1e-6
    )


def test_weights_with_a_computation_of_their_own_stay():
    model, x = network(), known()
    nn.utils.parametrizations.weight_norm(model[0])
    assert rotate(model, x) == ["2"]
    assert unrotate(model) == ["2"]
    assert nn.utils.parametrize.is_parametrized(model[0], "weight")
    rotate(model, x)
    nn.utils.parametrizations.weight_norm(model[2])
    with pytest.raises(ValueError, match="2 has another parametrization"):
        unrotate(model)


def test_nothing_is_turned_where_one_layer_cannot_be(monkeypatch):
    model, x = network(), known()
    eigh, taken = torch.linalg.eigh, []

    def failing(moment: torch.Tensor) -> Any:
        taken.append(moment)
        if len(taken) > 2:
            raise torch.linalg.LinAlgError
        return eigh(moment)

    monkeypatch.setattr("torch.linalg.eigh", failing)
    with pytest.raises(torch.linalg.LinAlgError):
        rotate(model, x)
    assert not nn.utils.parametrize.is_parametrized(model[0])


def test_its_state_goes_into_safetensors():
    model, x = network(), known()
    rotate(model, x)
    kept = load(save(model.state_dict()))
    other = network()
    rotate(other, known(8))
    other.load_state_dict(kept)
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)


def test_a_layer_that_is_called_twice_and_one_that_is_not_called():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.never = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.twice(self.twice(x).relu())

    torch.manual_seed(0)
    model, x = Odd(), torch.randn(12, 4)
    between = model.twice(x).relu().detach()
    assert rotate(model, x) == ["twice"]
    ways = model.twice.parametrizations.weight[0].inner
    seen = ways.T @ (x.T @ x + between.T @ between) @ ways
    assert (seen - seen.diagonal().diag()).abs().max() < 1e-4 * seen.max()


def test_large_sides_are_left_and_all_of_them_is_an_error():
    model, x = network(), known()
    assert rotate(model, x, largest=5) == ["0", "2"]
    turns = [model[place].parametrizations.weight[0] for place in (0, 2)]
    assert [(t.outer is None, t.inner is None) for t in turns] == [(True, False), (False, True)]
    with pytest.raises(ValueError, match="longer than largest=2"):
        rotate(network(), x, largest=2)


def wrapped(model: nn.Module) -> nn.Module:
    """A model that says it is DDP's, which asks for processes."""
    ddp = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(ddp)
    ddp.module = model
    return ddp


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: model.bfloat16(), "float32 and train it under autocast"),
        (lambda model: model.requires_grad_(False), "is frozen or shares"),
        (lambda model: nn.Conv1d(5, 3, 1), "has no nn.Linear"),
        (wrapped, "before DDP wraps it"),
    ],
)
def test_what_cannot_be_turned_is_refused(change, says):
    model = change(network(torch.float32))
    with pytest.raises(ValueError, match=says):
        rotate(model, known(dtype=torch.float32))


def test_fewer_rows_than_inputs_are_too_few():
    with pytest.warns(UserWarning, match=r"1 of 2 layers have inputs \(the first: 2, 6 of 7\)"):
        rotate(network(), known(6), batch_size=2)
    rotate(network(), known(6), largest=6)  # the side of 7 is not turned


def test_sharded_weights_are_refused(monkeypatch):
    monkeypatch.setattr("syngap.optim.rotation.is_sharded", lambda weight: True)
    with pytest.raises(ValueError, match="those of 0 are sharded"):
        rotate(network(), known())


def test_wrong_arguments_and_numbers_change_nothing():
    model, x = network(), known()
    with pytest.raises(ValueError, match="'both' or 'inputs'"):
        rotate(model, x, sides="left")
    with pytest.raises(ValueError, match="at least one batch"):
        rotate(model, [])
    broken = copy.deepcopy(model)
    with pytest.raises(ValueError, match="is not finite"):
        rotate(broken[0], x * 1e200, predict=lambda x: broken[0](x) * 1e-200)
    nn.init.constant_(broken[2].weight, torch.nan)
    with pytest.raises(FloatingPointError):
        rotate(broken, x)
    for each in (model, broken):
        assert not any(isinstance(module, Rotation) for module in each.modules())
        assert not has_forward_hooks(each)


def test_modes_and_random_states_are_left_as_they_were():
    model, x = network(torch.float32), known(dtype=torch.float32)
    model = nn.Sequential(model, nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[1].eval()
    buffers, modes = copy.deepcopy(model[1].state_dict()), [m.training for m in model.modules()]
    own, drawn = generator(), torch.get_rng_state()
    begun = own.get_state()
    unrotated = copy.deepcopy(model)
    rotate(unrotated, x)  # draws labels from torch's generator
    rotate(model, x, generator=own)
    assert [module.training for module in model.modules() if not _is_turn(module)] == modes
    torch.testing.assert_close(model[1].state_dict(), buffers)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(own.get_state(), begun)


def _is_turn(module: nn.Module) -> bool:
    return isinstance(module, (Rotation, nn.ModuleDict, nn.utils.parametrize.ParametrizationList))


def test_a_checkpoint_loads_into_a_model_that_was_rotated():
    model, x = network(), known()
    rotate(model, x, generator=generator())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    other = network()
    rotate(other, known(8))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
    unrotate(other)
    torch.testing.assert_close(other(x), model(x), rtol=1e-12, atol=1e-12)


def test_autocast_multiplies_directions_in_full_precision():
    model, x = network(torch.float32), known(dtype=torch.float32)
    plain = copy.deepcopy(model)
    rotate(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), plain(x))
        assert model[0].weight.dtype == torch.float32


def test_same_labels_same_directions():
    turned = []
    for _ in range(2):
        model = network()
        rotate(model, known(), generator=generator())
        turned.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in itertools.pairwise(turned):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# An optimizer that knew the weights before.

stale = partial(pytest.raises, RuntimeError, match="of other coordinates")


def gated(model: nn.Module, momentum: float = 0.9, **options: Any) -> SynGAP:
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return SynGAP.wrap(base, consolidation=0.9, **options)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    cross_entropy(model(known()), torch.arange(40) % 3).backward()
    optimizer.step()


def test_importance_from_before_a_turn_is_not_taken_for_that_of_directions():
    model, x = network(), known()
    optimizer = gated(model)
    optimizer.consolidate(model, x)
    rotate(model, x)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match="at least one batch"):
        optimizer.consolidate(model, [])  # which replaces nothing
    optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does
    for _ in range(2):
        with stale():
            stepped(model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.consolidate(model, x)
    stepped(model, optimizer)


def test_nothing_goes_on_over_a_turn_with_momentum():
    model, x = network(), known()
    optimizer = gated(model)
    rotate(model, x)  # an optimizer that has not stepped may be there before
    optimizer.consolidate(model, x)
    stepped(model, optimizer)
    unrotate(model)
    new = nn.Linear(7, 4, bias=False, dtype=torch.float64)
    for act in (
        lambda: stepped(model, optimizer),
        lambda: optimizer.consolidate(model, x),
        lambda: optimizer.grow(model[2].weight, new.weight),
    ):
        with stale():
            act()
    optimizer = gated(model)
    optimizer.consolidate(model, x)
    stepped(model, optimizer)


@pytest.mark.filterwarnings("ignore:SynGAP.step")
@pytest.mark.parametrize("compact", [False, True])
def test_without_momentum_importance_may_be_taken_anew(compact):
    model, x = network(), known()
    optimizer = gated(model, momentum=0.0, compact=compact)
    stepped(model, optimizer)
    rotate(model, x)
    with stale():
        stepped(model, optimizer)
    optimizer.consolidate(model, x)
    stepped(model, optimizer)


@pytest.mark.filterwarnings("ignore:SynGAP.step")
@pytest.mark.parametrize("way", ["added", "grown", "loaded", "copied", "pickled", "wrapped"])
def test_however_it_came_by_what_it_knows(way):
    model, x = network(), known()
    optimizer = gated(model)
    if way == "added":
        optimizer = SynGAP.wrap(torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9))
        stepped(model, optimizer)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        stepped(model, optimizer)
        model[0].requires_grad_(False)
    elif way == "grown":
        stepped(model, optimizer)
        old, model[2] = model[2], nn.Linear(7, 4, bias=False, dtype=torch.float64)
        optimizer.grow(old.weight, model[2].weight)
        stepped(model, optimizer)
        model[0].requires_grad_(False)
    elif way == "loaded":
        stepped(model, optimizer)
        model, state = network(), optimizer.state_dict()
        optimizer = gated(model)
        optimizer.load_state_dict(state)
    elif way == "wrapped":
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        stepped(model, base)
        optimizer = SynGAP.wrap(base)
    else:
        stepped(model, optimizer)
        both = (model, optimizer)
        model, optimizer = (
            copy.deepcopy(both) if way == "copied" else pickle.loads(pickle.dumps(both))
        )
    rotate(model, x)
    with stale():
        stepped(model, optimizer)


@pytest.mark.filterwarnings("ignore:SynGAP.step")
@pytest.mark.parametrize("copied_with", ["the optimizer", "none"])
def test_a_copy_of_a_rotated_model_is_guarded_as_its_original_is(copied_with):
    model, x = network(), known()
    rotate(model, x)
    if copied_with == "none":
        model = copy.deepcopy(model)
        optimizer = gated(model)
        stepped(model, optimizer)
    else:
        optimizer = gated(model)
        stepped(model, optimizer)
        model, optimizer = copy.deepcopy((model, optimizer))
    unrotate(model)
    with stale():
        stepped(model, optimizer)
    stepped(model, gated(model))


@pytest.mark.filterwarnings("ignore:SynGAP.step")
def test_what_it_does_not_know_may_be_turned():
    model, x = network(), known()
    optimizer = gated(model)
    model[0].requires_grad_(False)
    stepped(model, optimizer)  # the head alone, first
    rotate(network(), x)  # another model
    stepped(model, optimizer)
    twin, its = copy.deepcopy((model, optimizer))
    rotate(model, x)
    unrotate(model)  # there and back
    stepped(model, optimizer)
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)
    assert rotate(model, x) == ["0"]
    optimizer.consolidate(model, x)
    stepped(model, optimizer)
    stepped(twin, its)


def test_parameters_that_are_gone_are_not_held():
    model = network()
    optimizer = gated(model)
    optimizer.consolidate(model, known())
    gone = weakref.ref(model[2].weight)
    for group in optimizer.param_groups:
        group["params"] = list(model[0].parameters())
    for states in (optimizer.state, optimizer.base.state):
        states.pop(model[2].weight, None)
    del model[2]
    gc.collect()
    assert gone() is None
