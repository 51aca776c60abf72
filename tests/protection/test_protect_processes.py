"""`protect` in two processes that train a model together: DDP and FSDP2 end where one ends."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import PROCESSES, Checks, Results, needs_gloo, run
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import syngap
from syngap.optim.wrapped import WrappedSynGAP
from syngap.protection import Protection, plan_memory, teacher

# One start of two processes is for all of them.
pytestmark = [needs_gloo, pytest.mark.slow, pytest.mark.xdist_group("processes")]

HAS_FSDP = hasattr(torch.cpu.Stream, "record_event")
STEPS, ROWS, TOLERANCE = 3, 8, 1e-10


class Net(nn.Module):
    """Sizes that two processes cannot halve; two layers with the same inputs; plain entries."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 5)
        self.one, self.two = nn.Linear(5, 7), nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.ones(1))  # of which one process gets nothing
        self.conv = nn.Conv1d(7, 3, 2)
        self.head = nn.Linear(3, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = self.norm(torch.tanh(self.one(x)) * self.two(x)) * self.scale
        logits: Tensor = self.head(torch.tanh(self.conv(x.mT)).mean(-1))
        return logits


def build() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().double()


def texts(count: int, seed: int) -> Tensor:
    return torch.randint(11, (count, 6), generator=torch.Generator().manual_seed(seed))


def plain(model: nn.Module) -> nn.Module:
    return model


def shard(model: Net) -> nn.Module:
    """Each layer by itself, and what is left with the root, which stays whole after a pass."""
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of views, which nothing changes
    for layer in (model.tokens, model.one, model.two, model.conv):
        fully_shard(layer)
    return fully_shard(model)


KNOWN = texts(20, seed=1)  # batches of 8, the last one shorter
FORMS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "rotated": (partial(AdamW, lr=0.02, weight_decay=0.1), {}),
    "filtered": (partial(AdamW, lr=0.02), {"rank": 2}),
    "own-anchors": (partial(SGD, lr=0.1), {"rotate": True}),
    "observed": (partial(AdamW, lr=0.02), {"rotate": False}),
}
WAYS: dict[str, Callable[[Any], nn.Module]] = {"ddp": DistributedDataParallel}
WAYS |= {"fsdp": shard} if HAS_FSDP else {}
# Former answers are calculated again, or made of features where no weight is sharded.
BYTE_LIMITS = {"filtered": 0, "observed": (len(KNOWN) * 3 + 3 * 4 + 4) * 8}
PAIRS = [(way, form) for way in WAYS for form in FORMS]


class Dictated(Categorical):
    """A prediction whose sampled labels are given."""

    labels: Tensor

    def sample(self, sample_shape: Any = None) -> Tensor:
        return self.labels


def make(
    model: nn.Module, form: str, known: Tensor = KNOWN, **options: Any
) -> tuple[Protection, WrappedSynGAP]:
    base, own = FORMS[form]
    limit = mock.patch.object(teacher, "byte_limit", return_value=BYTE_LIMITS.get(form))
    with limit if form in BYTE_LIMITS else nullcontext():
        protection = syngap.protect(model, known, anchors=4, every=1, **own, **options)
    optimizer = protection.optimizer(base(model.parameters()))
    assert isinstance(optimizer, WrappedSynGAP)
    return protection, optimizer


def train(
    model: nn.Module,
    optimizer: WrappedSynGAP,
    teaching: Callable[[], Tensor],
    rank: int | None,
    steps: range,
    observes: bool = False,
) -> None:
    for step in steps:
        x = texts(ROWS, seed=10 + step)
        labels = x.sum(1) % 4
        if rank is not None:
            x, labels = x[rank::PROCESSES], labels[rank::PROCESSES]
        logits = model(x)
        optimizer.zero_grad()
        if observes:
            prediction = Dictated(logits=logits)
            prediction.labels = labels
            optimizer.observe(prediction)
        (F.cross_entropy(logits, labels) + teaching()).backward()
        optimizer.step()


def full(value: Any) -> Any:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    named = getattr(model, "module", model).named_parameters()
    return {name: full(param) for name, param in named}


def outcome(model: nn.Module, protection: Protection, optimizer: WrappedSynGAP) -> Any:
    """What must not depend on the number of processes."""
    trained, report = weights(model), protection.report()
    protection.interpolate(0.8)
    importance = optimizer.importance()
    assert isinstance(importance, dict)
    return {
        "weights": trained,
        "interpolated": weights(model),
        "importance": {name: full(value) for name, value in importance.items()},
        "report": {"kl": report.kl, "agreement": report.agreement},
        "moved": {"moved": round(report.moved, 6)},  # its norms are float32
        "coverage": {one.name: one.how for one in report.coverage},
        "calls": {"calls": protection.calls},
        "mean": {"mean": optimizer.summary()["importance/mean"]},
    }


def assert_close(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    for kind, values in expected.items():
        assert actual[kind].keys() == values.keys()
        for name, value in values.items():
            other = actual[kind][name]
            if isinstance(value, Tensor):
                assert value.shape == other.shape, f"{kind} {name}"
                difference = float((value - other).abs().max())
            else:
                difference = float(value != other) if isinstance(value, str) else value - other
            assert abs(difference) <= tolerance, f"{kind} {name}"


def alone(form: str) -> Any:
    """What one process with the whole batch comes to, and with the anchors of both."""
    model = build()
    protection, optimizer = make(model, form)
    teaching = protection.loss
    if form == "own-anchors":
        other = make(model, form, seed=1)[0]
        teaching = lambda: (protection.loss() + other.loss()) / 2  # noqa: E731
    train(model, optimizer, teaching, None, range(STEPS), form == "observed")
    return outcome(model, protection, optimizer)


# Steps --------------------------------------------------------------------------------------------

PROTECT: Checks = {}
CHECKS = {"PROTECT": PROTECT}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What all checks returned; the processes are started once."""
    return run(__name__, tmp_path_factory)["PROTECT"]


def together(way: str, form: str, rank: int) -> Any:
    model = WAYS[way](build())
    seed = rank if form == "own-anchors" else 0
    protection, optimizer = make(model, form, seed=seed)
    one, two = (protection.known[layer.weight].basis for layer in layers(model))
    assert one.right is two.right  # in every process in memory once
    train(model, optimizer, protection.loss, rank, range(STEPS), form == "observed")
    return outcome(model, protection, optimizer)


def layers(model: Any) -> tuple[Any, Any]:
    model = getattr(model, "module", model)
    return model.one, model.two


for way, form in PAIRS:
    PROTECT[f"{way}-{form}"] = partial(together, way, form)


@pytest.mark.parametrize(("way", "form"), PAIRS)
def test_two_processes_end_where_one_ends(found: Results, way: str, form: str) -> None:
    first, second = found[f"{way}-{form}"]
    assert_close(second, first, 0.0)
    assert_close(first, alone(form))


# States -------------------------------------------------------------------------------------------


def resumed(way: str, saved_by: str, form: str, rank: int) -> Any:
    """Train, save, train on; protect the start again, load, and train that on."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model = WAYS[way](build())
    protection, optimizer = make(model, form)
    train(model, optimizer, protection.loss, rank, range(2))
    of_model = copy.deepcopy(model.state_dict())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if saved_by == "torch":
        saved = copy.deepcopy(optimizer.state_dict())
    else:
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    train(model, optimizer, protection.loss, rank, range(2, STEPS))
    fresh = WAYS[way](build())
    again, loaded = make(fresh, form)
    fresh.load_state_dict(of_model)
    if saved_by == "torch":
        loaded.load_state_dict(saved)
    else:
        set_optimizer_state_dict(fresh, loaded, saved, options=options)
    train(fresh, loaded, again.loss, rank, range(2, STEPS))
    return outcome(model, protection, optimizer), outcome(fresh, again, loaded)


RESUMED = [
    (way, saved_by, form)
    for way in WAYS
    for saved_by in ("torch", "checkpoint")[: 1 if way == "ddp" else 2]
    for form in ("rotated", "filtered")
]
for way, saved_by, form in RESUMED:
    PROTECT[f"resumed-{way}-{saved_by}-{form}"] = partial(resumed, way, saved_by, form)


@pytest.mark.parametrize(("way", "saved_by", "form"), RESUMED)
def test_resumed_processes_end_with_the_same_bits(
    found: Results, way: str, saved_by: str, form: str
) -> None:
    for uninterrupted, again in found[f"resumed-{way}-{saved_by}-{form}"]:
        assert_close(again, uninterrupted, 0.0)


# What stays as it is, and what is refused ---------------------------------------------------------


def untouched(rank: int) -> Any:
    """Gradients and shards before and after, and parameters that a forward pass left whole."""
    model = shard(build())
    F.cross_entropy(model(KNOWN[:4]), KNOWN[:4, 0] % 4).backward()
    before = {name: full(param.grad) for name, param in model.named_parameters()}
    with torch.no_grad():
        model(KNOWN[:4])
    protection, _ = make(model, "rotated")
    protection.report()
    now = dict(model.named_parameters())
    return before, {name: full(param.grad) for name, param in now.items()}


if HAS_FSDP:
    PROTECT["untouched"] = untouched


@pytest.mark.skipif(not HAS_FSDP, reason="FSDP2 of this torch does not run on a CPU")
def test_gradients_of_shards_stay_as_they_are(found: Results) -> None:
    for before, after in found["untouched"]:
        assert_close({"grads": after}, {"grads": before}, 0.0)


def failing(way: str, rank: int) -> dict[str, str]:
    """What each process says of a mistake that the second one makes, all of them in step after."""

    model = WAYS[way](build())

    def said(known: Any = KNOWN, **options: Any) -> str:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            syngap.protect(model, known, **options)
        return f"{type(caught.value).__name__}: {caught.value}"

    found = {
        "nothing": said(KNOWN[:0] if rank else KNOWN),
        "others": said(KNOWN + rank if rank else KNOWN),
        "options": said(consolidation=0.95 if rank else 0.9),
        "range": said(anchors=1 - rank),
    }
    if way == "ddp":  # FSDP2 itself waits for all in a forward pass
        found["model"] = said(predict=lambda batch: model(batch) * (torch.nan if rank else 1.0))
    total = torch.ones(())
    dist.all_reduce(total)
    return found | {"total": str(int(total))}


SAID = {
    "nothing": ("ValueError: known has no inputs", True),
    "others": ("ValueError: known inputs or weights: '2 ", False),
    "options": ("ValueError: consolidation: 0.9 in process 0, 0.95 in process 1", False),
    "range": ("ValueError: anchors must be", True),
    "model": ("NotFiniteError: ", True),
}
for way in WAYS:
    PROTECT[f"failing-{way}"] = partial(failing, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_mistake_of_one_process_is_raised_in_all(found: Results, way: str) -> None:
    first, second = found[f"failing-{way}"]
    assert first.pop("total") == second.pop("total") == str(PROCESSES)
    for what, text in first.items():
        message, is_of_one = SAID[what]
        elsewhere = "RuntimeError: protect() failed in process 1 of 2: " if is_of_one else ""
        assert text.startswith(elsewhere + message)
        assert second[what].startswith(message)


def refused(rank: int) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (PROCESSES,))
    parallel = parallelize_module(build(), mesh, {"head": ColwiseParallel()})
    model = shard(build())
    protection = syngap.protect(model, KNOWN)
    found = {}
    with pytest.raises(ValueError, match="no tensor parallelism") as caught:
        syngap.protect(parallel, KNOWN)
    found["parallel"] = str(caught.value)
    with pytest.raises(ValueError, match="cannot grow") as caught:
        protection.grow(layers(model)[0].weight, nn.Parameter(torch.zeros(8, 5)))
    return found | {"grow": str(caught.value)}


if HAS_FSDP:
    PROTECT["refused"] = refused


@pytest.mark.skipif(not HAS_FSDP, reason="FSDP2 of this torch does not run on a CPU")
def test_what_shards_do_not_allow_is_refused(found: Results) -> None:
    for said in found["refused"]:
        assert sorted(said) == ["grow", "parallel"]


def by_itself(rank: int) -> Any:
    """Each process has a model of its own."""
    model = build()
    protection, optimizer = make(model, "rotated", KNOWN[rank:], process_group=None)
    train(model, optimizer, protection.loss, None, range(1))
    return protection.report().kl


PROTECT["by-itself"] = by_itself


def test_without_a_group_each_process_has_a_model_of_its_own(found: Results) -> None:
    first, second = found["by-itself"]
    assert first != second


class TwoHeads(nn.Module):
    """A new head beside the old one, which the teacher alone asks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.old, self.new = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(7, 2)

    def forward(self, x: Tensor, head: str = "new") -> Tensor:
        logits: Tensor = self.get_submodule(head)(torch.tanh(self.body(x)))
        return logits


def two_heads(every: int, wraps_first: bool, rank: int) -> Any:
    torch.manual_seed(0)
    model, known = TwoHeads().double(), torch.randn(32, 5, dtype=torch.double)
    wrapped = DistributedDataParallel(model) if wraps_first else None
    protection = syngap.protect(
        wrapped or model, known, predict=lambda batch: model(batch, "old"), every=every
    )
    wrapped = wrapped or DistributedDataParallel(model)
    optimizer = protection.optimizer(SGD(model.parameters(), lr=0.1))
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        loss = (
            protection.loss() + wrapped(torch.randn(8, 5, dtype=torch.double)).logsumexp(1).mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


HEADS = {
    f"two-heads-{every}-{first}": partial(two_heads, every, first)
    for every in (1, 3)
    for first in (True, False)
}
PROTECT |= HEADS


@pytest.mark.parametrize("name", HEADS)
def test_a_second_head_is_learned_under_ddp_whenever_the_teacher_is_asked(
    found: Results, name: str
) -> None:
    first, second = found[name]
    assert all(map(torch.equal, first, second))


# Memory -------------------------------------------------------------------------------------------


def bytes_of(tensors: Iterable[Any]) -> int:
    parts = (each.to_local() if hasattr(each, "to_local") else each for each in tensors)
    return sum(part.nbytes for part in parts)


def memory(rank: int) -> dict[str, int]:
    """Train sharded, and return the bytes of what this process has, by what for."""
    model = shard(build())
    protection, optimizer = make(model, "filtered")
    train(model, optimizer, protection.loss, rank, range(1))
    params = list(model.parameters())
    states = [optimizer.state[param] for param in params]
    masks = [stack.mask for work in optimizer.gate._works for stack in work.stacks]
    masks += [mask for work in optimizer.gate._works for mask in work.small or ()]
    return {
        "weights": bytes_of(params),
        "gradients": bytes_of(param.grad for param in params),
        "AdamW's moments": bytes_of(
            optimizer.base.state[param][name]
            for param in params
            for name in ("exp_avg", "exp_avg_sq")
        ),
        "importance": bytes_of(state["importance"] for state in states),
        "masks": bytes_of(masks),
        "directions": bytes_of(
            state[side] for state in states for side in ("left", "right") if side in state
        ),
        "start": bytes_of(protection._start.values.values()),
        "copy of importance": bytes_of(each.importance for each in protection.known.values()),
    }


if HAS_FSDP:
    PROTECT["memory"] = memory


@pytest.mark.skipif(not HAS_FSDP, reason="FSDP2 of this torch does not run on a CPU")
def test_the_first_process_takes_what_the_plan_says(found: Results) -> None:
    first, second = found["memory"]
    plan = plan_memory(build(), KNOWN, anchors=4, processes=PROCESSES, rank=2)
    planned = plan.on_device() | plan.on_cpu()
    assert first == {name: planned[name] for name in first}
    assert all(second[name] <= size for name, size in first.items())
