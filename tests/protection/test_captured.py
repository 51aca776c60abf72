"""The teacher's pass that is recorded does what the plain one does.

On a CPU nothing is recorded, and the same pass runs as it is; with a GPU it is replayed as well.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import syngap
from syngap.protection import Protection, captured, teacher
from syngap.protection.pending import Pending

pytestmark = [  # torch's own, on the threads of its backward passes
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

CLASSES, LENGTH, ROWS = 11, 4, 22
TOKENS = torch.randint(CLASSES, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(LENGTH) < torch.arange(ROWS).remainder(LENGTH).add(1).unsqueeze(1)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ),
]


class Block(nn.Module):
    """Has a frozen layer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.5)
        self.second.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.second(self.dropout(torch.tanh(self.first(x))))
        return x + changed


class Writer(nn.Module):
    """Has blocks, a tied head, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.unused = nn.Embedding(CLASSES, 6), nn.Linear(6, 6)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(6)
        self.head = nn.Linear(6, CLASSES, bias=False)
        self.head.weight = self.embedding.weight
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)) * self.scale
        return logits


def build(device: str) -> Writer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Writer().to(device)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device; the CPU counts as a GPU on which each pass runs as it is."""
    if request.param == "cpu":
        monkeypatch.setattr(captured, "_is_on_one_gpu", lambda model: True)
    monkeypatch.setattr(captured, "PREDICTIONS", 3 * LENGTH)  # three rows at a time
    return str(request.param)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each recorded run had."""
    seen: list[int] = []
    loss = captured.CapturedPass.loss

    def counted(self: Any, batch: Any, stored: Tensor, weights: Tensor) -> Any:
        seen.append(len(stored))
        return loss(self, batch, stored, weights)

    monkeypatch.setattr(captured.CapturedPass, "loss", counted)
    return seen


def moved(model: nn.Module) -> None:
    """Take the model away from where it started, so that the loss is not zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=generator).to(param))


def protection_of(
    model: nn.Module, known: Any = TOKENS, **options: Any
) -> tuple[Protection, teacher.Teacher]:
    protection = syngap.protect(model, known, **({"gate": False, "anchors": 8} | options), every=1)
    return protection, protection._teacher


def gradients(
    model: nn.Module, loss: Tensor, retain_graph: bool = False
) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    return {name: param.grad for name, param in model.named_parameters()}


def assert_alike(model: nn.Module, former: teacher.Teacher, place: int, atol: float = 1e-6) -> None:
    """Compare what is replayed with the plain pass."""
    assert former._captured is not None
    found = former.loss(place, 0.7)
    mine = gradients(model, found)
    kept, former._captured, former._may_capture = former._captured, None, False
    plain = former.loss(place, 0.7)
    its = gradients(model, plain)
    former._captured = kept
    assert found.item() == pytest.approx(plain.item(), abs=atol)
    assert found.item() > 1e-3
    for name, gradient in its.items():
        if gradient is None:
            assert mine[name] is None, name
        else:
            torch.testing.assert_close(mine[name], gradient, rtol=1e-3, atol=atol, msg=name)


def as_dict(tokens: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens, "attention_mask": MASK.long()}


KINDS: dict[str, tuple[Any, Callable[[nn.Module], Any]]] = {
    "a tensor": (TOKENS, lambda model: None),
    "with padding": (as_dict(TOKENS), lambda model: lambda batch: model(batch["input_ids"])),
    "arguments": ([(TOKENS[:8],), (TOKENS[8:],)], lambda model: None),
    "a factor": (TOKENS, lambda model: lambda tokens: 1.5 * model(tokens)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("room", [1 << 28, (ROWS * LENGTH * 6 + 6 * CLASSES) * 4])
def test_a_recorded_pass_is_the_plain_one(
    kind: str, room: int, device: str, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "byte_limit", lambda model: room)
    model = build(device)
    known, predict = KINDS[kind]
    protection, former = protection_of(model, known, predict=predict(model))
    assert former._rows(0) is not None or kind == "a factor"
    protection.loss()
    if former._rows(0) is None:
        assert former._captured is None  # former answers are calculated again
        return
    moved(model)
    for place in range(len(former.batches)):
        assert_alike(model, former, place)
    assert sum(replays) == ROWS


def test_training_is_the_same(device: str, replays: list[int]) -> None:
    def train(model: nn.Module, capturing: bool) -> None:
        protection, former = protection_of(model, gate=True)
        former._may_capture = capturing
        optimizer = protection.optimizer(torch.optim.AdamW(model.parameters(), 1e-2))
        for step in range(6):
            torch.manual_seed(step)
            x = TOKENS[step : step + 4].to(device)
            loss = protection.loss() + F.cross_entropy(model(x).flatten(0, 1), x.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model, other = build(device), build(device)
    train(model, False)
    assert not replays
    train(other, True)
    assert len(replays) == 5  # the first one showed that it can be recorded
    for name, value in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("outside", [False, True], ids=["in predict", "around the call"])
def test_autocast_takes_the_weights_of_now(device: str, outside: bool) -> None:
    model = build(device)
    half = torch.autocast(device, torch.bfloat16)

    def predict(tokens: Tensor) -> Tensor:
        with half if not outside else torch.autocast(device, enabled=torch.is_autocast_enabled()):
            logits: Tensor = model(tokens)
        return logits

    protection, former = protection_of(model, predict=None if outside else predict)
    with torch.autocast(device, torch.bfloat16, enabled=outside):
        model(TOKENS[:2].to(device))  # leaves weights in autocast's cache
        protection.loss()
        moved(model)
        torch.clear_autocast_cache()
        assert_alike(model, former, 0, atol=2e-2)


def test_the_model_is_left_as_it_was(device: str) -> None:
    model = build(device)
    parts = [dict(vars(module)) for module in model.modules()]
    protection, former = protection_of(model)
    protection.loss()
    assert former._captured is not None
    assert [dict(vars(module)) for module in model.modules()] == parts


def test_two_losses_before_one_backward(device: str, replays: list[int]) -> None:
    model = build(device)
    protection, former = protection_of(model)
    protection.loss()
    moved(model)
    both = former.loss(0, 0.7) + former.loss(1, 0.7)
    assert replays == [8]  # the second one does not write over the first
    mine = gradients(model, both)
    former._captured = None
    its = gradients(model, former.loss(0, 0.7) + former.loss(1, 0.7))
    for name, gradient in its.items():
        if gradient is not None:
            torch.testing.assert_close(mine[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def test_a_gradient_that_was_written_over_is_refused(device: str) -> None:
    model = build(device)
    protection, former = protection_of(model)
    protection.loss()
    moved(model)
    loss = former.loss(0, 0.7)
    loss.backward(retain_graph=True)
    former.loss(1, 0.7)
    with pytest.raises(RuntimeError, match="is gone"):
        loss.backward()


def test_a_second_backward_gives_the_same_again(device: str) -> None:
    model = build(device)
    protection, former = protection_of(model)
    protection.loss()
    moved(model)
    loss = former.loss(0, 0.7)
    first = gradients(model, loss, retain_graph=True)
    for name, gradient in gradients(model, loss).items():
        if gradient is not None:
            assert torch.equal(gradient, first[name]), name


def test_gradients_that_were_asked_for_stay(device: str) -> None:
    model = build(device)
    protection, former = protection_of(model)
    protection.loss()
    moved(model)
    (found,) = torch.autograd.grad(former.loss(0, 0.7), [model.norm.weight])
    before = found.clone()
    former.loss(1, 0.7)
    assert torch.equal(found, before)


def test_a_loss_that_nobody_uses_keeps_nothing(device: str, replays: list[int]) -> None:
    protection, _ = protection_of(build(device))
    for _ in range(4):
        protection.loss()
    assert len(replays) == 3


def test_the_models_own_gradients_stay(device: str) -> None:
    model = build(device)
    protection, _ = protection_of(model)
    protection.loss()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    moved(model)
    protection.loss()
    for param in model.parameters():
        assert param.grad is not None
        assert bool((param.grad == 1).all())


def add_hook(model: Writer) -> None:
    model.norm.register_forward_hook(lambda *_: None)


def move_memory(model: Writer) -> None:
    model.norm.weight.data = model.norm.weight.data.clone()


def freeze(model: Writer) -> None:
    model.norm.weight.requires_grad_(False)


def exchange_buffer(model: Writer) -> None:
    model.scale = torch.ones_like(model.scale)


@pytest.mark.parametrize("change", [add_hook, move_memory, freeze, exchange_buffer])
def test_a_model_that_changes_is_not_replayed(
    change: Callable[[Writer], None], device: str, replays: list[int]
) -> None:
    model = build(device)
    protection, former = protection_of(model)
    protection.loss()
    protection.loss()
    assert len(replays) == 1
    change(model)
    moved(model)
    assert protection.loss().item() > 0
    assert len(replays) == 1
    assert former._captured is None


def with_hook(model: Writer) -> Any:
    add_hook(model)
    return None


def over_the_batch(model: Writer) -> Any:
    return lambda tokens: model(tokens) - model(tokens).mean(0, keepdim=True)


def pairs_of_rows(model: Writer) -> Any:
    return lambda tokens: (each := model(tokens).flatten(1)) @ each.T


@pytest.mark.parametrize("spoil", [with_hook, over_the_batch, pairs_of_rows])
def test_what_cannot_be_recorded_runs_as_it_is(
    spoil: Callable[[Writer], Any], device: str, replays: list[int]
) -> None:
    model = build(device)
    # All batches have the same number of rows, which pairs of rows need.
    protection, former = protection_of(model, TOKENS[:16], predict=spoil(model))
    for _ in range(3):
        protection.loss()
    assert former._captured is None
    assert not replays


Cache = dict[nn.Module, list[Tensor]]


class Cached(nn.Module):
    """Its blocks add to a cache, as those of transformers do, unless its configuration says no."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.embedding, self.head = nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES)
        self.blocks = nn.ModuleList(KeepingBlock() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        cache: Cache | None = {} if self.config.use_cache else None
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cache=cache, debug=True)
        logits: Tensor = self.head(x)
        return logits


class KeepingBlock(nn.Module):
    """Takes keywords, one of which is also one of torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, *, cache: Cache | None, debug: bool = False) -> Tensor:
        changed: Tensor = torch.tanh(self.layer(x)) * (2 if debug else 1)
        if cache is not None:
            kept = cache.setdefault(self, [])
            kept.append(changed)  # a second time where the block runs again
            changed = torch.stack(kept).sum(0)
        return x + changed


class InPlace(nn.Sequential):
    """Changes what the layer before has returned."""

    def __init__(self) -> None:
        layers = [nn.Embedding(CLASSES, 6), nn.Linear(6, 6), nn.ReLU(inplace=True)]
        super().__init__(*layers, nn.Linear(6, CLASSES))


@pytest.mark.parametrize("make", [Cached, InPlace])
def test_models_of_other_kinds_are_recorded(
    make: Callable[[], nn.Module], device: str, replays: list[int]
) -> None:
    torch.manual_seed(0)
    model = make().to(device)
    protection, former = protection_of(model)
    protection.loss()
    moved(model)
    assert_alike(model, former, 0)
    assert replays
    assert getattr(getattr(model, "config", None), "use_cache", True)  # as it was


def test_names_of_a_batch_count(device: str, replays: list[int]) -> None:
    model = build(device)
    first, second = ({"a": TOKENS[:8], "b": TOKENS[8:16]}, {"b": TOKENS[:8], "a": TOKENS[8:16]})
    protection, _ = protection_of(
        model, [first, second], predict=lambda batch: model(batch["a"]) + 2 * model(batch["b"])
    )
    for _ in range(3):
        protection.loss()
    assert not replays


def test_a_very_unlikely_class_does_not_hide_rows_that_depend_on_others(
    device: str, replays: list[int]
) -> None:
    model = build(device)

    def predict(tokens: Tensor) -> Tensor:
        logits: Tensor = model(tokens)
        unlikely = torch.zeros(CLASSES, device=device).index_fill(
            0, torch.tensor([0], device=device), -1e4
        )
        return logits + unlikely - 3 * logits.mean(0, keepdim=True)

    protection, _ = protection_of(model, predict=predict)
    for _ in range(3):
        protection.loss()
    assert not replays


def test_sparse_gradients_stay_sparse(device: str, replays: list[int]) -> None:
    model = nn.Sequential(nn.Embedding(CLASSES, 6, sparse=True), nn.Linear(6, CLASSES)).to(device)
    protection, _ = protection_of(model)
    for _ in range(3):
        loss = protection.loss()
    loss.backward()
    assert not replays
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.is_sparse


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loss_is_there_at_once_where_training_changes_what_the_teacher_reads() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(LENGTH, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)]
    model = nn.Sequential(*layers).cuda()
    protection, _ = protection_of(model, TOKENS.float())
    for step in range(3):
        loss = protection.loss()
        assert not isinstance(loss, Pending) or step == 0
        (loss + model(TOKENS.float().cuda()).sum()).backward()


@pytest.mark.parametrize(("every", "count"), [(None, 1), (1, 0)])
def test_a_default_that_takes_long_is_named_once(
    every: int | None, count: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "byte_limit", lambda model: 0)  # answers are calculated again
    protection = syngap.protect(build(device), TOKENS, gate=False, every=every)
    if every is None:
        protection._every = 1  # as on a GPU
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            protection.loss()
    assert ["every=2" in str(each.message) for each in found] == [True] * count


def test_inputs_of_several_lengths_run_as_they_are(device: str, replays: list[int]) -> None:
    protection, _ = protection_of(build(device), [TOKENS[:8], TOKENS[8:16, :3]])
    for _ in range(3):
        protection.loss()
    assert not replays


USES: dict[str, Callable[[Tensor], Any]] = {
    "added": lambda loss: loss + 1,
    "added to": lambda loss: 1 + loss,
    "in place": lambda loss: loss.__iadd__(1),
    "in a list": lambda loss: torch.stack([loss, loss]),
    "by name": lambda loss: torch.add(input=loss, other=1),
    "read": lambda loss: loss.item(),
    "printed": str,
    "copied": lambda loss: loss.detach().clone(),
    "backward": lambda loss: loss.backward(),
    "its node": lambda loss: loss.grad_fn,
}


class Doubled(torch.autograd.Function):
    """A function of C++, to torch, which does not look at subclasses."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return 2 * loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_a_function_of_autograd_keeps_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    leaf = torch.ones((), requires_grad=True)
    written: Any = object()
    Doubled.apply(Pending.of(3 * leaf, written)).backward()
    assert leaf.grad == 6


@pytest.mark.parametrize("use", USES)
def test_whatever_uses_a_pending_loss_waits_for_it(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream:
        waited: ClassVar[list[object]] = []

        def wait_event(self, event: object) -> None:
            self.waited.append(event)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    written: Any = object()
    leaf = torch.ones((), requires_grad=True)
    loss = Pending.of(2 * leaf, written)
    assert isinstance(loss, Tensor)
    assert not Stream.waited
    found = USES[use](loss)
    assert Stream.waited
    assert set(Stream.waited) == {written}
    assert not isinstance(found, Pending)
    if use in ("added", "added to", "in place", "by name"):
        found.backward()
        assert leaf.grad == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_loss_is_there_when_it_is_read() -> None:
    model = build("cuda")
    protection, former = protection_of(model)
    protection.loss()
    moved(model)
    expected = former.loss(0, 0.7).item()
    for _ in range(20):
        loss = former.loss(0, 0.7)
        assert isinstance(loss, Pending)
        busy = torch.randn(2000, 2000, device="cuda")
        for _ in range(5):
            busy = busy @ busy / 1000
        total = loss + busy.sum() * 0
        assert total.item() == pytest.approx(expected, abs=1e-6)
        del loss, total  # else their gradient is still waited for


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_that_waits_for_the_gpu_runs_as_it_is(replays: list[int]) -> None:
    model = build("cuda")

    def predict(tokens: Tensor) -> Tensor:
        logits: Tensor = model(tokens)
        return logits if logits.sum().item() < 1e9 else 2 * logits

    protection, _ = protection_of(model, predict=predict)
    for _ in range(3):
        protection.loss()
    assert not replays
    F.dropout(torch.ones(8, device="cuda")).sum().item()  # random numbers still work


def test_no_garbage_is_collected_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is deleted then would end the recording."""
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: nullcontext())
    deleted: list[str] = []

    class Cycle:
        def __init__(self, name: str) -> None:
            self.itself = self
            weakref.finalize(self, deleted.append, name)

    Cycle("before")
    with captured.recording(object()):  # type: ignore[arg-type]
        assert deleted == ["before"]
        Cycle("meanwhile")
        _ = [[number] for number in range(100_000)]  # makes the collector run, were it enabled
        assert deleted == ["before"]
    assert gc.isenabled()
    with pytest.raises(RuntimeError), captured.recording(object()):  # type: ignore[arg-type]
        raise RuntimeError
    assert gc.isenabled()


def test_every_graph_is_recorded_without_garbage_collection() -> None:
    source = Path(syngap.__file__).parent
    places = [path for path in source.rglob("*.py") if "cuda.graph(" in path.read_text("utf-8")]
    assert places == [Path(captured.__file__)]
    assert Path(captured.__file__).read_text("utf-8").count("cuda.graph(") == 1
