"""The teacher answers as the model did before training, whether its answers are stored or not."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_identical
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import syngap
from syngap.protection import Protection, recomputed, teacher

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
FEATURES = (24 * 8 + 9 * CLASSES) * 4  # with the last layer itself
ROOM = {"whole": 24 * CLASSES * 4, "features": FEATURES, "again": 0}


def store(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "byte_limit", lambda model: ROOM[kept])


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
        (lambda logits: logits, FEATURES, 1),
        (lambda logits: logits, FEATURES - 1, 2),
        (lambda logits: 1.001 * logits, FEATURES, 2),  # not the last layer's product
        (lambda logits: logits[:, 1:], FEATURES, 2),
        (lambda logits: Categorical(logits=logits), FEATURES, 2),
    ],
)
def test_what_does_not_fit_into_memory_is_calculated_again(
    change: Callable[[Tensor], Any], room: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "byte_limit", lambda model: room)
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
    assert teacher.byte_limit(model) == teacher.SMALL
    monkeypatch.setattr(teacher, "SMALL", 0)
    learned = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    assert teacher.byte_limit(model) == learned > 0


def test_a_gradient_is_all_that_is_left_of_the_graph_until_the_backward_pass() -> None:
    """So that the graph is not in memory beside that of the new batch."""
    model = build()
    protection = syngap.protect(model, KNOWN)
    with saved_tensors() as saved:
        loss = protection.loss()
    learned = [param for param in model.parameters() if param.requires_grad]
    assert len(saved()) == len(learned)
    loss.backward()
    assert not saved()


@contextmanager
def saved_tensors() -> Iterator[Callable[[], list[Tensor]]]:
    """Yield what lists the tensors that a graph, made meanwhile, still keeps."""
    alive: dict[int, weakref.ref[Saved]] = {}

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            alive[id(self)] = weakref.ref(self)

    def tensors() -> list[Tensor]:
        return [saved.tensor for each in alive.values() if (saved := each()) is not None]

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        yield tensors


# Gradients that must not be taken early -----------------------------------------------------------


def gradients_of(loss: Tensor, model: nn.Module) -> list[Tensor | None]:
    model.zero_grad()
    loss.backward()
    return [param.grad for param in model.parameters()]


def test_parameters_outside_of_the_model_get_a_gradient_too() -> None:
    model, outside = nn.Linear(6, 8), nn.Linear(8, 5)
    outside.requires_grad_(False)
    protection = syngap.protect(model, KNOWN, predict=lambda x: outside(model(x)), gate=False)
    with torch.no_grad():
        outside.weight.add_(torch.randn(outside.weight.shape))
    protection.loss().backward()
    outside.requires_grad_(True)  # learns from now on
    protection.loss().backward()
    assert outside.weight.grad is not None
    assert model.weight.grad is not None


def test_float16_is_looked_for_in_each_precision() -> None:
    """A first call in float32 says nothing of later ones, whose small numbers wait for a scaler."""
    model = build()
    protection = syngap.protect(model, KNOWN, gate=False)
    protection.loss()
    with torch.autocast("cpu", torch.float16):
        later = protection.loss()
    assert taken_at_once(protection.loss())
    assert not taken_at_once(later)


def taken_at_once(loss: Tensor) -> bool:
    """Return whether its gradient is known already."""
    assert loss.grad_fn is not None
    return "KnownGradient" in str(loss.grad_fn)


def test_a_hook_of_a_parameter_runs_once() -> None:
    model = build()
    protection = syngap.protect(model, KNOWN, gate=False, anchors=24)
    with torch.no_grad():
        model.head.weight.add_(torch.randn(model.head.weight.shape))
    gradients_of(protection.loss(), model)
    expected = model.head.weight.grad
    assert expected is not None
    model.head.weight.register_hook(lambda grad: -0.1 * grad)
    gradients_of(protection.loss(), model)
    torch.testing.assert_close(model.head.weight.grad, -0.1 * expected)


def test_a_parameter_that_takes_no_part_gets_no_gradient() -> None:
    """DDP with find_unused_parameters=True would wait for it."""
    model = build()
    model.unused = nn.Parameter(torch.zeros(3))
    loss = syngap.protect(model, KNOWN, gate=False).loss()
    assert loss.grad_fn is not None
    reached = [node for node, _ in loss.grad_fn.next_functions if node is not None]
    assert len(reached) == sum(param.requires_grad for param in model.parameters()) - 1


@pytest.mark.filterwarnings("ignore:the weights are b?float16")
def test_small_numbers_of_float16_are_scaled_before_they_vanish() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 2000).half()
    known = torch.randn(256, 6).half()
    protection = syngap.protect(model, known, gate=False, anchors=256)
    with torch.no_grad():
        before = model(known).double().softmax(-1)
        model.weight.add_(0.01 * torch.randn(model.weight.shape))
        difference = (model(known).double().softmax(-1) - before) / len(known)
    (65536.0 * protection.loss()).backward()
    assert model.weight.grad is not None
    expected = difference.T @ known.double()
    found = model.weight.grad.double() / 65536.0
    assert ((found - expected).norm() / expected.norm()).item() < 0.02


def test_reentrant_checkpoints_are_allowed() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))

    def predict(x: Tensor) -> Tensor:
        logits: Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=True)
        return logits

    protection = syngap.protect(model, KNOWN, predict=predict, gate=False)
    assert all(each is not None for each in gradients_of(protection.loss(), model))


def test_calls_without_a_teacher_can_be_differentiated_too() -> None:
    model = build()
    protection = syngap.protect(model, KNOWN, every=2)
    protection.loss().backward()
    with torch.no_grad():
        assert not protection.loss().requires_grad


# What is stored, batch by batch -------------------------------------------------------------------


def test_features_are_stored_only_if_each_batch_is_their_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A head for each task, or a mask that changes nothing in the first batch."""
    model = nn.Linear(6, 8)
    heads = [nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)]
    monkeypatch.setattr(teacher, "byte_limit", lambda model: 12 * CLASSES * 4)
    batches = [(x, place % 2) for place, x in enumerate(KNOWN.split(4))]
    protection = syngap.protect(
        model, batches, predict=lambda batch: heads[batch[1]](model(batch[0])), gate=False, every=1
    )
    assert [protection.loss().item() for _ in batches] == pytest.approx([0.0] * 6, abs=1e-6)


def test_stored_batches_of_several_lengths_stay_below_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = 4000
    monkeypatch.setattr(teacher, "byte_limit", lambda model: limit)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, CLASSES))
    batches = [torch.randn(8, length, 6) for length in (1, 200)]
    protection = syngap.protect(model, batches, gate=False, every=1)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    protection.loss()
    assert len(calls) == 2  # nothing fits


@pytest.mark.usefixtures("again")
def test_weights_that_have_another_name_now_are_refused() -> None:
    """As when adapters are put into a model after protect()."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    protection = syngap.protect(model, KNOWN, gate=False, every=1)
    model[0] = nn.Sequential(model[0], nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"other parameters than at protect"):
        protection.loss()


@pytest.mark.usefixtures("not_whole")
def test_inputs_of_a_later_batch_that_are_not_finite_are_refused() -> None:
    known = KNOWN.clone()
    known[-1] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        syngap.protect(build(), known, gate=False)


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


class Pair(NamedTuple):
    inputs: Tensor
    more: dict[str, list[Tensor]]


def in_one_buffer(x: Tensor) -> Iterator[Tensor]:
    """Yield batches as a reader does that has memory for one."""
    buffer = torch.empty(8, 6)
    for part in x.detach().split(8):
        yield buffer.copy_(part)


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "dict": lambda x: {"x": x},
    "list": lambda x: list(x.split(8)),
    "nested": lambda x: [({"x": [part]},) for part in x.split(8)],
    "named": lambda x: [Pair(part, {"x": [part]}) for part in x.split(8)],
    "buffer": in_one_buffer,
}


def tensor_in(batch: Any) -> Tensor:
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch


@pytest.mark.parametrize("kept", ROOM)
@pytest.mark.parametrize("kind", KINDS)
def test_what_becomes_of_known_inputs_after_protect_changes_nothing(
    kind: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(kept, monkeypatch)
    model, mine = build(), KNOWN.clone().requires_grad_()
    plain = syngap.protect(model, KNOWN, anchors=8, every=1)
    protection = syngap.protect(
        model,
        KINDS[kind](mine),
        predict=lambda batch: model(tensor_in(batch)),
        anchors=8,
        every=1,
    )
    mine.data.zero_()
    with torch.no_grad():
        model.first.weight.add_(0.1)
    for _ in range(3):
        loss = protection.loss()
        assert torch.equal(loss, plain.loss())
        loss.backward()
    assert mine.grad is None
    assert protection.report().kl == plain.report().kl


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


@pytest.mark.usefixtures("again")
def test_a_layer_that_was_frozen_before_and_is_again_answers_as_before() -> None:
    model, protection = run()
    expected = protection.report().kl
    model.frozen.requires_grad_(True)
    with torch.no_grad():
        model.frozen.weight.mul_(3.0)
    unfrozen = protection.report().kl
    model.frozen.requires_grad_(False)
    assert protection.report().kl == unfrozen > expected


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


# Large models: blocks run again, and there is no second gradient ----------------------------------


class Blocks(nn.Module):
    """Has what blocks may have: dropout, keyword arguments, a shared weight, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].inner.weight = self.blocks[0].inner.weight
        self.blocks[1].outer.weight.requires_grad_(False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        logits: Tensor = self.head(x)
        return logits


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + scale * self.outer(self.dropout(torch.tanh(self.inner(x))))


def moved(make: Callable[[], nn.Module]) -> tuple[nn.Module, Protection]:
    """Return a protected model that has learned something since."""
    torch.manual_seed(0)
    model = make().double()
    protection = syngap.protect(model, KNOWN.double(), gate=False, every=1, anchors=24)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn(param.shape))
    return model, protection


LARGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": Blocks,
    "a list of layers": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
    "one layer": lambda: nn.Linear(6, CLASSES),
    "compiled": lambda: nn.Sequential(torch.compile(nn.Linear(6, CLASSES), backend="eager")),
}


def accumulated(model: nn.Module, protection: Protection) -> tuple[list[float], list[Tensor]]:
    """Return losses and the gradient of two losses of different weight, beside another loss."""
    model.zero_grad()
    losses = []
    for weight in (0.5, 3.0):
        loss = protection.loss()
        other = model.eval()(KNOWN.double()).square().mean()
        model.train()
        (weight * loss + other).backward()
        losses.append(loss.item())
    return losses, [param.grad for param in model.parameters() if param.grad is not None]


@pytest.mark.parametrize("name", LARGE_MODELS)
def test_the_gradient_of_a_large_model_is_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, gradients = accumulated(*moved(LARGE_MODELS[name]))
    monkeypatch.setattr(recomputed, "LARGE", 0)
    model, protection = moved(LARGE_MODELS[name])
    assert not taken_at_once(protection.loss())
    found = accumulated(model, protection)
    assert found[0] == pytest.approx(losses, rel=1e-12)
    assert len(found[1]) == len(gradients)
    for ours, theirs in zip(found[1], gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert not [each for each in model.modules() if isinstance(vars(each).get("forward"), partial)]


def test_a_large_model_has_no_second_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the backward pass nothing is kept but inputs of blocks and a difference of logits."""
    monkeypatch.setattr(recomputed, "LARGE", 0)
    model, protection = moved(Blocks)
    with saved_tensors() as saved:
        loss = protection.loss()
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    shapes = {each.shape for each in saved() if each.untyped_storage().data_ptr() not in own}
    assert shapes <= {(), (24,), (24, 6), (24, 8), (24, CLASSES)}
    loss.backward()
    assert not saved()


def test_weights_that_change_before_the_backward_pass_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recomputed, "LARGE", 0)
    model, protection = moved(Blocks)
    loss = protection.loss()
    with torch.no_grad():
        model.get_parameter("blocks.1.inner.weight").mul_(2.0)
    with pytest.raises(RuntimeError, match=r"changed between protection\.loss\(\) and backward"):
        loss.backward()


class Noisy(nn.Module):
    """Draws random numbers also in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        noisy: Tensor = F.dropout(torch.tanh(self.layer(x)), 0.5, training=True)
        return noisy


def with_averages() -> nn.Module:
    layers = [spectral_norm(nn.Linear(6, 6)), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, CLASSES)]
    return nn.Sequential(nn.Sequential(*layers))


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "random numbers": lambda: nn.Sequential(Noisy(), Noisy(), nn.Linear(6, CLASSES)),
    "averages": with_averages,
}


@pytest.mark.parametrize("name", CHANGING)
def test_the_second_run_is_the_first_whatever_changed_since(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random numbers, statistics of norms, and other averages in buffers."""
    found = []
    for limit in (recomputed.LARGE, 0):
        monkeypatch.setattr(recomputed, "LARGE", limit)
        model, protection = moved(CHANGING[name])
        model.train()
        torch.manual_seed(5)
        loss = protection.loss()
        assert taken_at_once(loss) == bool(limit)
        model(3.0 * KNOWN.double())
        after = copy.deepcopy(model.state_dict())
        found.append([loss.detach(), *gradients_of(loss, model)])
        assert_identical(dict(model.state_dict()), dict(after))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)


def test_a_block_that_is_used_again_runs_twice_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputed, "LARGE", 0)
    runs: list[int] = []

    class Counted(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(1)
            return torch.tanh(self.layer(x))

    block = Counted()
    _, protection = moved(lambda: nn.Sequential(*[block] * 5, nn.Linear(6, CLASSES)))
    runs.clear()
    protection.loss().backward()
    assert len(runs) == 10


def test_a_block_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputed, "LARGE", 0)
    model, protection = moved(Blocks)
    handle = model.head.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        protection.loss()
    handle.remove()
    assert not [each for each in model.modules() if "forward" in vars(each)]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_large_model_asks_its_teacher_at_every_fourth_step(
    sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recomputed, "LARGE", 0)
    monkeypatch.setattr(recomputed, "is_sharded", lambda param: sharded)
    model = Blocks()
    protection = syngap.protect(model, KNOWN, gate=False)
    asked = [protection.loss().grad_fn is not None for _ in range(8)]
    assert asked == [False, False, False, True] * 2
