"""A reservoir keeps what its definition says, cheaply, and forgets nothing of its own state."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
from chances import UNLIKELY, as_events, chance, doubling, p_value
from helpers import assert_identical
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from syngap.bench.memory import ClassBalanced, Memory, Reservoir
from syngap.bench.memory.base import subset

KINDS = pytest.mark.parametrize("kind", [Reservoir, ClassBalanced])


def numbered(start: int, stop: int) -> dict[str, Tensor]:
    """Samples that know their place in the stream, a field of each kind."""
    number = torch.arange(start, stop)
    x = (number[:, None] % 256).to(torch.uint8).expand(-1, 4).reshape(-1, 1, 2, 2)
    return {
        "x": x,
        "y": number % 7,
        "number": number,
        "logits": number[:, None] / 3 + torch.ones(2),
    }


def batches(total: int, *sizes: int) -> Iterator[dict[str, Tensor]]:
    start, turn = 0, 0
    while start < total:
        stop = min(start + sizes[turn % len(sizes)], total)
        yield numbered(start, stop)
        start, turn = stop, turn + 1


def contents(memory: Memory) -> dict[str, Tensor]:
    return memory.state_dict()["fields"]


# How one is made ----------------------------------------------------------------------------------


@KINDS
def test_a_size_is_all_that_a_memory_needs(kind: type[Memory]) -> None:
    memory = kind(50)
    memory.add(**numbered(0, 80))
    drawn = memory.draw(10)
    assert len(memory) == 50
    assert {values.device.type for values in drawn.values()} == {"cpu"}


@KINDS
def test_without_a_generator_the_seed_of_torch_decides(kind: type[Memory]) -> None:
    def kept(seed: int) -> list[int]:
        torch.manual_seed(seed)
        memory = kind(10)
        torch.rand(seed)  # what else is drawn from torch's numbers makes no difference
        memory.add(**numbered(0, 100))
        return contents(memory)["number"].tolist()

    with torch.random.fork_rng(devices=[]):
        assert kept(0) == kept(0) != kept(1)


@KINDS
def test_memories_without_a_generator_differ_and_leave_that_of_torch_alone(
    kind: type[Memory],
) -> None:
    with torch.random.fork_rng(devices=[]):
        one, other = kind(10), kind(10)
        before = torch.get_rng_state()
        for memory in (one, other):
            memory.add(**numbered(0, 100))
            memory.draw(5)
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(contents(one)["number"], contents(other)["number"])


@KINDS
def test_a_memory_is_made_whatever_the_default_device_is(kind: type[Memory]) -> None:
    with torch.device("meta"):
        assert kind(10).samples_seen == 0


# What is kept -------------------------------------------------------------------------------------


def kept_by_definition(size: int, total: int, seed: int) -> list[int]:
    """One sample at a time, as the paper defines it, from the same random numbers."""
    generator, slots = chance(seed), [-1] * size
    for n in range(total):
        u = torch.rand((), dtype=torch.float64, generator=generator).item()
        if n < size:
            slots[n] = n
        else:
            j = int(u * (n + 1))
            if j < size:
                slots[j] = n
    return slots


@pytest.mark.parametrize("sizes", [(1,), (3, 1, 64), (50,), (400,)], ids=str)
def test_slots_are_those_of_the_definition_however_the_stream_is_cut(sizes: tuple[int]) -> None:
    memory = Reservoir(20, generator=chance(3))
    for batch in batches(400, *sizes):
        memory.add(**batch)
    number = contents(memory)["number"]
    assert number.tolist() == kept_by_definition(20, 400, seed=3)
    whole = numbered(0, 400)
    assert_identical(contents(memory), {name: whole[name][number] for name in whole})


def times_kept(size: int, total: int, batch: int, seeds: Iterable[int]) -> Tensor:
    kept = torch.zeros(total, dtype=torch.int64)
    for seed in seeds:
        memory = Reservoir(size, generator=chance(seed))
        for start in range(0, total, batch):
            memory.add(number=torch.arange(start, min(start + batch, total)))
        kept[contents(memory)["number"]] += 1
    return kept


def test_every_sample_of_a_long_stream_has_the_same_chance() -> None:
    seeds = 300
    kept, expected = as_events(times_kept(1000, 10_000, 400, range(seeds)), seeds)
    assert p_value(kept, expected) > UNLIKELY
    for ordered in (kept, kept.flip(0)):
        assert p_value(doubling(ordered), doubling(expected)) > UNLIKELY


def test_every_sample_of_a_short_stream_has_the_same_chance() -> None:
    # Short, because off by one in a draw from 0..n shows only where n is small.
    seeds = 4000
    assert p_value(*as_events(times_kept(3, 12, 5, range(seeds)), seeds)) > UNLIKELY


def test_the_last_of_a_batch_has_a_contested_slot() -> None:
    memory = Reservoir(1, generator=chance(0))
    memory.add(**numbered(0, 500))  # about ln 500 of them want the only slot
    assert contents(memory)["number"].tolist() == kept_by_definition(1, 500, seed=0)


@KINDS
def test_a_batch_may_be_larger_than_the_memory(kind: type[Memory]) -> None:
    memory = kind(5, generator=chance(0))
    memory.add(**numbered(0, 100))
    assert (len(memory), memory.samples_seen) == (5, 100)
    assert len(set(contents(memory)["number"].tolist())) == 5


@KINDS
def test_memory_keeps_copies_outside_the_graph(kind: type[Memory]) -> None:
    memory = kind(3, generator=chance(0))
    logits = torch.ones(3, 2, requires_grad=True)
    memory.add(y=torch.arange(3), logits=logits * 2)
    drawn = memory.draw(3)["logits"]
    assert not drawn.requires_grad
    drawn.zero_()
    assert contents(memory)["logits"].eq(2).all()


# What is drawn ------------------------------------------------------------------------------------


def test_every_set_of_a_size_is_drawn_equally_often() -> None:
    generator, draws = chance(1), 20_000
    found = Counter(frozenset(subset(3, 6, generator)) for _ in range(draws))
    sets = [frozenset(some) for some in combinations(range(6), 3)]
    counts = torch.tensor([found[some] for some in sets]).double()
    assert counts.sum() == draws
    assert p_value(counts, torch.full_like(counts, draws / len(sets))) > UNLIKELY


@KINDS
def test_samples_are_drawn_whole_and_only_once(kind: type[Memory]) -> None:
    memory = kind(50, generator=chance(0))
    memory.add(**numbered(0, 200))
    for count in (1, 7, 49, 50):
        drawn = memory.draw(count)
        number = drawn["number"]
        assert len(set(number.tolist())) == count
        whole = numbered(0, 200)
        assert_identical(drawn, {name: whole[name][number] for name in whole})


@KINDS
def test_no_more_is_drawn_than_there_is(kind: type[Memory]) -> None:
    memory = kind(50, generator=chance(0))
    memory.add(**numbered(0, 4))
    assert sorted(memory.draw(10)["number"].tolist()) == [0, 1, 2, 3]


@KINDS
def test_an_empty_memory_draws_nothing(kind: type[Memory]) -> None:
    memory = kind(2, generator=chance(0))
    assert not memory
    assert memory.draw(3) == {}


@KINDS
def test_a_memory_of_size_zero_counts_and_keeps_nothing(kind: type[Memory]) -> None:
    memory = kind(0, generator=chance(0))
    for batch in batches(20, 8):
        memory.add(**batch)
    assert (len(memory), memory.samples_seen, memory.draw(3)) == (0, 20, {})
    assert not memory


# What it costs ------------------------------------------------------------------------------------


class LargestMade(TorchDispatchMode):
    """Notes the most numbers in any tensor that is made, other than those that were there."""

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self.there = {tensor.untyped_storage().data_ptr() for tensor in there}
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in self.there:
            self.numel = max(self.numel, result.numel())
        return result


@KINDS
def test_a_step_makes_no_tensor_as_long_as_the_memory(kind: type[Memory]) -> None:
    size, count = 5000, 16
    memory = kind(size, generator=chance(0))
    memory.add(**numbered(0, 2 * size))
    batch = numbered(2 * size, 2 * size + count)
    with LargestMade(memory._fields.tensors.values()) as made:
        memory.add(**batch)
        memory.draw(count)
    assert 0 < made.numel <= batch["x"].numel()


# What it remembers of itself ----------------------------------------------------------------------


def only_tensors_and_ints(state: Any) -> bool:
    if isinstance(state, dict):
        return all(type(key) is str and only_tensors_and_ints(state[key]) for key in state)
    return isinstance(state, Tensor) or type(state) is int


@KINDS
@pytest.mark.parametrize("stop", [0, 8, 24, 200], ids="after {}".format)
def test_a_restored_memory_goes_on_bit_for_bit(kind: type[Memory], stop: int) -> None:
    memory = kind(20, generator=chance(0))
    stream = list(batches(400, 8))
    for batch in stream[: stop // 8]:
        memory.add(**batch)
        memory.draw(5)
    state = memory.state_dict()
    assert only_tensors_and_ints(state)
    as_taken = copy.deepcopy(state)
    other = kind(20, generator=chance(99))
    other.add(**{name: values.flip(0) for name, values in numbered(0, 30).items()})
    other.load_state_dict(state)
    for batch in stream[stop // 8 :]:
        memory.add(**batch)
        other.add(**batch)
        assert_identical(other.draw(5), memory.draw(5))
    assert_identical(other.state_dict(), memory.state_dict())
    assert_identical(state, as_taken)


@KINDS
def test_a_state_of_another_size_is_refused_and_changes_nothing(kind: type[Memory]) -> None:
    memory, other = kind(20, generator=chance(0)), kind(10, generator=chance(1))
    for one in (memory, other):
        one.add(**numbered(0, 30))
    before = memory.state_dict()
    with pytest.raises(ValueError, match="size 20, the state 10"):
        memory.load_state_dict(other.state_dict())
    assert_identical(memory.state_dict(), before)


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": torch.zeros(2, 3)},
        {"x": torch.zeros(2, 3), "y": torch.zeros(2), "z": torch.zeros(2)},
        {"x": torch.zeros(2, 3), "y": torch.zeros(3)},
        {"x": torch.zeros(2, 4), "y": torch.zeros(2)},
        {"x": torch.zeros(2, 3), "y": torch.zeros(2).long()},
        {"x": torch.zeros(2, 3), "y": torch.zeros(())},
        {},
    ],
    ids=["fewer", "more", "length", "shape", "dtype", "scalar", "none"],
)
def test_samples_unlike_the_first_are_refused_and_change_nothing(wrong: dict[str, Tensor]) -> None:
    memory = Reservoir(4, generator=chance(0))
    memory.add(x=torch.zeros(6, 3), y=torch.zeros(6))
    before = memory.state_dict()
    with pytest.raises(ValueError, match="field"):
        memory.add(**wrong)
    assert_identical(memory.state_dict(), before)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0, got -1"):
        Reservoir(-1, generator=chance(0))


def test_storage_may_be_on_another_device() -> None:
    memory = Reservoir(4, generator=chance(0), device="meta")
    memory.add(**numbered(0, 100))
    assert {values.device.type for values in memory.draw(3).values()} == {"meta"}
