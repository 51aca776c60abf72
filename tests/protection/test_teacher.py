"""The teacher answers as the model did before training, whether its answers are stored or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

import syngap
from syngap.protection import Protection, teacher

KNOWN = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Has what a start is made of: weights, a frozen one, a tied one, an average in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 5)
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


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answers are stored."""
    monkeypatch.setattr(teacher, "room_for_answers", lambda model: 0)


def train(model: nn.Module, protection: Protection, steps: int = 5, lr: float = 0.05) -> None:
    optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), lr))
    for step in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(x), torch.arange(8) % 5)
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
def test_training_ends_with_the_same_bits_as_with_stored_answers(
    predict: Callable[[Net], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, of_stored = run(predict)
    monkeypatch.setattr(teacher, "room_for_answers", lambda model: 0)
    model, protection = run(predict)
    for name, value in model.state_dict().items():
        assert torch.equal(value, stored.state_dict()[name]), name
    assert protection.report() == of_stored.report()


def test_answers_that_take_more_memory_than_weights_are_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(teacher, "STORED", 0)
    head = nn.Linear(6, 50)
    size = head.weight.nbytes + head.bias.nbytes  # 7 numbers a class, so 7 answers are as large
    for count, calls in ((7, 1), (8, 2)):
        seen = []
        head.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        assert teacher.room_for_answers(head) == size
        protection = syngap.protect(head, torch.randn(count, 6), gate=False, anchors=count, every=1)
        seen.clear()
        protection.loss()
        assert len(seen) == calls


def test_answers_that_are_calculated_again_are_so_at_every_fourth_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for room, losses in ((1 << 20, [True] * 4), (0, [False, False, False, True])):
        monkeypatch.setattr(teacher, "room_for_answers", lambda model, room=room: room)
        model = build()
        protection = syngap.protect(model, KNOWN)
        with torch.no_grad():
            model.head.weight.add_(torch.randn(model.head.weight.shape))
        assert [bool(protection.loss() > 0) for _ in range(4)] == losses


@pytest.mark.usefixtures("again")
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


@pytest.mark.usefixtures("again")
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
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    protection = syngap.protect(model, KNOWN, gate=False, anchors=24, every=1)
    before = model(KNOWN).softmax(-1)
    train(model, protection)
    model[0].requires_grad_(False)
    expected = (before * (before / model(KNOWN).softmax(-1)).log()).sum(-1).mean()
    assert protection.loss().item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.usefixtures("again")
def test_a_head_that_grew_is_compared_on_its_former_classes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    protection = syngap.protect(model, KNOWN, every=1)
    old, new = model[2], nn.Linear(8, 7)
    with torch.no_grad():
        new.weight[:5], new.bias[:5] = old.weight, old.bias
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
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    protection = syngap.protect(model, KNOWN, gate=False, every=1)
    model.append(nn.Linear(5, 5))
    assert protection.loss().item() == pytest.approx(0.0, abs=1e-6)
