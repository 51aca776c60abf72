"""The teacher answers as the model did before training, whether its answers are stored or not."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

import syngap
from syngap.protection import Protection, teacher

CLASSES = 40
KNOWN = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Has what a start is made of: weights, a frozen one, a tied one, an average in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, CLASSES)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.frozen.weight
        self.frozen.requires_grad_(False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)) + self.tied(self.first(x)))
        logits: Tensor = self.head(self.dropout(self.frozen(x)))
        return logits


def build() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net()


# Bytes for answers to KNOWN: enough for all, for what the last layer makes them of, for nothing.
ROOM = {"whole": 24 * CLASSES * 4, "features": 24 * 8 * 4, "again": 0}


def store(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "room_for_answers", lambda model: ROOM[kept])


@pytest.fixture(params=["features", "again"])
def not_whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are not stored whole."""
    store(request.param, monkeypatch)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stored."""
    store("again", monkeypatch)


def train(model: nn.Module, protection: Protection, steps: int = 5, lr: float = 0.05) -> None:
    optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), lr))
    for step in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(x), torch.arange(8))
        optimizer.zero_grad()
        (loss + protection.loss()).backward()
        optimizer.step()


def run(predict: Callable[[Net], Any] = lambda model: None) -> tuple[Net, Protection]:
    torch.manual_seed(2)  # dropout
    model = build()
    protection = syngap.protect(model, KNOWN, predict=predict(model), every=2)
    train(model, protection)
    return model, protection


def to_categorical(model: Net) -> Callable[[Tensor], Distribution]:
    return lambda x: Categorical(logits=model(x))


@pytest.mark.parametrize("predict", [lambda model: None, to_categorical])
def test_training_ends_with_the_same_bits_whatever_is_stored(
    predict: Callable[[Net], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, of_whole = run(predict)
    for kept in ("features", "again"):
        store(kept, monkeypatch)
        model, protection = run(predict)
        for name, value in model.state_dict().items():
            assert torch.equal(value, whole.state_dict()[name]), name
        assert protection.report() == of_whole.report()


@pytest.mark.parametrize(
    ("change", "room", "passes"),
    [
        (lambda logits: logits, 24 * CLASSES * 4, 1),
        (lambda logits: logits, 24 * 8 * 4, 1),
        (lambda logits: logits, 24 * 8 * 4 - 1, 2),
        (lambda logits: 1.5 * logits, 24 * 8 * 4, 2),  # not the last layer's product
        (lambda logits: logits[:, 1:], 24 * 8 * 4, 2),
        (lambda logits: Categorical(logits=logits), 24 * 8 * 4, 2),
    ],
)
def test_what_does_not_fit_into_memory_is_calculated_again(
    change: Callable[[Tensor], Any], room: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "room_for_answers", lambda model: room)
    model = build()
    protection = syngap.protect(model, KNOWN, predict=lambda x: change(model(x)), every=1)
    seen: list[Tensor] = []
    model.register_forward_hook(lambda *_: seen.append(KNOWN))
    assert protection.loss().item() == pytest.approx(0.0, abs=1e-6)
    assert len(seen) == passes


def test_features_are_kept_in_the_precision_of_the_last_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store("features", monkeypatch)
    model = build()

    def predict(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits: Tensor = model(x)
        assert logits.dtype is torch.bfloat16
        return logits.float()

    protection = syngap.protect(model, KNOWN, predict=predict, every=1)
    seen: list[Tensor] = []
    model.register_forward_hook(lambda *_: seen.append(KNOWN))
    assert protection.loss().item() == 0.0
    assert len(seen) == 1


def test_there_is_room_for_as_much_as_the_weights_that_learn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build()
    assert teacher.room_for_answers(model) == teacher.STORED
    monkeypatch.setattr(teacher, "STORED", 0)
    learned = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    assert teacher.room_for_answers(model) == learned > 0


def test_the_graph_is_gone_when_the_loss_is_returned() -> None:
    """So that it is not in memory beside that of the new batch."""
    model = build()
    protection = syngap.protect(model, KNOWN)
    alive: set[int] = set()

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            alive.add(id(self))
            weakref.finalize(self, alive.discard, id(self))

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        loss = protection.loss()
    assert loss.requires_grad
    assert not alive


def test_parameters_outside_of_the_model_get_a_gradient_too() -> None:
    model, outside = nn.Linear(6, 8), nn.Linear(8, 5)
    protection = syngap.protect(model, KNOWN, predict=lambda x: outside(model(x)), gate=False)
    with torch.no_grad():
        outside.weight.add_(torch.randn(outside.weight.shape))
    protection.loss().backward()
    assert outside.weight.grad is not None
    assert model.weight.grad is not None


def test_answers_that_are_not_stored_whole_are_asked_for_at_every_second_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kept, losses in (("whole", [True] * 4), ("features", [False, True] * 2)):
        store(kept, monkeypatch)
        model = build()
        protection = syngap.protect(model, KNOWN)
        with torch.no_grad():
            model.head.weight.add_(torch.randn(model.head.weight.shape))
        assert [bool(protection.loss() > 0) for _ in range(4)] == losses


@pytest.mark.usefixtures("not_whole")
def test_the_model_is_as_it_was_after_each_answer() -> None:
    model = build()
    protection = syngap.protect(model, KNOWN, every=1)
    train(model, protection)
    held = {name: (value, value.clone()) for name, value in model.state_dict().items()}
    addresses = {name: value.data_ptr() for name, value in model.state_dict().items()}
    versions = [param._version for param in model.parameters()]
    protection.loss()
    protection.report()
    assert addresses == {name: value.data_ptr() for name, value in model.state_dict().items()}
    assert versions == [param._version for param in model.parameters()]
    assert all(torch.equal(*pair) for pair in held.values())
    assert model.training


@pytest.mark.usefixtures("not_whole")
def test_an_error_in_an_answer_leaves_the_weights_of_now() -> None:
    model = build()
    fails = False

    def predict(x: Tensor) -> Tensor:
        if fails:
            raise RuntimeError("out of memory")
        logits: Tensor = model(x)
        return logits

    protection = syngap.protect(model, KNOWN, predict=predict, every=1)
    train(model, protection)
    before, fails = copy.deepcopy(model.state_dict()), True
    with pytest.raises(RuntimeError, match="out of memory"):
        protection.loss()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("again")
def test_autocast_does_not_mix_the_weights_of_before_and_of_now() -> None:
    """It keeps weights in half precision for as long as its block lasts."""
    model = nn.Linear(6, 5)
    protection = syngap.protect(model, KNOWN, gate=False, anchors=24, every=1)
    start = copy.deepcopy(model)
    with torch.no_grad():
        model.weight[0].add_(1.0)
    x = torch.randn(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        before, now = start(KNOWN), model(KNOWN)
        expected = F.kl_div(*(each.float().log_softmax(-1) for each in (now, before)),
                            reduction="batchmean", log_target=True)  # fmt: skip
        first = model(x)
        found = protection.loss()
        assert torch.equal(model(x), first)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.usefixtures("again")
def test_a_layer_that_is_frozen_later_answers_as_before() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    protection = syngap.protect(model, KNOWN, gate=False, anchors=24, every=1)
    before = model(KNOWN).softmax(-1)
    train(model, protection)
    model[0].requires_grad_(False)
    expected = (before * (before / model(KNOWN).softmax(-1)).log()).sum(-1).mean()
    assert protection.loss().item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.usefixtures("not_whole")
def test_a_head_that_grew_is_compared_on_its_former_classes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    protection = syngap.protect(model, KNOWN, every=1)
    old, new = model[2], nn.Linear(8, CLASSES + 2)
    with torch.no_grad():
        new.weight[:CLASSES], new.bias[:CLASSES] = old.weight, old.bias
    model[2] = new
    with pytest.raises(ValueError, match=r"protection.grow"):
        protection.loss()
    for name in ("weight", "bias"):
        protection.grow(getattr(old, name), getattr(new, name))
    assert protection.loss().item() == pytest.approx(0.0, abs=1e-6)
    train(model, protection)
    assert protection.loss().item() > 1e-3


@pytest.mark.usefixtures("again")
def test_a_part_that_came_later_answers_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    protection = syngap.protect(model, KNOWN, gate=False, every=1)
    model.append(nn.Linear(CLASSES, CLASSES))
    assert protection.loss().item() == pytest.approx(0.0, abs=1e-6)
