"""Two processes that share a batch take the steps of one process that has it all."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Checks, Results, needs_gloo, run
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel

from syngap import SynGAP
from syngap.optim import Directions
from syngap.optim.distributed import independent_draws, reduced
from syngap.optim.scores import sample_labels

# One start of two processes is for all of them.
pytestmark = [needs_gloo, pytest.mark.slow, pytest.mark.xdist_group("processes")]

STEPS = 3
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-7, torch.bfloat16: 0, torch.int64: 0}
ROWS = (slice(0, 3), slice(3, 8))  # who has which part of a batch


# The task, for each of two processes or for the one that has it all (rank None) -------------------


class Net(nn.Module):
    """Sizes that two processes cannot halve, and two terms of a sum, whose gradients are one.

    Of the single number `scale` one process gets nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.gain = nn.Parameter(torch.rand(7))
        self.shift = nn.Parameter(torch.rand(7))
        self.scale = nn.Parameter(torch.rand(1))
        self.second = nn.Linear(7, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * (self.gain + self.shift)
        return self.head(torch.tanh(self.second(h))) * self.scale


class Branches(nn.Module):
    """A layer that a process may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 5)
        self.sometimes = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, rank: int | None = None) -> Tensor:
        if rank is None:
            return torch.cat([self(x[part], rank) for rank, part in enumerate(ROWS)])
        h = torch.tanh(self.always(x))
        return self.head(torch.tanh(self.sometimes(h)) if rank else h)


class Dictated(Categorical):
    """A prediction whose sampled labels are given."""

    def __init__(self, logits: Tensor, labels: Tensor) -> None:
        super().__init__(logits=logits)
        self.labels = labels

    def sample(self, sample_shape: Any = None) -> Tensor:
        return self.labels


class Noting(Categorical):
    """A prediction that remembers what was drawn from it."""

    def sample(self, sample_shape: Any = None) -> Tensor:
        self.drawn = super().sample()
        return self.drawn


def layers() -> nn.Sequential:
    """A network every parameter of which "exact" can read."""
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def build(make: Callable[[], nn.Module] = Net) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


def draw(rank: int | None, step: int, micro: int) -> tuple[Tensor, ...]:
    """Inputs, targets, labels to sample, and which rows count."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    targets, labels = torch.randint(3, (2, 8), generator=generator)
    mask = torch.tensor([True, False, True, True, True, True, False, True])
    batch = (x, targets, labels, mask)
    return batch if rank is None else tuple(tensor[ROWS[rank]] for tensor in batch)


def loss_of(rank: int | None, logits: Tensor, targets: Tensor) -> Tensor:
    """DDP and FSDP2 average over processes, so a row of the smaller batch weighs more."""
    if rank is not None:
        return F.cross_entropy(logits, targets)
    return sum(F.cross_entropy(logits[part], targets[part]) for part in ROWS) / len(ROWS)


def train(
    model: nn.Module,
    optimizer: SynGAP,
    rank: int | None,
    *,
    steps: range = range(STEPS),
    micro_batches: int = 2,
    masked: bool = False,
    forward: Callable[[Tensor], Tensor] | None = None,
    around: Callable[[int], AbstractContextManager[None]] = lambda micro: nullcontext(),
) -> None:
    for step in steps:
        optimizer.zero_grad()
        for micro in range(micro_batches):
            x, targets, labels, mask = draw(rank, step, micro)
            with around(micro):
                logits = model(x) if forward is None else forward(x)
                optimizer.observe(Dictated(logits, labels), mask=mask if masked else None)
                loss_of(rank, logits, targets).backward()
        optimizer.step()


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def in_order(values: dict[str, Tensor] | list[Tensor]) -> list[Tensor]:
    return [full(value) for value in (values.values() if isinstance(values, dict) else values)]


def outcome(optimizer: SynGAP) -> dict[str, list[Tensor]]:
    """What must not depend on the number of processes."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [optimizer.state[param] for param in params]
    return {
        "parameters": [full(param) for param in params],
        "importance": in_order(optimizer.importance()),
        "plasticity": in_order(optimizer.plasticity()),
        "means": [full(state["mean"]) for state in states],
        "network mean": [torch.tensor(optimizer.summary()["importance/mean"]).double()],
        "steps": [torch.tensor(group["steps"]) for group in optimizer.param_groups],
    }


def assert_outcome(actual: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> None:
    for kind in expected:
        for one, other in zip(actual[kind], expected[kind], strict=True):
            assert (one - other).abs().max() <= TOLERANCE[one.dtype], kind


def assert_same_bits(actual: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> None:
    for kind in expected:
        for one, other in zip(actual[kind], expected[kind], strict=True):
            assert torch.equal(one, other), kind


Make = Callable[[nn.Module], SynGAP]


def syngap(named: bool = False, **settings: Any) -> Make:
    options = {"lr": 0.1, "retention": 0.9, "momentum": 0.9, **settings}

    def make(model: nn.Module) -> SynGAP:
        return SynGAP(model.parameters(), **options, model=model if named else None)

    return make


def around_adamw(model: nn.Module) -> SynGAP:
    return SynGAP.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), retention=0.9)


def alone(make: Make, network: Callable[[], nn.Module] = Net, **how: Any) -> dict[str, Any]:
    """What one process with the whole batch comes to."""
    model = build(network)
    optimizer = make(model)
    train(model, optimizer, None, **how)
    return outcome(optimizer)


# DDP ----------------------------------------------------------------------------------------------

DDP: Checks = {}
FSDP: Checks = {}
HAS_FSDP = hasattr(torch.cpu.Stream, "record_event")
CHECKS = {"DDP": DDP} | ({"FSDP": FSDP} if HAS_FSDP else {})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    """What all checks returned; the processes are started once."""
    return run(__name__, tmp_path_factory)


@pytest.fixture
def ddp(found: dict[str, Results]) -> Results:
    return found["DDP"]


@pytest.fixture
def fsdp(found: dict[str, Results]) -> Results:
    if not HAS_FSDP:
        pytest.skip("FSDP2 of this torch does not run on a CPU")
    return found["FSDP"]


TRAINED: dict[str, tuple[Make, Callable[[], nn.Module], dict[str, Any]]] = {
    "sampled-network": (syngap(), Net, {}),
    "sampled-tensor": (syngap(scope="tensor", named=True), Net, {}),
    "exact-network": (syngap(estimator="exact", named=True), layers, {}),
    "exact-tensor": (syngap(estimator="exact", scope="tensor", named=True), layers, {}),
    "foreach": (syngap(foreach=True), Net, {}),
    "masked": (syngap(), Net, {"masked": True}),
    "wrapped-adamw": (around_adamw, Net, {}),
    "compact": (syngap(compact=True), Net, {}),
    "directions": (syngap(directions=Directions(refresh=2)), Net, {}),
}


def under_ddp(make: Make, network: Callable[[], nn.Module], how: Any, rank: int) -> Any:
    model = DistributedDataParallel(build(network))
    optimizer = make(model)
    # The first of two micro-batches without synchronisation, as one accumulates under DDP.
    train(model, optimizer, rank, around=lambda n: nullcontext() if n else model.no_sync(), **how)
    return outcome(optimizer)


for name, (make, network, how) in TRAINED.items():
    DDP[name] = partial(under_ddp, make, network, how)


@pytest.mark.parametrize("case", TRAINED)
def test_ddp_takes_the_steps_of_one_process_with_the_whole_batch(ddp: Results, case: str) -> None:
    make, network, how = TRAINED[case]
    first, second = ddp[case]
    assert_outcome(first, alone(make, network, **how))
    assert_same_bits(first, second)


def apart(rank: int) -> Any:
    model = DistributedDataParallel(build())
    optimizer = syngap(process_group=None)(model)
    train(model, optimizer, rank)
    return outcome(optimizer)


DDP["apart"] = apart


def test_processes_without_a_group_go_apart(ddp: Results) -> None:
    """Also shows that the comparison above can fail."""
    first, second = ddp["apart"]
    with pytest.raises(AssertionError, match="parameters"):
        assert_outcome(first, second)
    with pytest.raises(AssertionError, match="parameters"):
        assert_outcome(first, alone(syngap()))


def names(rank: int) -> Any:
    model = DistributedDataParallel(build())
    optimizer = syngap(named=True)(model)
    return list(optimizer.importance()), list(optimizer.summary())


DDP["names"] = names


def test_names_under_ddp_are_those_of_the_model(ddp: Results) -> None:
    for importance, summary in ddp["names"]:
        assert importance == [name for name, _ in Net().named_parameters()]
        assert "importance/first.weight/mean" in summary


def subgroup(rank: int) -> Any:
    own, _ = dist.new_subgroups(group_size=1)
    model = DistributedDataParallel(build(), process_group=own)
    optimizer = syngap(named=True)(model)
    train(model, optimizer, rank)
    by_group = outcome(optimizer)
    model = build()
    optimizer = syngap(process_group=None)(model)
    train(model, optimizer, rank)
    return by_group, outcome(optimizer)


DDP["subgroup"] = subgroup


def test_the_group_is_that_of_the_ddp_model(ddp: Results) -> None:
    for by_group, by_itself in ddp["subgroup"]:
        assert_same_bits(by_group, by_itself)


def static_graph(rank: int) -> Any:
    model = DistributedDataParallel(build(), static_graph=True)
    optimizer = syngap()(model)
    train(model, optimizer, rank, micro_batches=1)
    return outcome(optimizer)


DDP["static-graph"] = static_graph


def test_observe_is_not_the_first_backward_of_a_static_graph(ddp: Results) -> None:
    first, second = ddp["static-graph"]
    assert_outcome(first, alone(syngap(), micro_batches=1))
    assert_same_bits(first, second)


def unused(estimator: str, rank: int) -> Any:
    model = DistributedDataParallel(build(Branches), find_unused_parameters=True)
    optimizer = syngap(named=True, estimator=estimator)(model)
    train(model, optimizer, rank, micro_batches=1, forward=lambda x: model(x, rank))
    return outcome(optimizer)


for estimator in ("sampled", "exact"):
    DDP[f"unused-{estimator}"] = partial(unused, estimator)


def test_a_parameter_may_be_unused_in_one_process(ddp: Results) -> None:
    first, second = ddp["unused-sampled"]
    assert_outcome(first, alone(syngap(), Branches, micro_batches=1))
    assert_same_bits(first, second)


def test_a_parameter_may_be_unused_in_one_process_by_exact(ddp: Results) -> None:
    assert_same_bits(*ddp["unused-exact"])


def half_precision(rank: int) -> Any:
    """Values that only one process has: scores like the parameter, and wider squares."""
    params = [torch.zeros(3, dtype=torch.bfloat16)] * 2 + [torch.zeros(3, dtype=torch.float64)]
    values = [torch.full((3,), 2.0, dtype=kind) for kind in (torch.bfloat16, torch.float32)]
    here = [*values, None] if rank == 0 else [None, None, torch.full((3,), 2.0).double()]
    return reduced(here, params, dist.group.WORLD)


DDP["half-precision"] = half_precision


def test_sums_over_processes_are_in_full_precision_whoever_took_part(ddp: Results) -> None:
    for result in ddp["half-precision"]:
        assert [value.dtype for value in result] == [torch.float32, torch.float32, torch.float64]
        assert all(value.tolist() == [2.0, 2.0, 2.0] for value in result)


def consolidated(rank: int) -> Any:
    model = DistributedDataParallel(build())
    optimizer = syngap()(model)
    consolidate(model, optimizer, rank)
    return outcome(optimizer)


def consolidate(model: nn.Module, optimizer: SynGAP, rank: int | None) -> None:
    def predict(batch: tuple[Tensor, ...]) -> Categorical:
        return Dictated(model(batch[0]), batch[2])

    optimizer.consolidate(model, [draw(rank, step, 0) for step in range(3)], predict=predict)


DDP["consolidated"] = consolidated


def consolidated_alone() -> dict[str, list[Tensor]]:
    model = build()
    optimizer = syngap()(model)
    consolidate(model, optimizer, None)
    return outcome(optimizer)


def test_ddp_consolidates_as_one_process(ddp: Results) -> None:
    first, second = ddp["consolidated"]
    assert_outcome(first, consolidated_alone())
    assert_same_bits(first, second)


def padding_alone(rank: int | None) -> Any:
    """The second process has a batch of padding; then both have."""
    model = build() if rank is None else DistributedDataParallel(build())
    optimizer = syngap()(model)
    x, targets, labels, _ = draw(rank, 0, 0)
    everywhere = torch.tensor([True] * 3 + [False] * 5)
    mask = everywhere if rank is None else everywhere[ROWS[rank]]
    logits = model(x)
    optimizer.observe(Dictated(logits, labels), mask=mask)
    loss_of(rank, logits, targets).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="mask leaves out every position"):
        optimizer.observe(model(x), mask=torch.zeros(len(x), dtype=torch.bool))
    return outcome(optimizer)


DDP["padding-alone"] = padding_alone


def test_a_process_may_bring_nothing_but_padding(ddp: Results) -> None:
    first, second = ddp["padding-alone"]
    assert_outcome(first, padding_alone(None))
    assert_same_bits(first, second)


def drawn(rank: int) -> Any:
    """Labels of the same logits with the same seed, again, and again from a restored state."""
    model = DistributedDataParallel(build())
    optimizer = syngap()(model)
    x = draw(None, 0, 0)[0].repeat(20, 1)
    torch.manual_seed(3)
    found = []
    for attempt in range(3):
        if attempt == 1:
            state = torch.get_rng_state()
        if attempt == 2:
            torch.set_rng_state(state)
        prediction = Noting(logits=model(x))
        optimizer.observe(prediction)
        found.append(prediction.drawn)
    return found, torch.get_rng_state()


def drawn_by_generator(rank: int) -> Any:
    logits = torch.zeros(100, 3)
    generator = torch.Generator().manual_seed(3)
    found = []
    for attempt in range(3):
        if attempt == 1:
            state = generator.get_state()
        if attempt == 2:
            generator.set_state(state)
        with independent_draws(dist.group.WORLD, generator, logits.device) as own:
            found.append(sample_labels(logits, own))
    return found, generator.get_state()


DDP["drawn"] = drawn
DDP["drawn-by-generator"] = drawn_by_generator


@pytest.mark.parametrize("source", ["drawn", "drawn-by-generator"])
def test_processes_seeded_alike_draw_different_labels(ddp: Results, source: str) -> None:
    """The square of a sum of scores is unbiased because scores are independent.

    With the same labels for the same logits, two processes would count every score twice, and its
    square four times: F would double where it should stay.
    """
    (first, _), (second, _) = ddp[source]
    for one, other in zip(first, second, strict=True):
        assert 0.1 < (one == other).double().mean() < 0.9


@pytest.mark.parametrize("source", ["drawn", "drawn-by-generator"])
def test_restoring_the_random_state_restores_the_draws(ddp: Results, source: str) -> None:
    for (once, then, again), _ in ddp[source]:
        assert torch.equal(then, again)
        assert not torch.equal(once, then)


@pytest.mark.parametrize("source", ["drawn", "drawn-by-generator"])
def test_observing_leaves_random_states_alike(ddp: Results, source: str) -> None:
    (_, first), (_, second) = ddp[source]
    assert torch.equal(first, second)


# FSDP2 --------------------------------------------------------------------------------------------


def shard(model: Any, **how: Any) -> Any:
    """Every layer by itself, and what is left (two vectors of Net) with the root."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **how)
    return fully_shard(model, **how)


SHARDED: dict[str, tuple[Make, dict[str, Any]]] = {
    "network": (syngap(), {}),
    "tensor": (syngap(scope="tensor", named=True), {"reshard_after_forward": True}),
    "kept-whole": (syngap(foreach=True), {"reshard_after_forward": False}),
    "wrapped-adamw": (around_adamw, {}),
    "compact": (syngap(compact=True), {}),
}


def under_fsdp(make: Make, how: dict[str, Any], rank: int) -> Any:
    model = shard(build(), **how)
    optimizer = make(model)
    train(model, optimizer, rank)
    sizes = [param.to_local().shape[0] for param in model.parameters()]
    return outcome(optimizer), sizes


for name, (make, how) in SHARDED.items():
    FSDP[name] = partial(under_fsdp, make, how)


@pytest.mark.parametrize("case", SHARDED)
def test_fsdp_takes_the_steps_of_one_process_with_the_whole_batch(fsdp: Results, case: str) -> None:
    (first, sizes), (second, other_sizes) = fsdp[case]
    assert sizes != other_sizes, "the shards should be uneven"
    assert_outcome(first, alone(SHARDED[case][0]))
    assert_same_bits(first, second)


def train_synchronising_last(model: Any, optimizer: SynGAP, rank: int, **how: Any) -> None:
    @contextmanager
    def around(micro: int) -> Iterator[None]:
        model.set_requires_gradient_sync(micro == 1)
        model.set_is_last_backward(micro == 1)
        yield

    train(model, optimizer, rank, around=around, **how)


def unsynchronised(rank: int) -> Any:
    model = shard(build())
    optimizer = syngap()(model)
    train_synchronising_last(model, optimizer, rank)
    return outcome(optimizer)


FSDP["unsynchronised"] = unsynchronised


def test_fsdp_may_accumulate_without_synchronising(fsdp: Results) -> None:
    for result in fsdp["unsynchronised"]:
        assert_outcome(result, alone(syngap()))


def spoilt_in_one(rank: int) -> Any:
    model = shard(build())
    optimizer = syngap(non_finite="skip")(model)
    train(model, optimizer, rank, steps=range(1))
    before = outcome(optimizer)
    if rank:
        next(model.parameters()).grad.to_local().fill_(torch.inf)
    optimizer.step()
    return before, outcome(optimizer), optimizer.skipped


FSDP["spoilt-in-one"] = spoilt_in_one


def test_fsdp_skips_a_step_in_all_processes_or_in_none(fsdp: Results) -> None:
    for before, after, skipped in fsdp["spoilt-in-one"]:
        assert skipped == 1
        assert_same_bits(after, before)


def bfloat16(rank: int) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # Not to reduce in float32, for which gloo of torch 2.8 gives a sum in the place of an average.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    model = shard(build(), mp_policy=policy)
    optimizer = syngap()(model)
    train_synchronising_last(model, optimizer, rank, steps=range(1))
    return in_order(optimizer.importance()), [full(param.grad) for param in model.parameters()]


FSDP["bfloat16"] = bfloat16


def test_fsdp_works_in_mixed_precision(fsdp: Results) -> None:
    model = build()
    optimizer = syngap()(model)
    train(model, optimizer, None, steps=range(1))
    gradients = [param.grad for param in model.parameters()]
    for result in fsdp["bfloat16"]:
        for ours, theirs in zip(result, (optimizer.importance(), gradients), strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert (one - other).abs().max() <= 0.05 * other.abs().max()


def hybrid(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = shard(build(), mesh=mesh)
    optimizer = syngap()(model)
    train(model, optimizer, rank)
    return outcome(optimizer)


FSDP["hybrid"] = hybrid


def test_fsdp_may_replicate_shards(fsdp: Results) -> None:
    first, second = fsdp["hybrid"]
    assert_outcome(first, alone(syngap()))
    assert_same_bits(first, second)


def divided(rank: int) -> Any:
    model = shard(build())
    for module in (model, *model.children()):
        module.set_gradient_divide_factor(1.0)
    optimizer = syngap()(model)
    train(model, optimizer, rank, steps=range(1))
    gradients = [full(param.grad) for param in model.parameters()]
    return in_order(optimizer.importance()), gradients


FSDP["divided"] = divided


def test_fsdp_may_divide_gradients_by_any_factor(fsdp: Results) -> None:
    model = build()
    optimizer = syngap()(model)
    train(model, optimizer, None, steps=range(1))
    for importance, gradients in fsdp["divided"]:
        for one, other in zip(importance, optimizer.importance(), strict=True):
            torch.testing.assert_close(one, other)
        for one, param in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(one, 2 * param.grad)


class Surrounded(nn.Module):
    """A sharded network with neighbours that this optimizer does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.other = nn.Linear(4, 4)
        self.plain = nn.Parameter(torch.rand(3))
        self.whole = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.other(x)) * self.whole + self.plain


def surrounded(rank: int) -> Any:
    """Gradients before and after observe, of ours, of neighbours and of the input."""
    from torch.distributed.fsdp import fully_shard

    model = build(Surrounded)
    shard(model.net)
    fully_shard(model.other)
    fully_shard(model, ignored_params={model.plain, model.whole})
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)  # gives gradients to neighbours, too
    neighbours = {model.plain, *model.other.parameters()}
    ours = [param for param in model.parameters() if param not in neighbours]
    optimizer = SynGAP(ours, lr=0.1)
    hooked = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: hooked.append(None))
    result = []
    for step in range(2):
        x, targets, labels, _ = draw(rank, step, 0)
        x.requires_grad_()
        logits = model(x)
        leaves = [x, *model.parameters()]
        before = [None if leaf.grad is None else full(leaf.grad) for leaf in leaves]
        hooked.clear()
        optimizer.observe(Dictated(logits, labels))
        after = [None if leaf.grad is None else full(leaf.grad) for leaf in leaves]
        result.append((before, after, len(hooked)))
        loss_of(rank, logits, targets).backward()
        result[-1] += (len(hooked),)
    optimizer.step()
    return result, in_order(optimizer.importance())


FSDP["surrounded"] = surrounded


def test_fsdp_observe_leaves_every_gradient_alone(fsdp: Results) -> None:
    for steps, _ in fsdp["surrounded"]:
        for before, after, _, _ in steps:
            assert [grad is None for grad in before] == [grad is None for grad in after]
            for one, other in zip(before, after, strict=True):
                assert one is None or torch.equal(one, other)
        assert all(grad is None for grad in steps[0][0])
        assert all(grad is not None for grad in steps[1][0][1:])


def test_fsdp_observe_runs_no_gradient_hook(fsdp: Results) -> None:
    for steps, _ in fsdp["surrounded"]:
        assert all(observed == 0 and afterwards > 0 for _, _, observed, afterwards in steps)


def test_fsdp_takes_parameters_that_are_not_sharded_along(fsdp: Results) -> None:
    model = build(Surrounded)
    neighbours = {model.plain, *model.other.parameters()}
    ours = [param for param in model.parameters() if param not in neighbours]
    optimizer = SynGAP(ours, lr=0.1)
    for step in range(2):
        x, _, labels, _ = draw(None, step, 0)
        optimizer.observe(Dictated(model(x), labels))
    optimizer.step()
    for _, importance in fsdp["surrounded"]:
        for one, other in zip(importance, optimizer.importance(), strict=True):
            torch.testing.assert_close(one, other)


def restored(make: Make, way: str, rank: int) -> Any:
    """Train, save, train on; load into another optimizer and train that on."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model = shard(build())
    optimizer = make(model)
    train(model, optimizer, rank, steps=range(2))
    weights = copy.deepcopy(model.state_dict())
    options = StateDictOptions(full_state_dict=way == "full", broadcast_from_rank0=way == "full")
    if way == "plain":
        saved = copy.deepcopy(optimizer.state_dict())
    else:
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    train(model, optimizer, rank, steps=range(2, STEPS))

    fresh = shard(build())
    fresh.load_state_dict(weights)
    loaded = make(fresh)
    if way == "plain":
        loaded.load_state_dict(saved)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch takes an empty step to see what state there is
            set_optimizer_state_dict(fresh, loaded, saved, options=options)
    train(fresh, loaded, rank, steps=range(2, STEPS))
    return outcome(optimizer), outcome(loaded)


RESTORED = [
    (kind, way) for kind in ("network", "wrapped-adamw") for way in ("plain", "sharded", "full")
]
for kind, way in RESTORED:
    FSDP[f"restored-{kind}-{way}"] = partial(restored, SHARDED[kind][0], way)


@pytest.mark.parametrize(("kind", "way"), RESTORED)
def test_fsdp_state_survives_a_checkpoint(fsdp: Results, kind: str, way: str) -> None:
    for uninterrupted, resumed in fsdp[f"restored-{kind}-{way}"]:
        assert_same_bits(resumed, uninterrupted)


def looked_at(rank: int) -> Any:
    model = shard(build())
    optimizer = syngap(named=True)(model)
    train(model, optimizer, rank, steps=range(2))
    with torch.no_grad():
        model(draw(rank, 0, 0)[0])  # leaves the root's own parameters whole
    return (
        [name for name, _ in Net().named_parameters()],
        {name: full(value) for name, value in optimizer.plasticity().items()},
        optimizer.summary(),
    )


FSDP["looked-at"] = looked_at


def test_fsdp_can_be_looked_at(fsdp: Results) -> None:
    for names, plasticity, summary in fsdp["looked-at"]:
        assert list(plasticity) == names
        assert all(mask.min() > 0 and mask.max() <= 1.01 for mask in plasticity.values())
        assert {f"importance/{name}/mean" for name in names} <= set(summary)
        assert {f"plasticity/{name}/mean" for name in names if name != "scale"} <= set(summary)


def consolidated_shards(rank: int) -> Any:
    model = shard(build())
    optimizer = syngap()(model)
    consolidate(model, optimizer, rank)
    return outcome(optimizer)


FSDP["consolidated"] = consolidated_shards


def test_fsdp_consolidates_as_one_process(fsdp: Results) -> None:
    for result in fsdp["consolidated"]:
        assert_outcome(result, consolidated_alone())


def with_norm() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3)
    )


def parallelized() -> Any:
    """Tensor parallelism: layers by column and row, a norm by rows of its input."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=Shard(0)),
        "3": SequenceParallel(sequence_dim=0),
        "4": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    return parallelize_module(build(with_norm), init_device_mesh("cpu", (2,)), plan)


def refusals(rank: int) -> Any:
    def refused(network: Any, rank: int | None = rank, **settings: Any) -> str:
        x, _, labels, _ = draw(rank, 0, 0)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            syngap(**settings)(network).observe(Dictated(network(x), labels))
        return str(caught.value)

    return {
        "exact": refused(shard(build()), estimator="exact", named=True),
        "apart": refused(shard(build()), process_group=None),
        "tensor-parallel": refused(parallelized(), None),
    }


FSDP["refusals"] = refusals


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("exact", "cannot read sharded parameters; use estimator='sampled'"),
        ("apart", "over 2 processes, but process_group has 1"),
        ("tensor-parallel", "pass process_group=None"),
    ],
)
def test_what_shards_do_not_allow_is_refused(fsdp: Results, what: str, message: str) -> None:
    for said in fsdp["refusals"]:
        assert message in said[what]


def single(rank: int) -> Any:
    """FSDP2 over one process, as one tries a program on a single device."""
    from torch.distributed.device_mesh import DeviceMesh

    own, _ = dist.new_subgroups(group_size=1)
    model = shard(build(), mesh=DeviceMesh.from_group(own, "cpu"))
    optimizer = syngap(process_group=own)(model)
    train(model, optimizer, None)
    return outcome(optimizer)


FSDP["single"] = single


def test_fsdp_works_with_one_process(fsdp: Results) -> None:
    for result in fsdp["single"]:
        assert_outcome(result, alone(syngap()))


def with_directions(rank: int) -> Any:
    with pytest.raises(ValueError, match="directions need whole weights") as refused:
        syngap(directions=True)(shard(build()))
    return str(refused.value)


FSDP["directions"] = with_directions


def test_fsdp_refuses_directions_and_says_what_to_do(fsdp: Results) -> None:
    for message in fsdp["directions"]:
        assert "leave out directions, or use DDP" in message


def tensor_parallel(make: Make, rank: int) -> Any:
    model, idle = parallelized(), shard(build())
    optimizer = make(model)
    train(model, optimizer, None)
    del idle  # until here: another model that FSDP2 shards and that has not run
    return outcome(optimizer)


PARALLEL = {
    "itself": syngap(scope="tensor", process_group=None),
    "wrapped": lambda model: SynGAP.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), retention=0.9, process_group=None
    ),
}
for kind, make in PARALLEL.items():
    FSDP[f"parallel-{kind}"] = partial(tensor_parallel, make)


@pytest.mark.parametrize("kind", PARALLEL)
def test_tensor_parallel_processes_take_the_steps_of_one(fsdp: Results, kind: str) -> None:
    for result in fsdp[f"parallel-{kind}"]:
        assert_outcome(result, alone(PARALLEL[kind], with_norm))
